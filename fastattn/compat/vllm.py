"""vLLM's attention backend, which runs `attention_paged` on vLLM's packed tokens and pages.

The entry point `vllm.general_plugins` registers it in every process of vLLM 0.33:

    vllm serve MODEL --attention-backend CUSTOM

The contract is vllm/v1/attention/backend.py of vLLM 0.33.
"""

import warnings
from dataclasses import dataclass, replace
from importlib import metadata as distributions
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..cache.slots import append_paged
from ..cache.views import view_of_tensors
from ..cache_view import CacheView
from ..functional.paged import attention_paged

WRITTEN_FOR = "0.33"
# Classes made on first access, as their bases are vLLM's.
_CLASSES = ("Backend", "MetadataBuilder", "Impl")
# Most queries of a row for the small tiles; longer rows need a second launch.
_FEW_QUERIES = 16


def register() -> None:
    """Register this backend as vLLM's `--attention-backend CUSTOM`; called by vLLM's plugins."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.Backend")


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _warn_of_other_versions()
    from vllm.v1.attention import backend as base

    kinds = {
        "Backend": (_Backend, base.AttentionBackend),
        "MetadataBuilder": (_MetadataBuilder, base.AttentionMetadataBuilder),
        "Impl": (_Impl, base.AttentionImpl),
    }
    for each, bases in kinds.items():
        globals().setdefault(each, type(each, bases, {"__module__": __name__}))
    graphs = base.AttentionCGSupport.UNIFORM_BATCH
    globals()["MetadataBuilder"]._cudagraph_support = graphs
    return globals()[name]


def _warn_of_other_versions() -> None:
    try:
        installed = distributions.version("vllm")
    except distributions.PackageNotFoundError:
        return
    if not installed.startswith(f"{WRITTEN_FOR}."):
        warnings.warn(
            f"fastattn's backend is written for vLLM {WRITTEN_FOR}, and this is {installed}: vLLM "
            "promises no interface to backends",
            stacklevel=3,
        )


def _refuse(what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(
        f"fastattn's vLLM backend does not support {what}: {instead}, or choose another "
        "--attention-backend"
    )


class _Backend:
    """Capabilities of the backend, which vLLM checks first."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto", "float16", "bfloat16", "fp8", "fp8_e4m3",
    ]  # fmt: skip
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        return __getattr__("Impl")

    @staticmethod
    def get_builder_cls() -> Any:
        return __getattr__("MetadataBuilder")

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        from vllm.v1.attention.backend import MultipleOf

        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size <= 512

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    supports_sliding_window = supports_non_causal = supports_batch_invariance = supports_sink


@dataclass
class Metadata:
    """One step of vLLM's scheduler, in vLLM's own tensors, which a CUDA graph replays with."""

    num_actual_tokens: int
    max_seqlen_q: int | None
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool


class _MetadataBuilder:
    """Builds `Metadata`. Batches are not sorted: rows may have any number of tokens."""

    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Metadata:
        common = common_attn_metadata
        if isinstance(common.causal, Tensor):
            raise _refuse("a causal flag for each request", "give one for the batch")
        if common.mm_req_doc_ranges:
            raise _refuse("bidirectional ranges of images (mm_prefix)", "run the model without")
        if common.rswa_prefix_lens is not None:
            raise _refuse("R-SWA (rswa_prefix_lens)", "run the model without")
        if not common.block_table_tensor.is_contiguous():
            raise ValueError(
                "block_table_tensor must be contiguous, as it is read where it is, got strides "
                f"{common.block_table_tensor.stride()}"
            )
        longest = common.max_query_len
        return Metadata(
            common.num_actual_tokens,
            longest if longest <= _FEW_QUERIES else None,
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            bool(common.causal),
        )

    def update_block_table(
        self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> Metadata:
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class _Impl:
    """Attention of one layer."""

    lse_base_on_e = True
    supports_quant_query_input = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **extra: Any,
    ) -> None:
        if attn_type != "decoder":
            raise _refuse(f"attn_type={str(attn_type)!r}", "it serves decoders")
        for name, x in extra.items():
            if x is not None and x is not False and not (isinstance(x, int) and x == -1):
                raise _refuse(f"{name}={x!r}", "run the model without it")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.attn_type, self.kv_cache_dtype = attn_type, kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._codes = _is_fp8(kv_cache_dtype)
        self._window = sliding_window
        from vllm import envs

        invariant = bool(envs.VLLM_BATCH_INVARIANT)  # no other request may change a result
        self._options: dict[str, Any] = {"scale": self.scale, "batch_invariant": invariant}
        if logits_soft_cap:
            self._options["softcap"] = float(logits_soft_cap)
        # Weights, read after loading.
        self._of_heads: dict[str, Tensor | None] = {"sinks": sinks}
        if alibi_slopes is not None:
            self._of_heads["alibi_slopes"] = torch.tensor(
                alibi_slopes, dtype=torch.float32, device="cpu"
            )
        self._pool: tuple[Tensor, CacheView] | None = None

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store keys and values [tokens, H_k, width] in their slots; -1 = skip."""
        append_paged(self._pages(layer, kv_cache, key.dtype), key, value, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of query [tokens, H_q, D] over the cache into output."""
        if output_scale is not None or output_block_scale is not None:
            raise _refuse("a quantized output (output_scale)", "turn its fusion off")
        if attn_metadata is None:  # vLLM's memory profiling
            return output.fill_(0)
        step = attn_metadata
        view = self._pages(layer, kv_cache, query.dtype)._replace(
            block_table=step.block_table,
            lengths=step.seq_lens,
            length_bound=step.block_table.shape[1] * kv_cache.shape[2],
        )
        return attention_paged(
            query,
            view,
            step.query_start_loc,
            out=output,
            max_seqlen_q=step.max_seqlen_q,
            causal=step.causal,
            **self._options_on(query.device, step.causal),
        )

    def _options_on(self, device: torch.device, causal: bool) -> dict[str, Any]:
        """Options of `attention_paged`; without causal, vLLM's windows are symmetric."""
        options = dict(self._options)
        if self._window is not None:
            side = self._window - 1
            options["window"] = (side, None if causal else side)
        for name, x in self._of_heads.items():
            if x is not None:
                if x.device != device:
                    x = self._of_heads[name] = x.to(device)
                options[name] = x
        return options

    def _pages(self, layer: Any, kv_cache: Tensor, dtype: torch.dtype) -> CacheView:
        """A layer's cache [blocks, H_k, size, D + D_v], checked once; no rows yet."""
        if self._pool is None or self._pool[0] is not kv_cache:
            pages = kv_cache.view(torch.float8_e4m3fn) if self._codes else kv_cache
            nothing = kv_cache.new_zeros(1, dtype=torch.int32)
            view = view_of_tensors(
                pages[..., : self.head_size],
                pages[..., self.head_size :],
                nothing,
                block_table=nothing[None],
                k_scale=layer._k_scale if self._codes else None,
                v_scale=layer._v_scale if self._codes else None,
                dtype=dtype,
            )
            self._pool = kv_cache, view
        return self._pool[1]


def _is_fp8(kv_cache_dtype: str) -> bool:
    """Whether a cache holds e4m3 codes."""
    if kv_cache_dtype not in _Backend.supported_kv_cache_dtypes:
        served = ", ".join(_Backend.supported_kv_cache_dtypes)
        raise _refuse(f"kv_cache_dtype={kv_cache_dtype!r}", f"give one of {served}")
    if not kv_cache_dtype.startswith("fp8"):
        return False
    from vllm.platforms import current_platform

    if current_platform.fp8_dtype() is not torch.float8_e4m3fn:
        raise _refuse(
            f"kv_cache_dtype={kv_cache_dtype!r} of {current_platform.fp8_dtype()}",
            'give "auto" or "bfloat16"',
        )
    return True
