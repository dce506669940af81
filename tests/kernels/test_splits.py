"""Keys of each program of decoding, by the kernel's own rule and by the launcher's."""

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from fastattn.kernels import combine
from fastattn.kernels.launch import decode_splits, tiles
from fastattn.kernels.launch.interpreter import patch_interpreter
from fastattn.kernels.rules.integers import runtime_int
from fastattn.kernels.rules.mask import Mask
from fastattn.kernels.rules.pages import CacheTensors
from fastattn.kernels.rules.splits import FEWEST_BLOCKS, Lengths, Plan, part_of, share
from fastattn.options import Options

BLOCK_N = 64


@triton.jit
def part_kernel(out_ptr, lengths, mask, plan, B, BLOCK_N: tl.constexpr):
    """Row, first part and splits of the row, first visit and the one past the last, of a part."""
    part = tl.program_id(0)
    one = part_of(part, 0, B, 1, 1, lengths, mask, plan, 16, BLOCK_N, True)
    tl.store(out_ptr + 5 * part, tl.where(one.exists, one.b, B))
    if one.exists == 0:
        return
    first, last, _, _, _, _ = share(one.split, one.splits, 0, 0, one.row, mask, BLOCK_N, True)
    tl.store(out_ptr + 5 * part + 1, one.begin)
    tl.store(out_ptr + 5 * part + 2, one.splits)
    tl.store(out_ptr + 5 * part + 3, first)
    tl.store(out_ptr + 5 * part + 4, last)


class Part(NamedTuple):
    b: int
    begin: int
    splits: int
    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first


def parts_of(lengths: list[int], split: decode_splits.KeySplit, device: str) -> list[Part]:
    """The parts that exist."""
    patch_interpreter()
    B = len(lengths)
    assert split.plan is not None
    of_rows = torch.tensor(lengths, dtype=torch.int32, device=device)
    out = torch.full((split.parts, 5), -1, dtype=torch.int32, device=device)
    sizes = Lengths(of_rows, None, None, None, runtime_int(B), runtime_int(split.capacity))
    plan = Plan(*map(runtime_int, split.plan))
    part_kernel[(split.parts,)](out, sizes, Mask(), plan, B, BLOCK_N=BLOCK_N)
    rows = [Part(*row) for row in out.tolist()]
    existing = [part for part in rows if part.b < B]
    assert rows[: len(existing)] == existing, "parts that do not exist come last"
    return existing


def split_of(
    B: int, heads: int, capacity: int, count: int | None = None, sms: int = 132
) -> decode_splits.KeySplit:
    """The launcher's split of one token a row on a GPU of so many multiprocessors."""
    k = torch.empty(1, heads, capacity, 64, device="meta")
    cache = CacheTensors(k, k, None, None, None, k, None, None, None)
    q = torch.empty(B, heads, 1, 64, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "multiprocessors", lambda device: sms)
        split = decode_splits.split_keys(q, cache, Options(), tiles.TileConfig(16, BLOCK_N), count)
    return split


RAGGED = {
    "one-long": [16384] + [512] * 31,
    "one-long-at-the-end": [512] * 31 + [16384],
    "equal": [4096] * 32,
    "alone": [4096],
    "short-in-a-large-cache": [300],
    "empty-rows": [0, 5000, 0, 1, 0],
    "all-empty": [0, 0, 0],
    "many-rows": [(7919 * b) % 3001 for b in range(200)],
    "past-the-end": [20000, 64],
}


