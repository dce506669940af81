"""Checks of layers' arguments."""

import inspect
from collections.abc import Mapping
from typing import Any, Protocol, get_args

import torch
from torch import Tensor

from .. import checks
from ..cache.dense import KVCache
from ..rotary import (
    RotaryPositions,
    RotaryTables,
    check_rotary_dim,
    check_rotary_style,
    check_tables,
)
from .options import Scoring, excluded


class LayerCache(Protocol):
    """Interface that a layer needs from a cache; `KVCache` documents it.

    Attributes:
        k, v: [B, H_k, slots, D], slots >= length_bound; read after `append`, not before.
        max_length: capacity of a row, in tokens.
        length_bound: upper bound of the lengths of all rows.
        lengths: int32 [B].
        uniform_length: the common length of all rows if it is known, else None.
        attend: optional; attention of queries [B, H_q, T, D] to the cache, with the options of
            `decode_attention`. Layers call `decode_attention` for caches without it.
        rotates: optional; True if `append` takes q, rotary and rotary_style, as in `KVCache`.
    """

    k: Tensor
    v: Tensor
    max_length: int
    length_bound: int

    @property
    def lengths(self) -> Tensor: ...

    @property
    def uniform_length(self) -> int | None: ...

    def append(self, k: Tensor, v: Tensor, new_lengths: Tensor | None = None) -> Any:
        """Write each row's new tokens after its last one."""


def refuse_others(
    layer: torch.nn.Module, unnamed: tuple[object, ...], others: Mapping[str, object]
) -> None:
    """Raise TypeError for arguments that a layer's forward does not take, with the ones meant."""
    name, parameters = type(layer).__name__, inspect.signature(layer.forward).parameters.values()
    taken = [x.name for x in parameters if x.kind == x.KEYWORD_ONLY]
    for other in others:
        raise checks.unexpected(name, other, taken)
    if unnamed:
        mask = next((x for x in taken if x.endswith("padding_mask")), None)
        hint = f": pass a mask as {mask}=mask, bool, True = attend" if mask else ""
        own = " and ".join(x.name for x in parameters if x.kind == x.POSITIONAL_OR_KEYWORD)
        raise TypeError(f"{name}() takes {own} by position, the others by name{hint}")


