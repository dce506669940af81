"""`fastattn verify`: check the kernels on this machine."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .main import say


def add(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "verify",
        help="check every kernel's accuracy on this machine",
        description="Check every family of kernels on this GPU against float64, in child "
        "processes, so that a hang or a crash ends one case alone. Kernels that fail are skipped "
        "here from then on; fastattn.explain and fastattn info say why. Without a GPU, some run in "
        "Triton's interpreter.",
    )
    parser.set_defaults(command=_verify)
    add = parser.add_argument
    add("--quick", action="store_true", help="check the most important kernels, in minutes")
    add(
        "--backend",
        nargs="+",
        metavar="NAME",
        help="triton, hopper (default: all that the GPU has)",
    )
    family = "families, such as forward, backward, decode (default: all; a wrong name lists them)"
    add("--family", nargs="+", metavar="NAME", help=family)
    add("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (default: auto)")
    add("--export", metavar="FILE", help="write this device's results to a file")
    add("--clear", action="store_true", help="forget this device's results, and exit")


def _verify(arguments: argparse.Namespace) -> int:
    """Exit status: 0 if kernels ran and all are right, else 1."""
    from ..testing.verify import report, verification
    from ..training.train_config import resolve_device
    from ..tuned.environment import environment
    from ..tuned.store import Store

    auto = arguments.device == "auto"
    device = verification.device_of(None if auto else resolve_device(arguments.device))
    store = Store(environment(device))
    if arguments.clear:
        store.clear(verification.KIND)
        sys.stdout.write(f"forgot the results on {report.name_of(device)}\n")
        return 0
    choice = {"backends": arguments.backend, "families": arguments.family}
    scope = verification.scope_of(device, **choice, quick=arguments.quick)
    say(f"verifying the kernels on {report.name_of(device)}")
    with report.Steps(sys.stderr) as progress:
        results = list(verification.run(scope, device, store=store, progress=progress.advance))
    if arguments.export is not None:
        store.export(arguments.export)
    lines = [*report.table(results), *report.conclusions(results, device)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if results and all(x.verdict == "right" for x in results) else 1