@pytest.mark.parametrize("name", RAGGED)
def test_parts_follow_the_work_of_rows(name: str, device: str) -> None:
    lengths, capacity = RAGGED[name], 16384
    split = split_of(len(lengths), 8, capacity)
    assert split.plan is not None
    parts = parts_of(lengths, split, device)
    visits = [-(-min(n, capacity) // BLOCK_N) for n in lengths]
    largest = max(FEWEST_BLOCKS.value, -(-sum(visits) // split.plan[0]))
    assert sorted({part.b for part in parts}) == list(range(len(lengths)))
    for b, needed in enumerate(visits):
        own = [part for part in parts if part.b == b]
        begin = parts.index(own[0])
        assert parts[begin : begin + len(own)] == own
        assert {(p.begin, p.splits) for p in own} == {(begin, len(own))}
        ends = [0, *(part.last for part in own)]
        assert [part.first for part in own] == ends[:-1], "each goes on where another ended"
        assert ends[-1] == needed
        sizes = [part.size for part in own]
        assert max(sizes) <= largest and len(own) == max(1, -(-needed // largest))
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) > 0 or needed == 0
    if name == "one-long":
        assert (sum(part.b == 0 for part in parts), max(part.size for part in parts)) == (16, 16)


@pytest.mark.parametrize("count", [2, 29])
def test_a_given_number_of_splits_is_even(count: int, device: str) -> None:
    parts = parts_of([4096, 130, 0], split_of(3, 8, 4096, count), device)
    assert [part.b for part in parts] == [b for b in range(3) for _ in range(count)]
    sizes = [[part.size for part in parts if part.b == b] for b in range(3)]
    assert [*map(sum, sizes)] == [64, 3, 0]
    assert max(sizes[0]) - min(sizes[0]) <= 1


# Rows, K/V heads, capacity, and parts that equal rows of that length have, None: not split.
@pytest.mark.parametrize(
    ("B", "heads", "capacity", "expected"),
    [(1, 8, 4096, 16), (8, 8, 32768, 32), (24, 8, 4096, 96), (32, 8, 4096, 32),
     (128, 8, 1024, None), (512, 8, 65536, None), (1, 1, 64, None)],
)  # fmt: skip
def test_equal_rows_fill_the_device(
    B: int, heads: int, capacity: int, expected: int | None, device: str
) -> None:
    split = split_of(B, heads, capacity)
    if expected is None:
        assert split == decode_splits.KeySplit(capacity, B, None)
    else:
        parts = parts_of([capacity] * B, split, device)
        assert len(parts) == expected
        assert len({part.size for part in parts}) <= 2


@pytest.mark.parametrize(
    ("capability", "driver", "setting", "early"),
    [(90, 12030, None, True), (100, 13000, "1", True), (90, 12030, "0", False),
     (90, 12020, None, False), (120, 13000, None, False), (89, 13000, None, False)],
)  # fmt: skip
def test_merging_begins_early_where_graphs_can_hold_it(
    capability: int, driver: int, setting: str | None, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(combine, "nvidia_capability", lambda: capability)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False)
    monkeypatch.delenv("FASTATTN_PDL", raising=False)
    if setting is not None:
        monkeypatch.setenv("FASTATTN_PDL", setting)
    assert combine.may_begin_early() == early


def test_programs_that_share_a_multiprocessor_may_be_tuned() -> None:
    """For caches of some bytes an element and some head dims."""

    def shares() -> int:
        plan = split_of(4, 8, 16384).plan
        assert plan is not None
        return plan[0]

    device, key, usual = tiles.current_device(), tiles.device_key(torch.float32), shares()
    with tiles.forced(splits=4):
        more = shares()
    assert more > usual
    row = {"element_size": 4, "BLOCK_D": 64, "programs": 4}
    try:
        tiles.install([], device, [{**row, "element_size": 2}, {**row, "BLOCK_D": 128}])
        tiles.install([], device + 1, [row])
        assert shares() == usual
        assert tiles.device_key(torch.float32) != key, "known launches have other splits"
        tiles.install([], device, [row])
        for wrong in ({"programs": 0}, {"programs": 2**40}, {"programs": True}, {"one_launch": 1}):
            with pytest.raises(ValueError, match="no numbers of programs"):
                tiles.install([], device, [{**row, **wrong}])
        assert shares() == more
    finally:
        for index in (device, device + 1):
            tiles.install([], index)
    assert shares() == usual
