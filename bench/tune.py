"""Time tiles of the kernels on this machine's GPU and write its tuning table.

    python bench/tune.py --out DIR --seconds 300

DIR gets <arch>.json: the table in kernels/tuning with the rows that were measured in place. Rows
come in the order of their importance, and the file is written after each. If DIR holds a
results.json of bench/run_all.py, the rows and every candidate's outcome go there too.
"""

import argparse
import sys
from pathlib import Path

import torch

from fastattn.bench import facts, tuning
from fastattn.bench.report import Report
from fastattn.bench.suite import gpu_bench


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for the table"
    )
    parser.add_argument("--seconds", type=float, default=300, help="for everything (300)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("no GPU: torch sees no CUDA device, so there is nothing to time here\n")
        return 2
    left = tuning.deadline(arguments.seconds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path, command = arguments.out / "results.json", facts.command_line()
    report = Report.load(path) if path.exists() else Report.create(path, command)
    if not report.data["environment"]:
        report.data["environment"] = facts.environment()
    bench = gpu_bench("quick")
    bench.effort = tuning.effort_for(arguments.seconds)
    for table, rows, tried in tuning.tune(
        arguments.out, bench, left, report.data["environment"], command
    ):
        report.data["tuning"] = {"table": table.name, "rows": rows, "tried": tried}
        report.save()
        sys.stdout.write(f"{rows[-1]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
