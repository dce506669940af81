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
        description="Train a model. Without --text the data are this Python's standard "
        "library: its source text to continue (gpt) or to fill in (encoder, masked), its tokens "
        "with their tags (encoder, tagging), its docstrings with the names of their functions "
        "(seq2seq).",
        # No defaults here, so that missing options do not contradict a resumed run.
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(command=_train)
    run = parser.add_argument_group("run")
    run.add_argument("--model", choices=MODELS, help="the kind of model (default: gpt)")
    run.add_argument(
        "--task",
        choices=TASKS,
        help="what an encoder learns: tagging (default) or masked; other models have one task",
    )
    run.add_argument("--out", metavar="DIR", help="the run's folder (default: runs/<model>)")
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
            "Under torchrun --nproc-per-node N -m fastattn train ...; the product of the degrees "
            "is the number of ranks. Batches and learned weights do not depend on the degrees.",
        )
    )


# A dest is the part and field of fastattn.training.run.Options.
def _add_data_options(group: Any) -> None:
    files: dict[str, Any] = {"nargs": "+", "type": os.path.abspath, "metavar": "FILE"}
    text = "UTF-8 text; tagging: CoNLL files; translation: lines of source, a tab, and target"
    group.add_argument("--text", dest="data.text", help=text, **files)
    text = "gpt: token files of fastattn prepare, in place of --text and --tokenizer"
    data: dict[str, Any] = {"type": os.path.abspath, "metavar": "DIR"}
    group.add_argument("--data", dest="data.prepared", help=text, **data)
    text = "tagging, translation: files to validate on (default: the last tenth of --text)"
    group.add_argument("--validation", dest="data.validation", help=text, **files)
    group.add_argument(
        "--tokenizer",
        dest="data.tokenizer",
        metavar="NAME",
        help="char (default of gpt), bpe (byte-level; default of the others), word, word-space "
        "and word-sign (both keep white space), char-bpe, wordpiece, unigram; or a tokenizer's "
        "JSON file, a .txt file with one token a line, or a folder with GPT-2's vocab.json and "
        "merges.txt",
    )
    text = "size of the vocabulary to train, except for char (default: 1024)"
    group.add_argument("--vocab-size", dest="data.vocab_size", type=int, metavar="N", help=text)
    text = "tagging: begin with the encoder and the tokenizer of a masked run's folder"
    path: dict[str, Any] = {"type": os.path.abspath, "metavar": "DIR"}
    group.add_argument("--start-from", dest="data.start_from", help=text, **path)
    text = "without --text: docstrings to function names (names, default), or dates to words"
    group.add_argument("--pairs", dest="data.pairs", choices=("names", "dates"), help=text)
    text = "translation: cut texts that are too long for the model, instead of refusing them"
    group.add_argument("--truncate", dest="data.truncate", action="store_true", help=text)


def _adder(group: Any, part: str) -> Callable[..., None]:
    """Make add(option, field, kind, help, ...) for fields of a part of the options.

    kind: type of the value, or the bool that a flag sets.
    """

    def add(option: str, field: str, kind: Any, text: str, to: Any = group, **how: Any) -> None:
        if isinstance(kind, bool):
            how["action"] = f"store_{kind}".lower()
        elif field in CHOICES and "action" not in how:
            how["choices"] = CHOICES[field]
        elif "action" not in how and "choices" not in how:
            # argparse would show the dest in --help.
            name = {int: "N", float: "X"}.get(kind, option.lstrip("-").upper())
            how |= {"metavar": name, "type": kind}
        to.add_argument(option, dest=f"{part}.{field}", help=text, **how)

    return add


def _add_model_options(group: Any) -> None:
    add = _adder(group, "model")
    text = "published configuration, such as gpt2-small, which other options change"
    add("--preset", "preset", str, text)
    add("--layers", "num_layers", int, "number of layers (default: 4)")
    add("--heads", "num_heads", int, "query heads (default: 4)")
    add("--kv-heads", "num_kv_heads", int, "key/value heads (default: --heads)")
    add("--embed-dim", "embed_dim", int, "width of the model (default: 128)")
    add("--v-head-dim", "v_head_dim", int, "width of a value head (default: --embed-dim / --heads)")
    text = "width of the latent from which keys and values are computed, as in MLA (default: none)"
    add("--kv-latent-dim", "kv_latent_dim", int, text)
    add("--hidden-dim", "hidden_dim", int, "width of the MLP (default: 4 x --embed-dim)")
    add("--context", "context_length", int, "gpt, encoder: tokens of the context (default: 64)")
    text = "seq2seq: layers of the decoder (default: --layers)"
    add("--decoder-layers", "num_decoder_layers", int, text)
    add("--source-length", "source_length", int, "seq2seq: tokens of the source (default: 64)")
    add("--target-length", "target_length", int, "seq2seq: tokens of the target (default: 64)")
    add("--dropout", "dropout", float, "dropout of embeddings and layer outputs (default: 0)")
    text = "dropout of attention weights (default: 0)"
    add("--attention-dropout", "attention_dropout", float, text)
    text = "probability that the loss spreads over all tokens (default: 0)"
    add("--label-smoothing", "label_smoothing", float, text)
    add("--bias", "bias", True, "give linear layers and norms a bias")
    text = "seq2seq: one token embedding for sources and targets"
    add("--share-embeddings", "share_embeddings", True, text)
    add("--untied", "tie_weights", False, "give the output layer a weight of its own")
    add("--head-bias", "head_bias", True, "gpt: give the logits a bias")


