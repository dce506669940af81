"""`python -m fastattn.parallel.cost`: a table of what methods cost on more and more GPUs.

python -m fastattn.parallel.cost --gpus 8..1024 --model llama-8b --tokens 1048576
torchrun --nproc-per-node 4 -m fastattn.parallel.cost --measure
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch.distributed as dist

from .measure import measure, process_group
from .model import METHODS, MODELS, Rates, Shape, cost, costs, ideal_seconds, serves


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
    for line in table(given.model, given.tokens, given.gpus, rates):
        sys.stdout.write(line + "\n")
    if given.plot:
        plot(given.model, given.tokens, given.gpus, rates, given.plot)


if __name__ == "__main__":
    main()
