"""Checks of options that change scores and weights: biases, masks, tables, sinks, dropout, users'
functions.

Each takes an option and its call, and returns the value for the call's record.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import (
    FARTHEST,
    as_python,
    check_device,
    check_flag,
    check_floats,
    check_fraction,
    check_int,
    check_placement,
    check_seed,
    check_tensor,
    kind,
    type_name,
)

# An operator has so many parameters for them.
MAX_MOD_TENSORS = 8


class Checking(NamedTuple):
    """A call during the checks of its options, which follow the order of the table.

    B: batch rows, or packed sequences.
    arguments: all options.
    fields: of the record, so far.
    reach: over a cache, the number of positions that a mask must cover.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    B: int
    arguments: Mapping[str, Any]
    fields: dict[str, Any]
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


# Options that depend on the indices of rows, heads, queries and keys in the whole batch.
COUNTING = ("mask_mod", "score_mod", "dropout")


def _wanted(name: str, call: Checking) -> bool:
    """Whether an option that is checked later is given and not 0."""
    x = as_python(call.arguments.get(name))
    return x is not None and not (isinstance(x, (int, float)) and x == 0)


def check_heads(heads: Any, call: Checking) -> tuple[int, int | None]:
    """(first, total): the index of the call's first head, and the number of all heads.

    (0, None) if the options do not depend on it: then the same kernels serve all calls.
    """
    if not isinstance(heads, tuple) or len(heads) != 2:
        raise TypeError(f"heads must be a pair (first, total), got {type_name(heads)}")
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
    "positions": "keys are not met in their order",
}


def check_batch_invariant(flag: Any, call: Checking) -> bool:
    """Check a flag, and that no option breaks its promise."""
    invariant = check_flag("batch_invariant", flag)
    for name, reason in _VARIANT.items():
        if invariant and _wanted(name, call):
            raise ValueError(f"batch_invariant goes without {name}: {reason}")
    return invariant


# Positions are consecutive within blocks of this size: no tile of a kernel is longer.
POSITIONS_BLOCK = 128


def check_positions(positions: Any, call: Checking) -> tuple[Tensor, Tensor]:
    """A pair of int32 [B or 1, T_q] and [B or 1, T_k] on q's device.

    Positions rise by 1 within each block of 128; values are read on a CPU only.
    """
    if call.arguments.get("query_offset") is not None:
        raise ValueError("give positions or query_offset, not both")
    if not isinstance(positions, tuple) or len(positions) != 2:
        raise TypeError(
            f"positions must be a pair (q_positions, k_positions), got {type_name(positions)}"
        )
    for n, (x, like) in enumerate(zip(positions, (call.q, call.k), strict=True)):
        name = f"positions[{n}]"
        if not isinstance(x, Tensor) or x.dtype != torch.int32:
            raise TypeError(f"{name} must be an int32 tensor, got {kind(x)}")
        T = like.shape[2]
        if x.dim() != 2 or x.shape[0] not in (1, call.B) or x.shape[1] != T:
            raise ValueError(f"{name} must have shape [{call.B} or 1, {T}], got {list(x.shape)}")
        check_device(name, x, call.q)
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


def _per_score(name: str, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A tensor of 2 to 4 dims that broadcasts to every score; returned with 4, not expanded."""
    whole = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    shape = tuple(check_tensor(name, x).shape)
    if not 2 <= x.dim() <= 4:
        raise ValueError(f"{name} must have 2 to 4 dimensions, got {list(shape)}")
    sizes = zip(shape, whole[4 - x.dim() :], strict=True)
    if any(size not in (1, full) for size, full in sizes):
        raise ValueError(
            f"{name} must broadcast to [B, H_q, T_q, T_k] = {list(whole)}, got {list(shape)}"
        )
    check_device(name, x, q)
    return x[(None,) * (4 - x.dim())]


def _per_position(name: str, x: Tensor, q: Tensor, bound: int) -> Tensor:
    """Check a tensor over a cache like `_per_score`; its last dim, >= `bound`, never broadcasts."""
    if x.dim() < 2 or x.shape[-1] < bound:
        raise ValueError(
            f"{name} must reach over the cache's {bound} positions in its last of 2 to 4 "
            f"dimensions, got {list(x.shape)}"
        )
    like_keys = q.new_empty(1).expand(1, 1, x.shape[-1], 1)
    return _per_score(name, x, q, like_keys)


def _attn_mask(
    mask: Tensor, bias: Tensor | None, q: Tensor, k: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """bool (True = attend), or a float bias; returns mask and bias."""
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(
            f"attn_mask must be a bool (True = attend) or float tensor, got {kind(mask)}"
        )
    if mask.dtype == torch.bool:
        return _per_score("attn_mask", mask, q, k), bias
    if bias is not None:
        raise ValueError("attn_mask is a float tensor, so a bias, and attn_bias is given too")
    bias = _per_score("attn_mask", mask, q, k)
    check_floats("attn_bias", bias)
    return None, bias


def _cache_mask(mask: Any, q: Tensor, bound: int) -> Tensor:
    """bool (True = attend), as `_per_position`."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a bool tensor, got {kind(mask)}")
    if mask.dtype != torch.bool:
        raise TypeError(f"attn_mask must be bool (True = attend), got {mask.dtype}")
    return _per_position("attn_mask", mask, q, bound)


