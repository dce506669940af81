"""Lines of `fastattn info` about a device's kernels: sources of tiles, verdicts."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from .. import kernels
from ..ops import call
from . import choices
from .findings import Record

_HEAD_DIMS = (64, 128, 256)


def describe(device: torch.device) -> list[str]:
    """Lines about the kernels of a device; none where no kernel runs."""
    if not call.TRITON_INSTALLED:
        return []
    if choices.applies(device):
        rows = choices.read(device)
        choices.choices(device)  # installs its tiles
        with torch.cuda.device(-1 if device.index is None else device.index):
            return [*_tiles(), *_findings(rows), *_verified(rows, "on this device")]
    if call.interpreting():
        return _verified(choices.read(device), "in the interpreter")
    return []


def _tiles() -> Iterator[str]:
    """The source of each kernel's tile, for plain calls, by head dim."""
    tiles = kernels.tiles
    arch, device = tiles.current_arch(), tiles.current_device()
    yield "tiles by head dim; modelled and measured ones are shipped"
    for kernel in tiles.KINDS:
        for size in (2, 4):
            rows = ((D, tiles.row_of(arch, kernel, size, D, device)) for D in _HEAD_DIMS)
            origins = ", ".join(f"{D} {_origin(row)}" for D, row in rows)
            yield f"  {kernel}, {size} bytes: {origins}"
    for kernel in tiles.HOPPER:
        others = ((D, tiles.other_row(kernel, D)) for D in _HEAD_DIMS)
        listed = [f"{D} {_origin(row)}" for D, row in others if row is not None]
        if listed:
            yield f"  {kernel}: {', '.join(listed)}"


def _origin(row: Any) -> str:
    source = str(row.get("source", "modelled"))
    return f"tuned here {row['date']}" if source == "tuned" else source


def _findings(rows: choices.Records) -> Iterator[str]:
    """Tuned numbers of decoding programs, and how often each backend is the fastest one timed."""
    for row in rows.get("splits", ()):
        which = f"{row['element_size']} bytes, {row['BLOCK_D']}"
        programs = f"{row['programs']} programs per multiprocessor"
        programs += ", merged in one launch" if row.get("one_launch") else ""
        yield f"  splits of decode, {which}: {programs}, tuned here {row['date']}"
    count = Counter(row["backend"] for row in rows.get("backends", ()))
    if count:
        counts = ", ".join(f"{name} {n}" for name, n in count.most_common())
        yield f"fastest backend of {sum(count.values())} kinds of plain calls: {counts}"


def _verified(rows: choices.Records, where: str) -> list[str]:
    """The number of correct families, and the names of the others."""
    verifications = rows.get("verification", ())
    if not verifications:
        return [f"not verified {where}: run fastattn verify"]
    right = [row for row in verifications if row["verdict"] == "right"]
    last = max(row["date"] for row in verifications)
    counts = f"{len(right)} of {len(verifications)} families of kernels right"
    return [
        f"verified {where}, last {last}: {counts}",
        *(f"  {_failed(row)}" for row in verifications if row not in right),
    ]


def _failed(row: Record) -> str:
    what = f"{row['backend']} {row['family']} {row['dtype']} {row['head_dim']}"
    return f"{what}: {row['verdict']}: {row.get('reason') or row.get('case')}"
