"""Draw bench/results/README.md from the JSON files beside it, or check that it agrees with them.

python bench/results_table.py            # write
python bench/results_table.py --check    # exit 1 if the page is not what the files say
python bench/results_table.py --add F    # first take in what `fastattn tune --export F` wrote, or a
                                         # report: a copy beside the others, and tiles to ship
python bench/results_table.py --charts F DIR    # draw the charts of a report of your own, and
                                                # change nothing else
"""

import argparse
import sys
from pathlib import Path

from fastattn.bench.results import charts
from fastattn.bench.results.page import check, draw
from fastattn.bench.results.tuned import add

RESULTS = Path(__file__).resolve().parent / "results"


def draw_charts(path: Path, folder: Path) -> int:
    try:
        drawn = charts.drawn(path)
        written = charts.write(drawn, folder)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.writelines(f"{file}\n" for file in written)
    if not written:
        sys.stderr.write(f"{path} has no figure that a chart shows\n")
    return int(not written)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 on a difference"
    )
    parser.add_argument(
        "--add", type=Path, nargs="+", default=[], metavar="FILE", help="findings or reports"
    )
    parser.add_argument(
        "--charts", type=Path, nargs=2, metavar=("FILE", "DIR"), help="draw SVGs of a file into DIR"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    arguments = parser.parse_args()
    if arguments.charts:
        return draw_charts(*arguments.charts)
    for path in arguments.add:
        try:
            written = add(path, arguments.results)
        except (OSError, ValueError) as error:
            sys.stderr.write(f"{error}\n")
            return 1
        sys.stdout.writelines(f"{file}\n" for file in written)
    if not arguments.check:
        draw(arguments.results)
        return 0
    difference = check(arguments.results)
    if difference:
        sys.stderr.write(difference + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
