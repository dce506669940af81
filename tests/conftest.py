"""How the tests meet the machine: interpreter without a GPU, compiled kernels with one.

Triton binds every `@triton.jit` function to its CPU interpreter or to its compiler when it is
imported, so the choice has to be made here, before any test module imports triton.
"""

import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkout import foreign
from nightly import gate_cases

if TYPE_CHECKING:
    from fastattn.testing.compiling.compile_pool import CompilePool

# With the checkout on sys.path our kernel folder could be imported as a top-level package
# `kernels`, which is the name of somebody else's distribution.
_CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _CHECKOUT]

_TESTS = Path(__file__).parent

# Another checkout's code would pass, or fail, in this one's name.
if _foreign := list(foreign(_CHECKOUT)):
    pytest.exit(
        "\n".join([*_foreign, f"install this checkout: {sys.executable} -m pip install -e ."]),
        returncode=pytest.ExitCode.USAGE_ERROR,
    )
# Files that take longest. They start first: else workers would wait for the last of them. Without
# workers they run last: what fails sooner ends a run with -x sooner.
_COSTLY = (
    "test_dry_run.py",
    "docs/test_documents.py",
    "parallel/test_context_attention.py",
    "kernels/test_compile.py",
    "kernels/test_new_sizes.py",
    "functional/test_few_queries.py",
    "parallel/test_tensor_parallel.py",
    "compat/test_training_libraries.py",
    "ops/test_tracing.py",
    "kernels/test_hopper_attention.py",
    "functional/test_warmup.py",
)

# Workers of one machine share its cores.
if _workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // _workers))

_HAS_GPU = torch.cuda.is_available()
if not _HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

# What other releases of Triton than constraints.txt's make worse of a kernel than any limit may
# allow. Strict: who fixes one takes its line away. Limits that differ are in the tests.
_OVER_BUDGET = {
    # Products wait for one another, with every score at once; registers of RDNA do not suffice.
    "3.6": (
        *("sm_90 attention forward 128 heavy", "sm_90 attention backward 128 heavy"),
        "gfx1100 attention forward+backward 64 causal",
    ),
    # A number that does not change is read from the stack in a loop over full blocks; RDNA as 3.6.
    "3.9": ("sm_90 hopper backward 128 causal", "gfx1100 attention forward+backward 64 causal"),
}


def pytest_report_header() -> list[str]:
    return [f"triton {version('triton')}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {_TESTS / name: place for place, name in enumerate(_COSTLY)}
    assert all(path.is_file() for path in order), "a costly file has another name"
    others = len(_COSTLY) if _workers else -1
    items.sort(key=lambda item: order.get(item.path, others))
    release = ".".join(version("triton").split(".")[:2])
    over_budget = [f"test_compiles_well[{x}]" for x in _OVER_BUDGET.get(release, ())]
    reason = f"Triton {release} makes more of this kernel than its budget allows"
    for item in items:
        if item.name in over_budget:
            item.add_marker(pytest.mark.xfail(raises=AssertionError, strict=True, reason=reason))


@pytest.fixture(scope="session", autouse=True)
def no_findings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Isolate the tests from this machine's findings: none is used, and none is added."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTATTN_TUNED", "0")
        patch.setenv("FASTATTN_CACHE_DIR", str(tmp_path_factory.mktemp("findings")))
        yield


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
    from fastattn.testing.compiling.compile_pool import CompilePool

    with CompilePool() as pool:
        yield pool


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("nightly") and not gate_cases([], [item]):
        pytest.skip("marked nightly: make test-nightly runs it")
    if item.get_closest_marker("gpu") is None:
        return
    if not _HAS_GPU:
        pytest.skip("marked gpu: torch sees no CUDA device")
    if _INTERPRETING:
        pytest.skip("marked gpu: TRITON_INTERPRET=1 runs the kernels on the CPU")


@pytest.fixture(autouse=True)
def nan_filled_empty() -> Iterator[None]:
    """Uninitialised floating-point memory reads as NaN, so an output left unwritten is seen."""
    from fastattn.testing.inputs import nan_filled_empty

    with nan_filled_empty():
        yield


@pytest.fixture
def nothing_known() -> Iterator[None]:
    """No call, launch or finding is known from an earlier test."""
    from fastattn.functional import call_memo
    from fastattn.kernels.launch import launches
    from fastattn.tuned import choices

    choices.forget()
    call_memo.forget()
    launches.forget()
    yield
    call_memo.forget()


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with every call whose arguments are checked."""
    from fastattn.functional import call_options

    names: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        check = getattr(call_options, name)
        return lambda *args, **kwargs: names.append(name) or check(*args, **kwargs)

    for name in ("dense_options", "packed_options", "cache_options"):
        monkeypatch.setattr(call_options, name, counting(name))
    return names


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models too small to share: threads that wait for each other are slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def emulated(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, one_thread: None
) -> Iterator[None]:
    """Launch backend="hopper" into the emulator; each test has its own order of events."""
    import emulated_hopper

    emulated_hopper.emulate_hopper(monkeypatch, request.node.name)
    yield
    emulated_hopper.forget()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are launched."""
    from fastattn.kernels.launch.launches import Launch

    names: list[str] = []
    launch = Launch.__call__

    def recorded(self: Launch, *arguments: Any) -> None:
        kernel = getattr(self._kernel, "kernel", self._kernel)  # of the emulator
        names.append(kernel.__name__)
        launch(self, *arguments)

    monkeypatch.setattr(Launch, "__call__", recorded)
    return names


@pytest.fixture
def hopper_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has run all of Hopper's kernels right, and this device is one for them."""
    from fastattn import dispatch
    from fastattn.tuned import choices

    monkeypatch.setattr(dispatch, "on_hopper", lambda device: True)
    monkeypatch.setattr(choices, "UNPROVEN", ())


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of tensors on the CPU are as unknown to the host as a device's: none is refused."""
    monkeypatch.setattr("fastattn.tracing.host_knows", lambda x: False)


@pytest.fixture
def on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """For whole models: where kernels are interpreted, "auto" would interpret them all."""
    monkeypatch.setenv("FASTATTN_BACKEND", "torch")


@pytest.fixture
def models_on_torch(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """For whole models and tests of arguments: `on_torch`, except on a GPU."""
    if device == "cpu":
        monkeypatch.setenv("FASTATTN_BACKEND", "torch")


@pytest.fixture
def attention_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every call of `attention` by `compat.transformers`."""
    from fastattn.compat.transformers import hf_attention

    made = []
    attention = hf_attention.attention

    def record(q, k, v, **options):
        made.append(options)
        return attention(q, k, v, **options)

    monkeypatch.setattr(hf_attention, "attention", record)
    return made


@pytest.fixture
def draw(device: str) -> Callable[..., torch.Tensor]:
    """draw(*shape): normal numbers on the device, the next ones at each call."""
    from fastattn.testing.inputs import draws

    return draws(device=device)
