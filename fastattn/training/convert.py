"""Conversion of GPT-2 checkpoints from and to Hugging Face, and from nanoGPT.

Reading never runs code from a file: weights come from safetensors, or from torch's format with
`weights_only=True`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files.replace import replacing
from ..missing import import_extra
from ..models import gpt2
from ..models.fields import check_type
from ..models.gpt import GPTConfig
from .checkpoint import (
    Checkpoint,
    CheckpointError,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from .data.text import read_text_file
from .tokenizers import CharacterTokenizer, Tokenizer, load_tokenizer
from .tokenizers.backend import BackendTokenizer

_CONFIG = "config.json"
_WEIGHTS, _SHARDS = "model.safetensors", "model.safetensors.index.json"
# Hugging Face has no character tokenizer, so it gets a file of its own.
_CHARACTERS, _TOKENIZER = "characters.json", "tokenizer.json"


def import_hf(
    folder: str | Path, out_dir: str | Path, *, tokenizer: str | Path | None = None
) -> Path:
    """Make a checkpoint from a GPT-2 saved by Hugging Face transformers.

    Args:
        folder: holds config.json, model.safetensors (or its shards) and a tokenizer: tokenizer.json
            or vocab.json and merges.txt.
        out_dir: the folder of the new run.
        tokenizer: a tokenizer's JSON file, in place of the folder's.

    Returns:
        The checkpoint's folder; `load_model` reads it.

    Raises:
        CheckpointError: a file is missing or unreadable, a field is unusable, or out_dir already
            holds a run.
        UnsupportedModelError: the model is of a kind that `GPT` does not compute.
        TokenizerError: the tokenizer is unusable.
    """
    folder = Path(folder)
    path = folder / _CONFIG
    with _naming(path):
        config = gpt2.config_from_hf(_read_json(path))
    own = folder / _CHARACTERS
    vocabulary = load_tokenizer(tokenizer or (own if own.exists() else folder))
    with _naming(folder):
        weights = gpt2.weights_from_hf(_read_weights(folder), config)
    return _save(config, weights, vocabulary, out_dir, folder, "Hugging Face folder")


def export_hf(path: str | Path, folder: str | Path) -> Path:
    """Write a checkpoint as a Hugging Face GPT-2, which `import_hf` reads back.

    A Hugging Face tokenizer is written as tokenizer.json. Only `import_hf` reads a
    `CharacterTokenizer`, as transformers has no such kind.

    Args:
        path: a run's folder, for its newest checkpoint, or one checkpoint's folder.
        folder: where the files go, empty; made if it is not there.

    Returns:
        folder.

    Raises:
        CheckpointError: the checkpoint is unreadable, or `folder` is not empty or cannot be
            written.
        UnsupportedModelError: the model has a feature that GPT-2 lacks.
    """
    folder = Path(folder)
    if folder.exists() and (held := sorted(folder.iterdir())):
        raise CheckpointError(f"{folder} holds {held[0].name} already: choose an empty folder")
    checkpoint = load_checkpoint(path, training=False)
    if checkpoint.kind.name != "gpt":
        raise CheckpointError(f"{checkpoint.source} holds {checkpoint.kind.title}, a GPT is needed")
    config = checkpoint.model_config
    checkpoint.check()
    fields = gpt2.config_to_hf(config)
    weights = gpt2.weights_to_hf(checkpoint.model, config)
    content = import_extra("safetensors.torch", "a checkpoint").save(weights, {"format": "pt"})
    foreign = isinstance(checkpoint.tokenizer, BackendTokenizer)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / _WEIGHTS, "wb") as file:
            file.write(content)
        checkpoint.tokenizer.save(folder / (_TOKENIZER if foreign else _CHARACTERS))
        if foreign:
            kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
            _write_json(folder / "tokenizer_config.json", kind)
        _write_json(folder / _CONFIG, fields)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error.strerror}") from None
    return folder


def import_nanogpt(
    path: str | Path,
    out_dir: str | Path,
    *,
    tokenizer: str | Path | None = None,
    text: str | Path | None = None,
) -> Path:
    """Make a checkpoint from nanoGPT's ckpt.pt.

    Args:
        path: the file, read with weights_only=True, so that no code in it runs.
        out_dir: the folder of the new run.
        tokenizer: a tokenizer's JSON file, such as GPT-2's tokenizer.json.
        text: or the training text of a character-level nanoGPT (input.txt): its sorted characters
            are the ids. meta.pkl is not read, as that would run code.

    Returns:
        The checkpoint's folder; `load_model` reads it.

    Raises:
        CheckpointError: the file is missing, unreadable or no such checkpoint, a field of it is
            unusable, or out_dir holds a run already.
        ValueError: not exactly one of tokenizer and text is passed, the text is unreadable
            (DataError), or its ids do not fit the model.
        UnsupportedModelError: the weights do not fit the configuration.
    """
    if (tokenizer is None) == (text is None):
        raise ValueError("one of tokenizer and text must be given: the checkpoint has no tokenizer")
    stored = _read_torch(Path(path))
    for name in ("model", "model_args"):
        if not isinstance(stored, dict) or not isinstance(stored.get(name), dict):
            raise CheckpointError(f"{path} is no checkpoint of nanoGPT: it has no {name!r}")
    with _naming(path):
        config = gpt2.config_from_nanogpt(stored["model_args"])
    for name, tensor in stored["model"].items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path} is no checkpoint of nanoGPT: model.{name} is no tensor")
    with _naming(path):
        weights = gpt2.weights_from_nanogpt(stored["model"], config)
    if tokenizer is not None:
        vocabulary = load_tokenizer(tokenizer)
    else:
        assert text is not None
        vocabulary = CharacterTokenizer(read_text_file(Path(text)))
        size = vocabulary.vocab_size
        if size != config.vocab_size:
            raise ValueError(
                f"text must have the model's {config.vocab_size} characters, got {size}"
            )
    return _save(config, weights, vocabulary, out_dir, Path(path), "nanoGPT checkpoint")


def _save(
    config: GPTConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    out_dir: str | Path,
    source: Path,
    kind: str,
) -> Path:
    if latest_checkpoint(out_dir) is not None:
        raise CheckpointError(f"{out_dir} holds a run already: choose another folder")
    checkpoint = Checkpoint(
        step=0,
        model={name: tensor.float() for name, tensor in weights.items()},
        tokenizer=tokenizer,
        config={"kind": "gpt", "model": config.to_dict(), "imported": f"{kind} {source.name}"},
        source=str(source),
    )
    checkpoint.check()
    return save_checkpoint(out_dir, checkpoint)


@contextmanager
def _naming(source: str | Path) -> Iterator[None]:
    """Name the source in errors about its files."""
    try:
        yield
    except gpt2.UnsupportedModelError as error:
        raise gpt2.UnsupportedModelError(f"{source}: {error}") from None
    except ValueError as error:
        raise CheckpointError(f"{source} is unusable: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    """Read the fields of a JSON object from a file."""
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} holds no fields")
    return fields


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of model.safetensors, or of the files that its index names."""
    torch_format = import_extra("safetensors.torch", "a checkpoint")
    weights: dict[str, Tensor] = {}
    for name in _weight_files(folder):
        path = folder / name
        if not path.exists():
            raise CheckpointError(
                f"{folder} has no {name}; other formats than safetensors are not read, as they can "
                "hold code"
            )
        try:
            weights.update(torch_format.load_file(path))
        # The Rust code raises its own exception type for an unreadable file.
        except Exception as error:
            raise CheckpointError(f"cannot read {path}: {error}") from None
    return weights


def _weight_files(folder: Path) -> list[str]:
    """List model.safetensors, or the files that its index names."""
    if not (folder / _SHARDS).exists():
        return [_WEIGHTS]
    path = folder / _SHARDS
    weight_map: Any = _read_json(path).get("weight_map")
    with _naming(path):
        check_type("weight_map", weight_map, Mapping)
        for name, file in weight_map.items():
            check_type(f"weight_map.{name}", file, str)
            if Path(file).name != file:
                raise ValueError(f"weight_map.{name} must be a file of the folder, got {file!r}")
    return sorted(set(weight_map.values()))


def _read_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    # A damaged pickle makes the unpickler fail in any way.
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} cannot be read without running code in it: {why}") from None


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
