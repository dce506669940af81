"""Choose tiles of the kernels and write tuning tables: by timing them on this machine's GPU, as
`fastattn tune` does, or, without one, by what the compilers make of them.

    python bench/tune.py --out DIR --static sm_90        # leaves DIR/sm_90.json and .survivors.json
    python bench/tune.py --static sm_90 --check          # prints what compilers make of its rows
    python bench/tune.py --out DIR --seconds 300         # on a GPU: leaves DIR/tuned.json
    python bench/tune.py --out DIR --survivors DIR/sm_90.survivors.json

DIR/tuned.json is what `fastattn tune --export` writes, and `bench/results_table.py --add` takes. It
is written after each step, and a second call goes on with what has no finding yet. With --survivors
only what a static sweep left is timed.
"""

import argparse
import sys
from pathlib import Path

import torch

from fastattn.bench.tuning import static_check, static_sweep
from fastattn.bench.tuning.ahead import Compilation
from fastattn.bench.tuning.entries import ENTRIES, entries_named, entries_of
from fastattn.bench.tuning.tune import tune
from fastattn.bench.tuning.tuner import Progress
from fastattn.testing.compiling.cross_compile import TARGETS
from fastattn.tuned.environment import environment
from fastattn.tuned.store import Store


def static(out: Path, target: str, entries: list[str], workers: int) -> int:
    """Run a static sweep: print a line for each entry, and write the files after each."""
    chosen = entries_named(entries) if entries else ENTRIES
    compilation = Compilation(target, workers)
    found = {}
    try:
        for entry, survivors in static_sweep.sweep(target, chosen, compilation):
            found[entry] = survivors
            static_sweep.write(out, target, found)
            sys.stdout.write(f"{entry}: {survivors[0] if survivors else 'no tile fits'}\n")
    finally:
        compilation.close()
    return 0


def check(target: str, places: list[str], workers: int) -> int:
    """Compile the rows of a table, and print a line for each kernel of a row."""
    rows = entries_of(target)
    compilation = Compilation(target, workers)
    try:
        for line in static_check.check(
            target, entries_named(places, rows) if places else rows, compilation
        ):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    finally:
        compilation.close()
    return 0


def timed(out: Path, seconds: float, survivors: Path | None) -> int:
    """Tune on this machine's GPU: print a line for each step, and write the findings after each."""
    store = Store(environment("cuda"), out / "findings")

    def show(progress: Progress) -> None:
        if progress.done:
            store.export(out / "tuned.json")
            sys.stdout.write(f"{progress.step}: {progress.text}\n")
            sys.stdout.flush()

    left = static_sweep.read(survivors) if survivors else None
    tune(seconds=seconds, folder=out / "findings", survivors=left, show=show)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the files")
    parser.add_argument("--seconds", type=float, default=300, help="for everything (300)")
    parser.add_argument(
        "--static", choices=sorted(TARGETS), metavar="ARCH", help="compile for this GPU, time none"
    )
    parser.add_argument(
        "--places", nargs="*", default=[], metavar="KERNEL:BYTES:D", help="static: these rows (all)"
    )
    parser.add_argument("--check", action="store_true", help="static: print facts of the rows")
    parser.add_argument("--workers", type=int, default=2, help="static: processes (2)")
    parser.add_argument(
        "--survivors", type=Path, metavar="FILE", help="time what a static sweep left"
    )
    arguments = parser.parse_args(argv)
    if arguments.check and arguments.static:
        return check(arguments.static, arguments.places, arguments.workers)
    if arguments.out is None:
        parser.error("--out is needed")
    if not arguments.static and not torch.cuda.is_available():
        sys.stderr.write("no GPU: torch sees no CUDA device, so there is nothing to time here\n")
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.static:
        return static(arguments.out, arguments.static, arguments.places, arguments.workers)
    return timed(arguments.out, arguments.seconds, arguments.survivors)


if __name__ == "__main__":
    sys.exit(main())
