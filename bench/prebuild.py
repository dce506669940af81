"""Compile the kernels of `bench/run_all.py --set short` ahead, on a machine without a GPU.

    python bench/prebuild.py                      # build/prebuilt.txz, which run_all unpacks
    python bench/prebuild.py --out FILE --check   # and unpack it: a second process compiles nothing

Triton's driver runs on a stub of CUDA's (tests/dry_run), for an H100 or H200, so that the
launchers are built as well. Triton finds the kernels where its version, Python's and this checkout
are the same.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.append(str(CHECKOUT / "tests" / "dry_run"))
WORKERS = os.cpu_count() or 1
# Triton's cache of earlier runs; delete it to leave out kernels that have changed since.
KEPT = CHECKOUT / "build" / "prebuilt"


def works(only: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Launches of the short set, by name, of names that match a pattern."""
    return ((name, launch) for name, launch in _every() if re.search(only, name))


def _every() -> Iterator[tuple[str, Callable[[], object]]]:
    import torch

    from fastattn.bench.cases import sets
    from fastattn.bench.time import ahead, overhead
    from fastattn.bench.time.jobs import OPEN, training_case
    from fastattn.bench.tune.plan import USUAL_SHAPES, Gpu, plan_of
    from fastattn.bench.tune.tune import chosen
    from fastattn.testing.verify import verification
    from fastattn.testing.verify.case import Setting

    device = torch.device("cuda", 0)
    rows = [*sets.every_row("short")]
    rows += [sets.Row(training_case(T), (sets.OURS,)) for T in (1024, 4096)]
    for case, names in rows:
        if case.family == "decode" and case.T_k > 4096:
            continue  # the kernels of 4096 keys
        for name in ahead.compiled(case, names):
            small = ahead.small(case) if name in sets.FP8 else case
            yield f"{case.name} {name}", partial(ahead.launch, small, name, {}, "cuda")
    for name, call in overhead.calls_by_backend().items():
        if name.startswith("fastattn"):
            yield f"host cost {name}", call
    scope = verification.scope_of(device, quick=True)
    for subject in scope.subjects():
        for case in scope.cases(subject):
            yield (
                f"verify {' '.join(map(str, subject))}: {case.name}",
                partial(case.check, Setting(subject, device)),
            )
    gpu = Gpu("sm_90", 227 << 10, 132, True)
    for choice in chosen(plan_of(USUAL_SHAPES[:2], gpu), OPEN):
        for one in choice.candidates:
            job = partial(ahead.launch, ahead.small(choice.cases[0]), one.implementation)
            yield f"{choice.name}: {one.name}", partial(job, one.forced, "cuda")


def work(share: int, only: str) -> None:
    """Do every WORKERS-th work on the stand-in; print the kernels that were compiled.

    Kernels compute nothing: what verification says of their results is of no interest.
    """
    import posing  # before triton and fastattn
    import triton

    from fastattn.ops import attention_ops
    from fastattn.testing import compare

    compiled: Counter[str] = Counter()
    failed: dict[str, str] = {}

    def heard(*, metadata: Any, cache_hit: bool, **details: Any) -> None:
        compiled[metadata["name"]] += not cache_hit

    triton.knobs.compilation.listener = heard
    # For this hook Triton 3.6 writes constants as JSON, which fails for functions.
    triton.knobs.runtime.jit_post_compile_hook = None
    for name in ("results", "_outputs"):
        setattr(compare, name, ours_alone(getattr(compare, name)))
    for name, launch in itertools.islice(works(only), share, None, WORKERS):
        before = posing.count_of("launches")
        posing.stage.play(name, launch, launches=False)
        if attention_ops.uncompiled:  # other kernels went on; the next work has its own
            failed[name] = attention_ops.uncompiled[0]
            attention_ops.uncompiled.clear()
        elif posing.count_of("launches") == before:
            fault = "; ".join(posing.stage.scene.faults) or "launched nothing"
            if "cannot serve this call" not in fault:  # a verdict on the GPU too
                failed[name] = fault
    sys.stdout.write("\n" + json.dumps({"compiled": +compiled, "failed": failed}) + "\n")


def ours_alone(run: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse the oracle, which takes minutes on a CPU, once our kernels are launched."""

    def call(function: Any, *arguments: Any, **how: Any) -> Any:
        if getattr(function, "func", function).__module__ == "fastattn.reference":
            raise AssertionError("kernels compute nothing here")
        return run(function, *arguments, **how)

    return call


def run(folder: Path, only: str) -> tuple[Counter[str], list[str]]:
    """Do all works with Triton's cache in a folder; return the compiled kernels, and failures."""
    hidden = ("TRITON_INTERPRET", "FASTATTN_BACKEND")
    kept = {name: x for name, x in os.environ.items() if name not in hidden}
    variables = kept | {"TRITON_CACHE_DIR": str(folder), "PYTHONSAFEPATH": "1"}
    variables["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, str(Path(__file__).resolve()), "--only", only, "--share"]
    how: dict[str, Any] = {"env": variables, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen([*command, str(n)], **how) for n in range(WORKERS)]
    outputs = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise SystemExit("a process failed")
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    failed = [f"{name}: {why}" for result in results for name, why in result["failed"].items()]
    return sum((Counter(result["compiled"]) for result in results), Counter()), failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("--out", type=Path, default=CHECKOUT / "build" / "prebuilt.txz", metavar="FILE")
    option("--check", action="store_true", help="unpack and do all again: nothing may compile")
    option("--only", default="", metavar="REGEX", help="of works' names, such as ^verify.*hopper")
    option("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share is not None:
        work(options.share, options.only)
        return 0
    from fastattn.bench.time import prebuilt

    compiled, failed = run(KEPT, options.only)
    files = prebuilt.pack(KEPT, options.out)
    size = options.out.stat().st_size / 2**20
    say(f"{compiled.total()} kernels compiled; {files} files, {size:.1f} MiB: {options.out}")
    if options.check:
        with tempfile.TemporaryDirectory() as folder:
            prebuilt.unpack(options.out, Path(folder))
            again, _ = run(Path(folder), options.only)
        say(f"compiled again from the archive: {dict(again) or 'none'}")
        failed += [f"{name} is compiled again" for name in again]
    say("\n".join(failed))
    return int(bool(failed))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
