"""`python -m fastattn.parallel.cost`: a table of what methods cost on more and more GPUs.

python -m fastattn.parallel.cost --gpus 8..1024 --model llama-8b --tokens 1048576
python -m fastattn.parallel.cost --gpus 8..1024 --tokens 8192 --fsdp auto --tensor-parallel 2
torchrun --nproc-per-node 4 -m fastattn.parallel.cost --measure
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator

import torch.distributed as dist

from .measure import measure, process_group
from .model import METHODS, MODELS, Rates, Shape, cost, costs, ideal_seconds, serves
from .step import DENSE, DIMS, step, step_messages


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
        for method, (seconds, sent, held) in costs(shape, count, rates).items():
            yield (
                f"{count:>5} {method:<8} {seconds * layers * 1e3:>10.2f} {ideal / seconds:>9.0%} "
                f"{sent * layers / 1e9:>9.2f} {held / 1e6:>9.1f}"
            )


def split_of(gpus: int, fsdp: str | None, cp: int, tp: int) -> tuple[int, int, int, int] | None:
    """(dp, fsdp, cp, tp) of so many GPUs, dp or an fsdp of "auto" being the rest; None if none."""
    rest = gpus // (cp * tp)
    shards = rest if fsdp == "auto" else int(fsdp or 1)
    found = (rest // shards if shards else 0, shards, cp, tp)
    return found if math.prod(found) == gpus else None


def step_table(
    model: str, tokens: int, rows: int, splits: list[tuple[int, int, int, int]], rates: Rates
) -> Iterator[str]:
    """Lines: for each split, a training step of the whole model.

    rows: those that each rank of dp x fsdp has.
    """
    yield f"{model}, {tokens} tokens a row, {rows} rows a rank of dp x fsdp: a training step"
    sizes = " ".join(f"{name:>4}" for name in DIMS)
    sent = " ".join(f"{'GB ' + name:>8}" for name in DIMS)
    yield f"{'GPUs':>5} {sizes} {'ms':>9} {'of ideal':>9} {sent} {'messages':>9} {'GB states':>9}"
    for split in splits:
        seconds, ideal, states = step(DENSE[model], split, rows, tokens, rates)
        found = step_messages(DENSE[model], split, rows, tokens, rates=rates)
        degrees = " ".join(f"{n:>4}" for n in split)
        sent = " ".join(f"{found[name].sent / 1e9:>8.2f}" for name in DIMS)
        calls = sum(x.calls for x in found.values())
        yield (
            f"{math.prod(split):>5} {degrees} {seconds * 1e3:>9.1f} {ideal / seconds:>9.0%} "
            f"{sent} {calls:>9} {states / 1e9:>9.2f}"
        )


def plot(model: str, tokens: int, gpus: list[int], rates: Rates, path: str) -> None:
    """Draws the share of ideal by GPUs into a file."""
    from matplotlib.figure import Figure

    _, H_q, H_k, D = MODELS[model]
    shape = Shape(tokens, H_q, H_k, D)
    figure = Figure()
    axes = figure.subplots()
    for method in METHODS:
        counts = [n for n in gpus if serves(method, shape, n, rates)]
        shares = [ideal_seconds(shape, n, rates) / cost(method, shape, n, rates)[0] for n in counts]
        axes.plot(counts, shares, marker="o", label=method)
    axes.set(
        xscale="log", xlabel="GPUs", ylabel="share of ideal", title=f"{model}, {tokens} tokens"
    )
    axes.legend()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    """The command, of `sys.argv` or these arguments."""
    parser = argparse.ArgumentParser("fastattn.parallel.cost", description=__doc__)
    parser.add_argument("--gpus", type=parse_gpus, default="8..1024", help="8..1024, or 8,12")
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="of the whole sequence")
    whole = parser.add_argument_group(
        "a training step of the whole model instead, where one of these is given"
    )
    whole.add_argument("--fsdp", help='ranks that share the parameters, or "auto": all the rest')
    whole.add_argument("--context-parallel", type=int, help="ranks that share a row's tokens")
    whole.add_argument("--tensor-parallel", type=int, help="ranks that share heads and features")
    whole.add_argument("--rows", type=int, help="that each rank of dp x fsdp has; default 1")
    parser.add_argument("--plot", help="draw the share of ideal into this file")
    for name, value in Rates()._asdict().items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(value), default=value, help=f"default {value:g}")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="under torchrun: measure the rates on these ranks, and take those that were measured",
    )
    given = parser.parse_args(arguments)
    rates = Rates(*(getattr(given, name) for name in Rates._fields))
    if given.measure:
        try:
            with process_group():
                first = dist.get_rank() == 0
                measured = measure(rates)
        except ValueError as error:
            parser.error(f"--measure: {error}")
        if not first:
            return
        rates = measured.rates
        sys.stdout.writelines(f"{line}\n" for line in measured.lines())
    lines = table(given.model, given.tokens, given.gpus, rates)
    if any((given.fsdp, given.context_parallel, given.tensor_parallel, given.rows)):
        lines = _steps(parser, given, rates)
    for line in lines:
        sys.stdout.write(line + "\n")
    if given.plot:
        plot(given.model, given.tokens, given.gpus, rates, given.plot)


def _steps(
    parser: argparse.ArgumentParser, given: argparse.Namespace, rates: Rates
) -> Iterator[str]:
    """The table of steps; ends the command where degrees or the model do not suit it."""
    cp, tp = given.context_parallel or 1, given.tensor_parallel or 1
    model = DENSE.get(given.model)
    if model is None:
        parser.error(f"--model must be one of {', '.join(DENSE)} for a step, got {given.model}")
    if given.fsdp not in (None, "auto") and not given.fsdp.isdecimal():
        parser.error(f"--fsdp must be a number or auto, got {given.fsdp}")
    if given.plot:
        parser.error("--plot draws attention alone: give no --fsdp and the like")
    rows = given.rows or 1
    if cp < 1 or rows < 1:
        parser.error(f"--context-parallel and --rows must be positive, got {cp} and {rows}")
    if tp < 1 or model.H_q % tp or model.F % tp:
        parser.error(f"--tensor-parallel must divide heads and features of the model, got {tp}")
    found = [split_of(gpus, given.fsdp, cp, tp) for gpus in given.gpus]
    splits = [split for split in found if split is not None]
    if not splits:
        parser.error("--gpus must hold a number that the degrees divide")
    return step_table(given.model, given.tokens, rows, splits, rates)


if __name__ == "__main__":
    main()
