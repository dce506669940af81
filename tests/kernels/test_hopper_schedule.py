"""The order of tiles on the persistent grid of the Hopper kernels: complete, and balanced."""

import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gluon_emulator import Emulated
from nightly import gate_cases
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastattn.kernels.hopper import host, schedule
from fastattn.kernels.hopper.schedule import Work, assign, number_of_tiles
from fastattn.kernels.hopper.tile_table import backward_config, forward_config
from fastattn.kernels.launch import interpreter
from fastattn.kernels.launch.arguments import kernel_mask
from fastattn.options import Options

interpreter.patch_interpreter()


@gluon.jit
def order_kernel(out_ptr, heads, tiles, group, pairs, pair_group):
    work = Work(heads, tiles, group, pairs, None, None, None, None, pair_group, None, None)
    program = gl.program_id(0)
    for i in range(number_of_tiles(work)):
        rank, head = assign(i, work)
        cell = out_ptr + 3 * (head * tiles + rank)
        gl.store(cell, program)
        gl.store(cell + 1, i)
        gl.store(cell + 2, 1)


class Int(int):
    """An int with the one method that kernels call of their scalars."""

    def to(self, dtype: Any) -> "Int":
        return self

    def __add__(self, other: int) -> "Int":
        return Int(int(self) + other)

    def __sub__(self, other: int) -> "Int":
        return Int(int(self) - other)


class Memory:
    """A pointer to a list of ints."""

    def __init__(self, values: list[int], offset: int = 0) -> None:
        self.values, self.offset = values, offset

    def __add__(self, more: int) -> "Memory":
        return Memory(self.values, self.offset + more)


