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
BUDGET = {"torch": 72, "triton": 6}


@pytest.mark.parametrize("backend", BUDGET)
@pytest.mark.parametrize("name", [*OF_INTEGRATIONS, "flash_attn_with_kvcache"])
def test_generated_calls(name: str, backend: str, one_thread: None, device: str) -> None:
    """Each option alone, with as many keys as queries and with others, then some together."""
    options = sorted(TAKES[name])
    for seed in range(FIRST, FIRST + BUDGET[backend]):
        case = drawn(seed, backend)
        alone, draw = options[(seed - FIRST) // 2 :][:1], case.random("of integration")
        chosen = alone or draw.some(options, draw.integer(2, 4))
        case = legal(replace(case, call=name, options=tuple(chosen), device=device))
        sys.stdout.write(f"{case}\n")
        check(case)
