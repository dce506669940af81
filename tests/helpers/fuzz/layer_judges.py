"""Judges of layers: the formula, and steps over caches that equal the whole."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from engine import packed_layers
from naive_layers import naive_cross, naive_layer
from naive_other_layers import naive_latent, naive_scale, naive_sparse
from torch import Tensor

from fastattn import KVCache, PagedKVCache
from fastattn.rotary import RotaryPositions
from fastattn.testing import assert_within_budget
from fastattn.testing.inputs import nan_filled_empty
from fastattn.testing.orders import worst_naive

from .layer_calls import Given, drawn_arguments
from .layers import LayerCase, make_layer

_Plan = list[tuple[int, list[int]]]


def check_layer(case: LayerCase) -> None:
    """Judge a layer's calls: by the formula, over caches, and once more.

    Raises:
        AssertionError: a result that is wrong. Any other error is one too: the calls are legal.
    """
    with nan_filled_empty():
        layer = make_layer(case)
        draw = case.random("x")
        x = draw.normal(case.B, case.T, layer.embed_dim).to(case.dtype)
        if case.kind == "cross":
            _check_cross(case, layer, x)
            return
        given = drawn_arguments(case, layer)
        if case.kind == "latent":
            torch.testing.assert_close(layer.scale, naive_scale(layer, case.options))
        naive = partial(_NAIVE[case.kind], **given.theirs)
        y = _judged(case, layer, partial(_called, layer, given), naive, x)
        if case.kind in ("self", "latent"):
            _check_steps(case, layer, x, given)
        again = layer(x, **given.ours)
        assert torch.equal(again, y), "a second call gives another result"
        _check_other_dtypes(case, layer, x, given, naive)


_NAIVE: dict[str, Callable[..., Tensor]] = {
    "self": naive_layer, "latent": naive_latent, "moba": naive_sparse, "nsa": naive_sparse,
}  # fmt: skip


def _called(layer: Any, given: Given, x: Tensor) -> Tensor:
    y: Tensor = layer(x, **given.ours)
    return y


def _judged(
    case: LayerCase,
    layer: Any,
    ours: Callable[..., Tensor],
    naive: Callable[..., Tensor],
    *inputs: Tensor,
) -> Tensor:
    """The output of `ours(*inputs)`, which is compared with naive(layer, *inputs); gradients."""
    upstream = case.random("upstream").normal(*inputs[0].shape)

    def results(call: Callable[..., Tensor], of: Any, xs: list[Tensor]) -> list[Tensor]:
        xs = [x.detach().requires_grad_() for x in xs]
        y = call(*xs)
        if "forward" in case.traits or not y.numel():
            return [y.detach()]
        wanted = [*xs, *of.parameters()]
        grads = torch.autograd.grad(
            y, wanted, upstream.to(y.dtype), allow_unused=True, materialize_grads=True
        )
        return [y.detach(), *grads]

    got = results(ours, layer, list(inputs))
    wide = copy.deepcopy(layer).double()
    exact = results(partial(naive, wide), wide, [x.double() for x in inputs])
    plain = exact
    if case.dtype != torch.float64:
        plain = worst_naive(exact, lambda: results(partial(naive, layer), layer, list(inputs)))
    names = ("output", *(f"input {i}" for i in range(len(inputs))), *dict(layer.named_parameters()))
    for name, *triple in zip(names, got, exact, plain, strict=False):
        assert_within_budget(name, *triple)
    return got[0]


def _check_other_dtypes(
    case: LayerCase, layer: Any, x: Tensor, given: Given, naive: Callable[..., Tensor]
) -> None:
    """Padding that is NaN reaches no token, and autocast computes in its dtype."""
    if "poison" in case.traits and not given.real.all():
        # Where there is NaN, other functions of torch may serve, with other bits.
        y = layer(x.masked_fill(~given.real[..., None], torch.nan), **given.ours)
        exact = naive(copy.deepcopy(layer).double(), x.double())
        plain = worst_naive(exact, lambda: naive(layer, x))
        assert_within_budget("beside NaN", *(x[given.real] for x in (y, exact, plain)))
    selects = case.kind in ("moba", "nsa")
    if "autocast" not in case.traits or selects or not x.numel():
        return
    narrow = copy.deepcopy(layer).bfloat16()
    x = x.bfloat16()
    with torch.no_grad():
        exact = naive(copy.deepcopy(narrow).double(), x.double())
        plain = worst_naive(exact, lambda: naive(narrow, x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = copy.deepcopy(narrow).float()(x.float(), **given.ours)
    assert y.dtype == torch.bfloat16
    assert_within_budget("under autocast", y, exact, plain)


def _check_cross(case: LayerCase, layer: Any, x: Tensor) -> None:
    S = case.random("memory").integer(1, 9)
    memory = case.random("memory").normal(case.B, S, layer.memory_dim).to(case.dtype)
    of_memory = case.random("arguments")
    seen, given = torch.ones(case.B, S, dtype=torch.bool), {}
    if case.has("memory_padding_mask"):
        given["padding_mask"] = of_memory.bools(of_memory.choice(0.0, 0.6), case.B, S)
        seen = seen & given["padding_mask"]
    if case.has("memory_lengths"):
        given["lengths"] = of_memory.integers(0, S, case.B)
        seen = seen & (torch.arange(S) < given["lengths"][:, None])
    by_name = {f"memory_{name}": value for name, value in given.items()}

    def naive(layer: Any, x: Tensor, memory: Tensor) -> Tensor:
        return naive_cross(layer, x, memory, seen)

    def ours(x: Tensor, memory: Tensor) -> Tensor:
        y: Tensor = layer(x, memory, **by_name)
        return y

    y = _judged(case, layer, ours, naive, x, memory)
    with torch.no_grad():
        poisoned = memory.masked_fill(~seen[..., None], torch.nan)
        projected = layer.project_memory(poisoned, **given)
        parts = x.split(_cuts(case, first=1), dim=1)
        steps = torch.cat([layer(part, projected) for part in parts], dim=1)
        exact = naive(copy.deepcopy(layer).double(), x.double(), memory.double())
    assert_within_budget("steps", steps, exact, y)


def _cuts(case: LayerCase, first: int) -> list[int]:
    """Lengths of pieces of T tokens, the first of at least `first`, many of 1."""
    draw, left = case.random("cuts"), case.T
    pieces = []
    while left:
        least = max(1, first) if not pieces else 1
        pieces.append(min(left, max(least, draw.choice(1, 1, 2, draw.integer(1, left)))))
        left -= pieces[-1]
    return pieces


def _check_steps(case: LayerCase, layer: Any, x: Tensor, given: Given) -> None:
    """Pieces over a cache equal the whole, in rows of one length, or padded on either side."""
    if "documents" in case.call or not case.T:
        return
    ours, theirs = (
        {name: x for name, x in part.items() if name not in ("key_padding_mask", "key_lengths")}
        for part in (given.ours, given.theirs)
    )
    draw, T, masked = case.random("steps"), case.T, ""
    first = int(torch.as_tensor(ours.get("prefix_lengths", 0)).max())
    real = torch.ones(case.B, T, dtype=torch.bool)
    plan: _Plan = [(n, [n] * case.B) for n in (_cuts(case, first) if case.causal else [T])]
    if "prefix_lengths" not in case.call and draw.chance(0.5):
        masked = "right" if case.has("batch_invariant") else draw.choice("left", "right")
        lengths = draw.integers(1, T, case.B)
        real = torch.arange(T) < lengths[:, None]
        if masked == "left":
            theirs["key_padding_mask"] = real = real.flip(1)
        else:
            theirs["key_lengths"], left = lengths, lengths.tolist()
            plan = list(_ragged(case, plan, left)) if case.causal else [(T, left)]
    mask = real if masked == "left" else None
    with torch.no_grad():
        exact = _NAIVE[case.kind](copy.deepcopy(layer).double(), x.double(), **theirs)
        plain = exact
        if case.dtype != torch.float64:
            run = partial(_NAIVE[case.kind], layer, x, **theirs)
            plain = worst_naive(exact, run)
        for steps in _stepped(case, layer, x, plan, ours, mask):
            assert_within_budget("steps", steps[real], exact[real], plain[real])


def _ragged(case: LayerCase, plan: _Plan, lengths: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Steps of so many tokens, of which each row takes some, until all are taken."""
    draw, left = case.random("ragged"), list(lengths)
    for number, (T, _) in enumerate(plan):
        counts = [min(n, draw.integer(0 if number else min(1, n), T)) for n in left]
        left = [n - count for n, count in zip(left, counts, strict=True)]
        yield T, counts
    if any(left):
        yield max(left), left