def _add_layer_options(group: Any) -> None:
    add = _adder(group, "model")
    one = group.add_mutually_exclusive_group()
    add("--positions", "positions", str, "kind of positions (default: learned)", to=one)
    text = "the same as --positions alibi: lower scores in proportion to the distance"
    add("--alibi", "positions", str, text, to=one, action="store_const", const="alibi")
    text = "dims that are rotated in pairs: halves or neighbours (default: half)"
    add("--rotary-style", "rotary_style", str, text)
    text = "scalar, content, transformer_xl: longer distances count as this one (default: 32)"
    add("--relative-distance", "relative_distance", int, text)
    text = "vectors of relative distances (default: trained)"
    add("--relative-table", "relative_table", str, text)
    text = "add relative-position vectors to the values too"
    add("--relative-values", "relative_values", True, text)
    add("--window", "window", int, "keys that a token sees, itself included (default: all)")
    text = "first keys that stay visible beside --window (default: 0)"
    add("--keep-first", "keep_first", int, text)
    text = "--window and --stride in alternate layers, or both in all (default: dense)"
    add("--sparse", "sparse", str, text)
    add("--stride", "stride", int, "distance between the keys that a token sees beyond --window")
    add("--scoring", "scoring", str, "score of a query and a key (default: scaled_dot)")
    add("--softcap", "softcap", float, "bound of the attention scores (default: none)")
    add("--sinks", "sinks", True, "learn a share of attention that goes nowhere")
    text = "attention gives a token the same bits in training and generation"
    add("--batch-invariant", "batch_invariant", True, text)
    add("--qk-norm", "qk_norm", True, "normalise queries and keys")
    text = "sigmoid gates on the output, one a head or an element (default: none)"
    add("--output-gate", "output_gate", str, text)
    add("--block", "block", str, "order of norm, attention and MLP (default: pre)")
    add("--norm", "norm", str, "kind of norm (default: layernorm)")
    add("--ffn", "activation", str, "activation of the MLP (default: gelu)")
    add("--embedding-norm", "embedding_norm", True, "normalise the embedding, as BERT does")


def _add_training_options(group: Any) -> None:
    add = _adder(group, "training")
    add("--steps", "steps", int, "optimizer steps (default: 2000)")
    add("--batch", "batch_size", int, "windows, sentences or pairs a forward pass (default: 12)")
    add("--accumulate", "accumulation", int, "forward passes a step (default: 1)")
    add("--lr", "learning_rate", float, "highest learning rate (default: 3e-3)")
    add("--min-lr", "min_learning_rate", float, "learning rate at the end (default: --lr / 10)")
    add("--warmup", "warmup_steps", int, "steps of rising learning rate (default: 5 %% of --steps)")
    add("--weight-decay", "weight_decay", float, "AdamW's weight decay (default: 0.1)")
    add("--grad-clip", "grad_clip", float, "largest gradient norm; 0: unlimited (default: 1)")
    add("--seed", "seed", int, "seed of weights, batches and dropout (default: 0)")
    add("--device", "device", str, "auto, cpu, cuda or cuda:<index> (default: auto)")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("--dtype", "dtype", str, "dtype of activations (default: auto)", choices=dtypes)
    add("--compile", "compile", True, "use torch.compile")
    text = "recompute layers in the backward: full, or all but attention (default: none)"
    add("--activation-checkpointing", "activation_checkpointing", str, text, choices=RECOMPUTED)
    add("--log-every", "log_interval", int, "steps between log lines (default: 10)")
    add("--eval-every", "eval_interval", int, "steps between validations (default: 250)")
    add("--save-every", "checkpoint_interval", int, "steps between checkpoints (default: 500)")
    text = "several ranks: go on while a checkpoint is written"
    add("--save-in-background", "save_in_background", True, text)


def _add_parallel_options(group: Any) -> None:
    def add(option: str, field: str, help: str, **keywords: Any) -> None:
        group.add_argument(
            option, dest=f"parallel.{field}", type=_degree, metavar="N", help=help, **keywords
        )

    text = "ranks that split the rows of a batch (default: auto, all that are left)"
    add("--data-parallel", "data_parallel", text)
    text = "ranks that split rows and parameters; without N: all that are left (default: 1)"
    add("--fsdp", "fsdp", text, nargs="?", const="auto")
    text = "gpt: ranks that split the tokens of a row (default: 1)"
    add("--context-parallel", "context_parallel", text)
    text = "ranks that split heads and hidden features (default: 1)"
    add("--tensor-parallel", "tensor_parallel", text)
    text = "seconds that ranks wait for a stopped one before all end (default: 600)"
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
