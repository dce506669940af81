"""Checks of options beyond dtype and shape: pairs, users' functions, combinations.

Each takes an option and its call, and returns the value for the call's record.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import (
    FARTHEST,
    Sizes,
    as_python,
    check_flag,
    check_fraction,
    check_group,
    check_input,
    check_int,
    check_pair,
    is_integer,
    type_name,
    within_reach,
)
from .jit_functions.stand_ins import is_jit
from .tracing import wants_gradient

# An operator has so many parameters for them.
MAX_MOD_TENSORS = 8
# Options that depend on the indices of rows, heads, queries and keys in the whole batch.
COUNTING = ("mask_mod", "score_mod", "dropout")


class Checking(NamedTuple):
    """A call during the checks of its options, which follow the order of the table.

    expected: dtype of each field, dims, and dims in a call of packed sequences, as `check_input`
        has them.
    arguments: all options.
    fields: of the record, so far.
    sizes: of dims by their names; B also of packed sequences.
    reach: over a cache, the number of positions that a mask must cover.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    expected: Mapping[str, tuple[str, str, str]]
    arguments: Mapping[str, Any]
    fields: dict[str, Any]
    sizes: Sizes
    reach: int | None = None

    @property
    def mods(self) -> int:
        """The number of mod_tensors."""
        return len(self.fields.get("mod_tensors", ()))

    @property
    def windowed(self) -> bool:
        """Whether a window or stride hides keys."""
        sides = self.fields.get("left"), self.fields.get("right"), self.arguments.get("stride")
        return any(side is not None for side in sides)

    def tensor(self, name: str, x: Any, field: str = "") -> Any:
        """Return x if it is a tensor as the tags of a field say; default: of the option's."""
        dtype, dims, packed = self.expected[field or name]
        sizes = self.sizes
        dims = packed if "total_q" in sizes else dims
        return check_input(name, x, dtype, dims, self.q, sizes)


def _wanted(name: str, call: Checking) -> bool:
    """Whether an option that is checked later is given and not 0."""
    x = as_python(call.arguments.get(name))
    return x is not None and not (isinstance(x, (int, float)) and x == 0)


def check_heads(heads: Any, call: Checking) -> tuple[int, int | None]:
    """(first, total): the index of the call's first head, and the number of all heads.

    (0, None) if the options do not depend on it: then the same kernels serve all calls.
    """
    check_pair("heads", heads, "(first, total)")
    first, total = (check_int(f"heads[{n}]", x) for n, x in enumerate(heads))
    H_q = call.q.shape[1]
    # A part of a batch counts through rows: row * total + head.
    if first < 0 or first % max(total, 1) + H_q > total:
        raise ValueError(
            f"heads must be (first, total) with 0 <= first <= total - {H_q}, as q has {H_q} heads, "
            f"got ({first}, {total})"
        )
    counted = [name for name in COUNTING if _wanted(name, call)]
    if first >= total and counted and counted != ["dropout"]:
        raise ValueError(
            f"heads must begin below total={total} for {counted[0]}, which counts rows by itself, "
            f"got ({first}, {total})"
        )
    return (first, total) if counted and (H_q != total or first) else (0, None)


# Options that change a token's bits from call to call.
_VARIANT = {
    "dropout": "it draws by the row of the batch",
    "key_padding_mask": "keys move to other blocks; key_lengths hide the last ones",
    "documents": "they begin within blocks of keys; attention_varlen takes sequences",
    "positions": "keys are not visited in order",
}


def check_batch_invariant(flag: Any, call: Checking) -> bool:
    """Check a flag, and that no option breaks its promise."""
    invariant = check_flag("batch_invariant", flag)
    for name, reason in _VARIANT.items():
        if invariant and _wanted(name, call):
            raise ValueError(f"{name} cannot be combined with batch_invariant: {reason}")
    return invariant


# Positions are consecutive within blocks of this size: no tile of a kernel is longer.
POSITIONS_BLOCK = 128


def check_positions(positions: Any, call: Checking) -> tuple[Tensor, Tensor]:
    """A pair of int32 [B or 1, T_q] and [B or 1, T_k] on q's device.

    Positions rise by 1 within each block of 128; values are read on a CPU only.
    """
    if call.arguments.get("query_offset") is not None:
        raise ValueError("give positions or query_offset, not both")
    check_pair("positions", positions, "(q_positions, k_positions)")
    for n, x in enumerate(positions):
        name = f"positions[{n}]"
        call.tensor(name, x, "qk"[n] + "_positions")
        if x.is_cpu and not torch.compiler.is_compiling():
            _check_position_values(name, x, by_fours=n == 1 and _wanted("dropout", call))
    q_positions, k_positions = positions
    return q_positions, k_positions


