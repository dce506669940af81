"""`fastattn generate`: continue texts with a trained GPT."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..generation.request import Tally
    from ..models.gpt import GPT
    from ..models.sampling import Sampling
    from ..training.tokenizers import Tokenizer

_TEMPERATURE, _LENGTH_PENALTY = 0.8, 0.0
# Options that are fields of `Sampling`.
_FILTERS = ("temperature", "top_k", "top_p", "min_p", "epsilon_cutoff")
_DRAWN = (*_FILTERS, "repetition_penalty", "greedy")


def add(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "generate",
        help="continue texts with a trained GPT",
        description="Continue texts with a trained GPT. Several prompts are continued together, "
        "each as it would be alone, and each under a heading.",
    )
    parser.set_defaults(command=_generate)
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="folder of a run or of one checkpoint")
    add("--prompt", action="append", metavar="TEXT", help="text to continue; repeatable")
    add("--prompts-file", metavar="FILE", help="UTF-8 file of prompts, one a line")
    add("--tokens", type=int, default=500, help="largest number of new tokens (default: 500)")
    add("--stop", action="append", metavar="TEXT", help="end before this text; repeatable")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (default: auto)")
    add("--cuda-graph", action="store_true", help="replay decoding steps as a CUDA graph")
    text = "when the context is full: restart from its last half (default), or crop the text to "
    text += "the last context in every step, as nanoGPT does, which is slower"
    add("--past-context", choices=("restart", "crop"), help=text)
    # None by default: a missing option must not contradict --beams.
    drawn = parser.add_argument_group("sampling")
    add = drawn.add_argument
    add("--temperature", type=float, help=f"divisor of the logits (default: {_TEMPERATURE})")
    add("--top-k", type=int, help="keep this many of the most likely tokens")
    add("--top-p", type=float, help="keep the most likely tokens that sum to this probability")
    add("--min-p", type=float, help="keep tokens at least MIN_P times as likely as the top one")
    text = "keep tokens of at least this probability, which some courses call top-p"
    add("--epsilon-cutoff", type=float, help=text)
    add("--repetition-penalty", type=float, help="above 1: avoid earlier tokens (default: 1)")
    add(
        "--greedy",
        action="store_true",
        default=None,
        help="take the most likely token in each step",
    )
    add("--seed", type=int, help="seed of sampling (default: a new one each time)")
    search = parser.add_argument_group("beam search")
    add = search.add_argument
    add("--beams", type=int, help="number of beams")
    add(
        "--length-penalty",
        type=float,
        help=f"above 0: favour long texts (default: {_LENGTH_PENALTY})",
    )


def _generate(arguments: argparse.Namespace) -> int:
    _check_options(arguments)
    prompts = _prompts(arguments)
    from ..generation.request import Tally
    from ..training.checkpoint import load_model
    from ..training.train_config import resolve_device

    sampling = _sampling(arguments)
    device = resolve_device(arguments.device)
    model, tokenizer = load_model(arguments.checkpoint, device=device)
    # A character that the terminal cannot show must not end the text.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    tally = Tally()
    begin = time.perf_counter()
    pieces = _pieces(arguments, model, tokenizer, prompts, sampling, tally)
    if len(prompts) == 1:
        _write_stream(prompts[0], pieces)
    else:
        _write_texts(prompts, pieces)
    _report(tally, time.perf_counter() - begin)
    return 0


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise ValueError on options that exclude each other."""

    def passed(*names: str) -> list[str]:
        return [
            "--" + name.replace("_", "-") for name in names if getattr(arguments, name) is not None
        ]

    if arguments.beams is not None:
        excluded = passed(*_DRAWN, "seed", "past_context")
        excluded += ["--cuda-graph"] * arguments.cuda_graph
        if excluded:
            raise ValueError(f"--beams searches for the most likely text: leave out {excluded[0]}")
    elif arguments.length_penalty is not None:
        raise ValueError("--length-penalty needs --beams")
    elif arguments.greedy and (excluded := passed(*_FILTERS, "seed")):
        raise ValueError(f"--greedy takes the most likely token: leave out {excluded[0]}")


def _prompts(arguments: argparse.Namespace) -> list[str]:
    from ..files.text import read_lines

    prompts: list[str] = list(arguments.prompt or [])
    if arguments.prompts_file is None:
        return prompts or [""]
    return prompts + read_lines(arguments.prompts_file)


def _sampling(arguments: argparse.Namespace) -> Sampling:
    from ..models.sampling import Sampling

    chosen = {name: x for name in _DRAWN if (x := getattr(arguments, name)) is not None}
    return Sampling(**{"temperature": _TEMPERATURE, **chosen})


def _pieces(
    arguments: argparse.Namespace,
    model: GPT,
    tokenizer: Tokenizer,
    prompts: list[str],
    sampling: Sampling,
    tally: Tally,
) -> Iterator[tuple[int, str]]:
    """Yield (prompt number, text) as generated, without the prompts."""
    stop, count = arguments.stop or [], arguments.tokens
    if arguments.beams is not None:
        from ..generation.search import beam_texts

        penalty = arguments.length_penalty
        for row, prompt in enumerate(prompts):
            beams = beam_texts(
                model,
                tokenizer,
                prompt,
                count,
                beams=arguments.beams,
                stop=stop,
                length_penalty=_LENGTH_PENALTY if penalty is None else penalty,
            )
            text, beam = beams[0]
            tally.tokens += len(beam.tokens)
            yield row, text
    else:
        from ..generation.generate import generate_texts

        yield from generate_texts(
            model,
            tokenizer,
            prompts,
            count,
            sampling=sampling,
            seed=arguments.seed,
            stop=stop,
            cuda_graph=arguments.cuda_graph,
            tally=tally,
            past_context=arguments.past_context or "restart",
        )


def _write_stream(prompt: str, pieces: Iterator[tuple[int, str]]) -> None:
    """Stream one text; write nothing before the first piece, which may raise."""
    _, first = next(pieces, (0, ""))
    sys.stdout.write(prompt + first)
    for _, piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _write_texts(prompts: list[str], pieces: Iterator[tuple[int, str]]) -> None:
    """Write several finished texts in the order of their prompts."""
    texts = list(prompts)
    for row, piece in pieces:
        texts[row] += piece
    for row, text in enumerate(texts):
        sys.stdout.write(f"=== {row + 1} of {len(texts)} ===\n{text}\n")


def _report(tally: Tally, seconds: float) -> None:
    """Report the speed on stderr; stdout has the text alone."""
    speed = f"{tally.tokens / seconds:,.0f} tokens/s"
    sys.stderr.write(f"{tally.tokens} tokens in {seconds:.2f} s: {speed}\n")
