"""bench/results/README.md, generated from the JSON reports beside it."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from ...kernels.launch import tiles
from ..attention import TIMED
from . import modelled, probes, tuned
from .report import Report, markdown, table, write_whole

_INTRODUCTION = """# Results

This page is drawn from the JSON files of this folder by `bench/results_table.py`, and the test
suite fails where the two differ. Every performance figure of the project is in such a file, one for
each GPU and date, as `bench/run_all.py` or `fastattn tune --export` wrote it.

How the figures are made: times are medians between CUDA events with the second-level cache cold,
the implementations taking turns in one process. TFLOP/s count 4 * D operations for a pair of query
and key, half of the pairs under a causal mask, and 2.5 forward passes for a backward; the files
also have them over the pairs that the mask lets through, with 20th and 80th percentiles, clocks and
power. Before it is timed, every implementation is held to the error budget on a sample of heads.
"""

_NOTHING = """## Measured

There is no such file yet. What was measured outside a full run stands below."""

_OPEN = """## What the figures settled, and what is open

- The model of speed (`fastattn.testing.compiling.speed`) had chosen forward tiles of 128 by 128 for
  plain calls; on an H100 128 by 64 takes a quarter less time at head dim 64, a sixth at 128 and a
  third at 256 (causal). Fewer instructions for a pair are no gain there, and the model does not say
  why. `python bench/tune.py --out DIR` times tiles.
- The bounds of the model are far: without a mask the forward of head dim 128 ran at 614 TFLOP/s on
  Hopper's kernels where its bound is 989, and a plain product of matrices at 794.
- Keys by TMA are no faster than by pointers in the portable forward; no table asks for them.
- Turns of the consumers (`PING_PONG`) gain nothing, nor do other blocks and stages of the Hopper
  forward: the shapes in use were the fastest, or within 2 percent.
- Two passes or one: at head dim 128 the one with atomics takes 2 to 9 percent less time on Hopper
  with as many K/V heads as query heads, 13 percent more with 64 on 8, and at head dim 64 it takes 6
  percent more; of the portable kernels it is the slower everywhere.
- The Hopper kernels are faster than the portable ones, or as fast, wherever both were timed, so
  `auto` takes them. With causal tiles dealt out in pairs, and shorter steps, causal calls took 18
  to 28 percent less time than in the call before (7580bdc to 0b37215). The rows of T 16384 and of
  head dim 256 in the table above are of the older order, and the backward of head dim 256 is that
  of before a launch for each gradient (2.83 ms in the last call).
- `attn_bias` by TMA takes a fifth to an eighth of the time that it took by pointers (forward 0.78
  ms for 6.22 at head dim 128). dK and dV of one K/V head (32 query heads, T 8192) in parts take 3.6
  ms with dQ, where one program a tile took 6.9 on the same day's kernels and 12.4 before.
- Padding with holes is still 1.6 times plain at head dim 128 and 2 times at 64, `relative_bias` 5
  to 9 times, dropout 2 to 3.4 times. What `relative_bias` spent was found in the machine code:
  each number of its table was copied to shared memory alone, four bytes at a time. Now 18 loads a
  thread and block do for 32 copies, which was not timed.
- 8 bits on Hopper take 10 to 24 percent less time than 16 at head dim 128 and 3 to 7 percent less
  at 64, packing included or not; the aim of 1.4 times the speed is not reached.
- Tiles that the last probe found faster are in the table since, and were not timed in a full run:
  head dim 64, dK/dV 64 by 64 with 4 warps (1.31 ms for 1.61), dQ alike with 3 stages (0.73 for
  1.07).
- Decoding 8-bit caches reached 1.6 to 2.2 TB/s where bf16 reached 2.7 to 2.9. Its loop took 733
  instructions for a block of 64 int8 keys: with two programs of four warps on a multiprocessor
  those take 1466 clocks of the about 3600 that went by, so that most of the time instructions
  waited for one another. Since then, not timed, a block takes 371, of e4m3 331 (in pages of 64 or
  more 417 and 378), and one of bf16 231 for 267. Loads are far enough ahead, by a model: two
  programs have three blocks each on their way, 98 KB of codes or 192 KB of bf16, where about 40 KB
  hide the latency.
- Open: a dense uniform batch (dividing keys by rows costs it 4 percent, 0.2023 ms for 0.1935),
  packed sequences on Hopper (now dealt out by their length, not timed since), the host cost of a
  Hopper backward (380 us where the portable one takes 191), times on an H200. Not timed either:
  what Hopper's forward gains where O is rescaled only where that is due, and decoding where parts
  are merged without a gap; packed sequences in 8 bits.
  `python bench/run_all.py --out DIR` measures all in one
  call.
- Automatic warp specialisation (`tl.range(..., warp_specialize=True)`) of the forward kernel. With
  eight warps the compiler takes no notice: the loops come out the same, instruction by instruction.
  With four its pass `NVGPUWarpSpecialization` fails, since the kernel has one loop over full blocks
  and another over masked ones, and loads through pointers. The portable kernels keep the plain
  schedule; those in kernels/hopper specialise warps by hand."""


def page(folder: Path) -> str:
    """The text of README.md for the JSON files of a folder.

    Raises:
        ValueError: a file is not a report.
    """
    reports = [Report.load(path).data for path in sorted(folder.glob("*.json"))]
    parts = [_INTRODUCTION.strip()]
    parts.append("## Measured" if reports else _NOTHING)
    parts += [markdown(data).strip() for data in reports]
    parts += tuned.sections(folder / "tuned")
    parts += probes.tables(folder / "probes")
    parts += modelled.section(folder)
    parts.append(_verified(reports, probes.ran(folder / "probes")))
    parts.append(_OPEN)
    return "\n\n".join(parts) + "\n"


def _verified(reports: list[dict[str, Any]], probed: list[tuple[str, str]]) -> str:
    """A table of what ran on each architecture with tuned tiles. probed: see `probes.ran`."""
    lines = []
    for arch in tiles.TABLES:
        if arch == "interpreter":
            continue
        ran = [data for data in reports if _arch(data) == arch]
        tested = [_tests(data) for data in ran if data["tests"]]
        timed = [
            f"{data['environment']['gpu']['name']}, {data['started'][:10]}"
            for data in ran
            if any(
                r["status"] == TIMED and r["implementation"] == "fastattn-triton"
                for r in data["results"]
            )
        ]
        parts = [
            f"{gpu}: in parts, see above"
            for capability, gpu in probed
            if _tiles_for(capability) == arch
        ]
        lines.append(
            [arch, *("; ".join([*found, *parts]) or "not run" for found in (tested, timed))]
        )
    columns = ("tiles for", "numeric tests", "kernels timed")
    return "## What has run where\n\n" + table(columns, lines)


def _arch(data: dict[str, Any]) -> str | None:
    gpu = data["environment"].get("gpu")
    if not gpu:
        return None
    return _tiles_for(gpu["capability"])


def _tiles_for(capability: str) -> str:
    return tiles.table_for("sm_" + capability.replace(".", ""))


def _tests(data: dict[str, Any]) -> str:
    tests = data["tests"]
    name = data["environment"]["gpu"]["name"]
    return f"{name}: {tests['passed']} passed, {tests['failed']} failed ({tests['status']})"


def draw(folder: Path) -> None:
    """Write README.md."""
    write_whole(folder / "README.md", page(folder))


def check(folder: Path) -> str:
    """A diff of README.md and the page of the files, "" if they agree."""
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = difflib.unified_diff(
        text.splitlines(), page(folder).splitlines(), "README.md", "the JSON files", lineterm=""
    )
    return "\n".join(lines)
