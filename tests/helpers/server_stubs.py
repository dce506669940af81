"""Packages of servers for contract tests: their own, from a folder, or stand-ins for them.

FASTATTN_VLLM and FASTATTN_SGLANG name folders with an unpacked distribution, and others with what
it imports (`make test-servers`). Without them, in the gate, tests run on classes with the same
names, parameters and attributes, which a test of the folder compares with the real ones.
"""

import importlib
import inspect
import os
import sys
from dataclasses import dataclass
from enum import Enum
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


def signature_of(x: Any) -> list[tuple[str, Any, bool]]:
    """Parameters of a function: names, kinds, and whether there is a default."""
    function = getattr(x, "__func__", x)
    return [
        (p.name, p.kind, p.default is not inspect.Parameter.empty)
        for p in inspect.signature(inspect.unwrap(function)).parameters.values()
    ]


def methods(kind: type) -> dict[str, Any]:
    """What a class and its bases define, except those of object and typing."""
    return {
        name: inspect.getattr_static(kind, name)
        for name in dir(kind)
        if not name.startswith("__") or name == "__init__"
    }


class MultipleOf:
    def __init__(self, base: int) -> None:
        self.base = base


class AttentionCGSupport(Enum):
    ALWAYS, UNIFORM_BATCH, UNIFORM_SINGLE_TOKEN_DECODE, NEVER = 3, 2, 1, 0


class VllmBackend:
    """vllm.v1.attention.backend.AttentionBackend of 0.33: what a backend may override."""

    supported_dtypes = (torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16")
    forward_includes_kv_cache_update = True
    supports_kv_cache_update_bypass = False

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None): ...

    @staticmethod
    def get_name(): ...

    @staticmethod
    def get_impl_cls(): ...

    @staticmethod
    def get_builder_cls(): ...

    @classmethod
    def supports_head_size(cls, head_size): ...

    @classmethod
    def supports_sink(cls): ...

    @classmethod
    def supports_sliding_window(cls): ...

    @classmethod
    def supports_non_causal(cls): ...

    @classmethod
    def supports_batch_invariance(cls): ...

    @classmethod
    def supports_compute_capability(cls, capability): ...


class VllmBuilder:
    """AttentionMetadataBuilder."""

    _cudagraph_support = AttentionCGSupport.NEVER
    supports_update_block_table = False

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device): ...

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    def update_block_table(self, metadata, blk_table, slot_mapping): ...


class VllmImpl:
    """AttentionImpl."""

    lse_base_on_e = True
    supports_quant_query_input = False

    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None,
        sliding_window=None, kv_cache_dtype="auto", logits_soft_cap=None, attn_type="decoder",
        kv_sharing_target_layer_name=None,
    ): ...  # fmt: skip

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,
        output_block_scale=None,
    ): ...  # fmt: skip


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
