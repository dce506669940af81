"""Exact fused attention in Triton, as functions and as drop-in torch modules."""

from .cache import KVCache as KVCache
from .dispatch import Explanation as Explanation
from .functional import attention as attention
from .functional import explain as explain
from .modules import CausalGQAttention as CausalGQAttention

__all__ = ["CausalGQAttention", "Explanation", "KVCache", "attention", "explain"]
