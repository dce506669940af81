"""Inputs of a case: numbers, and their layout in memory."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastattn.testing import assert_within_budget
from fastattn.testing.calls import Draw

from .cases import EXPANDED, Case

# Scores of so much leave fp16 room for a product that is not scaled yet.
_HOT = {torch.float16: 200.0}


def inputs(case: Case, salt: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H_q, T_q, D], k [B, H_k, T_k, D], v [B, H_k, T_k, D_v] in the case's dtype and layouts.

    salt: of other numbers in the same layouts.
    """
    tensors = []
    of_keys = (case.H_k, case.T_k)
    sizes = ((case.H_q, case.T_q, case.D), (*of_keys, case.D), (*of_keys, case.D_v))
    for name, layout, (H, T, width) in zip("qkv", case.layouts, sizes, strict=True):
        draw = case.random(name + salt)
        shape = [case.B, H, T, width]
        if layout in EXPANDED:
            shape[EXPANDED[layout]] = 1
        x = draw.normal(*shape)
        if name == "q" and "hot" in case.traits:
            x = x * _HOT.get(case.dtype, 1e4 / math.sqrt(case.D))
        x = x.to(case.dtype).expand(case.B, H, T, width)
        tensors.append(laid(x.to(case.device), layout))
    q, k, v = tensors
    if "shared" in case.traits:  # beside one another, as a projection has them, or columns of k
        both = torch.cat((k, v), 3)
        of_keys = case.D_v <= case.D and case.random("shared").chance(0.5)
        k, v = both[..., : case.D], both[..., : case.D_v] if of_keys else both[..., case.D :]
    return q, k, v


def relaid(grad: Tensor, layout: str, packed: bool) -> Tensor:
    """A gradient of o [B, H, T, D_v], or packed, in another layout, or the same for rows."""
    x = grad.transpose(0, 1)[None] if packed else grad
    if layout in EXPANDED:
        x = x.narrow(EXPANDED[layout], 0, min(1, x.shape[EXPANDED[layout]])).expand_as(x)
    x = laid(x, layout)
    return x[0].transpose(0, 1) if packed else x


def laid(x: Tensor, layout: str) -> Tensor:
    """x [B, H, T, D] in another layout; of `EXPANDED` it is expanded already."""
    if layout == "bthd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout in ("wide", "odd"):
        return pad(x, (0, 8 if layout == "wide" else 1))[..., : x.shape[-1]]
    if layout == "shifted":
        memory = x.new_zeros(x.numel() + 1)
        return memory[1:].view(x.shape).copy_(x)
    if layout == "every-second":
        return torch.stack((x, x), 3).flatten(2, 3)[:, :, ::2]
    if layout == "heads-last":  # torch's channels_last
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "columns":
        return x.mT.contiguous().mT
    if layout == "negative":
        return negative(x)
    return x if layout in EXPANDED else x.contiguous()


def negative(x: Tensor) -> Tensor:
    """x with torch's negative bit: memory holds -x."""
    return torch._neg_view(x.neg())


def poisoned(x: Tensor, exists: Tensor, layout: str, draw: Draw) -> Tensor:
    """x [B, H, T, D] with NaN or inf in rows that do not exist; exists: bool [B, 1 or H, T]."""
    if layout in EXPANDED:
        return x
    poison = draw.choice(math.nan, math.inf, -math.inf)
    return laid(x.masked_fill(~exists[..., None], poison), layout)


def assert_nan_stays(
    case: Case, q: Tensor, call: Callable[..., Any], options: dict[str, Any], *, real: Any = True
) -> None:
    """Check that NaN in queries reaches their rows where those see a key, and no others.

    call: takes other queries, and return_lse. real: queries whose results are specified.
    """
    if "spoilt" not in case.traits or "hot" in case.traits or q.itemsize == 1:  # codes
        return
    draw = case.random("spoilt")
    hit = draw.bools(0.2, *q.shape[:-1])
    column = torch.arange(q.shape[-1]) == draw.integer(0, q.shape[-1] - 1)
    plain = q.detach().clone(memory_format=torch.contiguous_format)
    # Without lse torch's function may serve, which drops others.
    with_lse = "dropout" in options or draw.chance(0.5)
    with torch.no_grad():
        clean, seen = call(plain, return_lse=True)
        clean = clean if with_lse else call(plain, return_lse=False)
        o = call(plain.masked_fill(hit[..., None] & column, math.nan), return_lse=with_lse)
    o, lse = o if with_lse else (o, None)
    if q.dim() == 3:  # packed
        lse, seen = lse if lse is None else lse.mT, seen.mT
    sees = hit & real & (seen > -torch.inf)
    if not {"sinks", "dropout"} & options.keys():  # which leave rows without a weight
        assert o[sees].isnan().all() and (lse is None or lse[sees].isnan().all())
    # A bias of -inf is a number, and its sum with NaN is NaN.
    biases = (options.get(name) for name in ("attn_bias", "attn_mask"))
    biased = any(x is not None and x.is_floating_point() for x in biases)
    left = real & (~hit if biased else ~sees)
    for name, x, expected in (("o", o, clean), ("lse", lse, seen)):
        if x is not None:
            assert_within_budget(name, x[left], expected[left].double(), expected[left])
