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
from fastattn.bench.results.tables import add, page

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("--check", action="store_true", help="change nothing; exit 1 on a difference")
    option("--add", type=Path, nargs="+", default=[], metavar="FILE", help="findings or reports")
    arguments = parser.parse_args()
    path, wrong = RESULTS / "README.md", ""
    try:
        for file in arguments.add:
            sys.stdout.writelines(f"{written}\n" for written in add(file, RESULTS))
        if not arguments.check:
            write_whole(path, page(RESULTS))
        elif path.read_text("utf-8") != page(RESULTS):
            wrong = f"{path} is not what the files say: python bench/results_table.py writes it\n"
    except (OSError, ValueError) as error:
        wrong = f"{error}\n"
    sys.stderr.write(wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
