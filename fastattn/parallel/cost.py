"""Cost model of attention over several GPUs by each method.

A message takes a latency plus its bytes over a bandwidth, which differ within and between nodes.
Compute takes its operations over a rate. Of overlapping parts the longer one counts. All constants
are in `Rates`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

BACKWARD = 2.5  # operations of the backward relative to the forward: five products to two
METHODS = ("gather", "ring", "ulysses", "usp")
STORED, SUMMED = 2, 4  # bytes of a bf16 number, and of a summed gradient


class Rates(NamedTuple):
    """Rates of a cluster: bytes a second sent by a GPU; latencies in seconds; flops.

    The defaults describe a DGX H100 (NVIDIA, "DGX H100/H200 User Guide": NVLink 900 GB/s in both
    directions together, one ConnectX-7 of 400 Gb/s a GPU). The rate of attention and the latencies
    are assumed: pass measured ones, such as those of NVIDIA's nccl-tests.
    """

    flops: float = 500e12
    intra: float = 450e9
    inter: float = 50e9
    intra_latency: float = 5e-6
    inter_latency: float = 15e-6
    node: int = 8  # GPUs


class Shape(NamedTuple):
    """Attention of one layer to a whole sequence.

    share: visible pairs of all pairs. imbalance: pairs of the busiest rank over the mean. around:
    for a ring (or its groups of ranks), the hops, and sums over them of the shares of a rank's
    keys, and of gradients, that are sent; default: all keys to all ranks.
    """

    T: int
    H_q: int
    H_k: int
    D: int
    B: int = 1
    share: float = 0.5
    imbalance: float = 1.0
    around: tuple[int, float, float] | None = None


class Cost(NamedTuple):
    """Cost of a layer's forward and backward on a GPU: seconds, bytes sent, extra bytes held."""

    seconds: float
    sent: float
    held: float


MODELS = {  # H_q, H_k, D, from their published configurations
    "llama-8b": (32, 8, 128),
    "llama-70b": (64, 8, 128),
    "gpt-oss-120b": (64, 8, 64),
}


def ideal_seconds(shape: Shape, gpus: int, rates: Rates) -> float:
    """Balanced compute without communication."""
    B, T, D = shape.B, shape.T, shape.D
    forward = 4 * B * shape.H_q * D * T * T * shape.share
    return forward * (1 + BACKWARD) / gpus / rates.flops


def cost(method: str, shape: Shape, gpus: int, rates: Rates, inner: int | None = None) -> Cost:
    """Model the cost of a method of `context_attention`; inner: ranks of the inner dim of "usp"."""
    inner = inner or min(gpus, rates.node)
    sent = sum(message.sent for message in messages(method, shape, gpus, inner).values())
    if method == "gather":
        return _gather(shape, gpus, rates, sent)
    return _exchange_and_ring(shape, gpus, rates, _degree(method, gpus, inner), sent)


def serves(method: str, shape: Shape, gpus: int, rates: Rates) -> bool:
    """Whether a method serves: heads must be divisible by the ranks that share them."""
    degree = {"ulysses": gpus, "usp": min(gpus, rates.node)}.get(method, 1)
    return shape.H_q % degree == 0 and gpus % degree == 0


