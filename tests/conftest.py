"""How the tests meet the machine: interpreter without a GPU, compiled kernels with one.

Triton binds every `@triton.jit` function to its CPU interpreter or to its compiler when it is
imported, so the choice has to be made here, before any test module imports triton.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from fastattn.testing.compile_pool import CompilePool

# With the checkout on sys.path our kernel folder could be imported as a top-level package
# `kernels`, which is the name of somebody else's distribution.
_CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _CHECKOUT]

# Workers of one machine share its cores.
if _workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // _workers))

_HAS_GPU = torch.cuda.is_available()
if not _HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same numbers in every run, whatever ran before in the same process."""
    torch.manual_seed(0)


@pytest.fixture
def device() -> str:
    """Device for the tensors of a kernel test: "cuda" where kernels run compiled, else "cpu"."""
    return "cuda" if _HAS_GPU and not _INTERPRETING else "cpu"


@pytest.fixture(scope="session")
def compile_pool() -> Iterator["CompilePool"]:
    """Compiles kernels for GPUs, present or not, in processes that do not interpret."""
    from fastattn.testing.compile_pool import CompilePool

    with CompilePool() as pool:
        yield pool


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    if not _HAS_GPU:
        pytest.skip("marked gpu: torch sees no CUDA device")
    if _INTERPRETING:
        pytest.skip("marked gpu: TRITON_INTERPRET=1 runs the kernels on the CPU")


def _with_nan_contents(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_and_fill(*args, **kwargs) -> torch.Tensor:
        out = allocate(*args, **kwargs)
        # A traced allocation stays as the caller wrote it, or the graph under test would change.
        if (
            not torch.compiler.is_compiling()
            and out.is_floating_point()
            and out.layout is torch.strided
        ):
            with torch.no_grad():
                out.fill_(math.nan)
        return out

    return allocate_and_fill


@pytest.fixture(autouse=True)
def nan_filled_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised floating-point memory reads as NaN, so an output left unwritten is seen."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, _with_nan_contents(getattr(owner, name)))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models too small to share: threads that wait for each other are slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """For whole models: where kernels are interpreted, "auto" would interpret them all."""
    monkeypatch.setenv("FASTATTN_BACKEND", "torch")
