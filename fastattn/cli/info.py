"""`fastattn info`: versions, and each device's backend and tiles, with reasons."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    text = "show devices, backends and versions"
    description = "Show versions, and for each device which backend serves a causal call and why, "
    description += "where its tiles come from, and the results of fastattn verify."
    info = commands.add_parser("info", help=text, description=description)
    info.add_argument(
        "--distributed",
        action="store_true",
        help="under torchrun: the backends of torch.distributed, and the ranks",
    )
    text = "show problems of the GPU, C compiler, caches and packages, with remedies"
    info.add_argument("--doctor", action="store_true", help=text)
    info.set_defaults(command=_info)


def _info(arguments: argparse.Namespace) -> int:
    if arguments.distributed:
        return _distributed()
    if arguments.doctor:
        from .doctor import describe, examine

        sys.stdout.write("\n".join(describe(examine())) + "\n")
        return 0
    import platform
    from importlib import metadata

    import torch

    from .. import explain
    from ..tuned import report

    lines = [f"python {platform.python_version()} on {platform.platform()}"]
    for package in ("fastattn", "torch", "triton", "einops", "tokenizers", "safetensors"):
        try:
            lines.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{package} is not installed: see fastattn info --doctor")
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in (*devices, torch.device("cpu")):
        lines.append(f"{device}: {_device_name(device)}")
        for dtype in (torch.float32, torch.bfloat16):
            q = torch.zeros(1, 1, 16, 64, device=device, dtype=dtype)
            try:
                why = str(explain(q, q, q, causal=True))
            except ValueError as error:
                why = str(error)
            lines += [f"  {str(dtype).removeprefix('torch.')}", *_indented(why.splitlines(), 4)]
        lines += _indented(report.describe(device), 2)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _distributed() -> int:
    """Print the backends of torch.distributed and the number of ranks, on rank 0."""
    import os

    import torch.distributed as dist

    if not dist.is_torchelastic_launched():
        raise ValueError("--distributed found no ranks: start it by torchrun -m fastattn")
    world, node = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if int(os.environ["RANK"]):
        return 0
    able = [name for name in ("nccl", "gloo", "mpi", "ucc") if dist.is_backend_available(name)]
    sys.stdout.write(f"torch.distributed: {', '.join(able)}; {world} ranks, {node} on a node\n")
    return 0


def _device_name(device: Any) -> str:
    import torch

    if device.type == "cpu":
        return f"{torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    return (
        f"{properties.name}, compute capability {capability}, {properties.total_memory >> 20} MiB"
    )


def _indented(lines: list[str], width: int) -> list[str]:
    return [" " * width + line for line in lines]
