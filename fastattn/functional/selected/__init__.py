"""Attention over selected key blocks."""

from .attend import explain_selected as explain_selected
from .attend import selected_attention as selected_attention
from .indices import block_indices as block_indices
