"""Packages of servers for contract tests: their own, from a folder, or stand-ins for them.

FASTATTN_VLLM and FASTATTN_SGLANG name folders with an unpacked distribution, and others with what
it imports (`make test-servers`). Without them, in the gate, tests run on classes with the same
names, parameters and attributes, which a test of the folder compares with the real ones.
"""

import importlib
import inspect
import os
import re
import sys
from dataclasses import dataclass
from enum import Enum
from importlib.machinery import ModuleSpec
from itertools import accumulate
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

VLLM, SGLANG = (os.environ.get(f"FASTATTN_{name}") for name in ("VLLM", "SGLANG"))


def install(patch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    """Put modules of these contents, and the packages that they are in, into `sys.modules`."""
    for name, contents in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                module = ModuleType(path)
                module.__path__ = []
                patch.setitem(sys.modules, path, module)
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
        for key, x in contents.items():
            setattr(sys.modules[name], key, x)


def use_folder(patch: pytest.MonkeyPatch, folders: str) -> None:
    """Find the package in the first folder, and what it imports besides in the others, last."""
    first, *others = folders.split(os.pathsep)
    patch.setattr(sys, "path", [first, *sys.path, *others])


def use_sglang(patch: pytest.MonkeyPatch, folders: str) -> None:
    """`use_folder`, with a stand-in for torchvision, whose wheel wants a torch of its own."""
    importlib.import_module("transformers.image_utils")  # which would take the stand-in for it
    for name in ("io", "transforms", "transforms.functional", "transforms.v2.functional"):
        for path in accumulate(["torchvision", *name.split(".")], "{}.{}".format):
            if path not in sys.modules:
                sys.modules[path] = _AnyName(path)
    use_folder(patch, folders)


class _AnyName(ModuleType):
    """A package that has every name, as an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def signature_of(x: Any) -> list[tuple[str, Any, bool]]:
    """Parameters of a function: names, kinds, and whether there is a default."""
    function = getattr(x, "__func__", x)
    return [
        (p.name, p.kind, p.default is not inspect.Parameter.empty)
        for p in inspect.signature(inspect.unwrap(function)).parameters.values()
    ]


def methods(kind: type) -> dict[str, Any]:
    """Functions that a class and its bases define, except those of object and typing."""
    every = {name: inspect.getattr_static(kind, name) for name in dir(kind)}
    return {
        name: x
        for name, x in every.items()
        if (not name.startswith("__") or name == "__init__") and callable(getattr(x, "__func__", x))
    }


def entry_point(group: str) -> str:
    """Read what pyproject.toml enters for fastattn; an editable install keeps an older one."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    (line,) = re.findall(rf'^\[project.entry-points."{group}"\]\nfastattn = "(.*)"$', text, re.M)
    return line


class MultipleOf:
    def __init__(self, base: int) -> None:
        self.base = base


class AttentionCGSupport(Enum):
    ALWAYS, UNIFORM_BATCH, UNIFORM_SINGLE_TOKEN_DECODE, NEVER = 3, 2, 1, 0


def stand_in(name: str, signatures: str, **attributes: Any) -> type:
    """Make a class with attributes and methods, a signature a line, that return nothing."""
    kinds: dict[str, Any] = {"self": lambda function: function, "cls": classmethod}
    for signature in signatures.split("\n"):
        method, _, parameters = signature.strip().rstrip(")").partition("(")
        function = eval(f"lambda {parameters}: None")
        attributes[method] = kinds.get(parameters.partition(",")[0], staticmethod)(function)
    return type(name, (), attributes)


# vllm.v1.attention.backend of 0.33: what a backend may override.
VllmBackend = stand_in(
    "AttentionBackend",
    """get_supported_kernel_block_sizes(kv_cache_spec=None)
    get_name()
    get_impl_cls()
    get_builder_cls()
    supports_head_size(cls, head_size)
    supports_sink(cls)
    supports_sliding_window(cls)
    supports_non_causal(cls)
    supports_batch_invariance(cls)
    supports_compute_capability(cls, capability)""",
    supported_dtypes=(torch.float16, torch.bfloat16),
    supported_kv_cache_dtypes=("auto", "float16", "bfloat16"),
    forward_includes_kv_cache_update=True,
    supports_kv_cache_update_bypass=False,
)
VllmBuilder = stand_in(
    "AttentionMetadataBuilder",
    """__init__(self, kv_cache_spec, layer_names, vllm_config, device)
    build(self, common_prefix_len, common_attn_metadata, fast_build=False)
    update_block_table(self, metadata, blk_table, slot_mapping)""",
    _cudagraph_support=AttentionCGSupport.NEVER,
    supports_update_block_table=False,
)
VllmImpl = stand_in(
    "AttentionImpl",
    "__init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, "
    "sliding_window=None, kv_cache_dtype='auto', logits_soft_cap=None, attn_type='decoder', "
    "kv_sharing_target_layer_name=None)\n"
    "forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, "
    "output_block_scale=None)",
    lse_base_on_e=True,
    supports_quant_query_input=False,
)


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: Any = True
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    rswa_prefix_lens: Tensor | None = None


class AttentionBackendEnum(Enum):
    CUSTOM = None


REGISTERED: dict[Enum, str] = {}


def register_backend(backend, class_path=None, is_mamba=False):
    REGISTERED[backend] = class_path


def resolved(member: Any) -> Any:
    """The class that a backend's name stands for."""
    if VLLM:
        return member.get_class()
    module, _, name = REGISTERED[member].rpartition(".")
    return getattr(importlib.import_module(module), name)


VLLM_STUBS: dict[str, dict[str, Any]] = {
    "vllm.v1.attention.backend": {
        "AttentionBackend": VllmBackend,
        "AttentionMetadataBuilder": VllmBuilder,
        "AttentionImpl": VllmImpl,
        "AttentionCGSupport": AttentionCGSupport,
        "CommonAttentionMetadata": CommonAttentionMetadata,
        "MultipleOf": MultipleOf,
    },
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum": AttentionBackendEnum,
        "register_backend": register_backend,
    },
    "vllm.platforms": {"current_platform": SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn)},
    "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
}


