"""Generate bench/results/README.md and the shipped verdicts from the folder's JSON files, or check
that they agree.

python bench/results_table.py            # write
python bench/results_table.py --check    # exit 1 if one of them is not what the files say
python bench/results_table.py --add F    # first take in what `fastattn tune --export F` or `verify
                                         # --export F` wrote, or a report: a copy beside the others,
                                         # and tiles to ship
"""

import argparse
import sys
from pathlib import Path

from fastattn.bench.results.report import write_whole
from fastattn.bench.results.tables import add, page
from fastattn.bench.results.verdicts import FILE, text

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("--check", action="store_true", help="change nothing; exit 1 on a difference")
    option("--add", type=Path, nargs="+", default=[], metavar="FILE", help="findings or reports")
    arguments = parser.parse_args()
    wrong = ""
    try:
        for file in arguments.add:
            sys.stdout.writelines(f"{written}\n" for written in add(file, RESULTS))
        for path, draw in ((RESULTS / "README.md", page), (FILE, text)):
            if not arguments.check:
                write_whole(path, draw(RESULTS))
            elif path.read_text("utf-8") != draw(RESULTS):
                wrong += f"{path} is not what the files say: bench/results_table.py writes it\n"
    except (OSError, ValueError) as error:
        wrong = f"{error}\n"
    sys.stderr.write(wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
