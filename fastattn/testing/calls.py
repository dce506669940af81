"""Calls of each public function: arguments from q, k and v, options, and oracle.

`fastattn verify` makes the calls with fixed seeds, generated calls with random ones.
"""

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastattn

from .. import reference
from ..options import OPTIONS
from .compare import DIFFERENTIABLE, assert_matches_reference
from .fp8 import dequantized

Arguments = dict[str, Any]
Function = Callable[..., Any]


class Draw:
    """Source of random numbers and choices from a seed; tensors are on the CPU."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._tensors = torch.Generator().manual_seed(self._random.getrandbits(62))

    def choice(self, *among: Any) -> Any:
        return self._random.choice(among)

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def integer(self, least: int, most: int) -> int:
        return self._random.randint(least, max(least, most))

    def uniform(self, least: float, most: float) -> float:
        return self._random.uniform(least, most)

    def some(self, among: list[str], count: int) -> list[str]:
        return self._random.sample(among, min(count, len(among)))

    def weighted(self, weights: dict[Any, float]) -> Any:
        return self._random.choices(list(weights), list(weights.values()))[0]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._tensors)

    def integers(self, least: int, most: int, *shape: int) -> Tensor:
        """Draw integers, in int32 or int64."""
        x = torch.randint(least, max(least, most) + 1, shape, generator=self._tensors)
        return x.to(self.choice(torch.int32, torch.int64))

    def bools(self, share: float, *shape: int) -> Tensor:
        """Draw bools, each True with this chance."""
        return torch.rand(shape, generator=self._tensors) < share


def offsets(draw: Draw, total_q: int, total_k: int) -> tuple[Tensor, Tensor]:
    """Offsets [N + 1] of packed queries and keys.

    Some sequences may be empty, or all but the last of one length, and the last rows in none.
    Without any row there is no sequence.
    """
    inner, dtype = draw.integer(0, 3), draw.choice(torch.int32, torch.int64)
    alike = draw.chance(0.3)

    def ends(total: int) -> Tensor:
        last = draw.choice(total, total, draw.integer(0, total))
        cuts = sorted(draw.integer(0, last) for _ in range(inner))
        if alike:
            cuts = [n * (last // (inner + 1)) for n in range(1, inner + 1)]
        return torch.tensor([0, *cuts, last][: None if total_q + total_k else 1], dtype=dtype)

    return ends(total_q), ends(total_k)


def packed_rows(*rows: Tensor) -> Any:
    """x [B, H, T, D] as [B * T, H, D]."""
    return tuple(x.transpose(1, 2).flatten(0, 1) for x in rows)


QKV = tuple[Tensor, Tensor, Tensor]


class Made(NamedTuple):
    """Arguments of a call: q, k and v, those of its oracle, other ones, and those of it alone."""

    qkv: QKV
    clean: QKV
    beside: Arguments
    alone: Arguments

    @property
    def arguments(self) -> Arguments:
        """All of the function, by name."""
        return {**dict(zip("qkv", self.qkv, strict=True)), **self.beside, **self.alone}


def made(q: Tensor, k: Tensor, v: Tensor, **beside: Any) -> Made:
    """Make arguments that function and oracle share."""
    return Made((q, k, v), (q, k, v), beside, {})


def quantized(*qkv: Tensor, **cu_seqlens: Tensor) -> Made:
    """Codes and scales of q, k and v, packed with cu_seqlens_q and cu_seqlens_k."""
    starts = (*cu_seqlens.values(), *list(cu_seqlens.values())[1:]) or (None,) * 3
    both = [fastattn.quantize_fp8(x, cu_seqlens=cu) for x, cu in zip(qkv, starts, strict=True)]
    numbers: Any = tuple(
        dequantized(*x, cu).to(qkv[0].dtype) for x, cu in zip(both, starts, strict=True)
    )
    codes: Any = tuple(x for x, _ in both)
    scales = (scale for _, scale in both)
    by_name = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    return Made(codes, numbers, cu_seqlens, by_name | {"out_dtype": qkv[0].dtype})


class PublicCall(NamedTuple):
    """Public function with its options and oracle.

    oracle: takes the same arguments. make: returns arguments from a `Draw`, q, k, v [B, H, T, D].
    like: a function of OPTIONS with the same options, but for those in `without`. packed: takes
    packed sequences. learns: gradients are compared.
    """

    function: Function
    oracle: Function
    make: Callable[..., Made] = lambda draw, *qkv: made(*qkv)
    like: str = "attention"
    without: tuple[str, ...] = ()
    packed: bool = False
    learns: bool = True

    @property
    def takes(self) -> frozenset[str]:
        """Names of its options."""
        names = (name for name, row in OPTIONS.items() if self.like in row.calls)
        return frozenset(names) - {*self.without}

    def check(self, given: Made, backend: str, **options: Any) -> float:
        """Check a call of it by `assert_matches_reference`."""
        how = {"oracle": self.oracle, "backward": self.learns, **given.beside, **options}
        ours = partial(self.function, backend=backend, **given.alone)
        return assert_matches_reference(ours, *given.qkv, clean=given.clean, **how)


def _packed(draw: Draw, *qkv: Tensor) -> Made:
    q, k, v = packed_rows(*qkv)
    starts = (x.to(q.device) for x in offsets(draw, len(q), len(k)))
    return made(q, k, v, **dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True)))


def _weighted(draw: Draw, q: Tensor, k: Tensor, v: Tensor) -> Made:
    H_q, D = q.shape[1], q.shape[3]
    weight = draw.normal(*draw.choice((D, D), (H_q, D, D))) / D**0.5
    return made(q, k, v, weight=weight.to(q))


def _additive(draw: Draw, q: Tensor, k: Tensor, v: Tensor) -> Made:
    size = draw.choice(1, 3, None, 4)  # None: of projected rows
    hidden = size or q.shape[3]

    def weight(x: Tensor) -> Tensor:
        shape = draw.choice((hidden, x.shape[3]), (x.shape[1], hidden, x.shape[3]))
        return (draw.normal(*shape) / x.shape[3] ** 0.5).to(x)

    u = draw.normal(*draw.choice((hidden,), (q.shape[1], hidden))).to(q)
    weights = {"w_query": weight(q), "w_key": weight(k)} if size else {}
    return made(q, k, v, u=u, **weights)


def block_lists(
    draw: Draw, q: Tensor, k: Tensor, heads: int, block: tuple[int, int], n: int
) -> Arguments:
    """Lists of n numbers of blocks, some of them -1."""
    rows, blocks = (-(-x.shape[2] // size) for x, size in zip((q, k), block, strict=True))
    indices = draw.integers(-1, blocks - 1, q.shape[0], heads, rows, n)
    return {"indices": indices.to(q.device), "block": block}


def _selected(draw: Draw, q: Tensor, k: Tensor, v: Tensor) -> Made:
    H_q, H_k, n = q.shape[1], k.shape[1], draw.integer(0, 5)
    heads = [x for x in range(1, H_q + 1) if not H_k % x or not (x % H_k or H_q % x)]
    block = draw.choice(1, 1, 3, 16), draw.choice(16, 32, 5, 1, 64)
    some = draw.choice(*heads, *heads[1:-1])  # lists that heads share, but not all of them
    beside = block_lists(draw, q, k, some, block, n)
    counts = draw.integers(0, n, *beside["indices"].shape[:3]).to(q.device)
    return made(q, k, v, **beside, counts=counts if draw.chance(0.3) else None)


def _packed_fp8(draw: Draw, *qkv: Tensor) -> Made:
    packed = _packed(draw, *qkv)
    return quantized(*packed.qkv, **packed.beside)


def _by_weight(q: Tensor, *kv: Tensor, weight: Tensor, **options: Any) -> Any:
    return reference.attention(q @ weight.to(q.dtype).mT, *kv, scale=1.0, **options)


def _by_lists(
    *qkv: Tensor, indices: Tensor, block: tuple[int, int], counts: Tensor | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    _, H_q, T_q, _ = qkv[0].shape
    keep = reference.selected_mask(indices, block, H_q, T_q, qkv[1].shape[2], counts)
    return reference.attention(*qkv, attn_mask=keep, **options)


def additive_formula(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, w_query: Tensor | None = None,
    w_key: Tensor | None = None, return_lse: bool = True, **masks: Any,
) -> Any:  # fmt: skip
    """Compute the explicit formula, with a [B, H_q, T_q, T_k, hidden] tensor."""
    a, b = (
        x if w is None else torch.einsum(f"bhtd,{'h' * (w.dim() - 2)}cd->bhtc", x, w)
        for x, w in ((q, w_query), (k, w_key))
    )
    b, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (b, v))
    u = u.expand(q.shape[1], u.shape[-1])
    x = ((a[:, :, :, None] + b[:, :, None]).tanh() * u[:, None, None]).sum(-1)
    keep = _visible(q, k, **masks)
    x = x.masked_fill(~keep, -torch.inf)
    blind = ~keep.expand(x.shape).any(-1)
    x = x.masked_fill(blind[..., None], 0.0)
    weights = x.softmax(-1).masked_fill(blind[..., None], 0.0)
    o, lse = weights @ v, x.logsumexp(-1).masked_fill(blind, -torch.inf)
    return (o, lse) if return_lse else o


def _visible(q: Tensor, k: Tensor, **masks: Any) -> Tensor:
    """`reference.visible_mask`, which takes no functions and no ids of tokens, with these."""
    offset, heads = masks.get("query_offset"), masks.pop("heads", None)
    places = reference.torch_places(
        q.shape[0], q.shape[1], q.shape[2], k.shape[2], offset, q.device, heads=heads
    )
    keep = masks.pop("attn_mask", q.new_ones((), dtype=torch.bool))
    mod, read = masks.pop("mask_mod", None), masks.pop("mod_tensors", ())
    if mod is not None:
        keep = keep & reference.applied(mod, places, read)
    ids = masks.pop("documents", None)
    if ids is not None:
        q_ids, k_ids = ids if isinstance(ids, tuple) else (ids, ids)
        keep = keep & ((q_ids[:, :, None] == k_ids[:, None]) & (k_ids >= 0)[:, None])[:, None]
    return keep & reference.visible_mask(q.shape[2], k.shape[2], device=q.device, **masks)


def merged(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Merge parts: the oracle of `merge`."""
    largest = torch.maximum(lse1, lse2).detach()
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    total = (lse1 - largest).exp() + (lse2 - largest).exp()
    blind = total == 0
    total = total.masked_fill(blind, 1.0)
    lse = (largest + total.log()).masked_fill(blind, -torch.inf)
    first, second = (((x - largest).exp() / total)[..., None].to(o1.dtype) for x in (lse1, lse2))
    return o1 * first + o2 * second, lse


