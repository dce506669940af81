"""Conversion of GPT-2 weights from and to Hugging Face, and from nanoGPT.

Hugging Face stores the linear layers' weights transposed, as [in, out]; nanoGPT has Hugging Face's
names. Unsupported features raise.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .gpt import GPTConfig

_EMBEDDINGS = ("wte", "wpe")
_OUTSIDE = {"wte": "token_embedding", "wpe": "position_embedding", "ln_f": "norm"}
# There q, k and v are rows of one parameter; here they are separate.
_QKV = "attention.qkv_proj"
_PARTS = ("q_proj", "k_proj", "v_proj")
_INSIDE = {
    "ln_1": "attention_norm",
    "attn.c_attn": _QKV,
    "attn.c_proj": "attention.out_proj",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
_HEAD = "lm_head.weight"
# Masks among the weights of old files.
_BUFFERS = (".attn.bias", ".attn.masked_bias")
_ACTIVATIONS = {
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh"),
    **{"gelu": "gelu", "relu": "relu"},
}
# Names of fields there and here, and Hugging Face's defaults of those that a file may lack.
_SIZES = {"vocab_size": "vocab_size", "n_layer": "num_layers", "n_head": "num_heads"}
_SIZES["n_embd"] = "embed_dim"
_HF_FIELDS = {
    **_SIZES,
    **{"n_positions": "context_length", "n_inner": "hidden_dim", "resid_pdrop": "dropout"},
    **{"attn_pdrop": "attention_dropout", "tie_word_embeddings": "tie_weights"},
    "layer_norm_epsilon": "norm_eps",
}
_HF_DEFAULTS = {
    **{"n_inner": None, "activation_function": "gelu_new", "tie_word_embeddings": True},
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1),
    "layer_norm_epsilon": 1e-5,
}
_NANOGPT_FIELDS = {
    **_SIZES,
    **{"block_size": "context_length", "dropout": "dropout", "bias": "bias"},
}
# Fields of `GPTConfig` that GPT-2 has too, or that do not change the result.
_CONVERTED = {
    *(*_HF_FIELDS.values(), "num_kv_heads", "activation", "bias", "positions", "label_smoothing"),
}
# Fields of a Hugging Face configuration and the only values that GPT computes.
_REQUIRED = {
    "model_type": "gpt2",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


class UnsupportedModelError(ValueError):
    """A feature of the model is unsupported by `GPT` or the target format."""


def config_from_hf(fields: Mapping[str, Any]) -> GPTConfig:
    """Make a `GPTConfig` from the fields of Hugging Face's config.json.

    Raises:
        UnsupportedModelError: it is no GPT-2, or a variant that `GPT` does not support.
        ValueError: a field is missing, of a wrong type or out of range.
    """
    for name, value in _REQUIRED.items():
        if fields.get(name, value) != value:
            raise UnsupportedModelError(f"{name} must be {value!r}, got {fields[name]!r}")
    fields = {**_HF_DEFAULTS, **fields}
    name = fields["activation_function"]
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        choices = ", ".join(_ACTIVATIONS)
        raise UnsupportedModelError(f"activation_function must be one of {choices}, got {name!r}")
    dropouts = fields["resid_pdrop"], fields["embd_pdrop"]
    if dropouts[0] != dropouts[1]:
        raise UnsupportedModelError(
            f"resid_pdrop and embd_pdrop must be equal, got {dropouts[0]} and {dropouts[1]}"
        )
    return _config(fields, _HF_FIELDS, activation=_ACTIVATIONS[name], bias=True)


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Make the fields of Hugging Face's config.json; UnsupportedModelError for what GPT-2 lacks."""
    plain = GPTConfig(config.vocab_size)
    if config.positions != "learned":
        raise UnsupportedModelError(f"GPT-2 has learned positions only, got {config.positions!r}")
    if config.num_kv_heads not in (None, config.num_heads):
        raise UnsupportedModelError(
            f"GPT-2 has as many key/value heads as query heads, got {config.num_kv_heads} for "
            f"{config.num_heads}"
        )
    activation = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    if config.activation not in activation:
        raise UnsupportedModelError(f"GPT-2 has no activation {config.activation!r}")
    for name in dataclasses.asdict(config):
        if name not in _CONVERTED and getattr(config, name) != getattr(plain, name):
            raise UnsupportedModelError(f"GPT-2 has no {name}, got {getattr(config, name)!r}")
    return {
        **_REQUIRED,
        "architectures": ["GPT2LMHeadModel"],
        **{theirs: getattr(config, ours) for theirs, ours in _HF_FIELDS.items()},
        "activation_function": activation[config.activation],
        "embd_pdrop": config.dropout,
        # Ids of GPT-2's tokenizer may not exist in this vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
    }


