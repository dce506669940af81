"""Random tensors of a case, and `Implementation`: what computes attention on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...cache.views import view_of_tensors
from ...cache_view import CacheView
from ...mods import window_by_head
from .case import Case

# Caches of decoding: keys and values in the case's dtype, in pages of it, codes, or latents, which
# are keys whose first _LATENT columns are the values.
CACHES = ("", "paged", "int8", "fp8", "latent")
_REACH = 128  # distances in a table of relative biases
_PAGE, _LATENT, _LATENT_SCALE = 64, 512, 192**-0.5
# Codes and their scale, a power of two: numbers of the case's dtype have the codes exactly.
_CODES = {"int8": (torch.int8, 1 / 64, 127.0), "fp8": (torch.float8_e4m3fn, 1 / 256, 448.0)}


@triton.jit
def swish(x, b, h, q_pos, k_pos):  # type: ignore[no-untyped-def]
    return x * tl.sigmoid(x)


@dataclass
class Inputs:
    """The tensors of a case.

    q, k, v, do: [B, H, T, D] in the case's dtype and memory order, unit normal; q, k and v require
    grad if the case has a backward. Padding, if any, is key_lengths int32 [B] or key_padding_mask
    bool [B, T_k]. option: the case's option as arguments of `attention`. view: of decoding, a cache
    with k and v.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    key_lengths: Tensor | None = None
    key_padding_mask: Tensor | None = None
    option: dict[str, Any] = field(default_factory=dict)
    view: CacheView | None = None

    def arguments(self) -> dict[str, Any]:
        """Padding and option as arguments of `fastattn.attention`."""
        return {**self.padding(), **self.option}

    def padding(self) -> dict[str, Any]:
        """The padding as arguments of `fastattn.attention`."""
        return {"key_lengths": self.key_lengths, "key_padding_mask": self.key_padding_mask}


def make_inputs(case: Case, *, empty: bool = False) -> Inputs:
    """Draw the tensors of a case, the same each time; empty: leave the large ones uninitialised."""
    draw = _Draw(torch.device(case.device), empty)
    dtype = getattr(torch, case.dtype)

    def rows(H: int, T: int) -> Tensor:
        shape = (case.B, T, H, case.D) if case.layout == "bthd" else (case.B, H, T, case.D)
        x = draw(shape, dtype)
        return x.transpose(1, 2) if case.layout == "bthd" else x

    needs_grad = case.direction != "forward"
    q, do = rows(case.H_q, case.T_q), rows(case.H_q, case.T_q)
    if case.family == "decode":
        k, v, view = _cache(case, draw)
        option = {"scale": _LATENT_SCALE} if case.option == "latent" else {}
        return Inputs(q, k, v, do, option=option, view=view)
    k, v = rows(case.H_k, case.T_k), rows(case.H_k, case.T_k)
    q, k, v = (x.detach().requires_grad_(needs_grad) for x in (q, k, v))
    inputs = Inputs(q, k, v, do)
    if case.lengths is not None:
        lengths = torch.tensor(case.lengths, dtype=torch.int32, device=case.device)
        if case.padding_side == "right":
            inputs.key_lengths = lengths
        else:
            keys = torch.arange(case.T_k, device=case.device)
            inputs.key_padding_mask = keys >= case.T_k - lengths[:, None]
    assert case.option in OPTIONS, case.option
    for name in filter(None, case.option.split("+")):
        inputs.option[name] = _OPTIONS[name](case, draw)
        inputs.option |= _BESIDE[name](case, draw) if name in _BESIDE else {}
    return inputs


@dataclass
class _Draw:
    """Draws unit normal tensors, or leaves them uninitialised."""

    device: torch.device
    empty: bool

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(0)

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        how: dict[str, Any] = {"device": self.device, "dtype": dtype}
        if self.empty:
            return torch.empty(shape, **how)
        return torch.randn(shape, generator=self.generator, **how)

    def count(self, n: int) -> Tensor:
        return torch.arange(n, device=self.device, dtype=torch.int32)