def attention_block(
    q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False, **options: Any
) -> Any:
    """o, or (o, lse), of a part that has all keys, differentiable by its own backward."""
    names = [
        name for name in DIFFERENTIABLE
        if isinstance(options.get(name), Tensor) and options[name].requires_grad
    ]  # fmt: skip
    apply: Function = _Block.apply
    mods = options.get("mod_tensors", ())
    o, lse = apply(options, names, q, k, v, *(options[name] for name in names), *mods)
    return (o, lse) if return_lse else o


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, options: Arguments, names: Iterable[str], *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        o, lse = fastattn.attention_block_forward(*tensors[:3], **options)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.names = options, names
        ctx.save_for_backward(*tensors[:3], o, lse, *tensors[3:])
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, o, lse, *_ = ctx.saved_tensors
        do = (torch.zeros_like(o) if do is None else do).to(q.dtype)
        actual = fastattn.attention_block_backward(do, q, k, v, o, lse, dlse=dlse, **ctx.options)
        learned = [actual.of_options[name] for name in ctx.names]
        mods = ctx.options.get("mod_tensors", ())
        learned += actual.of_options.get("mod_tensors", [None] * len(mods))
        return None, None, actual.dq, actual.dk, actual.dv, *learned


CALLS: dict[str, PublicCall] = {
    "attention": PublicCall(fastattn.attention, reference.attention),
    "attention_varlen": PublicCall(
        fastattn.attention_varlen, reference.attention_varlen, _packed, "attention_varlen",
        packed=True,
    ),
    "attention_block": PublicCall(attention_block, reference.attention),
    "dot_product_attention": PublicCall(
        fastattn.dot_product_attention, partial(reference.attention, scale=1.0), without=("scale",)
    ),
    "multiplicative_attention": PublicCall(
        fastattn.multiplicative_attention, _by_weight, _weighted, without=("scale",)
    ),
    "additive_attention": PublicCall(
        fastattn.additive_attention, additive_formula, _additive, "additive_attention"
    ),
    "selected_attention": PublicCall(
        fastattn.selected_attention, _by_lists, _selected, "selected_attention"
    ),
    "attention_fp8": PublicCall(
        fastattn.attention_fp8, reference.attention, lambda draw, *qkv: quantized(*qkv),
        "attention_fp8", learns=False,
    ),
    "attention_varlen_fp8": PublicCall(
        fastattn.attention_varlen_fp8, reference.attention_varlen, _packed_fp8,
        "attention_varlen_fp8", packed=True, learns=False,
    ),
    "decode_attention": PublicCall(
        fastattn.decode_attention, reference.attention, like="decode_attention", learns=False
    ),
    "attention_paged": PublicCall(
        fastattn.attention_paged, reference.attention_paged, like="attention_paged", learns=False
    ),
    "attention_statistics": PublicCall(
        fastattn.attention_statistics, reference.attention, without=("dropout", "dropout_seed"),
        learns=False,
    ),
    "merge": PublicCall(fastattn.merge, merged, like="", learns=False),
}  # fmt: skip