def weights_from_hf(weights: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Convert Hugging Face's state dict; UnsupportedModelError for unknown or missing weights."""
    return _renamed(weights, config, transposed=True)


def weights_to_hf(weights: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Convert `GPT.state_dict` to Hugging Face's; layers without a bias get zeros."""
    converted: dict[str, Tensor] = {}
    for theirs, ours in _modules(config):
        weight = _of_module(weights, ours, "weight")
        assert weight is not None, f"a GPT has {ours}.weight"
        linear = theirs.rpartition(".")[2].startswith("c_")
        converted[f"transformer.{theirs}.weight"] = weight.t() if linear else weight
        if theirs not in _EMBEDDINGS:
            bias = _of_module(weights, ours, "bias")
            converted[f"transformer.{theirs}.bias"] = (
                weight.new_zeros(weight.shape[0]) if bias is None else bias
            )
    head = "token_embedding.weight" if config.tie_weights else "head.weight"
    if not config.tie_weights:
        converted[_HEAD] = weights[head]
    return {name: tensor.contiguous() for name, tensor in converted.items()}


def _of_module(weights: Mapping[str, Tensor], name: str, kind: str) -> Tensor | None:
    """Get a module's weight or bias by our name, q, k and v joined; None if absent."""
    parent = name.removesuffix("qkv_proj")
    names = [f"{parent}{part}.{kind}" for part in _PARTS]
    if name.endswith(_QKV) and names[0] in weights:
        return torch.cat([weights[part] for part in names])
    return weights.get(f"{name}.{kind}")


def config_from_nanogpt(fields: Mapping[str, Any]) -> GPTConfig:
    """Make a `GPTConfig` from nanoGPT's `model_args`; ValueError for a wrong field."""
    fields = {"dropout": 0.0, **fields}
    return _config(fields, _NANOGPT_FIELDS, attention_dropout=fields["dropout"])


def weights_from_nanogpt(weights: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Convert nanoGPT's state dict, compiled or not; errors as `weights_from_hf`."""
    plain = {name.removeprefix("_orig_mod."): tensor for name, tensor in weights.items()}
    return _renamed(plain, config, transposed=False)


def _config(fields: Mapping[str, Any], names: Mapping[str, str], **others: Any) -> GPTConfig:
    """Make a configuration from fields by their names there, which errors have too."""
    if missing := sorted(set(names) - set(fields)):
        raise ValueError(f"there is no field {missing[0]!r}")
    try:
        return GPTConfig(**{ours: fields[theirs] for theirs, ours in names.items()}, **others)
    except ValueError as error:
        there = {ours: theirs for theirs, ours in names.items()}
        said = re.sub(r"\w+", lambda word: there.get(word[0], word[0]), str(error))
        raise ValueError(said) from None


def _modules(config: GPTConfig) -> Iterator[tuple[str, str]]:
    """Yield the names of modules there and here; a config may claim any number of layers."""
    yield from _OUTSIDE.items()
    for i in range(config.num_layers):
        for theirs, ours in _INSIDE.items():
            yield f"h.{i}.{theirs}", f"blocks.{i}.{ours}"


def _renamed(
    weights: Mapping[str, Tensor], config: GPTConfig, *, transposed: bool
) -> dict[str, Tensor]:
    left = {
        name.removeprefix("transformer."): tensor
        for name, tensor in weights.items()
        if not name.endswith(_BUFFERS)
    }
    renamed: dict[str, Tensor] = {}
    for theirs, ours in _modules(config):
        linear = theirs.rpartition(".")[2].startswith("c_")
        kinds = ["weight"] + ["bias"] * (config.bias and theirs not in _EMBEDDINGS)
        for kind in kinds:
            tensor = left.pop(f"{theirs}.{kind}", None)
            if tensor is None:
                raise UnsupportedModelError(f"the weights have no {theirs}.{kind}")
            dims = 2 if kind == "weight" and (linear or theirs in _EMBEDDINGS) else 1
            if tensor.dim() != dims:
                raise UnsupportedModelError(
                    f"{theirs}.{kind} must have {dims} dims, got shape {tuple(tensor.shape)}"
                )
            turned = transposed and linear and kind == "weight"
            tensor = tensor.t().contiguous() if turned else tensor
            together = ours.endswith(_QKV)
            names = [ours.replace("qkv_proj", part) for part in _PARTS] if together else [ours]
            pieces = torch.tensor_split(tensor, len(names))
            renamed |= {f"{name}.{kind}": x for name, x in zip(names, pieces, strict=True)}
    head = left.pop(_HEAD, None)
    if not config.tie_weights:
        if head is None:
            raise UnsupportedModelError(f"the weights have no {_HEAD}, and it is not tied")
        renamed["head.weight"] = head
    elif head is not None and not torch.equal(head, renamed["token_embedding.weight"]):
        raise UnsupportedModelError(f"{_HEAD} must equal wte.weight, as the two are tied")
    if left:
        raise UnsupportedModelError(f"the weights have {min(left)}, which this model lacks")
    return renamed