def check_vectors(name: str, x: Any, width: int, length: str = "T") -> None:
    """Check for floats [B, T, width], dense, of any class that `torch.nn.Linear` takes."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} must be a float tensor, got {checks.kind(x)}")
    checks.check_dense(name, x)
    if x.dim() != 3 or x.shape[-1] != width:
        dim = "embed_dim" if length == "T" else "memory_dim"
        raise checks.wrong_shape(name, x, f"B {length} {dim}", {dim: width})


def checked_tables(
    x: Tensor, positions: Tensor | None, tables: RotaryTables | None, rotary_dim: int | None
) -> RotaryPositions | tuple[Tensor, Tensor] | None:
    """Check positions and tables; return the tables of x's tokens, None = none.

    Complex tables become cosines and sines.
    """
    if positions is None and tables is None:
        return None
    if rotary_dim is None:
        name = "rotary_tables" if positions is None else "positions"
        raise ValueError(f"{name} needs a layer with rotary='half' or 'interleaved', got None")
    if positions is not None and tables is not None:
        raise ValueError("give positions or rotary_tables, not both: the tables hold positions")
    B, T, _ = x.shape
    if positions is not None:
        checks.check_input("positions", positions, "", "B? T", positions, {"B": B, "T": T})
    if isinstance(tables, Tensor) and tables.is_complex():
        tables = (tables.real, tables.imag)
    if tables is None:
        return None
    if isinstance(tables, tuple) and len(tables) == 2:
        check_tables(*tables, x, {"B": B, "T": T, "R//2": rotary_dim // 2})
    elif not isinstance(tables, RotaryPositions):
        got = tables.dtype if isinstance(tables, Tensor) else type(tables).__name__
        raise TypeError(
            "rotary_tables must be (cos, sin), a complex tensor cos + i sin or RotaryPositions, "
            f"got {got}"
        )
    elif tables.rotary_dim != rotary_dim:
        raise ValueError(
            f"rotary_tables must have rotary_dim = {rotary_dim}, got {tables.rotary_dim}"
        )
    return tables


def check_layer_cache(name: str, cache: Any) -> None:
    """Check that the cache has the methods of `LayerCache`."""
    if isinstance(cache, KVCache):
        return
    if not hasattr(cache, "lengths") or not hasattr(cache, "append"):
        raise TypeError(
            f"{name} must be a KVCache or implement LayerCache, got {checks.type_name(cache)}"
        )


def check_cache_use(
    x: Tensor,
    key_padding_mask: Tensor | None,
    key_lengths: Tensor | None,
    cache: LayerCache,
    in_order: bool,
) -> None:
    """Raise errors that `attention` would raise after the append, when the cache has changed.

    in_order: the call needs options that `decode_attention` lacks, and reads the cache in place.
    """
    check_layer_cache("cache", cache)
    B, T, _ = x.shape
    in_order = in_order or torch.is_grad_enabled()
    if in_order and isinstance(cache, KVCache) and not cache.is_plain:
        raise ValueError(
            "cache must keep every token as it is, without window, quantize or starts, except "
            "under torch.no_grad() and without key_padding_mask, prefix_lengths, relative terms "
            f"on keys or values, additive scoring and attention_dropout, got {cache!r}"
        )
    if cache.lengths.shape[0] != B:
        raise ValueError(f"cache must have {B} rows to match x, got {cache.lengths.shape[0]}")
    if key_lengths is not None:
        checks.check_input("key_lengths", key_lengths, "integer", "B", x, {"B": B})
    if key_padding_mask is None:
        return
    n = cache.uniform_length
    if n is None or key_lengths is not None:
        raise ValueError(
            "key_padding_mask with a cache needs rows of one length: pad prompts on the left and "
            "pass the mask alone, or pad on the right and pass key_lengths alone"
        )
    sizes = {"B": B, "cached+T": n + T}
    checks.check_input("key_padding_mask", key_padding_mask, "bool", "B cached+T", x, sizes)


def check_groups_in_cache(
    x: Tensor,
    prefix_lengths: int | Tensor | None,
    documents: Tensor | None,
    cache: LayerCache,
) -> None:
    """Raise if documents are passed, or if the prefix enters the cache in several calls."""
    if documents is not None:
        raise ValueError(
            "documents is not supported with a cache, whose rows are one document each: use a row "
            "for each, or leave out the cache"
        )
    if prefix_lengths is None:
        return
    B, T, _ = x.shape
    prefix_lengths = checks.as_python(prefix_lengths)
    n = cache.uniform_length
    if not checks.is_integer(prefix_lengths):
        checks.check_input("prefix_lengths", prefix_lengths, "integer", "B", x, {"B": B})
    elif checks.check_count("prefix_lengths", prefix_lengths, 0) and n is not None:
        end = n or T
        if prefix_lengths > end:
            raise ValueError(
                f"prefix_lengths must be at most {end} here, got {prefix_lengths}: the whole "
                f"prefix enters the cache in one call, and {n} tokens are in it"
            )


def check_unprojected(memory_lengths: object, memory_padding_mask: object) -> None:
    """Raise if a projected memory, which has its own, comes with lengths or a mask."""
    if memory_lengths is not None or memory_padding_mask is not None:
        raise ValueError(
            "memory_lengths and memory_padding_mask are for a memory that is not projected: "
            "pass them to project_memory"
        )


def check_relative_bias(buckets: int | None, max_distance: int | None, causal: bool) -> None:
    """Check T5's buckets: half of them hold one distance each.

    Unless causal, half of the buckets are for keys after the query.
    """
    if buckets is None:
        if max_distance is not None:
            raise ValueError(
                f"relative_max_distance needs relative_bias, the number of buckets, "
                f"got {max_distance} without it"
            )
        return
    checks.check_count("relative_bias", buckets, 4)
    if not causal and buckets % 2:
        raise ValueError(f"relative_bias must be even unless causal, got {buckets}")
    if max_distance is not None:
        exact = buckets // 2 if causal else buckets // 4
        checks.check_count("relative_max_distance", max_distance, exact + 1)


def check_scoring(options: Mapping[str, Any]) -> None:
    """Check the scoring function, and that it has the other options."""
    scoring, scale = options["scoring"], options["scale"]
    if scoring not in get_args(Scoring):
        raise ValueError(f"scoring must be one of {', '.join(get_args(Scoring))}, got {scoring!r}")
    if scale is not None and scoring != "scaled_dot":
        raise ValueError(f"scale belongs to scoring='scaled_dot', got {scale} with {scoring!r}")
    if scoring == "additive":
        for name, value in excluded("additive", options):
            raise ValueError(f"{name} is not supported with scoring='additive', got {value}")


def check_relative(options: Mapping[str, Any]) -> None:
    """Check the module of relative terms, and options that its value terms exclude."""
    scheme, relative_bias = options["relative"], options["relative_bias"]
    if not isinstance(scheme, torch.nn.Module) or not hasattr(scheme, "has_values"):
        raise TypeError(
            "relative must be a module of fastattn.models.positions or another RelativeScheme, "
            f"got {checks.type_name(scheme)}"
        )
    if relative_bias is not None:
        raise ValueError(f"give relative or relative_bias, not both, got {relative_bias} buckets")
    if scheme.has_values:
        for name, value in excluded("values", options):
            raise ValueError(
                f"{name} is not supported with relative terms on the values, got {value}"
            )


def check_whole_rows(prefix_lengths: object, documents: object) -> None:
    """Raise if relative terms on the values come with prefixes or documents."""
    for name, value in (("prefix_lengths", prefix_lengths), ("documents", documents)):
        if value is not None:
            raise ValueError(f"{name} is not supported with relative terms on the values")


def check_dropouts(dropout: float, attention_dropout: float) -> None:
    """Check the dropout probabilities of the output (<= 1) and of the weights (< 1)."""
    if not 0.0 <= checks.check_number("dropout", dropout) <= 1.0:
        raise ValueError(f"dropout must be a probability, got {dropout}")
    checks.check_fraction("attention_dropout", attention_dropout)


def head_size(embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> int:
    """Check that all sizes agree; return the head size."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    if head_dim is not None:
        sizes["head_dim"] = head_dim
    for name, size in sizes.items():
        checks.check_count(name, size, 1)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads = {num_heads}, got {num_kv_heads}")
    if head_dim is not None:
        return head_dim
    if embed_dim % num_heads:
        raise ValueError(
            f"num_heads must divide embed_dim = {embed_dim} unless head_dim is given, "
            f"got {num_heads}"
        )
    return embed_dim // num_heads


def check_rotary(
    head_dim: int, rotary: str | None, rotary_base: float, rotary_dim: int | None
) -> None:
    if rotary is not None:
        check_rotary_style(rotary)
        check_rotary_dim(head_dim if rotary_dim is None else rotary_dim, head_dim)
        checks.check_positive("rotary_base", rotary_base)
    elif rotary_dim is not None:
        raise ValueError(f"rotary_dim needs rotary='half' or 'interleaved', got {rotary_dim}")
