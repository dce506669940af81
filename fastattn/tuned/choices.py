"""Stored results of verification and tuning, applied to calls; read at the first call.

Calls time nothing. FASTATTN_TUNED=0 ignores them; FASTATTN_TUNED=path reads a file of
`Store.export`. Shipped verdicts hold unless the device has its own.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels, tracing
from ..ops import call
from ..options import Options
from . import findings, shipped
from .environment import Environment, difference, environment
from .families import UNPROVEN, head_dim_class, of_call
from .findings import Record, Unreadable
from .store import Store, warn_once

TUNED = "FASTATTN_TUNED"
NEVER_RAN = "no GPU has run such kernels"
REMEDY = "`fastattn verify --quick` (minutes) checks them"
# A call has few tiles of so many rows if they do not fill the multiprocessors once, and some if
# they do not fill them so many times.
_ROWS, _SOME = 128, 4
Records = Mapping[str, list[Record]]
Key = tuple[Any, ...]


class Choices(NamedTuple):
    """Results of one device, by key: see `findings.KEYS`.

    verification: with the shipped verdicts, which stored ones replace. one_sided: whether gradients
    may change the backend of a call, for want of a verdict.
    """

    verification: dict[Key, Record]
    tiles: dict[Key, Record]
    backends: dict[Key, Record]
    passes: dict[Key, Record]
    splits: dict[Key, Record]
    multiprocessors: int
    one_sided: bool

    def verdicts(
        self, backend: str, families: tuple[str, ...], dtype: torch.dtype, head_dim: int
    ) -> tuple[str, ...]:
        """Verdicts on calls of these families, right or wrong; head_dim is one of HEAD_DIMS."""
        keys = [(backend, family, _name(dtype), head_dim) for family in families]
        return tuple(verdict(self.verification[key]) for key in keys if key in self.verification)

    def why_not(
        self, backend: str, families: tuple[str, ...], dtype: torch.dtype, head_dim: int
    ) -> str | None:
        """Reason that a backend is skipped in calls of these families, or None."""
        keys = [(backend, family, _name(dtype), head_dim) for family in families]
        for row in (self.verification[key] for key in keys if key in self.verification):
            if row.get("verdict") != "right":
                return verdict(row)
        missing = [key[1] for key in keys if key not in self.verification]
        if missing and backend in UNPROVEN:
            return f"{NEVER_RAN} ({', '.join(missing)}): {REMEDY}"
        return None

    def tuned_tiles(
        self, backend: str, element_size: int, head_dim: int, calls: str
    ) -> tuple[str, ...]:
        """Kernels of a backend with a tile tuned on this device for such calls."""
        named = (calls, element_size, head_dim)
        rows = (row for key, row in self.tiles.items() if key[1:] == named)
        hopper = backend == "hopper"
        return tuple(tuned(row) for row in rows if row["kernel"].startswith("hopper") == hopper)

    def fastest(
        self, direction: str, dtype: torch.dtype, head_dim: int, causal: bool, waves: str
    ) -> Record | None:
        """The finding about the fastest backend of plain attention; the arguments are its key."""
        return self.backends.get((direction, _name(dtype), head_dim, causal, waves))


def verdict(row: Record) -> str:
    """The verdict of `fastattn verify`, stored or shipped, as a sentence."""
    if "gpu" in row:
        return shipped.sentence(row)
    summary = f"fastattn verify found {row['family']} {row.get('verdict')} on this device"
    if row.get("verdict") != "right":
        return f"{summary} ({row['date']}): {row.get('reason') or row.get('case')}"
    share = row.get("share")
    worst = "" if share is None else f", worst error {share:.2f} of its budget"
    return f"{summary} ({row['date']}): {row.get('cases')} cases{worst}"


def tuned(row: Record) -> str:
    """The tile that `fastattn tune` chose, as a sentence."""
    times = f"{row.get('ms')} ms, shipped {row.get('ms_shipped')} ms"
    return f"fastattn tune found the tile of {row['kernel']} ({row['date']}): {times}"


def faster(name: str, row: Record) -> str:
    """The fastest choice of `fastattn tune`, as a sentence."""
    times = row.get("ms")
    listed = [f"{x} {ms} ms" for x, ms in times.items()] if isinstance(times, dict) else []
    on = f"on this device ({', '.join(listed)})" if listed else "on this device"
    return f"fastattn tune found {name} faster {on}, {row['date']}"


_known: dict[torch.device, Choices] = {}
# Whether gradients may change the backend of a call.
by_direction = False


def choices(device: torch.device) -> Choices:
    """Get the results of a device; the first call reads them."""
    if device not in _known:
        adopt(device, read(device) if applies(device) else {})
    return _known[device]


def adopt(device: torch.device, rows: Records) -> Choices:
    """Use these results on the device: verdicts, timings, and tiles."""
    global by_direction
    verification, tiles, backends, passes, splits = (
        {tuple(row[field] for field in findings.KEYS[kind]): row for row in rows.get(kind, ())}
        for kind in ("verification", "tiles", "backends", "passes", "splits")
    )
    if tiles or splits or (applies(device) and device in _known):
        _install(device, tiles.values(), splits.values())
    wrong = any(row.get("verdict") != "right" for row in verification.values())
    by_direction = by_direction or wrong or bool(backends)
    multiprocessors = environment(device).multiprocessors if backends else 0
    verification = {**shipped.verdicts(), **verification}
    one_sided = _one_sided(verification)
    adopted = Choices(verification, tiles, backends, passes, splits, multiprocessors, one_sided)
    _known[device] = adopted
    return adopted


def _one_sided(verification: Mapping[Key, Record]) -> bool:
    right = {key for key, row in verification.items() if row.get("verdict") == "right"}
    for backend, family, *rest in right:
        direction, plus, option = family.partition("+")
        if backend in UNPROVEN and direction == "forward":
            for ending in (plus + option,) if plus else ("", "+parts"):
                if (backend, f"backward{ending}", *rest) not in right:
                    return True
    return False


def forget() -> None:
    """Read results again at the next call."""
    global by_direction
    for device in filter(applies, _known):
        _install(device, (), ())
    _known.clear()
    by_direction = False


def _install(device: torch.device, tiles: Iterable[Record], splits: Iterable[Record]) -> None:
    """Replace the tuned tiles of the kernels, and clear the memo of calls."""
    index = -1 if call.interpreting() else device.index
    try:
        kernels.tiles.install(tiles, index, splits)
    except ValueError as error:
        warn_once(f"fastattn ignores the tiles that were tuned on {device}: {error}")


def applies(device: torch.device) -> bool:
    """Whether results apply on a device: a GPU, without the interpreter."""
    return device.type == "cuda" and call.TRITON_INSTALLED and not call.interpreting()


def read(device: torch.device) -> Records:
    """Read the stored results of a device, by kind."""
    setting = os.environ.get(TUNED, "")
    if setting == "0":
        return {}
    try:
        here = environment(device)
        store = Store(here)
    except (RuntimeError, AssertionError):  # a fake tensor's device, which does not exist
        return {}
    except (OSError, ImportError) as error:
        warn_once(f"fastattn has no folder for results: {error}")
        return {}
    if setting not in ("", "1"):
        return _read_file(Path(setting), here)
    rows = {kind: store.read(kind) for kind in findings.KEYS}
    if applies(device) and not any(rows.values()):
        _tell_of_others(store)
    return rows


def _read_file(path: Path, here: Environment) -> Records:
    """Read the results of a file, if they are of this environment."""
    try:
        stored = findings.read(path)
    except (OSError, Unreadable) as error:
        warn_once(f"fastattn ignores {TUNED}={path}: {error}")
        return {}
    if stored.environment == here:
        return stored.rows
    warn_once(f"fastattn ignores {TUNED}={path}: it has {difference(stored.environment, here)}")
    return {}


def _tell_of_others(store: Store) -> None:
    """Warn if results for this GPU were stored with other versions of software."""
    for path in sorted(store.folder.parent.glob("*/*.json")):
        try:
            other = findings.read(path).environment
        except (OSError, Unreadable):
            continue
        if other[:2] == store.environment[:2]:
            why = difference(other, store.environment)
            warn_once(
                f"fastattn has results for this GPU, but with {why}: "
                "`fastattn verify` and `fastattn tune` renew them"
            )
            return


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def judge(
    why: dict[str, str | None], q: Tensor, k: Tensor, v: Tensor, options: Options,
    family: str | None, training: bool | None, also: tuple[str, ...] = (),
) -> str | None:  # fmt: skip
    """Add verdicts and the device's timings to the reasons; return the fastest backend, if timed.

    Args:
        why: the reason against each backend, the slowest first, the fastest last.
        family: of verification; default: those of attention.
        training: whether there is a backward; None: if autograd needs one.
        also: further families of the call.
    """
    timed = any_timed(q.device)
    if not why:
        return None
    if training is None:
        training = wants_gradients(q, k, v, options)
    for name in why:
        if why[name] is None:
            named = (family,) if family else families(name, q, k, v, options, training)
            why[name] = why_quarantined(name, q, v, named + also)
    if not timed:
        return None
    # Each call takes what serves all of them.
    untimed = family is not None or options.batch_invariant
    bucket = None if untimed else _bucket(q, v, options, training)
    best = None if bucket is None else fastest(*bucket)
    # Torch's kernels add up gradients in any order.
    repeats = not training or options.atomic_dq or torch.are_deterministic_algorithms_enabled()
    if bucket is None or best is None or (best == "torch" and not repeats):
        return None
    if best == "torch" or why.get(best, "") is None:
        names = list(why)
        for name in names if best == "torch" else names[names.index(best) + 1 :]:
            why[name] = why[name] or why_fastest(*bucket)
    return best


def families(
    backend: str, q: Tensor, k: Tensor, v: Tensor, options: Options, training: bool
) -> tuple[str, ...]:
    """The families of a call of attention by a backend."""
    directions = ("forward", "backward") if training else ("forward",)
    return of_call(backend, directions, q, k, v, options)


def wants_gradients(q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """Whether autograd records a backward, at any level of torch.func's transforms."""
    inputs = (x for x in (q, k, v, *options.differentiable) if x is not None)
    return torch.is_grad_enabled() and any(map(tracing.wants_gradient, inputs))


