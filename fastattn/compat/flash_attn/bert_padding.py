"""flash_attn.bert_padding: convert between padded batches and packed tokens, differentiable."""

import torch
from einops import rearrange, repeat
from torch import Tensor

from .packed import offsets_of

__all__ = [
    "index_first_axis", "index_put_first_axis", "pad_input", "rearrange", "repeat", "unpad_input",
    "unpad_input_for_concatenated_sequences",
]  # fmt: skip


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Gather rows of x [N, ...] at int64 indices [M]: [M, ...]."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Scatter values [M, ...] to rows indices [M] of zeros [first_axis_dim, ...]."""
    whole = values.new_zeros(first_axis_dim, *values.shape[1:])
    return whole.index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Remove the padding of a batch. Waits for the device.

    Args:
        hidden_states: [B, T, ...].
        attention_mask: [B, T], bool or integers, nonzero = a token.
        unused_mask: likewise: positions to keep although they are no tokens.

    Returns:
        tokens [total, ...]; int64 [total], their indices in the flattened batch; int32 [B + 1],
        starts of the rows, and the total; the longest row; int32 [B], tokens of each row without
        unused_mask.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.bool().sum(dim=-1, dtype=torch.int32)
    used = attention_mask.bool().sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    offsets = offsets_of(lengths)
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, offsets, longest, used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Remove the padding of rows of several sequences. Waits for the device.

    Args:
        hidden_states: [B, T, ...].
        attention_mask_in_length: [B, T], integers: lengths of row b's sequences, and zeros.

    Returns:
        As `unpad_input`, with starts and longest of all sequences, and no lengths.
    """
    lengths = attention_mask_in_length
    places = torch.arange(lengths.shape[1], device=lengths.device)
    tokens, indices, *_ = unpad_input(hidden_states, places < lengths.sum(-1, keepdim=True))
    found = lengths[lengths > 0]
    return tokens, indices, offsets_of(found), int(found.max()) if found.numel() else 0


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Pad tokens [total, ...] to [batch, seqlen, ...] with 0, undoing `unpad_input`."""
    whole = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return whole.view(batch, seqlen, *whole.shape[1:])
