"""bench/results/README.md, generated from the JSON reports beside it."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from ...kernels.launch import tiles
from ..attention import TIMED
from .report import Report, markdown, write_whole

_INTRODUCTION = """# Results

This page is drawn from the JSON files of this folder by `bench/results_table.py`, and the test
suite fails where the two differ. Every performance figure of the project is in such a file, one for
each GPU and date, as `bench/run_all.py` wrote it.

How the figures are made: times are medians between CUDA events with the second-level cache cold,
the implementations taking turns in one process. TFLOP/s count 4 * D operations for a pair of query
and key, half of the pairs under a causal mask, and 2.5 forward passes for a backward; the files
also have them over the pairs that the mask lets through, with 20th and 80th percentiles, clocks and
power. Before it is timed, every implementation is held to the error budget on a sample of heads.
"""

_NOTHING = """## Not measured yet

There is no such file yet: nothing has been measured on a GPU, and the kernels have run on none. Do
not expect a particular speed."""

_OPEN = """## Open questions

What is known without a measurement, from Triton 3.7 and sm_90, and what one has to settle:

- Automatic warp specialisation (`tl.range(..., warp_specialize=True)`) of the forward kernel. With
  eight warps the compiler takes no notice: the loops come out the same, instruction by instruction.
  With four its pass `NVGPUWarpSpecialization` fails, since the kernel has one loop over full blocks
  and another over masked ones, and loads through pointers. It would take a single loop that masks
  every block, and descriptors for all that it loads. The portable kernels keep the plain schedule;
  those in kernels/hopper specialise warps by hand.
- Tiles of 128 by 128 for plain calls, and keys that come by TMA at head dim 128: both take fewer
  instructions for a pair of query and key than what they replaced. TMA costs the host a descriptor
  each of K and V in every call. `python bench/tune.py --out DIR` times the tiles and both kinds of
  loads.
- Turns of the consumers, and other blocks and stages, in the kernels for Hopper. On an H100 or
  H200, `pytest tests -m gpu -k hopper` runs their numeric tests, and
  `python bench/run_all.py --out DIR --skip tuning` checks `fastattn-hopper` and times it beside the
  others. What turns are worth is the difference between two such runs, the second with
  `PING_PONG: bool = True` in `kernels/hopper/tile_table.py`; so for the other fields there.
- Which backward is faster, on each GPU: the deterministic one in two passes, of seven products, or
  the one that `deterministic=False` permits, of five, whose atomics add 4 bytes for each element
  of dQ and block of keys. The backward cases of `python bench/run_all.py --out DIR --skip tuning`
  time `fastattn-triton` and `fastattn-one-pass` side by side.
- What 8 bits gain on Hopper over 16: the forward cases of the same command time `fastattn-hopper`
  beside `fastattn-hopper-fp8`, which packs values in every call, and `fastattn-hopper-fp8-packed`.
  The aim is 1.4 times the speed at head dim 128. `attention_fp8` takes that kernel by itself once
  results here show it right and faster."""


def page(folder: Path) -> str:
    """The text of README.md for the JSON files of a folder.

    Raises:
        ValueError: a file is not a report.
    """
    reports = [Report.load(path).data for path in sorted(folder.glob("*.json"))]
    parts = [_INTRODUCTION.strip()]
    parts.append("## Measured" if reports else _NOTHING)
    parts += [markdown(data).strip() for data in reports]
    parts.append(_verified(reports))
    parts.append(_OPEN)
    return "\n\n".join(parts) + "\n"


def _verified(reports: list[dict[str, Any]]) -> str:
    """A table of what ran on each architecture with tuned tiles."""
    lines = [
        "## What has run where",
        "",
        "| tiles for | numeric tests | kernels timed |",
        "| --- | --- | --- |",
    ]
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
        cells = [arch, "; ".join(tested) or "not run", "; ".join(timed) or "not run"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _arch(data: dict[str, Any]) -> str | None:
    gpu = data["environment"].get("gpu")
    if not gpu:
        return None
    return tiles.table_for("sm_" + gpu["capability"].replace(".", ""))


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