def why_quarantined(backend: str, q: Tensor, v: Tensor, families: tuple[str, ...]) -> str | None:
    """Reason that verdicts on these families rule out a backend, or None."""
    width = head_dim_class(max(q.shape[-1], v.shape[-1]))
    return quarantined(q.device, backend, families, q.dtype, width)


def why_unproven(
    backend: str, q: Tensor, k: Tensor, v: Tensor, options: Options, training: bool
) -> str | None:
    """Reason that verdicts rule out a backend, in one pass if the options permit it, or None."""
    named = families(backend, q, k, v, options, training)
    if training and options.atomic_dq:
        named += of_call(backend, ("one-pass",), q, k, v, options)
    return why_quarantined(backend, q, v, named)


def why_not_one_pass(backend: str, q: Tensor, k: Tensor, v: Tensor, options: Options) -> str | None:
    """Reason of a verdict or a timing against gradients in one pass, or None."""
    wrong = why_quarantined(backend, q, v, of_call(backend, ("one-pass",), q, k, v, options))
    width = head_dim_class(max(q.shape[-1], v.shape[-1]))
    return wrong or why_two_passes(q.device, backend, q.dtype, width)


def _bucket(
    q: Tensor, v: Tensor, options: Options, training: bool
) -> tuple[torch.device, str, torch.dtype, int, bool, str] | None:
    """Key of the timings that decide the fastest backend; None if no timing covers such calls.

    Backends are timed on calls without options except causal. A symbolic size counts as large.
    """
    plain = options.plain and not (options.registers or options.fp32_results)
    offset = options.query_offset
    if not plain or options.right is not None or offset is None:
        return None
    if options.causal and not tracing.always(offset == 0):
        return None
    tiles = q.shape[0] * q.shape[1] * ((q.shape[2] + _ROWS - 1) // _ROWS)
    waves = "many"
    for name, limit in (("some", _SOME), ("few", 1)):
        if tracing.always(tiles < limit * multiprocessors(q.device)):
            waves = name
    width = head_dim_class(max(q.shape[-1], v.shape[-1]))
    direction = "training" if training else "forward"
    return q.device, direction, q.dtype, width, options.causal, waves


# torch.compile runs these functions while it traces and takes their results for constants. Marked
# by hand: torch.compiler.assume_constant_result would import torch._dynamo.
def any_timed(device: torch.device) -> bool:
    """Whether backends were timed on a device. Its first call installs the device's tiles."""
    return bool(choices(device).backends)


def quarantined(
    device: torch.device, backend: str, families: tuple[str, ...], dtype: torch.dtype, width: int
) -> str | None:
    """`Choices.why_not` of a device."""
    global by_direction
    stored = choices(device)
    by_direction = by_direction or (backend in UNPROVEN and stored.one_sided)
    return stored.why_not(backend, families, dtype, width)


def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a device that has timings of backends."""
    return choices(device).multiprocessors


def fastest(
    device: torch.device, direction: str, dtype: torch.dtype, width: int, causal: bool, waves: str
) -> str | None:
    """The name of the fastest backend, of `Choices.fastest`."""
    row = choices(device).fastest(direction, dtype, width, causal, waves)
    return None if row is None else str(row["backend"])


def why_fastest(
    device: torch.device, direction: str, dtype: torch.dtype, width: int, causal: bool, waves: str
) -> str:
    """`fastest` in words."""
    row = choices(device).fastest(direction, dtype, width, causal, waves)
    assert row is not None
    return faster(str(row["backend"]), row)


def why_two_passes(
    device: torch.device, backend: str, dtype: torch.dtype, width: int
) -> str | None:
    """Reason for two backward passes although one is permitted, or None."""
    row = choices(device).passes.get((backend, _name(dtype), width))
    if row is None or row.get("passes") != "two":
        return None
    return faster("two passes", row)


_CONSTANT: tuple[Callable[..., object], ...] = (
    any_timed,
    quarantined,
    multiprocessors,
    fastest,
    why_fastest,
    why_two_passes,
)
for _function in _CONSTANT:
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]
