"""Run all measurements on a machine with a GPU.

    python bench/run_all.py --out DIR --quick --budget-minutes 9

Writes results.json, results.md, charts (SVG), log.txt, tests.jsonl and, without --quick, tuned.json
(the findings of `fastattn tune`) to DIR. JSON files are complete after each case. The same command
continues an interrupted run. Cases without a figure of the current kernels in bench/results come
first. `python bench/results_table.py --add DIR/results.json DIR/tuned.json` adds the results.
"""

import argparse
import sys
from pathlib import Path

import torch

from fastattn.bench.results.tables import reports
from fastattn.bench.time.environment import command_line
from fastattn.bench.time.full_run import PARTS, run_all, summary

CHECKOUT = Path(__file__).resolve().parents[1]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for results")
    parser.add_argument("--quick", action="store_true", help="the small set of cases")
    parser.add_argument(
        "--budget-minutes", type=float, help="for everything (9 with --quick, else 60)"
    )
    parser.add_argument("--skip", nargs="+", default=[], choices=PARTS, help="leave out")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("no GPU: torch sees no CUDA device, so there is nothing to measure here\n")
        return 2
    minutes = arguments.budget_minutes or (9 if arguments.quick else 60)
    name = torch.cuda.get_device_name()
    records = reports(CHECKOUT / "bench" / "results")
    report = run_all(
        arguments.out,
        CHECKOUT,
        "quick" if arguments.quick else "full",
        60 * minutes,
        command_line(),
        skip=arguments.skip,
        earlier=[data for data in records if data["environment"]["gpu"]["name"] == name],
        say=say,
    )
    sys.stdout.write((arguments.out / "results.md").read_text(encoding="utf-8")[-6000:])
    sys.stdout.write(summary(report.data) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
