"""Convert other libraries' block masks to lists of key blocks."""

from typing import Any

import torch
from torch import Tensor

from ... import checks, tracing


def block_indices(blocks: Any, *, most: int | None = None) -> Tensor:
    """Convert a block mask to `indices` of `selected_attention`.

    Args:
        blocks: one of

            - a bool map [B, H_s, R, N], True if query block r sees key block j;
            - torch's BlockMask of FlexAttention, without its mask_mod: `selected_attention` masks
              pairs within blocks by its own options. `block` is its BLOCK_SIZE;
            - (counts [B, H_s, R], numbers [B, H_s, R, n]), or also with those of full blocks, as in
              FlashAttention 4 and FlexAttention;
            - a torch.sparse_bsr tensor [T_q, T_k], or (indptr [R + 1], indices [nnz]), as in
              FlashInfer: one pattern for all heads, [1, 1, R, n].
        most: n, the size of each list; later blocks are dropped. Default: the maximum; for BSR the
            longest list, which waits for the device.

    Returns:
        int32 [B, H_s, R, n], padded with -1.

    Raises:
        TypeError: another type. ValueError: on a CPU, a list is longer than `most`.

    Examples:
        >>> block_indices(torch.ones(4, 4).tril().bool()[None, None])[0, 0].tolist()
        [[0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, -1], [0, 1, 2, 3]]
    """
    most = None if most is None else checks.check_count("most", most, 0)
    if isinstance(blocks, Tensor) and blocks.layout is torch.sparse_bsr:
        blocks = blocks.crow_indices(), blocks.col_indices()
    if isinstance(blocks, Tensor):
        indices = _of_map(blocks)
    elif hasattr(blocks, "kv_num_blocks"):
        partial = (blocks.kv_num_blocks, blocks.kv_indices)
        full = (blocks.full_kv_num_blocks, blocks.full_kv_indices)
        indices = _of_counts(*partial, *(() if full[0] is None else full))
    elif isinstance(blocks, tuple) and all(isinstance(x, Tensor) for x in blocks):
        by_rows = len(blocks) == 2 and blocks[0].dim() == 1
        indices = _of_rows(*blocks) if by_rows else _of_counts(*blocks)
    else:
        raise TypeError(
            "blocks must be a bool map, a BlockMask, pairs of counts and numbers, or BSR, got "
            f"{checks.type_name(blocks)}"
        )
    if most is None:
        return indices
    lost = indices[..., most:]
    if tracing.host_knows(lost) and bool((lost >= 0).any()):
        longest = int((indices >= 0).sum(-1).max())
        raise ValueError(f"most must be at least {longest}, the longest list, got {most}")
    return indices[..., :most]


def _of_map(seen: Tensor) -> Tensor:
    checks.check_input("blocks", seen, "bool", "B H_s R N", seen, {})
    return _packed(seen, torch.arange(seen.shape[3], device=seen.device).expand(seen.shape))


def _of_counts(*tensors: Tensor) -> Tensor:
    if len(tensors) not in (2, 4):
        raise TypeError(f"blocks must be two tensors or four, got {len(tensors)}")
    counted = []
    for counts, numbers in zip(tensors[::2], tensors[1::2], strict=True):
        checks.check_input("blocks", numbers, "integer", "...", numbers, {})
        if tuple(counts.shape) != tuple(numbers.shape[:-1]):
            raise ValueError(
                f"blocks must have a count for each list of {list(numbers.shape)}, got counts of "
                f"{list(counts.shape)}"
            )
        places = torch.arange(numbers.shape[-1], device=numbers.device)
        counted.append((places < counts[..., None], numbers))
    listed, numbers = (torch.cat(x, -1) for x in zip(*counted, strict=True))
    return _packed(listed, numbers)


def _packed(listed: Tensor, numbers: Tensor) -> Tensor:
    """Listed numbers of each row, sorted and padded with -1."""
    past = torch.iinfo(torch.int32).max
    indices = torch.where(listed, numbers, past).to(torch.int32).sort(dim=-1).values
    return indices.masked_fill(indices == past, -1)


def _of_rows(starts: Tensor, numbers: Tensor) -> Tensor:
    for x in (starts, numbers):
        checks.check_input("blocks", x, "integer", "...", starts, {})
    lengths = starts.diff()
    R, n = lengths.shape[0], int(lengths.max()) if len(lengths) else 0
    rows = torch.arange(R, device=starts.device).repeat_interleave(lengths)
    places = torch.arange(numbers.shape[0], device=starts.device) - starts[:-1].long()[rows]
    indices = starts.new_full((R, n), -1, dtype=torch.int32)
    return indices.index_put((rows, places), numbers.to(torch.int32))[None, None]
