"""Choose tiles of the kernels and write tuning tables: by timing them on this machine's GPU, or,
without one, by what the compilers make of them.

    python bench/tune.py --out DIR --static sm_90        # leaves DIR/sm_90.json and .survivors.json
    python bench/tune.py --out DIR --seconds 300         # on a GPU
    python bench/tune.py --out DIR --survivors DIR/sm_90.survivors.json

DIR gets <arch>.json: the table in kernels/launch/tuning with the rows that were chosen in place,
each saying whether it was modelled or measured. On a GPU, rows come in the order of importance
and the file is written after each; with --survivors only what a static sweep left is timed. The
rows and every candidate's outcome also go to DIR/results.json, where a second call goes on.
"""

import argparse
import sys
from pathlib import Path

import torch

from fastattn.bench import environment
from fastattn.bench.results.report import Report
from fastattn.bench.run.suite import gpu_bench
from fastattn.bench.tuning import static_sweep, timed_sweep
from fastattn.testing.compiling.cross_compile import TARGETS


def static(out: Path, target: str, entries: list[str], workers: int) -> int:
    """Run a static sweep: print a line for each entry, and write the files after each."""
    chosen = static_sweep.entries_named(entries) if entries else timed_sweep.ENTRIES
    compilation = timed_sweep.Compilation(target, workers)
    found = {}
    try:
        for entry, survivors in static_sweep.sweep(target, chosen, compilation):
            found[entry] = survivors
            static_sweep.write(out, target, found)
            sys.stdout.write(f"{entry}: {survivors[0] if survivors else 'no tile fits'}\n")
    finally:
        compilation.close()
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for the table"
    )
    parser.add_argument("--seconds", type=float, default=300, help="for everything (300)")
    parser.add_argument(
        "--static", choices=sorted(TARGETS), metavar="ARCH", help="compile for this GPU, time none"
    )
    parser.add_argument(
        "--places", nargs="*", default=[], metavar="KERNEL:BYTES:D", help="static: these rows (all)"
    )
    parser.add_argument("--workers", type=int, default=2, help="static: processes (2)")
    parser.add_argument(
        "--survivors", type=Path, metavar="FILE", help="time what a static sweep left"
    )
    arguments = parser.parse_args(argv)
    if arguments.static:
        arguments.out.mkdir(parents=True, exist_ok=True)
        return static(arguments.out, arguments.static, arguments.places, arguments.workers)
    if not torch.cuda.is_available():
        sys.stderr.write("no GPU: torch sees no CUDA device, so there is nothing to time here\n")
        return 2
    left = timed_sweep.deadline(arguments.seconds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path, command = arguments.out / "results.json", environment.command_line()
    report = Report.load(path) if path.exists() else Report.create(path, command)
    if not report.data["environment"]:
        report.data["environment"] = environment.collect()
    bench = gpu_bench("quick")
    bench.effort = timed_sweep.effort_for(arguments.seconds)
    for table, rows, tried in timed_sweep.tune(
        arguments.out,
        bench,
        left,
        report.data["environment"],
        command,
        static_sweep.read(arguments.survivors) if arguments.survivors else None,
        report.data["tuning"].get("rows", ()),
        report.data["tuning"].get("tried", ()),
    ):
        report.data["tuning"] = {"table": table.name, "rows": rows, "tried": tried}
        report.save()
        sys.stdout.write(f"{rows[-1]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