def _stepped(
    case: LayerCase, layer: Any, x: Tensor, plan: _Plan, ours: dict[str, Any], mask: Tensor | None
) -> Iterator[Tensor]:
    """Outputs [B, T, C] of the steps over each kind of cache that serves them."""
    most = case.T + 2
    own = layer.new_cache(case.B, most)
    for part in {own.k.data_ptr(): own.k, own.v.data_ptr(): own.v}.values():
        part.fill_(torch.nan)
    if case.kind == "latent":
        forms = (None, False, True) if mask is None else (None, False)
        ours = {**ours, "absorbed": case.random("absorbed").choice(*forms)}
    yield _over_cache(layer, x, plan, ours, mask, own)
    alone = case.causal and mask is None and "prefix_lengths" not in case.call
    if case.kind == "latent" or not alone:
        return
    if not {*ours} & {"positions", "rotary_tables"}:
        yield _over_pages(case, layer, x, plan)
    in_order = layer.scoring == "additive" or layer.relative is not None
    if isinstance(layer.window, int) and layer.stride is None and not in_order:
        # What its tokens see, and the tokens of the longest step, are all that a ring holds.
        first, window = layer.keep_first, layer.window + case.random("ring").integer(0, 2)
        slots = first + window + max(T for T, _ in plan) - 1
        how: dict[str, Any] = {"window": window, "keep_first": first, "dtype": case.dtype}
        sizes = (case.B, case.H_k, slots, layer.head_dim)
        ring = KVCache(*sizes, value_dim=layer.v_head_dim, **how)
        yield _over_cache(layer, x, plan, ours, None, ring)


