"""Measure latency and bandwidth of each mesh dim, and the rate of attention."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...functional.attend import attention
from .model import BACKWARD, Rates

_SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 22)  # bytes
_REPEATS = 5


class Link(NamedTuple):
    """Link to the next rank of a dim: latency in seconds, bandwidth in bytes a second."""

    latency: float
    bandwidth: float

    def __str__(self) -> str:
        return f"{self.latency * 1e6:.1f} us, {self.bandwidth / 1e9:.3g} GB/s"


class Measured(NamedTuple):
    """Ranks as (nodes, ranks per node), measured links, and the resulting rates."""

    nodes: tuple[int, int]
    links: dict[str, Link]
    rates: Rates

    def lines(self) -> Iterator[str]:
        """Report which rates are measured and which are assumed."""
        yield f"ranks: {self.nodes[0]} x {self.nodes[1]} (nodes x ranks of a node)"
        for name in ("intra", "inter"):
            assumed = Link(getattr(self.rates, f"{name}_latency"), getattr(self.rates, name))
            link = self.links.get(name)
            yield f"{name}: {link or assumed}, {'measured' if link else 'assumed'}"
        yield f"attention: {self.rates.flops / 1e12:.3g} TFLOP/s a rank, measured"


@contextmanager
def process_group() -> Iterator[None]:
    """Process group of torchrun's ranks, NCCL on GPUs and gloo on a CPU; else a ValueError.

    An existing group is used and kept.
    """
    if dist.is_initialized():
        yield
        return
    if not dist.is_torchelastic_launched():
        raise ValueError("there are no ranks: torchrun --nproc-per-node 4 -m ... starts some")
    by_gpu = torch.cuda.is_available() and dist.is_nccl_available()
    if by_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if by_gpu else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure(rates: Rates) -> Measured:
    """Measure a process group and its devices, to replace the assumed rates.

    Raises:
        ValueError: nodes have different numbers of ranks.
    """
    world = dist.get_world_size()
    node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % node:
        raise ValueError(f"{world} ranks must be as many on each node, got {node} on this one")
    nodes = (world // node, node)
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    mesh = init_device_mesh(device.type, nodes, mesh_dim_names=("inter", "intra"))
    links = measure_links(mesh)
    flops = measure_flops(device, 4096 if device.type == "cuda" else 256)
    measured: dict[str, Any] = {"flops": flops, "node": node}
    for name, link in links.items():
        measured |= {name: link.bandwidth, f"{name}_latency": link.latency}
    return Measured(nodes, links, rates._replace(**measured))


def measure_links(mesh: DeviceMesh) -> dict[str, Link]:
    """Links by name of each dim with several ranks, by the slowest rank of a ring."""
    names = mesh.mesh_dim_names or tuple(str(n) for n in range(mesh.ndim))
    return {
        name: _measure_link(mesh.get_group(n), mesh.device_type)
        for n, name in enumerate(names)
        if mesh.size(n) > 1
    }


def fit(samples: Sequence[tuple[int, float]]) -> Link:
    """Fit seconds = latency + bytes / bandwidth to (bytes, seconds), by relative least squares.

    Relative, as large messages take thousands of times as long as small ones.
    """
    weight = torch.tensor([1 / seconds for _, seconds in samples], dtype=torch.float64)
    sizes = torch.tensor([size for size, _ in samples], dtype=torch.float64)
    columns = torch.stack([weight, sizes * weight], 1)
    latency, each = torch.linalg.lstsq(columns, torch.ones_like(weight)[:, None]).solution[:, 0]
    # Noise may make either negative.
    return Link(max(float(latency), 0.0), 1 / max(float(each), 1e-15))


def measure_flops(device: torch.device, T: int) -> float:
    """Operations a second of causal attention of T tokens, forward and backward, on the
    slowest rank.
    """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    H, D = 8, 128
    q, k, v = (
        torch.randn(1, H, T, D, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )

    def run() -> None:
        torch.autograd.grad(attention(q, k, v, causal=True).sum(), (q, k, v))

    seconds = torch.tensor(_seconds(run, device), dtype=torch.float64, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return 2 * H * D * T * T * (1 + BACKWARD) / float(seconds)


def _measure_link(group: ProcessGroup, device_type: str) -> Link:
    device = torch.device(device_type)
    ranks, own = group.size(), group.rank()
    after, before = (dist.get_global_rank(group, (own + step) % ranks) for step in (1, -1))
    samples = []
    for size in _SIZES:
        sent, received = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))

        def shift(sent: Tensor = sent, received: Tensor = received) -> None:
            moves = [
                dist.P2POp(dist.isend, sent, after, group),
                dist.P2POp(dist.irecv, received, before, group),
            ]
            for work in dist.batch_isend_irecv(moves):
                work.wait()

        slowest = torch.tensor(_seconds(shift, device), dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # over all ranks, so that plans are equal
        samples.append((size, float(slowest)))
    return fit(samples)


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    """The median of some runs, after a warm-up."""
    times = []
    for _ in range(_REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[_REPEATS // 2]
