"""Generated calls of what integrations have in place of other projects' functions.

FASTATTN_FUZZ_SEED draws other calls.
"""

import os
import sys
from dataclasses import replace

import pytest
from fuzz.cases import OF_INTEGRATIONS, TAKES, drawn, legal
from fuzz.judges import check

FIRST = int(os.environ.get("FASTATTN_FUZZ_SEED", "0"))
BUDGET = {"torch": 64, "triton": 6}


@pytest.mark.parametrize("backend", BUDGET)
@pytest.mark.parametrize("name", OF_INTEGRATIONS)
def test_generated_calls(name: str, backend: str, one_thread: None, device: str) -> None:
    options = sorted(TAKES[name])
    for seed in range(FIRST, FIRST + BUDGET[backend]):
        case = drawn(seed, backend)
        chosen = tuple(case.random("of integration").some(options, seed % 5))
        case = legal(replace(case, call=name, options=chosen, device=device))
        sys.stdout.write(f"{case}\n")
        check(case)
