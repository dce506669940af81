"""dK and dV: query heads dealt out to several programs, and a launch for each gradient."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn.kernels import backward_dkv
from fastattn.kernels.launch import launches, tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.testing import assert_matches_reference, make_qkv


def attend(q: Tensor, k: Tensor, v: Tensor, *starts: Tensor, **options: Any) -> Any:
    function = fastattn.attention_varlen if starts else fastattn.attention
    return function(q, k, v, *starts, backend="triton", **options)


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


def test_parts_are_added_in_one_order(summed: list[int], device: str) -> None:
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


def test_the_last_part_has_fewer_heads(
    summed: list[int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of seven heads each, and one."""
    monkeypatch.setattr(backward_dkv, "head_parts", lambda *_: 4)
    q, k, v = make_qkv(2, 14, 2, 19, 27, 16, device=device)
    assert_matches_reference(attend, q, k, v, causal=True)
    assert set(summed) == {4}


@pytest.mark.parametrize("deterministic", [True, False], ids=["two-pass", "one-pass"])
@pytest.mark.parametrize(("D", "heads"), [(16, 1), (40, 2)])
def test_a_launch_for_each_gradient(D: int, heads: int, deterministic: bool, device: str) -> None:
    tile = TileConfig(16, 16, apart=True)
    q, k, v = make_qkv(2, 2, heads, 19, 27, D, device=device)
    with tiles.forced(backward_dkv=tile, backward_one_pass=tile):
        assert_matches_reference(attend, q, k, v, causal=True, deterministic=deterministic)


@pytest.mark.parametrize(
    ("G", "programs", "parts"),
    [
        (1, 8, 1),  # nothing to deal out
        (32, 64, 8),  # 8192 keys of one head: 512 programs
        (32, 263, 2),
        (32, 264, 1),  # two rounds of 132
        (4, 128, 4),
        (7, 128, 4),
        (6, 200, 3),
        (32, 1, 32),
        (8, 0, 8),
    ],
)
def test_parts_of_a_group(G: int, programs: int, parts: int) -> None:
    assert backward_dkv.head_parts(G, programs, 132) == parts


def test_parts_are_bounded() -> None:
    for G in range(2, 130):
        for programs in range(1, 264):
            parts = backward_dkv.head_parts(G, programs, 132)
            assert parts <= G
            assert parts * programs < 8 * 132
            assert parts == G or parts * programs > 2.6 * 132
