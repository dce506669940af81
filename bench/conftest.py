"""The cases of the benchmarks on this machine; kernels are compiled, and run on a GPU only."""

import sys
from pathlib import Path

import pytest
import torch

# With the checkout on sys.path our kernel folder could be imported as a top-level package
# `kernels`, the name of another distribution.
_CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _CHECKOUT]

from fastattn.bench.cases.case import cpu_cases, gpu_cases  # noqa: E402
from fastattn.bench.cases.registry import side_by_side  # noqa: E402

WHY_NOT = "needs a GPU: torch sees no CUDA device"
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=WHY_NOT))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise tests of (case, implementation) with every pair."""
    if {"case", "implementation"} <= set(metafunc.fixturenames):
        pairs = [
            pytest.param(
                case,
                implementation,
                id=f"{case.name}-{implementation.name}",
                marks=ON_GPU if case.device == "cuda" else (),
            )
            for case in [*gpu_cases(), *cpu_cases()]
            for implementation in side_by_side(case.device)
        ]
        metafunc.parametrize(("case", "implementation"), pairs)
