"""Judges of statistics, additive attention, attention in 8 bits, and merging."""

from typing import Any

import torch
from torch import Tensor

import fastattn
from fastattn import reference
from fastattn.testing.compare import assert_all_near
from fastattn.testing.fp8 import dequantized
from fastattn.testing.inputs import to_device
from fastattn.testing.verify.scoring import assert_statistics
from fastattn.torch_backend import triton_language

from .cases import ORDERS, Case
from .tensors import inputs, offsets
from .values import drawn_options

ADDITIVE_RESULTS = ("o", "lse", "dq", "dk", "dv", "du", "dw_query", "dw_key")


def statistics(case: Case, how: dict[str, Any]) -> None:
    """Entropy, weight received, the largest weights and all of them."""
    q, k, _ = inputs(case)
    assert_statistics(q, k, how.get("backend"), drawn_options(case, case.B))


def additive(case: Case, how: dict[str, Any]) -> None:
    """o, lse and the gradients of q, k, v, u and both projections."""
    draw, hidden = case.random("weights"), case.random("hidden").choice(1, 3, 4)
    q, k, v = inputs(case)

    def weight(H: int) -> Tensor:
        shape = draw.choice((hidden, case.D), (H, hidden, case.D))
        return (draw.normal(*shape) / case.D**0.5).to(case.dtype)

    u = draw.normal(*draw.choice((hidden,), (case.H_q, hidden))).to(case.dtype)
    tensors = [q, k, v, u, weight(case.H_q), weight(case.H_k)]
    masks = to_device(drawn_options(case, case.B), case.device)
    how |= {"return_lse": True, **masks}
    ours = additive_results(fastattn.additive_attention, tensors, **how)
    exact = additive_results(additive_formula, [x.double() for x in tensors], **masks)

    def plain() -> list[Tensor]:
        return additive_results(additive_formula, tensors, **masks)

    assert_all_near(ADDITIVE_RESULTS, ours, exact, plain, ORDERS)


def additive_formula(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor, w_query: Tensor, w_key: Tensor, **masks: Any
) -> tuple[Tensor, Tensor]:
    """The explicit formula, with a [B, H_q, T_q, T_k, hidden] tensor."""
    a = torch.einsum("bhtd,...hcd->bhtc" if w_query.dim() == 3 else "bhtd,cd->bhtc", q, w_query)
    b = torch.einsum("bhtd,...hcd->bhtc" if w_key.dim() == 3 else "bhtd,cd->bhtc", k, w_key)
    b, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (b, v))
    u = u.expand(q.shape[1], u.shape[-1])
    x = ((a[:, :, :, None] + b[:, :, None]).tanh() * u[:, None, None]).sum(-1)
    keep = _visible(q, k, **masks)
    x = x.masked_fill(~keep, -torch.inf)
    blind = ~keep.expand(x.shape).any(-1)
    x = x.masked_fill(blind[..., None], 0.0)
    weights = x.softmax(-1).masked_fill(blind[..., None], 0.0)
    return weights @ v, x.logsumexp(-1).masked_fill(blind, -torch.inf)


def _visible(q: Tensor, k: Tensor, **masks: Any) -> Tensor:
    """`reference.visible_mask`, which takes no functions and no ids of tokens, with these."""
    offset, heads = masks.get("query_offset"), masks.pop("heads", None)
    places = reference.torch_places(*q.shape[:3], k.shape[2], offset, q.device, heads=heads)
    keep = masks.pop("attn_mask", torch.ones((), dtype=torch.bool, device=q.device))
    mod, read = masks.pop("mask_mod", None), masks.pop("mod_tensors", ())
    if mod is not None:
        keep = keep & triton_language.mask_mod(mod, places, read)
    ids = masks.pop("documents", None)
    if ids is not None:
        q_ids, k_ids = ids if isinstance(ids, tuple) else (ids, ids)
        keep = keep & ((q_ids[:, :, None] == k_ids[:, None]) & (k_ids >= 0)[:, None])[:, None]
    return keep & reference.visible_mask(q.shape[2], k.shape[2], device=q.device, **masks)


