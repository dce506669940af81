"""Exact fused attention in Triton, as functions and as drop-in torch modules."""

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any


def _is_command() -> bool:
    """Whether this process is the `fastattn` command, or `python -m fastattn`."""
    script = sys.argv[0] if getattr(sys, "argv", None) else ""
    if script == "-m":  # until the module runs
        return ("-m", __name__) in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    return Path(script).name in (__name__, f"{__name__}.exe")


# The command answers --help and typos without torch. Other processes import everything at once,
# which also registers the operators with torch; so does the first use of one of these names.
_LATER = "_LATER" not in globals() and _is_command()
if not _LATER:
    from .block_mask import BlockMask as BlockMask
    from .cache.dense import KVCache as KVCache
    from .cache.latent import LatentCache as LatentCache
    from .cache.latent import PagedLatentCache as PagedLatentCache
    from .cache.page_allocator import OutOfPages as OutOfPages
    from .cache.paged import PagedKVCache as PagedKVCache
    from .cache.quantized import QuantizedKVCache as QuantizedKVCache
    from .cache.slots import append_paged as append_paged
    from .cache.views import view_of_tensors as view_of_tensors
    from .cache_view import CacheView as CacheView
    from .compat.multihead import MultiheadAttention as MultiheadAttention
    from .compat.patch import patch_sdpa as patch_sdpa
    from .compat.patch import unpatch_sdpa as unpatch_sdpa
    from .compat.swap.model import swap as swap
    from .dispatch import Explanation as Explanation
    from .functional.additive import additive_attention as additive_attention
    from .functional.block import BlockGradients as BlockGradients
    from .functional.block import attention_block_backward as attention_block_backward
    from .functional.block import attention_block_forward as attention_block_forward
    from .functional.decode import decode_attention as decode_attention
    from .functional.decode import explain_decode as explain_decode
    from .functional.fp8 import PackedValues as PackedValues
    from .functional.fp8 import attention_fp8 as attention_fp8
    from .functional.fp8 import attention_varlen_fp8 as attention_varlen_fp8
    from .functional.fp8 import explain_fp8 as explain_fp8
    from .functional.fp8 import pack_values as pack_values
    from .functional.fp8 import quantize_fp8 as quantize_fp8
    from .functional.fused_attention import attention as attention
    from .functional.fused_attention import attention_varlen as attention_varlen
    from .functional.fused_attention import explain as explain
    from .functional.merge import cascade_attention as cascade_attention
    from .functional.merge import merge as merge
    from .functional.merge import shared_pages as shared_pages
    from .functional.paged import attention_paged as attention_paged
    from .functional.paged import explain_paged as explain_paged
    from .functional.scoring import dot_product_attention as dot_product_attention
    from .functional.scoring import multiplicative_attention as multiplicative_attention
    from .functional.selected import block_indices as block_indices
    from .functional.selected import decode_selected as decode_selected
    from .functional.selected import explain_selected as explain_selected
    from .functional.selected import indexer_loss as indexer_loss
    from .functional.selected import moba_attention as moba_attention
    from .functional.selected import native_sparse_attention as native_sparse_attention
    from .functional.selected import select_blocks as select_blocks
    from .functional.selected import select_tokens as select_tokens
    from .functional.selected import selected_attention as selected_attention
    from .functional.statistics import AttentionStatistics as AttentionStatistics
    from .functional.statistics import attention_statistics as attention_statistics
    from .functional.statistics import attention_weights as attention_weights
    from .functional.warmup import warmup as warmup
    from .modules.cross_attention import CrossGQAttention as CrossGQAttention
    from .modules.latent_attention import MultiheadLatentAttention as MultiheadLatentAttention
    from .modules.self_attention import CausalGQAttention as CausalGQAttention
    from .modules.self_attention import GQAttention as GQAttention
    from .modules.sparse import MoBAttention as MoBAttention
    from .modules.sparse import NativeSparseAttention as NativeSparseAttention
    from .position_tables import alibi_slopes as alibi_slopes
    from .position_tables import document_ids as document_ids
    from .position_tables import t5_relative_bias as t5_relative_bias
    from .torch_backend.dropout import keep_mask as dropout_keep_mask

if TYPE_CHECKING:
    from collections.abc import Callable

    __version__: str
    tune: Callable[..., Any]
    verify: Callable[..., Any]

# Top-level modules that depend on the rest of the package are imported at first use.
_LATE = {"tune": ".bench.tune.tune", "verify": ".testing.verify"}
# Both are about kernels.
_WITHOUT_TRITON = find_spec("triton") is None


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version(__name__)
        except metadata.PackageNotFoundError:
            return "of a checkout that is not installed"
    if name in _LATE and _WITHOUT_TRITON:
        raise AttributeError(f"fastattn.{name} needs Triton, which is not installed")
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name], __name__), name)
    if _LATER and name in __all__:
        return getattr(importlib.reload(sys.modules[__name__]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AttentionStatistics",
    "BlockGradients",
    "BlockMask",
    "CacheView",
    "CausalGQAttention",
    "CrossGQAttention",
    "Explanation",
    "GQAttention",
    "KVCache",
    "LatentCache",
    "MoBAttention",
    "MultiheadAttention",
    "MultiheadLatentAttention",
    "NativeSparseAttention",
    "OutOfPages",
    "PackedValues",
    "PagedKVCache",
    "PagedLatentCache",
    "QuantizedKVCache",
    "additive_attention",
    "alibi_slopes",
    "append_paged",
    "attention",
    "attention_block_backward",
    "attention_block_forward",
    "attention_fp8",
    "attention_paged",
    "attention_statistics",
    "attention_varlen",
    "attention_varlen_fp8",
    "attention_weights",
    "block_indices",
    "cascade_attention",
    "decode_attention",
    "decode_selected",
    "document_ids",
    "dot_product_attention",
    "dropout_keep_mask",
    "explain",
    "explain_decode",
    "explain_fp8",
    "explain_paged",
    "explain_selected",
    "indexer_loss",
    "merge",
    "moba_attention",
    "multiplicative_attention",
    "native_sparse_attention",
    "pack_values",
    "patch_sdpa",
    "quantize_fp8",
    "select_blocks",
    "select_tokens",
    "selected_attention",
    "shared_pages",
    "swap",
    "t5_relative_bias",
    "tune",
    "unpatch_sdpa",
    "verify",
    "view_of_tensors",
    "warmup",
]
if _WITHOUT_TRITON:
    __all__.remove("tune")
    __all__.remove("verify")