def check_mask_or_bias(x: Any, call: Checking) -> tuple[Tensor | None, Tensor | None]:
    """Check attn_mask or attn_bias; returns mask and bias. A float attn_mask is a bias."""
    if call.reach is not None:
        return _cache_mask(x, call.q, call.reach), None
    return _attn_mask(x, call.arguments.get("attn_bias"), call.q, call.k)


def check_attn_bias(x: Any, call: Checking) -> Tensor:
    check_floats("attn_bias", x)
    if call.reach is not None:
        return _per_position("attn_bias", x, call.q, call.reach)
    return _per_score("attn_bias", x, call.q, call.k)


def check_alibi_slopes(slopes: Tensor, call: Checking) -> Tensor:
    """float32 [H_q] or [B, H_q] on q's device, without gradient."""
    B, H_q = call.B, call.q.shape[1]
    if not isinstance(slopes, Tensor) or slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes must be a float32 tensor, got {kind(slopes)}")
    if tuple(slopes.shape) not in ((H_q,), (B, H_q)):
        raise ValueError(
            f"alibi_slopes must have shape [{H_q}] or [{B}, {H_q}], got {list(slopes.shape)}"
        )
    check_device("alibi_slopes", slopes, call.q)
    if slopes.requires_grad:
        raise ValueError(
            "alibi_slopes have no gradient, but require one; relative_bias is a bias that learns"
        )
    return slopes


def check_relative_bias(bias: Tensor, call: Checking) -> Tensor:
    """Any float dtype, [H_q, 2 R + 1], on q's device."""
    H_q = call.q.shape[1]
    check_floats("relative_bias", bias)
    if bias.dim() != 2 or bias.shape[0] != H_q or bias.shape[1] % 2 == 0:
        raise ValueError(f"relative_bias must have shape [{H_q}, 2 R + 1], got {list(bias.shape)}")
    return check_device("relative_bias", bias, call.q)


def check_relative_keys(keys: Tensor, call: Checking) -> Tensor:
    """q's dtype and device, [H_q, H_k or 1, 2 R + 1, D]; q is [..., H_q, T_q, D] or packed."""
    q, H_k = call.q, call.k.shape[1]
    if not isinstance(keys, Tensor) or keys.dtype != q.dtype:
        raise TypeError(f"relative_keys must have the dtype of q ({q.dtype}), got {kind(keys)}")
    H_q, D = q.shape[1], q.shape[-1]
    heads = (H_q, H_k, 1)
    if (
        keys.dim() != 3
        or keys.shape[0] not in heads
        or keys.shape[1] % 2 == 0
        or keys.shape[2] != D
    ):
        raise ValueError(
            f"relative_keys must have shape [H, 2 R + 1, {D}] with H one of "
            f"{', '.join(map(str, sorted(set(heads))))}, got {list(keys.shape)}"
        )
    return check_device("relative_keys", keys, q)


def check_relative_query(query: Tensor, call: Checking) -> Tensor:
    """q's dtype, device and shape; needs relative_keys."""
    q = call.q
    if call.fields.get("relative_keys") is None:
        raise ValueError("relative_query is multiplied by relative_keys, which is not given")
    if not isinstance(query, Tensor) or query.dtype != q.dtype:
        raise TypeError(f"relative_query must have the dtype of q ({q.dtype}), got {kind(query)}")
    return check_placement("relative_query", query, tuple(q.shape), q)


