"""Positions of queries and keys: a part of a sequence computes what the whole does of it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastattn
from fastattn import attention
from fastattn.kernels.launch import tiles
from fastattn.testing import assert_matches_reference, make_qkv
from fastattn.testing.inputs import draw, to_device
from fastattn.testing.option_examples import near_or_striped, squash, squash_grad

H_q, H_k, T_q, T_k, D, R = 1, 1, 136, 256, 16, 20
BLOCK = 128


@pytest.fixture(autouse=True, scope="module")
def few_tiles() -> Iterator[None]:
    """Tiles of two sizes, both less than a block, or the interpreter would take minutes."""
    tile, other = tiles.TileConfig(64, 128), tiles.TileConfig(128, 64)
    with tiles.forced(
        forward=tile, backward_dq=tile, backward_dkv=other, backward_one_pass=other, relative=tile
    ):
        yield


def of_blocks(*blocks: int) -> torch.Tensor:
    """Positions int32 of these blocks of a sequence, in this order."""
    return torch.cat([torch.arange(BLOCK) + BLOCK * n for n in blocks]).int()


# Out of order, with a gap; the queries end within a block.
POSITIONS = (of_blocks(2, 1)[None, :T_q], of_blocks(3, 1)[None])
OPTIONS: dict[str, dict[str, Any]] = {
    "window-first-alibi": {
        "causal": True,
        "window": 60,
        "keep_first": 140,
        "alibi_slopes": torch.tensor([0.02]),
        "sinks": draw(H_q),
    },
    "prefix-relative-bias-dropout": {
        "causal": True,
        "prefix_lengths": torch.tensor([447]),  # all but the last key of a tile of 64
        "relative_bias": draw(H_q, 2 * R + 1),
        "dropout": 0.3,
        "dropout_seed": torch.tensor([3, 4]),
    },
    "relative-keys": {
        "window": (60, 200),
        "relative_keys": draw(H_q, 2 * R + 1, D),
        "relative_query": draw(1, H_q, T_q, D),
    },
    "stride-functions": {
        "stride": 3,
        "window": (50, None),
        "mask_mod": near_or_striped,
        "score_mod": squash,
        "score_mod_grad": squash_grad,
        "mod_tensors": (torch.tensor([200.0]), torch.arange(4 * BLOCK) % 5 + 505),
    },
    # By their places in memory: what else there is of keys.
    "places": {
        "causal": True,
        "key_lengths": torch.tensor([200]),
        "key_padding_mask": draw(1, T_k) > -1,
        "documents": (torch.arange(T_q)[None] // 90, torch.arange(T_k)[None] // 130),
        "attn_bias": draw(T_q, T_k),
    },
}


def by_triton(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    return attention(q, k, v, backend="triton", **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_blocks_that_stand_anywhere(name: str, device: str) -> None:
    """Run the kernels alone: torch has no blocks, and combines positions with every option."""
    q, k, v = make_qkv(1, H_q, H_k, T_q, T_k, D, device=device)
    options = to_device({**OPTIONS[name], "positions": POSITIONS}, device)
    assert_matches_reference(by_triton, q, k, v, **options)


def test_dropout_drops_what_it_drops_of_the_whole() -> None:
    seed, T = torch.tensor([7, 8]), 2 * BLOCK
    whole = fastattn.dropout_keep_mask(seed, 0.5, 1, 2, T, T)
    rows, keys = of_blocks(1)[:20], of_blocks(1, 0)
    part = fastattn.dropout_keep_mask(
        seed, 0.5, 1, 2, len(rows), len(keys), positions=(rows[None], keys[None])
    )
    assert torch.equal(part, whole[:, :, rows.long()][..., keys.long()])
