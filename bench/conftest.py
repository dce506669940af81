"""The cases of the benchmarks on this machine; kernels are compiled, and run on a GPU only."""

import sys
from pathlib import Path

import pytest
import torch

# With the checkout on sys.path our kernel folder could be imported as a top-level package
# `kernels`, the name of another distribution.
_CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _CHECKOUT]

from fastattn.bench.cases.case import cpu_cases  # noqa: E402
from fastattn.bench.cases.registry import BY_NAME, ON_CPU  # noqa: E402
from fastattn.bench.cases.sets import every_row  # noqa: E402

WHY_NOT = "needs a GPU: torch sees no CUDA device"
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=WHY_NOT))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise tests of (case, implementation) with every pair."""
    if {"case", "implementation"} <= set(metafunc.fixturenames):
        of_gpu = [(case, BY_NAME[name]) for case, names in every_row("short") for name in names]
        of_cpu = [(case, one) for case in cpu_cases() for one in ON_CPU]
        pairs = [
            pytest.param(*pair, id=f"{pair[0].name}-{pair[1].name}", marks=marks)
            for of_device, marks in ((of_gpu, ON_GPU), (of_cpu, ()))
            for pair in of_device
        ]
        metafunc.parametrize(("case", "implementation"), pairs)
