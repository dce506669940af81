"""How long attention over several GPUs takes by each method, from a model of messages and compute.

A message takes a latency and its bytes over a bandwidth, both other between nodes than inside one.
Compute takes its floating-point operations over a rate. Of what overlaps, the longer one counts.

`python -m fastattn.parallel.cost --gpus 8..1024 --model llama-8b --tokens 1048576` prints a table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import NamedTuple

from .gather import heads_at_once

BACKWARD = 2.5  # operations of the backward, over those of the forward: five products to two
STORED, SUMMED = 2, 4  # bytes of a number in bf16, and of a gradient that is added up


class Rates(NamedTuple):
    """Of a cluster. Bandwidths are bytes a second that one GPU sends, latencies seconds.

    The defaults are those of a DGX H100 (NVIDIA, "DGX H100/H200 User Guide": NVLink 900 GB/s both
    ways together, one ConnectX-7 of 400 Gb/s a GPU). What attention reaches and the latencies are
    assumed: measure them and give your own.
    """

    flops: float = 500e12
    intra: float = 450e9
    inter: float = 50e9
    intra_latency: float = 5e-6
    inter_latency: float = 15e-6
    node: int = 8  # GPUs


class Shape(NamedTuple):
    """Attention of one layer to a whole sequence.

    share: of all pairs, those that are visible. hops: how often a ring passes keys on; default, as
    often as brings them to all.
    """

    T: int
    H_q: int
    H_k: int
    D: int
    B: int = 1
    share: float = 0.5
    hops: int | None = None


class Cost(NamedTuple):
    """Of one layer's forward and backward on one GPU: seconds, bytes sent, bytes held beside."""

    seconds: float
    sent: float
    held: float


MODELS = {  # layers, H_q, H_k, D, from their published configurations
    "llama-8b": (32, 32, 8, 128),
    "llama-70b": (80, 64, 8, 128),
    "gpt-oss-120b": (36, 64, 8, 64),
}


def ideal_seconds(shape: Shape, gpus: int, rates: Rates) -> float:
    """Compute alone, shared out evenly."""
    B, T, D = shape.B, shape.T, shape.D
    forward = 4 * B * shape.H_q * D * T * T * shape.share
    return forward * (1 + BACKWARD) / gpus / rates.flops


def cost(method: str, shape: Shape, gpus: int, rates: Rates, inner: int | None = None) -> Cost:
    """Of a method of `context_attention`.

    Args:
        inner: for "usp", the ranks of the inner dimension; default: those of a node.
    """
    if method == "gather":
        return _gather(shape, gpus, rates)
    degree = {"ring": 1, "ulysses": gpus}.get(method, inner or min(gpus, rates.node))
    return _exchange_and_ring(shape, gpus, rates, degree)


def serves(method: str, shape: Shape, gpus: int, rates: Rates) -> bool:
    """Whether a method can be had: ranks that share out heads have to divide them."""
    degree = {"ulysses": gpus, "usp": min(gpus, rates.node)}.get(method, 1)
    return shape.H_q % degree == 0 and gpus % degree == 0


def _keys(shape: Shape, gpus: int) -> float:
    """Bytes of k and v that a GPU holds."""
    return 2 * shape.B * shape.H_k * shape.D * shape.T / gpus * STORED


def _link(gpus: int, rates: Rates) -> tuple[float, float]:
    """Latency and bandwidth of the slowest link among GPUs."""
    if gpus <= rates.node:
        return rates.intra_latency, rates.intra
    return rates.inter_latency, rates.inter


def _gather(shape: Shape, gpus: int, rates: Rates) -> Cost:
    """Heads by heads: all but the first gather overlaps with compute, gradients likewise.

    Between nodes every GPU's own link carries its share, and the node spreads what came in.
    """
    latency, _ = _link(gpus, rates)
    bandwidth = rates.intra if gpus <= rates.node else min(rates.intra, rates.node * rates.inter)
    local = _keys(shape, gpus)
    groups = shape.H_k // heads_at_once(shape.H_k, gpus)
    sent = local * (gpus - 1)
    summed = sent * SUMMED / STORED
    # Gradients go straight to their owners, most of them in other nodes.
    outside = max(0.0, 1 - rates.node / gpus)
    back = summed * (outside / rates.inter + (1 - outside) / rates.intra)
    compute = ideal_seconds(shape, gpus, rates) / (1 + BACKWARD)
    forward = _overlapped(groups, compute, groups * latency + sent / bandwidth)
    backward = _overlapped(groups, BACKWARD * compute, groups * latency + sent / bandwidth + back)
    held = 2 * local * gpus / groups + local * gpus / groups * SUMMED / STORED
    return Cost(forward + backward, 2 * sent + summed, held)


