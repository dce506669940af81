"""Generate bench/results/README.md from the folder's JSON files, or check that it agrees.

python bench/results_table.py            # write
python bench/results_table.py --check    # exit 1 if the page is not what the files say
python bench/results_table.py --add F    # first take in what `fastattn tune --export F` wrote, or a
                                         # report: a copy beside the others, and tiles to ship
"""

import argparse
import sys
from pathlib import Path

from fastattn.bench.results.report import write_whole
from fastattn.bench.results.tables import add, check, page

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("--check", action="store_true", help="change nothing; exit 1 on a difference")
    option("--add", type=Path, nargs="+", default=[], metavar="FILE", help="findings or reports")
    arguments = parser.parse_args()
    wrong = ""
    try:
        for path in arguments.add:
            sys.stdout.writelines(f"{file}\n" for file in add(path, RESULTS))
        if not arguments.check:
            write_whole(RESULTS / "README.md", page(RESULTS))
        wrong = check(RESULTS)
    except (OSError, ValueError) as error:
        wrong = str(error)
    sys.stderr.write(wrong + "\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
