"""Masks and scores of a grid of pixels, whose tokens are in row-major order.

At the border a neighbourhood moves inwards and keeps its size, as in NATTEN.

    natten_1d(6, 3)     sliding_tiles_2d(2, 4, tile=2, kernel=1): pixels of 2 x 2 see their tile
    1 1 1 0 0 0         1 1 0 0 1 1 0 0
    1 1 1 0 0 0         1 1 0 0 1 1 0 0
    0 1 1 1 0 0         0 0 1 1 0 0 1 1
    0 0 1 1 1 0         0 0 1 1 0 0 1 1
    0 0 0 1 1 1         ...
    0 0 0 1 1 1

At 32 x 32 pixels and blocks of 64, natten_2d(32, 32, 7) visits 76 of 256 blocks.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compose import bind


@triton.jit
def near(x, y, length, kernel):
    """Whether y is one of the `kernel` positions nearest to x, in a row of `length`."""
    first = tl.minimum(tl.maximum(x - kernel // 2, 0), length - kernel)
    return (y >= first) & (y < first + kernel)


@triton.jit
def natten_1d_rule(b, h, q_pos, k_pos, length, kernel):
    return near(q_pos, k_pos, length, kernel)


@triton.jit
def natten_2d_rule(b, h, q_pos, k_pos, height, width, kernel):
    rows = near(q_pos // width, k_pos // width, height, kernel)
    return rows & near(q_pos % width, k_pos % width, width, kernel)


@triton.jit
def natten_3d_rule(b, h, q_pos, k_pos, depth, height, width, kernel):
    area = height * width
    planes = near(q_pos // area, k_pos // area, depth, kernel)
    return planes & natten_2d_rule(b, h, q_pos % area, k_pos % area, height, width, kernel)


@triton.jit
def sliding_tiles_rule(b, h, q_pos, k_pos, height, width, tile, kernel):
    rows = near(q_pos // width // tile, k_pos // width // tile, height // tile, kernel)
    columns = near(q_pos % width // tile, k_pos % width // tile, width // tile, kernel)
    return rows & columns


def _fits(name: str, kernel: int, *lengths: int) -> None:
    if type(kernel) is not int or not 1 <= kernel <= min(lengths):
        raise ValueError(f"kernel of {name} must be an int from 1 to {min(lengths)}, got {kernel}")


def natten_1d(length: int, kernel: int) -> Any:
    """A `mask_mod`: each of length tokens sees the kernel tokens nearest to it."""
    _fits("natten_1d", kernel, length)
    return bind(natten_1d_rule, length, kernel)


def natten_2d(height: int, width: int, kernel: int) -> Any:
    """A `mask_mod`: each pixel sees the kernel x kernel pixels nearest to it.

    Raises:
        ValueError: kernel is larger than a side.
    """
    _fits("natten_2d", kernel, height, width)
    return bind(natten_2d_rule, height, width, kernel)


def natten_3d(depth: int, height: int, width: int, kernel: int) -> Any:
    """A `mask_mod`: each voxel sees the kernel^3 voxels nearest to it; see `natten_2d`."""
    _fits("natten_3d", kernel, depth, height, width)
    return bind(natten_3d_rule, depth, height, width, kernel)


def sliding_tiles_2d(height: int, width: int, *, tile: int, kernel: int) -> Any:
    """A `mask_mod`: a tile of tile x tile pixels sees the kernel x kernel tiles nearest to it.

    Permute the tokens so that each tile is contiguous: then blocks are full or empty (STA).

    Raises:
        ValueError: tile does not divide a side, or a side has fewer than kernel tiles.
    """
    if height % tile or width % tile:
        raise ValueError(f"tile must divide height {height} and width {width}, got {tile}")
    _fits("sliding_tiles_2d", kernel, height // tile, width // tile)
    return bind(sliding_tiles_rule, height, width, tile, kernel)


def swin_windows(mask: Tensor, batch: int) -> Tensor:
    """The `attn_mask` of shifted windows, from Swin's mask, for q [batch * nW, H, N, D].

    Args:
        mask: [nW, N, N]: bool, True = attend; or Swin's own, 0 where it attends, else negative.
        batch: number of images; the windows of one image are contiguous.

    Returns:
        bool [batch * nW, 1, N, N].

    Raises:
        ValueError: mask has another shape.
    """
    if mask.dim() != 3 or mask.shape[1] != mask.shape[2]:
        raise ValueError(f"mask must have shape [nW, N, N], got {list(mask.shape)}")
    seen = mask if mask.dtype == torch.bool else mask == 0
    return seen.repeat(batch, 1, 1)[:, None]


def decomposed_positions(
    q: Tensor, k: Tensor, rows: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor, float]:
    """q, k and scale with SAM's relative positions: exact, learned, with no T x T bias.

    The score of pixels (y, x) and (y', x') is scale * q.k + q.rows[y - y' + H - 1]
    + q.columns[x - x' + W - 1]. The terms become H + W more channels.

    Args:
        q, k: [B, H_q, H * W, D] and [B, H_k, H * W, D].
        rows, columns: [2 H - 1, D] and [2 W - 1, D], for the sides H and W of the grid.

    Returns:
        q and k of D + H + W channels, and the scale to call `attention` with.

    Raises:
        ValueError: T is not H * W.
    """
    H, W = (x.shape[0] // 2 + 1 for x in (rows, columns))
    if q.shape[2] != H * W or k.shape[2] != H * W:
        raise ValueError(f"q and k must have {H} * {W} tokens, got {q.shape[2]} and {k.shape[2]}")
    scale = q.shape[3] ** -0.5
    y, x = (torch.arange(n, device=q.device) for n in (H, W))
    grid = q.reshape(*q.shape[:2], H, W, -1) / scale
    by_row = torch.einsum("bhyxd,yud->bhyxu", grid, rows[y[:, None] - y + H - 1])
    by_column = torch.einsum("bhyxd,xud->bhyxu", grid, columns[x[:, None] - x + W - 1])
    index = torch.arange(H * W, device=q.device)
    hot = torch.cat(
        [torch.nn.functional.one_hot(index // W, H), torch.nn.functional.one_hot(index % W, W)], 1
    )
    wide_q = torch.cat((q, by_row.flatten(2, 3), by_column.flatten(2, 3)), 3)
    wide_k = torch.cat((k, hot.to(k.dtype).expand(*k.shape[:2], -1, -1)), 3)
    return wide_q, wide_k, scale