def _over_cache(
    layer: Any, x: Tensor, plan: _Plan, ours: dict[str, Any], mask: Tensor | None, cache: Any
) -> Tensor:
    """Outputs [B, T, C] of steps of (T, each row's count of tokens); what is no token is NaN."""
    B, T_all = x.shape[:2]
    outputs, rows = torch.zeros_like(x), torch.arange(B)
    done = torch.zeros(B, dtype=torch.long)
    for T, counts in plan:
        at = done[:, None] + torch.arange(T)
        taken = torch.arange(T) < torch.tensor(counts)[:, None]
        at = at.clamp(max=T_all - 1)
        part = x[rows[:, None], at].masked_fill(~taken[..., None], torch.nan)
        call = {name: _at(value, name, at) for name, value in ours.items()}
        if done.any() and isinstance(call.get("prefix_lengths"), Tensor):
            del call["prefix_lengths"]  # a cache holds it
        if counts != [T] * B:
            call["key_lengths"] = torch.tensor(counts)
        if mask is not None:
            call["key_padding_mask"] = mask[:, : int(done[0]) + T]
        y = layer(part, cache=cache, **call)
        outputs[rows[:, None].expand(B, T)[taken], at[taken]] = y[taken]
        done = done + torch.tensor(counts)
    assert cache.lengths.tolist() == done.tolist()
    return outputs


def _at(value: Any, name: str, at: Tensor) -> Any:
    """The part of positions or tables for the tokens at [B, T]."""
    if name == "positions":
        return value[at] if value.dim() == 1 else value.gather(1, at)
    if name != "rotary_tables" or isinstance(value, RotaryPositions):
        return value
    rows = torch.arange(len(at))[:, None]
    if isinstance(value, tuple):
        return tuple(x[at] if x.dim() == 2 else x[rows, at] for x in value)
    return value[at] if value.dim() == 2 else value[rows, at]


def _over_pages(case: LayerCase, layer: Any, x: Tensor, plan: _Plan) -> Tensor:
    """Outputs [B, T, C] of packed steps over pages."""
    size = case.random("pages").integer(1, 4)
    pages = PagedKVCache(
        case.B * (case.T // size + 2), size, case.H_k, layer.head_dim,
        value_dim=layer.v_head_dim, dtype=case.dtype,
    )  # fmt: skip
    outputs, rows = torch.zeros_like(x), [pages.allocate() for _ in range(case.B)]
    for _, counts in plan:
        some = [b for b, n in enumerate(counts) if n]
        if not some:
            continue
        taken = [slice(pages.length(rows[b]), pages.length(rows[b]) + counts[b]) for b in some]
        (cache,) = packed_layers(pages, [rows[b] for b in some], [counts[b] for b in some])
        packed = torch.cat([x[b, part] for b, part in zip(some, taken, strict=True)])
        y = layer(packed[:, None], cache=cache)[:, 0]
        for b, part in zip(some, taken, strict=True):
            outputs[b, part], y = y[: counts[b]], y[counts[b] :]
    return outputs