def _exchange_and_ring(shape: Shape, gpus: int, rates: Rates, degree: int) -> Cost:
    """Tokens for heads among `degree` GPUs, and a ring of the groups of these."""
    hops = gpus // degree - 1 if shape.hops is None else shape.hops
    steps, inside = hops + 1, min(degree, rates.node)
    tokens = shape.B * shape.D * shape.T / gpus * STORED
    repeated = max(shape.H_k, degree)
    # q, k, v and o go once forward; do, dq, dk and dv backward.
    exchanged = 2 * tokens * (2 * shape.H_q + 2 * repeated) * (degree - 1) / degree
    outside = 1 - inside / degree
    exchange = exchanged * (outside / rates.inter + (1 - outside) / rates.intra)
    exchange += 8 * (degree > 1) * _link(degree, rates)[0]
    passed = 2 * tokens * repeated if degree > 1 else _keys(shape, gpus)
    latency, bandwidth = _link(gpus, rates)
    compute = ideal_seconds(shape, gpus, rates) / (1 + BACKWARD)
    hop = latency + passed / bandwidth if hops else 0.0
    forward = _overlapped(steps, compute, steps * hop)
    # Keys go around, and their gradients behind them.
    backward = _overlapped(steps, BACKWARD * compute, steps * hop * (1 + SUMMED / STORED))
    around = passed * hops
    held = 2 * passed * (hops > 0) + tokens * (2 * shape.H_q + 2 * repeated) * (degree > 1)
    sent = exchanged + around * (2 + SUMMED / STORED)
    return Cost(exchange + forward + backward, sent, held)


def _overlapped(pieces: int, compute: float, messages: float) -> float:
    """As many pieces, of which each is computed while the next one's messages are on their way."""
    return max(compute, messages) + min(compute, messages) / pieces if messages else compute


def parse_gpus(text: str) -> list[int]:
    """ "8..64" counts by doubling; "8,12" is a list."""
    first, dots, last = text.partition("..")
    if not dots:
        return [int(n) for n in text.split(",")]
    found = [int(first)]
    while found[-1] * 2 <= int(last):
        found.append(found[-1] * 2)
    return found


def table(model: str, tokens: int, gpus: list[int], rates: Rates) -> Iterator[str]:
    """Lines: for each number of GPUs and method, a step's attention in all layers."""
    layers, H_q, H_k, D = MODELS[model]
    shape = Shape(tokens, H_q, H_k, D)
    yield f"{model}, {tokens} tokens, causal: attention of {layers} layers, forward and backward"
    yield f"{'GPUs':>5} {'method':<8} {'ms':>10} {'of ideal':>9} {'GB sent':>9} {'MB held':>9}"
    for count in gpus:
        ideal = ideal_seconds(shape, count, rates)
        for method in ("gather", "ring", "ulysses", "usp"):
            if not serves(method, shape, count, rates):
                continue
            seconds, sent, held = cost(method, shape, count, rates)
            yield (
                f"{count:>5} {method:<8} {seconds * layers * 1e3:>10.2f} {ideal / seconds:>9.0%} "
                f"{sent * layers / 1e9:>9.2f} {held / 1e6:>9.1f}"
            )


def plot(model: str, tokens: int, gpus: list[int], rates: Rates, path: str) -> None:
    """Draws the share of ideal by GPUs into a file."""
    from matplotlib.figure import Figure

    _, H_q, H_k, D = MODELS[model]
    shape = Shape(tokens, H_q, H_k, D)
    figure = Figure()
    axes = figure.subplots()
    for method in ("gather", "ring", "ulysses", "usp"):
        counts = [n for n in gpus if serves(method, shape, n, rates)]
        shares = [ideal_seconds(shape, n, rates) / cost(method, shape, n, rates)[0] for n in counts]
        axes.plot(counts, shares, marker="o", label=method)
    axes.set(
        xscale="log", xlabel="GPUs", ylabel="share of ideal", title=f"{model}, {tokens} tokens"
    )
    axes.legend()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser("fastattn.parallel.cost", description=__doc__)
    parser.add_argument("--gpus", type=parse_gpus, default="8..1024", help="8..1024, or 8,12")
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="of the whole sequence")
    parser.add_argument("--plot", help="draw the share of ideal into this file")
    for name, value in Rates()._asdict().items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(value), default=value, help=f"default {value:g}")
    given = parser.parse_args(arguments)
    rates = Rates(*(getattr(given, name) for name in Rates._fields))
    for line in table(given.model, given.tokens, given.gpus, rates):
        sys.stdout.write(line + "\n")
    if given.plot:
        plot(given.model, given.tokens, given.gpus, rates, given.plot)


if __name__ == "__main__":
    main()
