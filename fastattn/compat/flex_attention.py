"""torch's `flex_attention`, translated to options of `fastattn.attention`.

    from fastattn.compat.flex_attention import flex_attention

A `score_mod` runs once with a symbolic score that records its changes: factors, a softcap, terms
independent of the score, and masked positions. These become `scale`, `softcap`, `attn_bias` and
`attn_mask`. Other changes of the score are refused; `fastattn.attention` takes any @triton.jit
function. A `BlockMask` becomes an `attn_mask`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from ..functional.fused_attention import attention

# Untyped, as the overloads take only a literal return_lse.
_attention: Any = attention


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """torch.nn.attention.flex_attention.flex_attention, as far as `fastattn.attention` serves it.

    Args:
        query: [B, H_q, T_q, D].
        key: [B, H_k, T_k, D]; with a block_mask also [1, H_k, T_k, D], as value.
        value: [B, H_k, T_k, D_v].
        score_mod: score_mod(score, b, h, q_idx, kv_idx) in torch. It may add terms independent of
            the score (captured tensors get gradients), multiply by positive numbers, take `c *
            torch.tanh(score / c)` before it adds, and mask by `torch.where(seen, score, -inf)`. The
            terms take up to 4 bytes of memory per batch row, head, query and key, as far as they
            vary.
        block_mask: evaluated in each call, which takes a byte per batch row, head, query and key,
            as far as its mask_mod varies. mask_mod may capture tensors.
        scale: default D ** -0.5.
        enable_gqa: whether H_k may divide H_q.
        return_lse, return_aux: also return lse, fp32 [B, H_q, T_q], in natural log.
        kernel_options: of torch's kernels; ignored.

    Returns:
        o [B, H_q, T_q, D_v]; (o, lse) with return_lse; (o, AuxOutput) with return_aux.

    Raises:
        NotImplementedError: score_mod changes the score in another way, or max_scores is requested.
        TypeError, ValueError: as `fastattn.attention`, or a block_mask of other sizes.
    """
    if return_lse and return_aux is not None:
        raise ValueError("return_lse and return_aux both ask for lse: give one of them")
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError("return_aux.max_scores: fastattn does not return largest scores")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"enable_gqa must be True for {query.shape[1]} heads of query and {key.shape[1]} of key"
        )
    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    options: dict[str, Any] = {}
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    seen = None
    if block_mask is not None:
        seen = _seen(block_mask, sizes, query.device)
        if key.shape[0] == 1:
            key, value = (x.expand(sizes[0], *x.shape[1:]) for x in (key, value))
    if score_mod is not None:
        score, keep, bias = _recorded(score_mod, sizes, query.device)
        factor *= score.inner
        if score.outer is not None:
            options["softcap"], factor = score.outer, factor * score.outer
        if keep is not None:
            seen = keep if seen is None else seen & keep
        options |= {} if bias is None else {"attn_bias": bias}
    options |= {} if seen is None else {"attn_mask": seen}
    with_lse = return_lse or (return_aux is not None and return_aux.lse)
    result = _attention(query, key, value, scale=factor, return_lse=with_lse, **options)
    if return_aux is None:
        return result
    return (result[0], AuxOutput(lse=result[1])) if with_lse else (result, AuxOutput())


def mask_options(mask: BlockMask, query: Tensor, key: Tensor) -> dict[str, Any]:
    """Options of `fastattn.attention`, for query and key [B, H, T, D], in place of a block_mask.

    Raises:
        ValueError: it is of other sizes.
    """
    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return {"attn_mask": _seen(mask, sizes, query.device)}


Sizes = tuple[int, int, int, int]


def _everywhere(function: Callable[..., Any], sizes: Sizes, device: torch.device) -> Any:
    """function(b, h, q_idx, kv_idx) of all indices, [B, H_q, T_q, T_k], expanded where constant."""
    for dim in (3, 2, 1, 0):
        dims = tuple(0 if n == dim else None for n in range(4))
        function = torch.vmap(function, in_dims=dims)
    return function(*(torch.arange(n, dtype=torch.int32, device=device) for n in sizes))


def _seen(mask: BlockMask, sizes: Sizes, device: torch.device) -> Tensor:
    """bool [B, H_q, T_q, T_k]: mask_mod in the partial blocks, True in the full ones."""
    if tuple(mask.seq_lengths) != sizes[2:]:
        raise ValueError(
            f"block_mask must be of {sizes[2]} queries and {sizes[3]} keys, "
            f"got {tuple(mask.seq_lengths)}"
        )
    rows, heads = mask.kv_num_blocks.shape[:2]
    if rows not in (1, sizes[0]) or heads not in (1, sizes[1]):
        raise ValueError(
            f"block_mask must be of 1 or {sizes[0]} rows and 1 or {sizes[1]} heads, "
            f"got {rows} and {heads}"
        )
    seen: Tensor = _everywhere(mask.mask_mod, sizes, device).to(torch.bool)
    partial = _places(mask, mask.kv_num_blocks, mask.kv_indices)
    if mask.full_kv_num_blocks is None or mask.full_kv_indices is None:
        return seen & partial
    return (seen & partial) | _places(mask, mask.full_kv_num_blocks, mask.full_kv_indices)


def _places(mask: BlockMask, counts: Tensor, indices: Tensor) -> Tensor:
    """bool [B or 1, H or 1, T_q, T_k]: blocks in the first `counts` entries of `indices`."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    blocks = torch.zeros_like(indices).scatter_add(-1, indices.long(), listed.to(indices.dtype)) > 0
    rows, columns = mask.BLOCK_SIZE
    T_q, T_k = mask.seq_lengths
    whole = blocks.repeat_interleave(rows, -2)[..., :T_q, :]
    return whole.repeat_interleave(columns, -1)[..., :T_k]