def _check_position_values(name: str, x: Tensor, *, by_fours: bool) -> None:
    first = x[:, ::POSITIONS_BLOCK].repeat_interleave(POSITIONS_BLOCK, 1)[:, : x.shape[1]]
    ahead = torch.arange(x.shape[1], dtype=torch.int32, device=x.device) % POSITIONS_BLOCK
    if not torch.equal(x, first + ahead):
        raise ValueError(f"{name} must rise by 1 within each aligned block of {POSITIONS_BLOCK}")
    if bool((x.abs() > FARTHEST).any()):
        raise ValueError(f"{name} must be within 2**28 of 0, got {int(x.abs().max())}")
    if by_fours and bool((first % 4 != 0).any()):
        raise ValueError(
            f"{name} must begin each block of {POSITIONS_BLOCK} at a multiple of 4 where there is "
            "dropout, which draws its bits for four keys at once"
        )


def check_query_offset(offset: Any, call: Checking) -> tuple[int, Tensor | None]:
    """An int, or a tensor; returns it as the first or the second."""
    offset = as_python(offset)
    if not is_integer(offset):
        return 0, call.tensor("query_offset", offset, "query_offsets")
    if not torch.compiler.is_compiling() and not -FARTHEST <= offset <= FARTHEST:
        raise ValueError(f"query_offset must be within 2**28 of 0, got {offset}")
    return offset, None


def check_prefix_lengths(prefix: Any, call: Checking) -> Tensor:
    """An int of at least 0, or a tensor; returned as a tensor."""
    if not call.fields.get("causal", False):
        raise ValueError(
            "prefix_lengths makes keys visible that causal hides: it needs causal=True"
        )
    prefix = as_python(prefix)
    if not is_integer(prefix):
        return call.tensor("prefix_lengths", prefix)
    if prefix < 0:
        raise ValueError(f"prefix_lengths must be at least 0, got {prefix}")
    B, device = call.sizes["B"], call.q.device
    return torch.full((B,), within_reach(prefix), dtype=torch.int32, device=device)


def check_documents(documents: Any, call: Checking) -> tuple[Tensor, Tensor]:
    """Ids of all tokens, or a pair of them for queries and keys."""
    T_q, T_k = call.sizes["T_q"], call.sizes["T_k"]
    if isinstance(documents, tuple):
        check_pair("documents", documents, "(q_ids, k_ids), or ids")
        names, (q_ids, k_ids) = ("documents[0]", "documents[1]"), documents
    elif T_q != T_k:
        raise ValueError(
            f"documents must be a pair (q_ids [B, T_q], k_ids [B, T_k]) where T_q and T_k differ, "
            f"got one tensor for {T_q} queries and {T_k} keys"
        )
    else:
        names, q_ids, k_ids = ("documents", "documents"), documents, documents
    call.tensor(names[0], q_ids, "q_documents")
    call.tensor(names[1], k_ids, "k_documents")
    return q_ids, k_ids


def check_mask_or_bias(x: Any, call: Checking) -> tuple[Tensor | None, Tensor | None]:
    """Check attn_mask; returns mask and bias. A float attn_mask is a bias, but over a cache."""
    bias = call.arguments.get("attn_bias")
    if call.reach is not None:
        # attn_bias may reach farther.
        call._replace(sizes=dict(call.sizes)).tensor("attn_mask", x)
    elif not isinstance(x, Tensor) or not x.is_floating_point():
        call.tensor("attn_mask", x)
    elif bias is None:
        return None, check_bias(call.tensor("attn_mask", x, "attn_bias"), call)
    else:
        raise ValueError("give attn_bias or a float attn_mask, which is a bias, not both")
    return check_bias(x, call, "attn_mask"), bias


def check_bias(x: Tensor, call: Checking, name: str = "attn_bias") -> Tensor:
    """x with four dims, not expanded. Over a cache its last dim reaches over all positions."""
    if call.reach is not None and x.shape[-1] < call.reach:
        raise ValueError(
            f"{name} must reach over the cache's {call.reach} positions in its last dim, "
            f"got {list(x.shape)}"
        )
    return x[(None,) * (4 - x.dim())]


def check_alibi_slopes(slopes: Tensor, call: Checking) -> Tensor:
    """Slopes have no gradient."""
    if wants_gradient(slopes):
        raise ValueError(
            "alibi_slopes have no gradient, but require one; relative_bias can be learned"
        )
    return slopes


def check_relative_keys(keys: Tensor, call: Checking) -> Tensor:
    """Vectors of each query head, each key head, or all heads."""
    heads = (call.sizes["H_q"], call.sizes["H_k"], 1)
    if keys.shape[0] not in heads:
        known = ", ".join(map(str, sorted({*heads})))
        raise ValueError(
            f"relative_keys must have H_q, H_k or 1 heads, {known}, got {list(keys.shape)}"
        )
    return keys


def check_query2(query: Tensor, call: Checking) -> Tensor:
    """Columns of a second product, on whose number the scale depends."""
    if not query.shape[-1]:
        raise ValueError(f"query2 must have columns, got shape {list(query.shape)}")
    if call.arguments.get("scale") is None:
        if any(_one_memory(x, call.v) for x in (call.k, call.arguments["key2"])):
            raise ValueError(
                "scale must be given if v is k or key2, as for latents: it is that of the head dim "
                "before a projection was absorbed, not of the widths here"
            )
        call.fields["scale"] = (call.q.shape[-1] + query.shape[-1]) ** -0.5
    return query


