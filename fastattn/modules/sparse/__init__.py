"""Self-attention to chosen key blocks, as torch modules."""

from .moba import MoBAttention as MoBAttention
from .nsa import NativeSparseAttention as NativeSparseAttention
