"""Random tensors of a case, and `Implementation`: what computes attention on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .case import Case

# Options of `attention`, one name or two joined by "+", for each class of calls with its own tiles.
OPTIONS = ("", "alibi_slopes", "attn_bias", "relative_bias", "attn_mask", "attn_bias+relative_bias")
_REACH = 128  # distances in a table of relative biases


@dataclass
class Inputs:
    """The tensors of a case.

    q, k, v, do: [B, H, T, D] in the case's dtype and memory order, unit normal; q, k and v require
    grad if the case has a backward. Padding, if any, is key_lengths int32 [B] or key_padding_mask
    bool [B, T_k]. option: the case's option tensors by name.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    key_lengths: Tensor | None = None
    key_padding_mask: Tensor | None = None
    option: dict[str, Tensor] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Padding and option as arguments of `fastattn.attention`."""
        return {**self.padding(), **self.option}

    def padding(self) -> dict[str, Any]:
        """The padding as arguments of `fastattn.attention`."""
        return {"key_lengths": self.key_lengths, "key_padding_mask": self.key_padding_mask}


def make_inputs(case: Case, *, empty: bool = False) -> Inputs:
    """Draw the tensors of a case, the same each time; empty: leave q, k, v and do uninitialised."""
    device = torch.device(case.device)
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def draw(H: int, T: int) -> Tensor:
        shape = (case.B, T, H, case.D) if case.layout == "bthd" else (case.B, H, T, case.D)
        x = torch.empty(shape, device=device, dtype=dtype)
        if not empty:
            x = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return x.transpose(1, 2) if case.layout == "bthd" else x

    needs_grad = case.direction != "forward"
    q, do = draw(case.H_q, case.T_q), draw(case.H_q, case.T_q)
    k, v = draw(case.H_k, case.T_k), draw(case.H_k, case.T_k)
    q, k, v = (x.detach().requires_grad_(needs_grad) for x in (q, k, v))
    inputs = Inputs(q, k, v, do)
    if case.lengths is not None:
        lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
        if case.padding_side == "right":
            inputs.key_lengths = lengths
        else:
            keys = torch.arange(case.T_k, device=device)
            inputs.key_padding_mask = keys >= case.T_k - lengths[:, None]
    shapes: dict[str, tuple[int, ...]] = {
        "alibi_slopes": (case.H_q,),
        "attn_bias": (1, case.H_q, case.T_q, case.T_k),
        "attn_mask": (1, 1, case.T_q, case.T_k),  # bool
        "relative_bias": (case.H_q, 2 * _REACH + 1),
    }
    assert case.option in OPTIONS, case.option
    for name in filter(None, case.option.split("+")):
        wide = dtype if name == "attn_bias" else torch.float32
        x = torch.randn(shapes[name], generator=generator, device=device, dtype=wide)
        inputs.option[name] = x > -1 if name == "attn_mask" else x
    return inputs


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Unserved(Exception):
    """Raised by `prepare`: the implementation cannot serve the case; the message says why."""


@dataclass(frozen=True)
class Implementation:
    """An implementation of attention.

    serves: reason that it cannot serve a case, by sizes alone, or None. prepare: makes a function
    from q, k, v to o, differentiable if the case has a backward; raises `Unserved` for reasons that
    depend on the tensors. check: checks o against another bound than the error budget.
    """

    name: str
    serves: Callable[[Case], str | None]
    prepare: Callable[[Case, Inputs], Attention]
    check: Callable[[Case, Inputs, Tensor], None] | None = None