def check_key2(key: Tensor, call: Checking) -> Tensor:
    """Heads that divide those of k."""
    check_group("key2", "k", call.sizes["H_k"], key.shape[1])
    return key


def _one_memory(x: Any, y: Tensor) -> bool:
    """Whether x and y start at the same address."""
    if torch.compiler.is_compiling() or not isinstance(x, Tensor):
        return x is y
    shared: bool = torch._C._is_alias_of(x, y)  # type: ignore[attr-defined]
    return shared and x.storage_offset() == y.storage_offset()


def check_dropout(dropout: Any, call: Checking) -> float:
    """A probability below 1."""
    return check_fraction("dropout", dropout)


def check_dropout_seed(seed: Tensor, call: Checking) -> Tensor | None:
    """None without dropout."""
    return seed if call.fields.get("dropout") else None


def check_mask_mod(mod: Any, call: Checking) -> Any:
    """A function mask_mod(b, h, q_pos, k_pos, *tensors), or a `BlockMask`."""
    check_function("mask_mod", getattr(mod, "mask_mod", mod), "b, h, q_pos, k_pos", call.mods)
    return mod


def check_score_mod_grad(mod: Any, call: Checking) -> Any:
    """A @triton.jit function score_mod_grad(dx, x, b, h, q_pos, k_pos, *tensors)."""
    check_function("score_mod_grad", mod, "dx, x, b, h, q_pos, k_pos", call.mods)
    return mod


def check_score_mod(mod: Any, call: Checking) -> Any:
    """A @triton.jit function score_mod(x, b, h, q_pos, k_pos, *tensors).

    If an input checked so far requires grad, its score_mod_grad is derived.
    """
    check_function("score_mod", mod, "x, b, h, q_pos, k_pos", call.mods)
    if call.arguments.get("score_mod_grad") is not None or not torch.is_grad_enabled():
        return mod
    inputs = (call.q, call.k, call.v, *call.fields.values())
    if any(isinstance(x, Tensor) and wants_gradient(x) for x in inputs):
        grad = derived(mod, call.fields.get("mod_tensors", ()), "where an input requires grad")
        call.fields["score_mod_grad"] = grad
    return mod


def derived(mod: Any, tensors: tuple[Tensor, ...], where: str) -> Any:
    """The score_mod_grad of a checked score_mod.

    Raises:
        ValueError: it cannot be derived. `where` says in which case it is needed.
    """
    from .jit_functions import derivative

    try:
        return derivative.score_mod_grad(mod, tensors)
    except derivative.NotDifferentiable as error:
        raise ValueError(
            f"score_mod needs score_mod_grad {where}; {getattr(mod, '__name__', mod)} cannot be "
            f"differentiated: {error}. Give it, or call under torch.no_grad()"
        ) from error


def check_function(name: str, mod: Any, parameters: str, tensors: int) -> None:
    """A @triton.jit function of `parameters` and one parameter for each of mod_tensors."""
    python: Callable[..., Any] | None = getattr(mod, "fn", None)
    if not is_jit(mod) or not inspect.isfunction(python):
        got = getattr(mod, "__name__", None) or type_name(mod)
        raise TypeError(f"{name} must be a function of Python or of @triton.jit, got {got}")
    expected = parameters.count(",") + 1 + tensors
    names = list(inspect.signature(python).parameters)
    if len(names) != expected:
        raise ValueError(
            f"{name} must take ({parameters}) and {tensors} mod_tensors, got ({', '.join(names)})"
        )


def check_mod_tensors(tensors: Any, call: Checking) -> tuple[Tensor, ...]:
    """A tuple of contiguous tensors on q's device, with a function that reads them."""
    if not isinstance(tensors, tuple):
        raise TypeError(f"mod_tensors must be a tuple of tensors, got {type_name(tensors)}")
    if len(tensors) > MAX_MOD_TENSORS:
        raise ValueError(
            f"mod_tensors must be at most {MAX_MOD_TENSORS}, got {len(tensors)}: stack some into "
            "one; of a Python function they are those that it reads, and one of their sizes"
        )
    for n, x in enumerate(tensors):
        name = f"mod_tensors[{n}]"
        check_input(name, x, "", "...", call.q, {})
        if not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {list(x.stride())}")
        if torch.is_grad_enabled() and wants_gradient(x):
            raise ValueError(
                f"{name} has no gradient, but requires one: detach it, or call under "
                "torch.no_grad(); relative_bias and attn_bias can be learned"
            )
    used = call.arguments.get("mask_mod") is not None or call.arguments.get("score_mod") is not None
    if tensors and not used:
        raise ValueError("mod_tensors are read by mask_mod or score_mod; neither is given")
    return tensors