class SharedReadEnds(Enum):
    PRE_REPLAY, IN_REPLAY, POST_REPLAY, UNKNOWN = 1, 2, 3, 4


# sglang.srt.layers.attention.base_attn_backend.AttentionBackend of 0.5.23.
_SglangMethods = stand_in(
    "AttentionBackend",
    """init_forward_metadata(self, forward_batch)
    init_forward_metadata_out_graph(self, forward_batch, in_capture=False)
    init_forward_metadata_in_graph(self, forward_batch)
    init_cuda_graph_state(self, max_bs, max_num_tokens)
    get_cuda_graph_seq_len_fill_value(self)
    shared_read_ends(self, fm)
    support_triton(self)
    forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True)
    forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True)""",
)


class SglangBackend(_SglangMethods):
    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        decodes = forward_batch.forward_mode.is_decode()
        call = self.forward_decode if decodes else self.forward_extend
        return call(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


class ForwardMode(Enum):
    EXTEND, DECODE, MIXED, IDLE, TARGET_VERIFY, DLLM_EXTEND = range(6)

    def __getattr__(self, name: str) -> Any:
        """Return what tells whether this is the mode: is_decode and others."""
        if not name.startswith("is_"):
            raise AttributeError(name)
        return lambda: self.name == name.removeprefix("is_").upper()


class RadixAttention:
    def __init__(
        self, num_heads, head_dim, scaling, num_kv_heads, layer_id, logit_cap=0.0, v_head_dim=-1,
        sliding_window_size=-1, is_cross_attention=False, pos_encoding_mode="NONE",
        logit_capping_method="tanh", attn_type=None,
    ):  # fmt: skip
        self.tp_q_head_num, self.tp_k_head_num, self.tp_v_head_num = num_heads, *[num_kv_heads] * 2
        self.head_dim = self.qk_head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim == -1 else v_head_dim
        self.scaling, self.layer_id, self.logit_cap = scaling, layer_id, logit_cap
        self.sliding_window_size, self.is_cross_attention = sliding_window_size, is_cross_attention
        self.pos_encoding_mode, self.logit_capping_method = pos_encoding_mode, logit_capping_method
        self.attn_type = AttentionType.DECODER if attn_type is None else attn_type
        self.k_scale = self.v_scale = None
        self.xai_temperature_len = -1


class AttentionType(Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


@dataclass(frozen=True)
class KVWriteLoc:
    loc: Tensor
    swa_loc: Tensor | None = None
    full_loc: Tensor | None = None
    physical: bool = False

    @classmethod
    def for_batch(cls, forward_batch, *, swa_loc=None, full_loc=None):
        return cls(forward_batch.out_cache_loc, swa_loc, full_loc)


class MHATokenToKVPool:
    """A slot for each token, and a page of slots that nobody has."""

    def __init__(
        self, size, page_size, dtype, head_num, head_dim, layer_num, device, enable_memory_saver,
    ):  # fmt: skip
        self.dtype, self.page_size = dtype, page_size
        shape = (layer_num, size + page_size, head_num, head_dim)
        self.k_buffer, self.v_buffer = (torch.zeros(shape).to(dtype) for _ in "kv")

    def get_kv_buffer(self, layer_id):
        return self.k_buffer[layer_id], self.v_buffer[layer_id]

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None):
        if cache_k.dtype != self.dtype:
            for x, scale in ((cache_k, k_scale), (cache_v, v_scale)):
                if scale is not None:
                    x.div_(scale)
        stored = zip(self.get_kv_buffer(layer.layer_id), (cache_k, cache_v), strict=True)
        for buffer, x in stored:
            # torch indexes no fp8.
            kind = torch.uint8 if x.dtype.itemsize != self.dtype.itemsize else buffer.dtype
            kind = torch.uint8 if self.dtype.itemsize == 1 else kind
            buffer.view(kind)[loc_info.loc] = x.to(self.dtype).view(kind)


ATTENTION_BACKENDS: dict[str, Any] = {}


def register_attention_backend(name):
    return lambda function: ATTENTION_BACKENDS.setdefault(name, function)


_CHOICES: dict[str, list[str]] = {
    "ATTENTION_BACKEND_CHOICES": [],
    "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": [],
    "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND": [],
}
_ADDING = {f"add_{name.lower().removesuffix('_choices')}_choices": x.extend
           for name, x in _CHOICES.items()}  # fmt: skip
SGLANG_STUBS: dict[str, dict[str, Any]] = {
    "sglang.srt.arg_groups.choices": {**_CHOICES, **_ADDING},
    "sglang.srt.layers.attention.attention_registry": {
        "ATTENTION_BACKENDS": ATTENTION_BACKENDS,
        "register_attention_backend": register_attention_backend,
    },
    "sglang.srt.layers.attention.base_attn_backend": {
        "AttentionBackend": SglangBackend,
        "SharedReadEnds": SharedReadEnds,
    },
    "sglang.srt.layers.radix_attention": {
        "RadixAttention": RadixAttention,
        "AttentionType": AttentionType,
    },
    "sglang.srt.mem_cache.memory_pool": {
        "KVWriteLoc": KVWriteLoc,
        "MHATokenToKVPool": MHATokenToKVPool,
    },
    "sglang.srt.model_executor.forward_batch_info": {"ForwardMode": ForwardMode},
}  # fmt: skip
