"""Jobs of a run, the most important first: verification, attention, host costs, training, tuning.

`main` is the process that does them for `run_all`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...kernels.launch import tiles
from ...models.gpt import GPTConfig
from ...testing.supervision import PREPARES, RUNS, WAITS, Tell, talk
from ...testing.verify import verification
from ...training.step_timing import as_dict, time_training_steps
from ...tuned import choices
from ...tuned.environment import environment as environment_of
from ...tuned.store import Store
from ..cases import sets
from ..cases.case import Case, plain
from ..cases.inputs import make_inputs
from ..cases.registry import BY_NAME, CUDNN, OURS
from ..tune.tune import VERIFICATION, not_right, tune
from . import environment, overhead
from .ahead import Ahead
from .attention import Record, run_case
from .failures import FAILED, TIMED, Failure, failure, release
from .measure import Run, serve
from .samples import Bench, Function, gpu_bench

# GPT-2 small's shape (Radford et al. 2019) with a vocabulary that is a multiple of 64.
GPT2_SMALL = GPTConfig(
    vocab_size=50304, context_length=1024, num_layers=12, num_heads=12, embed_dim=768
)
TUNING = "tuning"
# Shares of a run's time, at most; and what "short" tunes: choices that no figure has settled.
_SHARES = {VERIFICATION: 0.25, TUNING: 0.3}
OPEN = ("hopper_forward", "hopper_dkv", "hopper_one_pass", "passes")
# Trained beside ours: the torch backend with torch's attention pinned.
_PINNED = {CUDNN: SDPBackend.CUDNN_ATTENTION, "sdpa-flash": SDPBackend.FLASH_ATTENTION}


class Job(NamedTuple):
    """A measurement: what runs, its kinds (see `measure`), and calls whose kernels it launches."""

    run: Run
    kinds: tuple[str, ...]
    compiles: tuple[sets.Row, ...] = ()


class Session(NamedTuple):
    """State that the jobs of a run share.

    which: a set, "short" or "full". folder: of findings. seconds: of the whole run. left: returns
    the seconds left. tell: sends a message to the parent; `note` is a line for readers.
    """

    which: str
    folder: Path
    seconds: float
    left: Callable[[], float]
    tell: Tell

    def share(self, job: str) -> float:
        """Seconds for a job, at most."""
        return min(self.left(), _SHARES[job] * self.seconds)


def main() -> None:
    """Do jobs on the current CUDA device; the argument is the settings of `run` as JSON."""
    settings = json.loads(sys.argv[1])
    talk(lambda tell, requests: run(settings, tell, requests))


def run(settings: Mapping[str, Any], tell: Tell, requests: Iterator[Any]) -> None:
    """Do the work of the process.

    settings: fields of `Session`, left as a number; and names of jobs, which are compiled ahead.
    """
    end = time.monotonic() + settings["left"]
    torch.cuda.init()  # type: ignore[no-untyped-call]
    tell(ready=True)
    session = Session(
        settings["which"], Path(settings["folder"]), settings["seconds"],
        lambda: end - time.monotonic(), tell,
    )  # fmt: skip
    jobs = gpu_jobs(session)
    ahead = Ahead(tiles.current_arch())
    for name in settings["names"]:
        for case, implementations in jobs[name].compiles:
            ahead.submit(name, [case], implementations)

    def ready(job: str) -> None:
        if (why_not := ahead.why_not(job, seconds=60.0)) is not None:
            # The launch compiles again, and raises.
            sys.stderr.write(f"ahead of {job}: {why_not}\n")

    runs = {name: job.run for name, job in jobs.items()}
    try:
        serve(runs, gpu_bench(session.which), tell, requests, ready)
    finally:
        ahead.close()


def gpu_jobs(session: Session) -> dict[str, Job]:
    """The jobs of a set on a GPU, by name, in their order."""
    training = {
        f"training-T{T}": Job(
            partial(_training, T),
            (*training_case(T).kernels, "training"),
            (sets.Row(training_case(T), (OURS,)),),
        )
        for T in ((1024, 4096) if session.which == "short" else (1024, 4096, 16384))
    }
    jobs = {
        "environment": Job(_environment, ("environment",)),
        VERIFICATION: Job(partial(_verify, session), (VERIFICATION,)),
        **of_rows(sets.plain_rows()),
        **of_rows(sets.decode_rows()),
        **of_rows(sets.option_rows()),
        "host cost of a call": Job(_host_cost, ("host cost",)),
        **training,
        **of_rows(sets.fp8_rows(), ", in 8 bits"),
        TUNING: Job(partial(_tune, session), (TUNING,)),
        **of_rows(sets.portable_rows(), ", portable"),
    }
    if session.which == "full":
        jobs |= of_rows(sets.unfused_rows(), ", unfused") | of_rows(sets.swept_rows(), ", all")
    return jobs


def training_case(T: int) -> Case:
    """Attention of GPT-2 small over 16384 tokens."""
    H, D = GPT2_SMALL.num_heads, GPT2_SMALL.head_dim
    return plain("forward_backward", 16384 // T, H, H, T, D, causal=True)


def of_rows(rows: Iterable[sets.Row], of: str = "") -> dict[str, Job]:
    """A job for each row, named by its case; of: what distinguishes rows of the same cases."""
    return {
        case.name + of: Job(
            partial(run_case, case, [BY_NAME[name] for name in names]),
            case.kernels,
            (sets.Row(case, names),),
        )
        for case, names in rows
    }


def _verify(session: Session, bench: Bench) -> list[Record]:
    """Verify kernels that have no verdict yet; counts of all verdicts."""
    bench.announce(VERIFICATION, WAITS)  # it ends hangs itself
    device = torch.device("cuda", torch.cuda.current_device())
    scope = verification.scope_of(device, quick=session.which == "short")
    store = Store(environment_of(device), session.folder)
    reserve = session.left() - session.share(VERIFICATION)

    def left() -> float:
        return session.left() - reserve

    status = "finished"
    try:
        for finding in verification.run(scope, device, store=store, again=False, left=left):
            session.tell(note=str(finding), tests=_counts(store, "not finished"))
    except ChildProcessError as error:
        status = str(error)
    return [{"tests": _counts(store, status if left() > 0 else "the time was up")}]


def _counts(store: Store, status: str) -> dict[str, Any]:
    bad = not_right(store)
    return {
        "status": status,
        "passed": len(store.read(verification.KIND)) - len(bad),
        "failed": len(bad),
        "failures": bad,
    }


def _tune(session: Session, bench: Bench) -> list[Record]:
    """Tune; later jobs measure the shipped tiles all the same."""
    bench.announce(TUNING, WAITS)
    release()
    short = session.which == "short"
    try:
        tune(
            seconds=session.share(TUNING),
            head_dims=(64, 128) if short else None,
            only=OPEN if short else None,
            folder=session.folder,
            show=lambda x: session.tell(note=f"{x.step}: {x.text}") if x.done else None,
        )
    finally:
        device = torch.device("cuda", torch.cuda.current_device())
        verdicts = Store(environment_of(device), session.folder).read(verification.KIND)
        choices.adopt(device, {verification.KIND: verdicts})
    return []


def _environment(bench: Bench) -> list[Record]:
    """The environment of the other records, see `environment.collect`, and limits of this GPU.

    matmul_tflops of 8192 x 8192 x 8192 on normal data in bf16; copy_gbps of bytes read and written;
    empty_ms between two successive events, an overhead of every time.
    """
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(2**31, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    works: dict[str, Function] = {
        "matmul": lambda: torch.mm(a, b),
        "copy": lambda: target.copy_(source),
        "nothing": lambda: None,
    }
    ms = {}
    for name, result in bench.compare(works).items():
        if isinstance(result, Failure):
            raise RuntimeError(result.reason)
        ms[name] = result["median"]
    ceilings = {
        "matmul_tflops": round(2 * 8192**3 / ms["matmul"] / 1e9, 1),
        "copy_gbps": round(2 * source.numel() / ms["copy"] / 1e6, 1),
        "empty_ms": ms["nothing"],
        **bench.readings,
    }
    return [{"environment": environment.collect(), "ceilings": ceilings}]


def record(family: str, name: str, implementation: str, **figures: Any) -> Record:
    """A record of a measurement other than a single attention call."""
    case = {"family": family, "name": name}
    return {"case": case, "implementation": implementation, "status": TIMED} | figures


def _host_cost(bench: Bench) -> list[Record]:
    name = "host cost of a call"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        costs = overhead.host_costs(overhead.calls_by_backend()).items()
    return [record("overhead", name, call, host_us=round(us, 2)) for call, us in costs]


def _training(T: int, bench: Bench) -> list[Record]:
    """Training with 16384 tokens per step at context T, by `auto` and by torch's kernels."""
    name, case = f"training-T{T}, GPT-2 small", training_case(T)
    chooses = BY_NAME[OURS].chooses
    assert chooses is not None
    who = {OURS: chooses(case, make_inputs(case, empty=True)), **{x: x for x in _PINNED}}
    config = replace(GPT2_SMALL, context_length=T)
    records = []
    for implementation, called in who.items():
        if called in bench.broken:
            figures = Failure(FAILED, bench.broken[called])._asdict()
        else:
            bench.announce(called, PREPARES)
            pinned = _PINNED.get(implementation)
            how: dict[str, Any] = {"batch_size": case.B, "backend": "torch" if pinned else "auto"}
            how["issued"] = partial(bench.announce, called, RUNS)
            try:
                with nullcontext() if pinned is None else sdpa_kernel(pinned):
                    figures = as_dict(time_training_steps(config, device=case.device, **how))
            except (ValueError, RuntimeError) as error:
                figures = failure(error, called, bench.timer.synchronize)._asdict()
        records.append(record("training", name, implementation, **figures))
        release()
    return records