def heads_at_once(H_k: int, ranks: int) -> int:
    """K/V heads that `gather` processes together: a divisor of H_k, about 4 H_k / ranks.

    This bounds gathered memory to a few times a rank's own.
    """
    most = max(1, 4 * H_k // ranks)
    return max(n for n in range(1, H_k + 1) if H_k % n == 0 and n <= most)


class Messages(NamedTuple):
    """Traffic of a GPU in a mesh dim, forward and backward: messages, and their bytes."""

    calls: int = 0
    sent: float = 0.0


def messages(method: str, shape: Shape, gpus: int, inner: int | None = None) -> dict[str, Messages]:
    """Messages by mesh dim, "sequence" or "heads".

    A test compares them with a real run. Small messages, such as document ids, are not counted;
    inner as for `cost`.
    """
    if method == "gather":
        local = _keys(shape, gpus)
        groups = shape.H_k // heads_at_once(shape.H_k, gpus)
        # Keys twice, and gradients to their owners.
        sent = local * (gpus - 1) * (2 + SUMMED / STORED)
        return {"sequence": Messages(3 * groups, sent), "heads": Messages()}
    degree = _degree(method, gpus, inner)
    (hops, keys, gradients), share = _around(shape, gpus, degree), (degree - 1) / degree
    # q, k, v and o go once forward, do, dq, dk and dv backward, and lse in fp32.
    heads = 2 * shape.H_q + 2 * _repeated(shape, degree)
    numbers = shape.B * shape.T // gpus
    exchanged = (2 * numbers * shape.D * heads * STORED + numbers * shape.H_q * SUMMED) * share
    # Keys twice around; gradients follow them and return home.
    around = _passed(shape, gpus, degree) * (2 * keys + gradients * SUMMED / STORED)
    return {
        "sequence": Messages(2 * 3 * hops, around) if hops else Messages(),
        "heads": Messages(9, exchanged) if degree > 1 else Messages(),
    }


def choice(shape: Shape, gpus: int, rates: Rates, methods: Sequence[str] = METHODS) -> str:
    """The method with the least modelled time among those that serve."""
    able = [name for name in methods if serves(name, shape, gpus, rates)]
    return min(able, key=lambda name: cost(name, shape, gpus, rates).seconds)


def _degree(method: str, gpus: int, inner: int | None) -> int:
    """GPUs that share the heads."""
    return {"ring": 1, "ulysses": gpus}.get(method, inner or gpus)


def _around(shape: Shape, gpus: int, degree: int) -> tuple[int, float, float]:
    """Hops, keys and gradients around a ring of groups of GPUs; see `Shape`."""
    every = gpus // degree - 1
    return (every, every, every) if shape.around is None else shape.around


def _repeated(shape: Shape, degree: int) -> int:
    """Key heads after repetition, divisible by `degree`."""
    return math.lcm(shape.H_k, degree)


def _passed(shape: Shape, gpus: int, degree: int) -> float:
    """Bytes of k and v sent around, for a GPU's heads."""
    return _keys(shape, gpus) * _repeated(shape, degree) / shape.H_k


def _keys(shape: Shape, gpus: int) -> float:
    """Bytes of k and v on a GPU."""
    return 2 * shape.B * shape.H_k * shape.D * shape.T / gpus * STORED


def _link(gpus: int, rates: Rates) -> tuple[float, float]:
    """Latency and bandwidth of the slowest link among GPUs."""
    if gpus <= rates.node:
        return rates.intra_latency, rates.intra
    return rates.inter_latency, rates.inter


def _gather(shape: Shape, gpus: int, rates: Rates, sent: float) -> Cost:
    """Group by group of heads: all but the first gather overlap with compute, as do gradients.

    Between nodes every GPU's link carries its share, which is then distributed in the node.
    """
    latency, _ = _link(gpus, rates)
    bandwidth = rates.intra if gpus <= rates.node else min(rates.intra, rates.node * rates.inter)
    local = _keys(shape, gpus)
    groups = shape.H_k // heads_at_once(shape.H_k, gpus)
    keys = local * (gpus - 1)
    # Gradients go directly to their owners, mostly in other nodes.
    outside = max(0.0, 1 - rates.node / gpus)
    back = (sent - 2 * keys) * (outside / rates.inter + (1 - outside) / rates.intra)
    compute = ideal_seconds(shape, gpus, rates) * shape.imbalance / (1 + BACKWARD)
    start = groups * latency
    forward = overlapped(groups, compute, start + keys / bandwidth)
    backward = overlapped(groups, BACKWARD * compute, 2 * start + keys / bandwidth + back)
    held = 2 * local * gpus / groups + local * gpus / groups * SUMMED / STORED
    return Cost(forward + backward, sent, held)


def _exchange_and_ring(shape: Shape, gpus: int, rates: Rates, degree: int, sent: float) -> Cost:
    """Exchange among `degree` GPUs, and a ring of such groups."""
    (hops, keys, gradients), inside = _around(shape, gpus, degree), min(degree, rates.node)
    passed = _passed(shape, gpus, degree)
    around = passed * (2 * keys + gradients * SUMMED / STORED)
    outside = 1 - inside / degree
    exchange = (sent - around) * (outside / rates.inter + (1 - outside) / rates.intra)
    exchange += 9 * (degree > 1) * _link(degree, rates)[0]
    latency, bandwidth = _link(gpus, rates)
    compute = ideal_seconds(shape, gpus, rates) * shape.imbalance / (1 + BACKWARD)
    there = hops * latency + passed * keys / bandwidth
    forward = overlapped(hops + 1, compute, there)
    # Keys go around; gradients follow them and return home.
    behind = hops * latency + passed * gradients * SUMMED / STORED / bandwidth
    backward = overlapped(hops + 1, BACKWARD * compute, there + behind)
    tokens = shape.B * shape.D * shape.T / gpus * STORED
    heads = 2 * shape.H_q + 2 * _repeated(shape, degree)
    held = 2 * passed * (hops > 0) + tokens * heads * (degree > 1)
    return Cost(exchange + forward + backward, sent, held)


def overlapped(pieces: int, compute: float, messages: float) -> float:
    """Time of `pieces` pieces when each overlaps with the next one's messages."""
    return max(compute, messages) + min(compute, messages) / pieces if messages else compute