def check_query2(query: Tensor, call: Checking) -> Tensor:
    """q's dtype and device, and q's shape except the width, which the scale depends on."""
    q = call.q
    if call.arguments.get("key2") is None:
        raise ValueError("query2 is multiplied by key2, which is not given")
    _check_second("query2", query, q, q.shape[1])
    if call.arguments.get("scale") is None:
        if any(_one_memory(x, call.v) for x in (call.k, call.arguments["key2"])):
            raise ValueError(
                "scale must be given where values are keys too, as of latents: it is that of the "
                "head dim before a projection was absorbed, not of the widths here"
            )
        call.fields["scale"] = (q.shape[-1] + query.shape[-1]) ** -0.5
    return query


def check_key2(key: Tensor, call: Checking) -> Tensor:
    """q's dtype and device; rows of k, as wide as query2, heads that divide those of k."""
    query, H_k = call.fields.get("query2"), call.k.shape[1]
    if query is None:
        raise ValueError("key2 is multiplied by query2, which is not given")
    heads = key.shape[1] if isinstance(key, Tensor) and key.dim() > 1 else 0
    _check_second("key2", key, call.k, heads, query.shape[-1])
    if not heads or H_k % heads:
        raise ValueError(f"key2 must have a number of heads that divides k's {H_k}, got {heads}")
    return key


def _check_second(name: str, x: Any, like: Tensor, heads: int, width: int | None = None) -> None:
    """Check x: the shape of `like` except heads and width."""
    if not isinstance(x, Tensor) or x.dtype != like.dtype:
        raise TypeError(f"{name} must have the dtype of q ({like.dtype}), got {kind(x)}")
    shape = list(like.shape)
    shape[1], shape[-1] = heads, (x.shape[-1] if x.dim() else 0) if width is None else width
    check_placement(name, x, tuple(shape), like)
    if not shape[-1]:
        raise ValueError(f"{name} must have columns, got shape {shape}")


def _one_memory(x: Any, y: Tensor) -> bool:
    """Whether x and y start at the same address."""
    if torch.compiler.is_compiling() or not isinstance(x, Tensor):
        return x is y
    shared: bool = torch._C._is_alias_of(x, y)  # type: ignore[attr-defined]
    return shared and x.storage_offset() == y.storage_offset()


def check_sinks(x: Tensor, call: Checking) -> Tensor:
    """Any float dtype, [H_q], on q's device."""
    check_floats("sinks", x)
    return check_placement("sinks", x, (call.q.shape[1],), call.q)


def check_dropout(dropout: Any, call: Checking) -> float:
    """A probability below 1."""
    return check_fraction("dropout", dropout)


def check_dropout_seed(seed: Tensor, call: Checking) -> Tensor | None:
    """int64 [2] on q's device; None without dropout."""
    check_seed("dropout_seed", seed)
    check_device("dropout_seed", seed, call.q)
    return seed if call.fields.get("dropout") else None


def check_mask_mod(mod: Any, call: Checking) -> Any:
    """A @triton.jit function mask_mod(b, h, q_pos, k_pos, *tensors), or a `BlockMask`."""
    check_function("mask_mod", getattr(mod, "mask_mod", mod), "b, h, q_pos, k_pos", call.mods)
    return mod


def check_score_mod_grad(mod: Any, call: Checking) -> Any:
    """A @triton.jit function score_mod_grad(dx, x, b, h, q_pos, k_pos, *tensors)."""
    if call.arguments.get("score_mod") is None:
        raise ValueError("score_mod_grad is the gradient of score_mod, which is not given")
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
    if any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
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
    if not type(mod).__module__.startswith("triton.") or not inspect.isfunction(python):
        got = getattr(mod, "__name__", None) or type_name(mod)
        raise TypeError(f"{name} must be a @triton.jit function, got {got}")
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
        raise ValueError(f"mod_tensors must be at most {MAX_MOD_TENSORS}, got {len(tensors)}")
    for n, x in enumerate(tensors):
        name = f"mod_tensors[{n}]"
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type_name(x)}")
        if not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {list(x.stride())}")
        check_device(name, x, call.q)
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} has no gradient, but requires one: detach it, or call under "
                "torch.no_grad(); relative_bias and attn_bias are biases that learn"
            )
    used = call.arguments.get("mask_mod") is not None or call.arguments.get("score_mod") is not None
    if tensors and not used:
        raise ValueError("mod_tensors are read by mask_mod or score_mod; neither is given")
    return tensors