class Grid:
    """The programs of a launch, and the one that runs: what `plain` functions ask for."""

    def __init__(self, programs: int) -> None:
        self.programs, self.program = programs, 0
        self.language = types.SimpleNamespace(
            program_id=lambda axis: self.program,
            num_programs=lambda axis: programs,
            where=lambda condition, a, b: Int(a if condition else b),
            minimum=lambda a, b: Int(min(a, b)),
            maximum=lambda a, b: Int(max(a, b)),
            cdiv=lambda a, b: -(-a // b),
            load=lambda pointer: Int(pointer.values[pointer.offset]),
            int32=None,
            constexpr=None,
        )

    def plain(self, function: Any) -> Callable[..., Any]:
        """A jit function of scalars as a Python function."""
        source = function.fn
        used = {
            name: self._of(x)
            for name, x in source.__globals__.items()
            if name in source.__code__.co_names
        }
        return types.FunctionType(source.__code__, used, source.__name__, source.__defaults__)

    def _of(self, x: Any) -> Any:
        if getattr(x, "__name__", "") in ("triton.language", "triton.experimental.gluon.language"):
            return self.language
        if isinstance(getattr(x, "fn", None), types.FunctionType):
            return self.plain(x)
        return getattr(x, "value", x)

    def each(self, work: Work, function: Any, *rest: Any) -> Iterator[tuple[int, int, Any]]:
        """(program, i, function(i, work, *rest)) for all tiles of all programs."""
        count, find = self.plain(number_of_tiles), self.plain(function)
        for program in range(self.programs):
            self.program = program
            for i in range(count(work)):
                yield program, i, find(i, work, *rest)


def assigned(programs: int, work: Work) -> dict[tuple[int, int], tuple[int, int]]:
    """(program, turn) of each (head, rank); each is met once."""
    results = {}
    for program, i, (rank, head) in Grid(programs).each(work, assign):
        assert (head, rank) not in results, "a tile is worked on twice"
        results[head, rank] = (program, i)
    assert len(results) == work.heads * work.tiles
    return results


def order_table(
    q: Tensor, k: Tensor, options: Options, config: Any, sizes: tuple[int, ...], *, of_keys: bool
) -> Tensor | None:
    """Table of `packed_order` for q and k of these shapes, filled by the interpreter."""
    like = torch.empty((), dtype=q.dtype)
    q, k = (like.expand(x.shape) for x in (q, k))
    _, order, tables = host.mask_of(options, q, k, config, sizes, of_keys=not of_keys)
    if tables is None:
        return order
    tables.bind((*options, *tables.empty))
    filled, _ = tables(options)
    return filled


def loads(
    kernel: str, B: int, H: int, T: int, D: int = 128, G: int = 1, T_k: int | None = None,
    **arguments: Any,
) -> list[int]:  # fmt: skip
    """Blocks of each program, where each part of a tile is met once."""
    options = Options(**{"right": 0, "scale": 0.1} | arguments)
    places = {"dtype": torch.bfloat16, "device": "meta"}
    q, k = (torch.empty(B, h, t, D, **places) for h, t in ((H, T), (H // G, T_k or T)))
    of_keys, of_backward = kernel == "dkv", kernel != "forward"
    config = forward_config(D, False)
    config = backward_config(kernel, D, False, False) if of_backward else config
    (programs,), sizes = (host.key_grid if of_keys else host.query_grid)(q, k, config, options)
    mask, order = kernel_mask(options), None
    if options.cu_seqlens_q is not None:
        order = order_table(q, k, options, config, sizes, of_keys=of_keys)
    mask = mask._replace(
        **{name: Memory(x.tolist()) for name, x in mask._asdict().items() if isinstance(x, Tensor)}
    )
    rows_q, rows_k, H, G, heads, tiles, group, pairs, pair_group, *parts = sizes
    table = None if order is None else Memory(order.tolist())
    work = Work(heads, tiles, group, pairs, rows_q, rows_k, H, mask, pair_group, G, table, *parts)
    assigned(programs, work)
    blocks = [0] * programs
    find = schedule.key_tile if of_keys else schedule.query_tile
    run = Grid(programs)
    of_tile = plain_loops(run, work)
    for program, _, tile in run.each(work, find, config):
        if tile.first < tile.length:
            blocks[program] += sum(map(len, of_tile(tile))) if of_keys else tile.blocks
    return blocks


def plain_loops(run: Grid, work: Work) -> Callable[[schedule.Tile], list[range]]:
    """The blocks of each loop of dK and dV over a tile of keys: one or two of each head."""
    heads, blocks, loops = map(
        run.plain, (schedule.heads_of_part, schedule.blocks_of_part, schedule.loops_of_part)
    )

    def of_tile(tile: schedule.Tile) -> list[range]:
        visits = []
        for g in range(*heads(tile, work)):
            begin, stop = blocks(g, tile, work)
            boundary_end, full, full_end = loops(begin, stop, tile, work)
            visits += [range(begin, boundary_end)]
            visits += [range(tile.boundary + full, tile.boundary + full_end)]
        return visits

    return of_tile


def imbalance(*call: Any, **arguments: Any) -> float:
    """Most blocks of a program by their mean."""
    blocks = loads(*call, **arguments)
    return max(blocks) * len(blocks) / sum(blocks)


@pytest.mark.parametrize(
    ("programs", "heads", "tiles", "group", "pairs", "pair_group"),
    [
        pytest.param(4, 3, 3, 2, 0, 1, id="one-by-one"),
        pytest.param(3, 9, 5, 9, 2, 1, id="pairs"),
        pytest.param(3, 8, 4, 8, 3, 2, id="whole-rounds-of-pairs"),
        pytest.param(40, 3, 3, 3, 0, 1, id="more-programs-than-tiles"),
    ],
)
def test_plain_python_agrees_with_the_emulator(
    programs: int, heads: int, tiles: int, group: int, pairs: int, pair_group: int
) -> None:
    out = torch.zeros(heads, tiles, 3, dtype=torch.int32)
    Emulated(order_kernel)[(programs,)](out, heads, tiles, group, pairs, pair_group)
    work = Work(heads, tiles, group, pairs, None, None, None, None, pair_group, None, None)
    for (head, rank), (program, i) in assigned(programs, work).items():
        assert out[head, rank].tolist() == [program, i, 1]


SHAPES = [(8, 16, 2048), (4, 16, 4096), (2, 16, 8192), (1, 16, 16384)]
# B, H_q, H_k, T, D; all have as many tiles of queries as multiprocessors, and more.
FEW_KEYS = [
    (1, 32, 1, 8192, 128), (1, 32, 8, 2048, 128), (1, 71, 1, 2048, 64), (1, 8, 1, 8192, 256),
    (1, 28, 4, 4096, 128), (2, 15, 3, 4096, 64), (3, 14, 2, 3000, 64), (1, 1, 1, 20000, 128),
    (1, 64, 8, 8192, 128), (8, 16, 4, 2048, 128),
]  # fmt: skip


@pytest.mark.parametrize("right", [0, None], ids=["causal", "full"])
@pytest.mark.parametrize("shape", FEW_KEYS, ids=str)
def test_few_kv_heads_keep_all_multiprocessors_busy(
    shape: tuple[int, ...], right: int | None
) -> None:
    """One program for each tile of keys kept 0.06 to 0.57 of them busy, for most of these."""
    B, H_q, H_k, T, D = shape
    blocks = loads("dkv", B, H_q, T, D, H_q // H_k, right=right)
    assert sum(blocks) / (132 * max(blocks)) >= 0.9


@pytest.mark.parametrize("tiles", [100, 500, 1000, 1500, 2000, 2300, 2900, 3500, 5700])
def test_how_busy_programs_are_that_take_tiles_in_turns(tiles: int) -> None:
    """Lengths fall to 0; every other round goes backwards."""
    work = [0.0] * 1000
    for i in range(tiles):
        turn, place = divmod(i, 1000)
        work[999 - place if turn % 2 else place] += 1 - i / tiles
    assert host._busy(tiles / 1000, slanted=True) == pytest.approx(
        sum(work) / 1000 / max(work), rel=0.01
    )


def test_parts_are_bounded() -> None:
    """Each is an fp32 copy of dK and dV, for the time of a call."""
    for heads, G in ((1, 71), (3, 5), (8, 4), (40, 2)):
        for T in (1, 64, 500, 2000, 9000):
            q, k = (torch.empty(1, h, T, 64, device="meta") for h in (heads * G, heads))
            for right in (0, None):
                _, sizes = host.key_grid(
                    q, k, backward_config("dkv", 64, False, False), Options(right=right, scale=0.1)
                )
                tiles, parts = sizes[5], sizes[-1]
                assert parts == 1 or heads * tiles * parts <= 8 * 132
                assert parts == 1 or parts * 64 <= G * T


KERNELS = ("forward", "dkv", "dq")
# Each shape by a kernel, in turns; the others by night.
IN_TURNS = [
    (shape, kernel)
    for n, shape in enumerate(SHAPES)
    for kernel in gate_cases(KERNELS[n % 3 :][:1], (*KERNELS[: n % 3], *KERNELS[n % 3 + 1 :]))
]


@pytest.mark.parametrize(("shape", "kernel"), IN_TURNS, ids=str)
def test_causal_work_is_balanced(shape: tuple[int, int, int], kernel: str) -> None:
    """15.5 rounds of tiles, so that 1.03 is what tiles of one length would have."""
    for D in (64, 128):
        assert imbalance(kernel, *shape, D) < 1.02
        assert imbalance(kernel, *shape, D, G=4 if kernel != "dkv" else 1) < 1.02
    assert imbalance(kernel, *shape, right=None) < 1.04


@pytest.mark.parametrize(("shape", "kernel"), [x for x in IN_TURNS if x[1] != "dq"], ids=str)
def test_other_masks_are_balanced(shape: tuple[int, int, int], kernel: str) -> None:
    """Windows miss by a block at most what is possible; lengths, which no host knows, by more."""
    B, _, T = shape
    for left in (255, 1023):
        assert imbalance(kernel, *shape, left=left) < 1.07
    lengths = torch.tensor([T - 97 * b for b in range(B)], dtype=torch.int32)
    assert imbalance(kernel, *shape, key_lengths=lengths) < 1.06
    assert imbalance(kernel, *shape, T_k=2 * T) < 1.1
    assert imbalance(kernel, *shape, T_k=T // 2) < 1.11


def packed(lengths: list[int]) -> dict[str, Tensor]:
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {"cu_seqlens_q": starts, "cu_seqlens_k": starts}


def documents(total: int, mean: float) -> list[int]:
    """Lengths of texts, most of which are short: their logarithms have a normal distribution."""
    torch.manual_seed(1)
    lengths = (torch.randn(total // 16) + math.log(mean) - 0.5).exp().long().clamp(min=16)
    ends = lengths.cumsum(0)
    whole = lengths[ends < total].tolist()
    return [*whole, total - sum(whole)]


PACKED = {
    "equal": [2048] * 8,
    "many short": documents(16384, 300),
    "texts": documents(32768, 1500),
    "one long": [12000, *documents(4384, 100)],
}


@pytest.mark.parametrize("kernel", ["forward", "dkv"])
@pytest.mark.parametrize("lengths", PACKED.values(), ids=PACKED)
def test_packed_sequences_are_balanced(lengths: list[int], kernel: str) -> None:
    """Without an order of their own some programs would have 1.1 to 1.6 of the mean."""
    assert imbalance(kernel, 1, 16, sum(lengths), **packed(lengths)) < 1.06
