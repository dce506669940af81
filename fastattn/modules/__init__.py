"""Attention layers as torch modules."""

from .self_attention import CausalGQAttention as CausalGQAttention
from .self_attention import GQAttention as GQAttention
