"""Draw bench/results/README.md from the JSON files beside it, or check that it agrees with them.

python bench/results_table.py            # write
python bench/results_table.py --check    # exit 1 if the page is not what the files say
"""

import argparse
import sys
from pathlib import Path

from fastattn.bench.results.page import check, draw

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 on a difference"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    arguments = parser.parse_args()
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