# Makes options of `attention` from a case, the most used first; others need a second argument.
_OPTIONS: dict[str, Callable[[Case, _Draw], Any]] = {
    # Four equal ones a row.
    "documents": lambda case, draw: (
        (draw.count(case.T_k) * 4 // case.T_k).expand(case.B, -1).contiguous()
    ),
    "attn_mask": lambda case, draw: draw((1, 1, case.T_q, case.T_k)) > -1,
    "alibi_slopes": lambda case, draw: draw((case.H_q,)),
    "attn_bias": lambda case, draw: draw(
        (1, case.H_q, case.T_q, case.T_k), getattr(torch, case.dtype)
    ),
    "relative_bias": lambda case, draw: draw((case.H_q, 2 * _REACH + 1)),
    "dropout": lambda case, draw: 0.1,
    "mask_mod": lambda case, draw: window_by_head,
    "score_mod": lambda case, draw: swish,
    "sinks": lambda case, draw: draw((case.H_q,)),
    "softcap": lambda case, draw: 20.0,
}
_BESIDE: dict[str, Callable[[Case, _Draw], dict[str, Any]]] = {
    "dropout": lambda case, draw: {"dropout_seed": draw.count(2).long()},
    "mask_mod": lambda case, draw: {"mod_tensors": ((draw.count(case.H_q) + 1) * 128,)},
}
# Those of cases: one name, or two joined by "+".
OPTIONS = ("", *_OPTIONS, "attn_bias+relative_bias")


def _cache(case: Case, draw: _Draw) -> tuple[Tensor, Tensor, CacheView]:
    """Keys and values of decoding in the case's dtype, and a full cache of them."""
    shape, dtype = (case.B, case.H_k, case.T_k, case.D), getattr(torch, case.dtype)
    lengths = torch.full((case.B,), case.T_k, dtype=torch.int32, device=draw.device)
    if case.option == "latent":
        k = draw(shape, dtype)
        v = k[..., :_LATENT]
        return k, v, view_of_tensors(k, v, lengths)
    if case.option in _CODES:
        codes_dtype, scale, largest = _CODES[case.option]
        scales = torch.full(shape[:3], scale, device=draw.device)
        in_k, in_v = (_codes(draw, shape, codes_dtype, scale, largest) for _ in range(2))
        view = view_of_tensors(in_k, in_v, lengths, k_scale=scales, v_scale=scales)
        k, v = (x if draw.empty else x.to(dtype).mul_(scale) for x in (in_k, in_v))
        return k, v, view
    k, v = draw(shape, dtype), draw(shape, dtype)
    if case.option == "":
        return k, v, view_of_tensors(k, v, lengths)
    pages = case.B * case.T_k // _PAGE
    table = torch.randperm(pages, generator=draw.generator, device=draw.device)
    in_pages = (case.B, case.H_k, -1, _PAGE, case.D)
    parts = [x.view(in_pages).transpose(1, 2).flatten(0, 1) for x in (k, v)]
    in_k, in_v = (torch.empty_like(x).index_copy_(0, table, x) for x in parts)
    table = table.view(case.B, -1).to(torch.int32)
    return k, v, view_of_tensors(in_k, in_v, lengths, block_table=table)


def _codes(
    draw: _Draw, shape: tuple[int, ...], dtype: torch.dtype, scale: float, largest: float
) -> Tensor:
    if draw.empty:
        return torch.empty(shape, device=draw.device, dtype=dtype)
    x = draw(shape, torch.bfloat16).div_(scale).clamp_(-largest, largest)
    return (x.round_() if dtype == torch.int8 else x).to(dtype)


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Unserved(Exception):
    """Raised by `prepare`: the implementation cannot serve the case; the message says why."""


@dataclass(frozen=True)
class Implementation:
    """An implementation of attention.

    serves: reason that it cannot serve a case, by sizes alone, or None. prepare: makes a function
    from q, k, v to o, differentiable if the case has a backward; raises `Unserved` for reasons that
    depend on the tensors. check: checks o against another bound than the error budget. chooses: the
    name of the implementation whose kernels it launches, if that depends on the case.
    """

    name: str
    serves: Callable[[Case], str | None]
    prepare: Callable[[Case, Inputs], Attention]
    check: Callable[[Case, Inputs, Tensor], None] | None = None
    chooses: Callable[[Case, Inputs], str] | None = None
