"""Attention over selected key blocks."""

from .block_sparse_attention import explain_selected as explain_selected
from .block_sparse_attention import selected_attention as selected_attention
from .choose import select_blocks as select_blocks
from .decode import decode_selected as decode_selected
from .indexer import indexer_loss as indexer_loss
from .indexer import select_tokens as select_tokens
from .indices import block_indices as block_indices
from .moba import moba_attention as moba_attention
from .nsa import native_sparse_attention as native_sparse_attention
from .nsa import pooled_attention as pooled_attention