@dataclass(frozen=True, eq=False)
class _Score:
    """inner * x + bias, or outer * tanh(inner * x) + bias, or -inf where keep is False."""

    inner: float = 1.0
    outer: float | None = None
    bias: Any = None
    keep: Any = None

    def __add__(self, x: Any, sign: int = 1) -> "_Score":
        if isinstance(x, _Score):
            raise _refused("adds scores to one another")
        x = x * sign
        return replace(self, bias=x if self.bias is None else self.bias + x)

    __radd__ = __add__

    def __sub__(self, x: Any) -> "_Score":
        return self.__add__(x, -1)

    def __mul__(self, x: Any) -> "_Score":
        if not isinstance(x, (int, float)) or not x > 0:
            raise _refused("multiplies the score by other than a positive number")
        bias = None if self.bias is None else self.bias * x
        if self.outer is None:
            return replace(self, inner=self.inner * x, bias=bias)
        return replace(self, outer=self.outer * x, bias=bias)

    __rmul__ = __mul__

    def __truediv__(self, x: Any) -> "_Score":
        return self * (1 / x if isinstance(x, (int, float)) and x else None)

    def __neg__(self, _: Any = None) -> "_Score":
        return self * -1

    __rsub__ = __neg__

    def __pow__(self, _: Any) -> "_Score":
        raise _refused("raises the score to a power")

    def __bool__(self) -> bool:
        raise _refused("branches on the score")

    def _compared(self, _: Any) -> bool:
        raise _refused("compares the score")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compared
    __hash__ = object.__hash__

    def tanh(self) -> "_Score":
        if self.outer is not None or self.bias is not None or self.keep is not None:
            raise _refused("takes tanh of a score that something was added to")
        return replace(self, outer=1.0)

    def to(self, *args: Any, **named: Any) -> "_Score":
        for x in (*args, *named.values()):
            if isinstance(x, torch.dtype) and not (x.is_floating_point and x.itemsize > 1):
                raise _refused("rounds the score")
        return self

    def float(self) -> "_Score":
        return self

    def __getattr__(self, name: str) -> Any:
        raise _refused(f"calls .{name} of the score")

    @classmethod
    def __torch_function__(
        cls, function: Any, _: Any, arguments: tuple[Any, ...], kwargs: Any = None
    ) -> Any:
        name = function.__name__.strip("_")
        if name == "where" and len(arguments) == 3 and not kwargs:
            return _either(*arguments)
        if name == "tanh" and len(arguments) == 1:
            return arguments[0].tanh()
        if name in ("add", "radd", "mul", "rmul") and len(arguments) == 2 and not kwargs:
            x, y = arguments if isinstance(arguments[0], cls) else arguments[::-1]
            return x + y if name.endswith("add") else x * y
        if name in ("sub", "div", "true_divide") and isinstance(arguments[0], cls) and not kwargs:
            x, y = arguments
            return x - y if name == "sub" else x / y
        raise _refused(f"calls {function.__name__} with the score")


def _either(condition: Any, x: Any, y: Any) -> _Score:
    """torch.where of two scores, or of a score and -inf."""
    if not isinstance(x, _Score):
        return _either(~condition, y, x)
    if not isinstance(y, _Score):
        if isinstance(y, Tensor) or y != -math.inf:
            raise _refused("replaces the score by other than -inf")
        return replace(x, keep=condition if x.keep is None else x.keep & condition)
    if (x.inner, x.outer) != (y.inner, y.outer):
        raise _refused("scales the score in some places alone")
    bias, keep = None, None
    if x.bias is not None or y.bias is not None:
        a, b = (0.0 if side is None else side for side in (x.bias, y.bias))
        bias = torch.where(condition, a, b)
    if x.keep is not None or y.keep is not None:
        a, b = (torch.ones_like(condition) if side is None else side for side in (x.keep, y.keep))
        keep = torch.where(condition, a, b)
    return replace(x, bias=bias, keep=keep)


def _recorded(
    score_mod: Callable[..., Any], sizes: Sizes, device: torch.device
) -> tuple[_Score, Tensor | None, Tensor | None]:
    """Record score_mod: its changes to the score, its mask and its bias."""
    done: list[_Score] = []

    def terms(*indices: Tensor) -> tuple[Tensor, Tensor]:
        score = score_mod(_Score(), *indices)
        if not isinstance(score, _Score):
            raise _refused("returns a value that does not depend on the score")
        done[:] = [score]
        keep = torch.ones((), dtype=torch.bool, device=device) if score.keep is None else score.keep
        bias = torch.as_tensor(0.0 if score.bias is None else score.bias, device=device)
        return keep, bias if bias.is_floating_point() else bias.float()

    keep, bias = _everywhere(terms, sizes, device)
    (score,) = done
    return score, None if score.keep is None else keep, None if score.bias is None else bias


def _refused(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"score_mod {what}: fastattn.compat.flex_attention serves terms that are added, factors "
        "that are numbers, softcaps and places that are hidden; fastattn.attention takes any "
        "score_mod as a @triton.jit function, with score_mod_grad"
    )
