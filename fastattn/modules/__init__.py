"""Attention layers as torch modules."""

from .latent_attention import MultiheadLatentAttention as MultiheadLatentAttention
from .self_attention import CausalGQAttention as CausalGQAttention
from .self_attention import GQAttention as GQAttention
