"""What a training step of a whole model sends on each dimension of a mesh, and how long it takes.

Dimensions and their messages are those of `fastattn train`: FSDP2 on "dp" and "fsdp", attention's
exchanges on "cp", `tp_plan` on "tp". Models have the layers of Llama: no biases, gated hidden
units, RMSNorm, and scores with weights of their own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .model import (
    MODELS,
    STORED,
    SUMMED,
    Messages,
    Rates,
    Shape,
    choice,
    cost,
    ideal_seconds,
    messages,
    overlapped,
)

DIMS = ("dp", "fsdp", "cp", "tp")
_STATES = 16  # bytes of a parameter in fp32, its gradient, and AdamW's two moments
_BACKWARD = 2  # products of matrices backward, over those forward


class Model(NamedTuple):
    """Sizes: C is the width of a token, F that of hidden units, V the vocabulary."""

    layers: int
    H_q: int
    H_k: int
    D: int
    C: int
    F: int
    V: int


class Step(NamedTuple):
    """A step on one GPU: its seconds, those of compute alone shared out evenly, bytes of states."""

    seconds: float
    ideal: float
    states: float


# From their published configurations.
DENSE = {
    "llama-8b": Model(*MODELS["llama-8b"], C=4096, F=14336, V=128256),
    "llama-70b": Model(*MODELS["llama-70b"], C=8192, F=28672, V=128256),
}


def step_messages(
    model: Model,
    split: tuple[int, int, int, int],
    rows: int,
    T: int,
    *,
    passes: int = 1,
    stored: int = STORED,
    rates: Rates | None = None,
) -> dict[str, Messages]:
    """By dimension of the mesh, what one GPU sends in an optimizer step.

    A test counts those of dp, fsdp and tp. Without the few numbers of clipping and logs; nothing is
    recomputed. Ranks of cp have the same parameters: messages of these are under fsdp where that is
    more than 1, else under dp.

    Args:
        split: ranks of (dp, fsdp, cp, tp).
        rows: of a pass, those that each rank of dp x fsdp has.
        T: tokens of a row.
        passes: forwards and backwards whose gradients the step adds up.
        stored: bytes of an activation, and of a parameter that is gathered.
        rates: by which `choice` takes the method of cp; default: `Rates()`.
    """
    replicas, shards = data_ranks(split)
    layer, rest = _parameters(model, split[-1])
    every, groups = model.layers * layer + rest, model.layers + 1  # those of FSDP2
    # Layers are gathered by the forward and by the backward, the rest stays from one to the other.
    gathered = (every + model.layers * layer) * stored
    share = (shards - 1) / shards
    summed = 2 * (replicas - 1) / replicas * every / shards * SUMMED
    found = {
        "dp": Messages(groups, summed),
        "fsdp": Messages(passes * (3 * groups - 1), passes * (gathered + every * SUMMED) * share),
        "cp": _of_context(model, split, rows, T, passes, rates or Rates()),
        "tp": _of_tensors(model, split, rows, T, passes, stored),
    }
    alone = {"dp": replicas == 1, "fsdp": shards == 1, "cp": split[2] == 1, "tp": split[3] == 1}
    return {name: Messages() if alone[name] else sent for name, sent in found.items()}


def step(model: Model, split: tuple[int, int, int, int], rows: int, T: int, rates: Rates) -> Step:
    """A step of one pass in bf16, with sums in fp32; arguments as of `step_messages`.

    Messages of parameters overlap with the layers before or behind them. Those of tp are waited
    for, and of those of cp what `cost` says.
    """
    dp, fsdp, cp, tp = split
    replicas, shards = data_ranks(split)
    sent = step_messages(model, split, rows, T, rates=rates)
    shape, near = _attention(model, split, rows, T, rates)
    attended = cost(choice(shape, cp, near), shape, cp, near).seconds
    work = _products(model, tp, rows * T / cp) / rates.flops + model.layers * attended
    work += _seconds(sent["tp"], tp, 1, rates)
    data = _seconds(sent["fsdp"], shards, tp, rates)
    data += _seconds(sent["dp"], replicas, shards * tp, rates)
    whole = Shape(T, model.H_q, model.H_k, model.D, rows * dp * fsdp)
    gpus = math.prod(split)
    ideal = _products(model, 1, rows * dp * fsdp * T) / rates.flops / gpus
    ideal += model.layers * ideal_seconds(whole, gpus, rates)
    layer, rest = _parameters(model, tp)
    states = _STATES * (model.layers * layer + rest) / shards
    return Step(overlapped(model.layers + 1, work, data), ideal, states)


def data_ranks(split: tuple[int, int, int, int]) -> tuple[int, int]:
    """Replicas of the parameters, and ranks that share out each; split: dp, fsdp, cp, tp.

    Ranks of cp see other tokens: for parameters they are data ranks. They shard the parameters too
    where those are sharded, as torchtitan has it, else replicate.
    """
    dp, fsdp, cp, _ = split
    return (dp, fsdp * cp) if fsdp > 1 else (dp * cp, 1)


def _parameters(model: Model, tp: int) -> tuple[int, int]:
    """Of a rank of tp: parameters of a layer, and of all but the layers."""
    C = model.C
    # Ranks that share a head of keys have all of them whole.
    keys = model.H_k * model.D // (1 if model.H_k % tp else tp)
    layer = C * (2 * model.H_q * model.D // tp + 2 * keys + 3 * model.F // tp) + 2 * C
    return layer, 2 * -(-model.V // tp) * C + C


def _products(model: Model, tp: int, tokens: float) -> float:
    """Operations of a rank of tp for matrices, forward and backward."""
    heads = 2 * model.H_q + 2 * max(model.H_k, tp)
    layer = model.C * (heads * model.D + 3 * model.F)
    return 2 * (1 + _BACKWARD) * (model.layers * layer + model.V * model.C) / tp * tokens


def _of_tensors(
    model: Model, split: tuple[int, int, int, int], rows: int, T: int, passes: int, stored: int
) -> Messages:
    """Sums over tp, which go around twice."""
    _, _, cp, tp = split
    tokens = rows * T // cp
    # Behind attention and hidden units and, of gradients, in front of them; of the embedding and,
    # of gradients, the scores.
    activations = 4 * model.layers + 2
    sent = activations * tokens * model.C * stored
    calls = activations + 2  # of the loss: the highest score of a token, then three sums
    sent += 4 * tokens * SUMMED
    if model.H_k % tp:  # gradients of matrices that ranks have whole
        calls += 2 * model.layers
        sent += 2 * model.layers * model.H_k * model.D * model.C * stored
    return Messages(passes * calls, passes * sent * 2 * (tp - 1) / tp)


def _attention(
    model: Model, split: tuple[int, int, int, int], rows: int, T: int, rates: Rates
) -> tuple[Shape, Rates]:
    """What the ranks of cp share, and rates with the ranks that they have of a node."""
    _, _, _, tp = split
    shape = Shape(T, model.H_q // tp, max(model.H_k // tp, 1), model.D, rows)
    return shape, rates._replace(node=max(1, rates.node // tp))


def _of_context(
    model: Model, split: tuple[int, int, int, int], rows: int, T: int, passes: int, rates: Rates
) -> Messages:
    """Those of attention in all layers."""
    cp = split[2]
    shape, near = _attention(model, split, rows, T, rates)
    found = messages(choice(shape, cp, near), shape, cp, min(cp, near.node))
    times = passes * model.layers
    calls = sum(x.calls for x in found.values())
    return Messages(times * calls, times * sum(x.sent for x in found.values()))


def _seconds(sent: Messages, ranks: int, stride: int, rates: Rates) -> float:
    """Of collectives of ranks that lie `stride` GPUs apart.

    Between nodes all links of those that a node has of them carry a share. A collective takes as
    many latencies as a tree of its ranks is high.
    """
    inside = ranks * stride <= rates.node
    near = max(1, rates.node // stride)
    bandwidth = rates.intra if inside else min(rates.intra, near * rates.inter)
    latency = rates.intra_latency if inside else rates.inter_latency
    return sent.calls * math.ceil(math.log2(ranks)) * latency + sent.sent / bandwidth