def additive_results(function: Any, tensors: list[Tensor], **arguments: Any) -> list[Tensor]:
    """o, lse and all gradients; do and dlse are equal in every dtype."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    o, lse = function(*tensors, **arguments)
    generator = torch.Generator().manual_seed(1)
    do, dlse = (
        torch.randn(x.shape, generator=generator).bfloat16().to(x.device, x.dtype) for x in (o, lse)
    )
    grads = torch.autograd.grad((o, lse), tensors, (do, dlse))
    return [o.detach(), lse.detach(), *grads]


def fp8(case: Case, how: dict[str, Any]) -> None:
    """o and lse against the oracle on the numbers that the codes stand for."""
    options = drawn_options(case, case.B)
    codes = [fastattn.quantize_fp8(x) for x in inputs(case)]
    scales = {f"{name}_scale": scale for name, (_, scale) in zip("qkv", codes, strict=True)}
    actual = fastattn.attention_fp8(
        *(x for x, _ in codes), **scales, out_dtype=case.dtype, return_lse=True, **how, **options
    )
    numbers = [dequantized(x, scale) for x, scale in codes]
    _judge(case, actual, numbers, lambda *x: reference.attention(*x, return_lse=True, **options))


def varlen_fp8(case: Case, how: dict[str, Any]) -> None:
    """Run `fp8` on packed sequences."""
    starts = offsets(case)
    of = (starts[0], starts[1], starts[1])
    options = drawn_options(case, starts[0].shape[0] - 1)
    packed = [x[0].transpose(0, 1) for x in inputs(case)]
    codes = [fastattn.quantize_fp8(x, cu_seqlens=cu) for x, cu in zip(packed, of, strict=True)]
    scales = {f"{name}_scale": scale for name, (_, scale) in zip("qkv", codes, strict=True)}
    actual = fastattn.attention_varlen_fp8(
        *(x for x, _ in codes), *starts, **scales, out_dtype=case.dtype, return_lse=True, **how,
        **options,
    )  # fmt: skip
    numbers = [dequantized(x, scale, cu) for (x, scale), cu in zip(codes, of, strict=True)]

    def oracle(*x: Tensor) -> Any:
        return reference.attention_varlen(*x, *starts, return_lse=True, **options)

    _judge(case, actual, numbers, oracle)


def _judge(case: Case, actual: Any, numbers: list[Tensor], oracle: Any) -> None:
    """Numbers are read back in the dtype of the output, and attention takes those."""
    rounded = [x.to(case.dtype) for x in numbers]
    exact = oracle(*(x.double() for x in rounded))
    assert_all_near(("o", "lse"), actual, exact, lambda: oracle(*rounded), ORDERS)


def merge(case: Case, how: dict[str, Any]) -> None:
    """Two parts, each of which may have seen nothing, some of it NaN then."""
    draw = case.random("merge")
    shape = (case.B, case.H_q, case.T_q)
    lse_dtype = torch.float64 if case.dtype is torch.float64 else torch.float32
    parts = []
    for _ in range(2):
        o = draw.normal(*shape, case.D_v).to(case.dtype)
        lse = draw.normal(*shape).to(lse_dtype) * draw.choice(1.0, 50.0)
        blind = draw.bools(0.2, *shape)
        parts.append((o, lse.masked_fill(blind, -torch.inf), blind))
    given = []
    for o, lse, blind in parts:
        given += [o.masked_fill(blind[..., None], torch.nan) if "nan" in case.traits else o, lse]
    tested = _with_gradients(lambda *x: fastattn.merge(*x, **how), case, given)

    def formula(*x: Tensor) -> tuple[Tensor, Tensor]:
        o1, lse1, o2, lse2 = x
        largest = torch.maximum(lse1, lse2).detach()
        largest = largest.masked_fill(largest == -torch.inf, 0.0)
        total = (lse1 - largest).exp() + (lse2 - largest).exp()
        blind = total == 0
        lse = largest + total.masked_fill(blind, 1.0).log()
        lse = lse.masked_fill(blind, -torch.inf)
        shares = [(y - largest).exp() / total.masked_fill(blind, 1.0) for y in (lse1, lse2)]
        first, second = (share[..., None].to(o1.dtype) for share in shares)
        return o1 * first + o2 * second, lse

    plain = [x for o, lse, _ in parts for x in (o, lse)]
    exact = _with_gradients(formula, case, [x.double() for x in plain])
    names = ("o", "lse", "do1", "dlse1", "do2", "dlse2")[: len(exact)]
    assert_all_near(names, tested, exact, lambda: _with_gradients(formula, case, plain), ORDERS)


def _with_gradients(function: Any, case: Case, given: list[Tensor]) -> tuple[Tensor, ...]:
    """The results, and unless the case is one of the forward alone the gradients of all inputs."""
    if "forward" in case.traits:
        actual: tuple[Tensor, ...] = function(*given)
        return actual
    leaves = [x.detach().requires_grad_() for x in given]
    results = function(*leaves)
    draw = case.random("gradients")
    grads = [draw.normal(*x.shape).bfloat16().to(x.dtype) for x in results]
    return (*results, *torch.autograd.grad(results, leaves, grads))
