"""`fastattn train`: train a GPT, an encoder or an encoder-decoder."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

INTERRUPTED = 130  # exit status of a command stopped by Ctrl-C

MODELS = ("gpt", "encoder", "seq2seq")
TASKS = ("language", "tagging", "masked", "translation")
RECOMPUTED = ("none", "full", "selective")
# Configuration fields with named choices.
CHOICES = {
    "positions": (
        *("learned", "sinusoidal", "rotary", "alibi"),
        *("scalar", "content", "transformer_xl", "none"),
    ),
    "rotary_style": ("half", "interleaved"),
    "relative_table": ("trained", "sinusoidal"),
    "sparse": ("alternate", "merge"),
    "output_gate": ("head", "element"),
    "scoring": ("scaled_dot", "dot", "multiplicative", "additive"),
    "block": ("pre", "post", "parallel"),
    "norm": ("layernorm", "rmsnorm"),
    "activation": ("relu", "gelu", "gelu_tanh", "geglu", "swiglu"),
}


def add_train(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "train",
        help="train a GPT, an encoder or an encoder-decoder",
        description="Train a model. Without --text the data come from this Python's standard "
        "library: its source text to continue (gpt) or to fill in (encoder, masked), its tokens "
        "with their tags (encoder, tagging), its docstrings with the names of their functions "
        "(seq2seq).",
        # No defaults here, so that missing options do not contradict a resumed run.
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(command=_train)
    run = parser.add_argument_group("run")
    run.add_argument("--model", choices=MODELS, help="(gpt)")
    run.add_argument(
        "--task", choices=TASKS, help="of an encoder: tagging (default) or masked; others have one"
    )
    run.add_argument("--out", metavar="DIR", help="the run's folder (runs/ and the model's name)")
    run.add_argument(
        "--resume",
        action="store_true",
        default=False,
        help="continue the run in --out with its own options; start it if there is none",
    )
    _add_data_options(parser.add_argument_group("data"))
    _add_model_options(parser.add_argument_group("model"))
    _add_layer_options(parser.add_argument_group("layers"))
    _add_training_options(parser.add_argument_group("training"))
    _add_parallel_options(
        parser.add_argument_group(
            "ranks",
            "Under torchrun --nproc-per-node N -m fastattn train ...; the degrees multiply to the "
            "number of ranks. The batch, its order and the learned weights do not depend on them.",
        )
    )


# A dest is the part and field of fastattn.training.run.Options.
def _add_data_options(group: Any) -> None:
    files: dict[str, Any] = {"nargs": "+", "type": os.path.abspath, "metavar": "FILE"}
    text = "UTF-8: text; for tagging CoNLL's form; for translation source TAB target a line"
    group.add_argument("--text", dest="data.text", help=text, **files)
    text = "token files, made by fastattn prepare, in place of --text and --tokenizer; gpt"
    data: dict[str, Any] = {"type": os.path.abspath, "metavar": "DIR"}
    group.add_argument("--data", dest="data.prepared", help=text, **data)
    text = "more such files to measure on (the last tenth of the others); tagging, translation"
    group.add_argument("--validation", dest="data.validation", help=text, **files)
    group.add_argument(
        "--tokenizer",
        dest="data.tokenizer",
        metavar="NAME",
        help="char (default for gpt), bpe (byte-level, default for others), word, word-space "
        "and word-sign (keep white space), char-bpe, wordpiece, unigram; or a tokenizer's JSON, a "
        "vocabulary of a token a line (.txt), or a folder with GPT-2's vocab.json and merges.txt",
    )
    text = "of a tokenizer that is trained, but char (1024)"
    group.add_argument("--vocab-size", dest="data.vocab_size", type=int, metavar="N", help=text)
    text = "a masked-token run's folder, whose encoder and tokenizer to begin with; tagging"
    path: dict[str, Any] = {"type": os.path.abspath, "metavar": "DIR"}
    group.add_argument("--start-from", dest="data.start_from", help=text, **path)
    text = "without --text: names of functions for their docstrings (default), or dates in words"
    group.add_argument("--pairs", dest="data.pairs", choices=("names", "dates"), help=text)
    text = "cut texts that are too long for the model, instead of refusing them; translation"
    group.add_argument("--truncate", dest="data.truncate", action="store_true", help=text)


def _adder(group: Any, part: str) -> Callable[..., None]:
    """Make add(option, field, help, ...) for fields of a part of the options."""

    def add(option: str, field: str, text: str, to: Any = group, **keywords: Any) -> None:
        if field in CHOICES and "action" not in keywords:
            keywords["choices"] = CHOICES[field]
        if "action" not in keywords and "choices" not in keywords:
            # argparse would show the dest in --help.
            name = {int: "N", float: "X"}.get(keywords.get("type", str), option.lstrip("-").upper())
            keywords["metavar"] = name
        to.add_argument(option, dest=f"{part}.{field}", help=text, **keywords)

    return add


def _add_model_options(group: Any) -> None:
    add = _adder(group, "model")
    text = "begin with a published configuration, such as gpt2-small; other options change it"
    add("--preset", "preset", text)
    add("--layers", "num_layers", "(4)", type=int)
    add("--heads", "num_heads", "query heads (4)", type=int)
    add("--kv-heads", "num_kv_heads", "key/value heads (as many as query heads)", type=int)
    add("--embed-dim", "embed_dim", "width (128)", type=int)
    text = "width of a value head (--embed-dim / --heads)"
    add("--v-head-dim", "v_head_dim", text, type=int)
    text = "width of one latent that all keys and values come from, and that the cache holds (none)"
    add("--kv-latent-dim", "kv_latent_dim", text, type=int)
    add("--hidden-dim", "hidden_dim", "width between the linear layers (4 x --embed-dim)", type=int)
    add("--context", "context_length", "tokens; gpt and encoder (64)", type=int)
    text = "layers of the decoder (as many as --layers); seq2seq"
    add("--decoder-layers", "num_decoder_layers", text, type=int)
    add("--source-length", "source_length", "tokens of the source (64); seq2seq", type=int)
    add("--target-length", "target_length", "tokens of the target (64); seq2seq", type=int)
    add("--dropout", "dropout", "of embeddings and outputs of layers (0)", type=float)
    add("--attention-dropout", "attention_dropout", "of attention weights (0)", type=float)
    text = "share of the target that the loss spreads over all tokens (0)"
    add("--label-smoothing", "label_smoothing", text, type=float)
    add("--bias", "bias", "give linear layers and norms a bias", action="store_true")
    text = "one token embedding for sources and targets; seq2seq"
    add("--share-embeddings", "share_embeddings", text, action="store_true")
    text = "give the output layer a weight of its own"
    add("--untied", "tie_weights", text, action="store_false")
    text = "give the logits a bias; language"
    add("--head-bias", "head_bias", text, action="store_true")


def _add_layer_options(group: Any) -> None:
    add = _adder(group, "model")
    one = group.add_mutually_exclusive_group()
    add("--positions", "positions", "(learned)", to=one)
    text = "the same as --positions alibi: lower scores in proportion to the distance"
    add("--alibi", "positions", text, to=one, action="store_const", const="alibi")
    add("--rotary-style", "rotary_style", "pairs that are rotated together (half)")
    text = "distance from which on positions scalar, content and transformer_xl are alike (32)"
    add("--relative-distance", "relative_distance", text, type=int)
    add("--relative-table", "relative_table", "vectors of their distances (trained)")
    text = "add vectors by relative position to the values too"
    add("--relative-values", "relative_values", text, action="store_true")
    add("--window", "window", "keys a token sees, itself included (all)", type=int)
    add("--keep-first", "keep_first", "first keys that stay visible with --window (0)", type=int)
    text = "--window and --stride in layers by turns, or both in every layer (dense)"
    add("--sparse", "sparse", text)
    add("--stride", "stride", "distance between keys that are seen beyond --window", type=int)
    add("--scoring", "scoring", "of queries and keys (scaled_dot)")
    add("--softcap", "softcap", "bound of the attention scores (none)", type=float)
    add("--sinks", "sinks", "learn a share of attention that goes nowhere", action="store_true")
    text = "attention gives a token the same bits in training and generation"
    add("--batch-invariant", "batch_invariant", text, action="store_true")
    add("--qk-norm", "qk_norm", "normalise queries and keys", action="store_true")
    add("--output-gate", "output_gate", "sigmoids on the output: of a head or an element (none)")
    add("--block", "block", "order of norm, attention and linear layers (pre)")
    add("--norm", "norm", "(layernorm)")
    add("--ffn", "activation", "of the linear layers (gelu)")
    text = "normalise the embedding, as BERT does"
    add("--embedding-norm", "embedding_norm", text, action="store_true")


def _add_training_options(group: Any) -> None:
    add = _adder(group, "training")
    add("--steps", "steps", "optimizer steps (2000)", type=int)
    add("--batch", "batch_size", "windows, sentences or pairs a forward pass (12)", type=int)
    add("--accumulate", "accumulation", "forward passes a step (1)", type=int)
    add("--lr", "learning_rate", "highest learning rate (3e-3)", type=float)
    add("--min-lr", "min_learning_rate", "learning rate at the end (a tenth)", type=float)
    add("--warmup", "warmup_steps", "steps of rising learning rate (5 %% of steps)", type=int)
    add("--weight-decay", "weight_decay", "(0.1)", type=float)
    add("--grad-clip", "grad_clip", "largest gradient norm, 0 = any (1)", type=float)
    add("--seed", "seed", "(0)", type=int)
    add("--device", "device", "auto (default), cpu, cuda or cuda:<index>")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("--dtype", "dtype", "of activations (auto)", choices=dtypes)
    add("--compile", "compile", "use torch.compile", action="store_true")
    text = "what backward passes compute again (none): layers, in full or all but attention"
    add("--activation-checkpointing", "activation_checkpointing", text, choices=RECOMPUTED)
    add("--log-every", "log_interval", "steps (10)", type=int)
    add("--eval-every", "eval_interval", "steps (250)", type=int)
    add("--save-every", "checkpoint_interval", "steps (500)", type=int)
    text = "go on while a checkpoint is written; several ranks"
    add("--save-in-background", "save_in_background", text, action="store_true")


def _add_parallel_options(group: Any) -> None:
    def add(option: str, field: str, help: str, **keywords: Any) -> None:
        group.add_argument(
            option, dest=f"parallel.{field}", type=_degree, metavar="N", help=help, **keywords
        )

    text = "ranks that share out the rows of a batch, each with all parameters; auto = the ranks "
    add("--data-parallel", "data_parallel", f"{text}that the other degrees leave (auto)")
    text = "ranks that share out rows and parameters; without N the ranks that the others leave (1)"
    add("--fsdp", "fsdp", text, nargs="?", const="auto")
    add("--context-parallel", "context_parallel", "ranks that share the tokens of a row; gpt (1)")
    text = "ranks that share heads and hidden features (1)"
    add("--tensor-parallel", "tensor_parallel", text)
    text = "how long a rank waits for one that has stopped, before all end (600)"
    group.add_argument(
        "--timeout", dest="parallel.timeout", type=float, metavar="SECONDS", help=text
    )


def _degree(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _train(arguments: argparse.Namespace) -> int:
    from ..training.distributed.degrees import ranks_started

    if ranks_started() == 1:
        return _train_here(arguments)
    from ..training.distributed.launcher import shown_once

    return shown_once(lambda: _train_here(arguments))


def _train_here(arguments: argparse.Namespace) -> int:
    from ..training.checkpoint import latest_checkpoint
    from ..training.distributed.degrees import is_first
    from ..training.run import Options, train

    chosen = vars(arguments)
    parts: dict[str, dict[str, Any]] = {"model": {}, "training": {}, "data": {}, "parallel": {}}
    for name, value in chosen.items():
        part, _, field = name.partition(".")
        if field:
            parts[part][field] = tuple(value) if isinstance(value, list) else value
    kind = None
    if "model" in chosen or "task" in chosen:
        from ..training.tasks.kinds import find_kind

        kind = find_kind(chosen.get("model"), chosen.get("task"))
    out = chosen.get("out", os.path.join("runs", "gpt" if kind is None else kind.model))
    options = Options(**parts, kind=None if kind is None else kind.name)
    try:
        with _Stop() as stop:
            result = train(options, out, resume=arguments.resume, should_stop=stop, say=say)
    except KeyboardInterrupt:
        if is_first():
            say(f"interrupted: {latest_checkpoint(out) or 'nothing'} is kept")
        return INTERRUPTED
    if not is_first():
        return 0 if result.finished else INTERRUPTED
    if not result.finished:
        say(
            f"stopped at step {result.step}: {result.checkpoint} is kept; "
            f"fastattn train --out {out} --resume goes on"
        )
        return INTERRUPTED
    sys.stdout.write(f"validation loss {result.validation_loss:.4f} over the whole split\n")
    sys.stdout.writelines(f"{line}\n" for line in _score_lines(result.scores))
    if result.tokens_per_second:
        sys.stdout.write(f"{result.tokens_per_second:,.0f} tokens/s while training\n")
    sys.stdout.write(f"checkpoint {result.checkpoint}\n")
    sys.stdout.write(f"loss curve {os.path.join(out, 'loss.png')}\n")
    return 0


def _score_lines(scores: Mapping[str, Any]) -> Iterator[str]:
    """One line per figure; figures by tag follow their name, sorted."""
    for name, value in scores.items():
        title = _SCORE_TITLES.get(name, name)
        if isinstance(value, Mapping):
            width = max(map(len, value))
            yield f"{title}:"
            yield from (f"  {key:{width}} {figure:.4f}" for key, figure in value.items())
        else:
            yield f"{title} {value:.4f}" if isinstance(value, float) else f"{title} {value}"


_SCORE_TITLES = {
    "majority": "accuracy of the most frequent tag alone",
    "macro_f1": "mean F1",
    "f1": "F1 of each tag",
    "bleu": "BLEU",
    "chrf": "chrF",
    "exact_match": "exact match",
    "pairs": "pairs translated for these scores:",
}


class _Stop:
    """Stop training between two steps after a first Ctrl-C or SIGTERM, at once after a second."""

    def __init__(self) -> None:
        self._asked = self._heard = False

    def __enter__(self) -> _Stop:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self.handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        self._heard = True
        return self._asked

    def handle(self, number: int, frame: FrameType | None) -> None:
        from ..training.distributed.degrees import ranks_started

        together = ranks_started() > 1
        if (self._asked and not together) or not self._heard:
            raise KeyboardInterrupt
        self._asked = True
        if together:
            return  # torchrun repeats signals, and sends them to all ranks; rank 0 reports
        # On a terminal the cursor is after the progress bar.
        start = "\n" if sys.stderr.isatty() else ""
        say(f"{start}stopping after this step (once more to stop at once)")


def say(text: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
