"""Positions of queries and keys: a part of a sequence computes what the whole does of it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastattn
from fastattn import attention, attention_block_backward, attention_block_forward
from fastattn.kernels.launch import tiles
from fastattn.testing import assert_matches_reference, assert_within_budget, make_qkv
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
        "window": 150,
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


def test_parts_of_a_sequence_add_up_to_it(device: str) -> None:
    """Two ranks, with blocks 0 and 3 and blocks 1 and 2: every result of the whole and its bits."""
    T, ranks = 4 * BLOCK, [of_blocks(0, 3), of_blocks(1, 2)]
    options: dict[str, Any] = {
        "causal": True,
        "window": 300,
        "dropout": 0.4,
        "dropout_seed": torch.tensor([5, 6], device=device),
        "relative_bias": draw(1, 9).to(device).requires_grad_(),
        "deterministic": False,
    }
    q, k, v = make_qkv(1, 1, 1, T, T, D, device=device)
    do = draw(1, 1, T, D).to(device)
    whole, lse = attention(q, k, v, return_lse=True, backend="triton", **options)
    bias = options["relative_bias"]
    wanted = torch.autograd.grad(whole, (q, k, v, bias), do)
    whole, lse = whole.detach(), lse.detach()
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    dbias = torch.zeros_like(bias)
    for mine in ranks:
        at = mine.to(device).long()
        parts = []
        for theirs in ranks:
            there = theirs.to(device).long()
            given = {**options, "positions": (mine.to(device)[None], theirs.to(device)[None])}
            given["backend"] = "triton"
            qkv = (q[:, :, at].detach(), k[:, :, there].detach(), v[:, :, there].detach())
            parts.append(attention_block_forward(*qkv, **given))
            of_whole = (whole[:, :, at], lse[:, :, at])
            actual = attention_block_backward(do[:, :, at], *qkv, *of_whole, **given)
            dq[:, :, at] += actual.dq
            dk[:, :, there] += actual.dk
            dv[:, :, there] += actual.dv
            dbias += actual.of_options["relative_bias"]
        o, part_lse = fastattn.merge(*parts[0], *parts[1])
        assert_within_budget("o", o, whole[:, :, at].double(), whole[:, :, at])
        assert_within_budget("lse", part_lse, lse[:, :, at].double(), lse[:, :, at])
    for name, x, exact in zip(("dq", "dk", "dv", "bias"), (dq, dk, dv, dbias), wanted, strict=True):
        assert_within_budget(name, x, exact.double(), exact)


def test_dropout_drops_what_it_drops_of_the_whole() -> None:
    seed, T = torch.tensor([7, 8]), 2 * BLOCK
    whole = fastattn.dropout_keep_mask(seed, 0.5, 1, 2, T, T)
    rows, keys = of_blocks(1)[:20], of_blocks(1, 0)
    part = fastattn.dropout_keep_mask(
        seed, 0.5, 1, 2, len(rows), len(keys), positions=(rows[None], keys[None])
    )
    assert torch.equal(part, whole[:, :, rows.long()][..., keys.long()])
