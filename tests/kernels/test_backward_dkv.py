"""dK and dV: query heads split among several programs, and a launch for each gradient."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn.kernels import backward_dkv
from fastattn.kernels.launch import launches, tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.testing import assert_matches_reference, make_qkv

attend = partial(fastattn.attention, backend="triton")


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Parts of each gradient that was added up, on a device of 100 multiprocessors."""
    parts: list[int] = []
    add = backward_dkv.launch_add_parts

    def counted(sums: Tensor, x: Tensor, *rest: Any) -> None:
        parts.append(sums.shape[1] // x.shape[1])
        add(sums, x, *rest)

    monkeypatch.setattr(tiles, "multiprocessors", lambda device: 100)
    monkeypatch.setattr(backward_dkv, "launch_add_parts", counted)
    launches.forget()
    yield parts
    launches.forget()


def test_parts_are_added_in_one_order(
    summed: list[int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit the same in every run, and the sum in the order of the heads."""
    q, k, v = make_qkv(1, 6, 1, 33, D=16, device=device)
    do = torch.randn_like(q)
    runs = [torch.autograd.grad(attend(q, k, v), (q, k, v), do) for _ in range(3)]
    assert summed == [6] * 6
    for run in runs[1:]:
        assert all(map(torch.equal, runs[0], run))
    total = torch.zeros_like(v)
    for h in range(6):
        one = [x.detach().requires_grad_() for x in (q[:, h : h + 1], k, v)]
        total += torch.autograd.grad(attend(*one), one[2], do[:, h : h + 1])[0]
    assert torch.equal(runs[0][2], total)
    # Two of seven heads each, and one.
    monkeypatch.setattr(backward_dkv, "head_parts", lambda *_: 4)
    launches.forget()
    inputs = make_qkv(2, 14, 2, 19, 27, 16, device=device)
    assert_matches_reference(attend, *inputs, causal=True)
    assert set(summed[6:]) == {4}


@pytest.mark.parametrize("deterministic", [True, False], ids=["two-pass", "one-pass"])
@pytest.mark.parametrize(("D", "heads"), [(16, 1), (40, 2)])
def test_a_launch_for_each_gradient(D: int, heads: int, deterministic: bool, device: str) -> None:
    tile = TileConfig(16, 16, apart=True)
    q, k, v = make_qkv(2, 2, heads, 19, 27, D, device=device)
    with tiles.forced(backward_dkv=tile, backward_one_pass=tile):
        assert_matches_reference(attend, q, k, v, causal=True, deterministic=deterministic)


def test_parts_of_a_group() -> None:
    """Two rounds of 132 programs and more, and few more copies of the gradients."""
    # 32 heads of queries and 8192 keys of one: 512 programs.
    some = {(1, 8): 1, (32, 64): 8, (32, 263): 2, (32, 264): 1, (7, 128): 4, (6, 200): 3, (8, 0): 8}
    assert {x: backward_dkv.head_parts(*x, 132) for x in some} == some
    for G in range(2, 130):
        for programs in range(1, 264):
            parts = backward_dkv.head_parts(G, programs, 132)
            assert parts <= G and parts * programs < 8 * 132
            assert parts == G or parts * programs > 2.6 * 132
