"""`fastattn tune`: find the fastest tiles and backends on this machine."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .main import say


def add(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "tune",
        help="autotune tiles and backends on this GPU",
        description="Verify the kernels, time candidates against the shipped choices, and "
        "store each winner at once: Ctrl-C loses nothing. Untimed kernels come first. "
        "Later calls use the results, unless FASTATTN_TUNED=0.",
    )
    parser.set_defaults(command=_tune)
    add = parser.add_argument
    add("--heads", type=int, help="query heads")
    add("--kv-heads", type=int, help="key/value heads (default: --heads)")
    add("--dims", type=int, nargs="+", metavar="D", help="head dims (default: 128 64 256)")
    dtypes = ("bfloat16", "float16", "float32")
    add(
        "--dtype",
        nargs="+",
        choices=dtypes,
        help="dtypes in order (default: bfloat16 float32)",
    )
    add("--seconds", type=float, default=300.0, help="time limit (default: 300)")
    add("--device", default="auto", help="auto or cuda:<index> (default: auto)")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--export", metavar="FILE", help="write all results to a file at the end")
    one.add_argument(
        "--import", dest="read", metavar="FILE", help="store the results of a file, and exit"
    )


def _tune(arguments: argparse.Namespace) -> int:
    """Exit status: 0, or 1 if a step was aborted."""
    import torch

    from ..bench.tune.tune import tune
    from ..testing.verify.report import Steps
    from ..tuned.environment import environment
    from ..tuned.store import Store

    if not torch.cuda.is_available():
        raise ValueError("no GPU: torch sees no CUDA device, so there is nothing to tune here")
    name = "cuda" if arguments.device == "auto" else arguments.device
    device = torch.device(name)
    if device.type != "cuda":
        raise ValueError(f"device must be a GPU, got {arguments.device}")
    store = Store(environment(device))
    if arguments.read is not None:
        count = store.import_(arguments.read)
        sys.stdout.write(f"stored {count} results of {arguments.read}\n")
        return 0
    if arguments.export is not None:
        store.export(arguments.export)  # report an unwritable file at once
    say(f"tuning on {store.environment.gpu}, {arguments.seconds:.0f} s")
    with Steps(sys.stderr) as status:

        def show(progress: Any) -> None:
            text = f"{progress.step}: {progress.text}"
            prefix = f"{max(0.0, progress.left):4.0f} s left  "
            status.show(progress.number, progress.steps, text, prefix=prefix, done=progress.done)
            if arguments.export is not None and progress.done:
                store.export(arguments.export)  # in case this process is killed

        try:
            result = tune(
                heads=arguments.heads,
                kv_heads=arguments.kv_heads,
                head_dims=arguments.dims,
                dtypes=arguments.dtype,
                seconds=arguments.seconds,
                device=device,
                show=show,
            )
        finally:
            if arguments.export is not None:
                store.export(arguments.export)
    sys.stdout.write("\n".join(summary(result)) + "\n")
    return int(any(step.status == "broken off" for step in result.steps))


def summary(result: Any) -> list[str]:
    """Format the summary of a `Tuning`."""
    faster = [row for _, row in result.rows if row["gain"]]
    left = sum(step.status == "not reached" for step in result.steps)
    lines = [f"choices measured: {len(result.rows)}, faster than shipped: {len(faster)}"]
    if result.rows:
        lines[0] += f"; kept in {result.folder}"
    if left:
        steps = f"{left} of {len(result.steps)}"
        lines.append(f"steps not reached: {steps}; the same command continues there")
    return lines
