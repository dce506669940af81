"""Write what the model of speed says of the kernels that ship: bench/results/modelled/sm_90.json.

    python bench/model.py && python bench/results_table.py

Compiles for a GPU that need not be there; takes a minute or two.
"""

import os
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> int:
    os.environ.pop("TRITON_INTERPRET", None)
    from fastattn.bench.results import modelled

    path = RESULTS / "modelled" / f"{modelled.TARGET}.json"
    path.parent.mkdir(exist_ok=True)
    modelled.write(path)
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
