"""Errors of missing names and packages: what replaces a removed name, how to install an extra."""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

# No release is on an index. `fastattn[hf]` from one would be another project's package.
_INSTALL = 'pip install ".[{}]" in a checkout of fastattn'

_ENGINE = (
    "see examples/engine.py, with PagedKVCache, append_paged and attention_paged, or use "
    "vLLM or SGLang (docs/integrations)"
)
_SPECULATIVE = "see examples/speculative.py, with attention_paged(tree_mask=)"
_RANKS = "torchrun's ranks train by DDP or FSDP2, and torch.distributed.checkpoint saves shards"
_TRAIN = "train_tokenizer(kind, text, vocab_size=..., special=True) trains one of any kind, and "
_TRAIN += "BackendTokenizer(tokenizer) wraps one of Hugging Face's"
# By the name after "fastattn.", or the option of the command.
REMOVED: dict[str, str] = {
    "generate --draft": _SPECULATIVE,
    "generate --draft-tokens": _SPECULATIVE,
    "generation.Engine": _ENGINE,
    "generation.speculative_text": _SPECULATIVE,
    "generation.speculative_tokens": _SPECULATIVE,
    "parallel.cost": "context_attention chooses by a rule; explain_context gives its reason",
    "prepare --check": "fastattn train --data checks a folder's sizes and counts as it opens it",
    "prepare --files-from": "--text takes folders and reads all files in them",
    "training.distributed": _RANKS,
    "training.sharded": _RANKS,
    "training.storage": "fastattn.training.checkpoint reads and writes",
    "training.tokenizers.BPETokenizer": _TRAIN,
    "training.tokenizers.PieceTokenizer": _TRAIN,
    "train --alibi": "--positions alibi",
    "train --data-parallel": "the rows of a batch are split among the ranks automatically",
    "train --context-parallel": "fastattn.parallel, as in examples/long_context.py",
    "train --tensor-parallel": "tp_plan of fastattn.models, as in examples/tensor_parallel.py",
    "train --save-in-background": "torch.distributed.checkpoint.async_save in a loop of your own",
}


def raise_missing(module: str, name: str) -> NoReturn:
    """Raise AttributeError for a module's missing name; ImportError if it was removed."""
    # `from module import name` hides an AttributeError's text.
    full = f"{module}.{name}"
    if instead := REMOVED.get(full.removeprefix("fastattn.")):
        raise ImportError(f"{full} was removed: {instead}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def installing(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml."""
    return _INSTALL.format(extra)


def import_extra(module: str, purpose: str) -> Any:
    """Import a module of the `gpt` extra, by its dotted name.

    purpose: what needs it, as the subject of the message: "a checkpoint".

    Raises:
        ModuleNotFoundError: the package is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise ModuleNotFoundError(
            f"{purpose} needs the package {package}, which is not installed: {installing('gpt')}",
            name=error.name,
        ) from error


def find_extra(module: str) -> Any:
    """Import an optional module, or return None where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        return None
