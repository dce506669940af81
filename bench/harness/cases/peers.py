"""Peers: FlexAttention, flash-attn 2, 3 and 4.

A missing peer gives that as its reason for each case, so that reports name it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .case import Case
from .inputs import Attention, Implementation, Inputs


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def why_no_option(case: Case) -> str | None:
    """Reason that torch's own functions cannot serve a case's option, or None."""
    return None if case.option in ("", "documents") else f"it has no {case.option}"


def _flex_serves(case: Case) -> str | None:
    if case.device != "cuda":
        return "measured on a GPU only"
    if case.dtype == "float32":
        return "its products would be TF32, which the error budget of float32 excludes"
    return why_no_option(case)


def _flex_prepare(case: Case, inputs: Inputs) -> Attention:
    import torch._functorch.config as functorch_config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Each shape resets the count of recompilations. A repeated backward cannot donate its saved
    # tensors.
    torch.compiler.reset()
    functorch_config.donated_buffer = False
    mask_mod = _flex_mask(case, inputs)
    block_mask = None
    if mask_mod is not None:
        B = case.B if case.lengths or case.option else None
        sizes = (B, None, case.T_q, case.T_k)
        block_mask = create_block_mask(mask_mod, *sizes, device=inputs.q.device)
    compiled = torch.compile(flex_attention, dynamic=False)

    grouped = case.H_q != case.H_k
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask, enable_gqa=grouped)


def _flex_mask(case: Case, inputs: Inputs) -> Callable[..., Tensor] | None:
    """The case's mask in FlexAttention's form; None = all visible."""
    offset = case.T_k - case.T_q
    left, right = case.window or (None, None)
    right = 0 if case.causal else right
    lengths, padding = inputs.key_lengths, inputs.key_padding_mask
    documents = inputs.option.get("documents")
    if not ((case.causal and case.T_q > 1) or case.window or case.lengths or case.option):
        return None

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        keep = j >= 0
        if left is not None:
            keep = keep & (i + offset - j <= left)
        if right is not None:
            keep = keep & (j - i - offset <= right)
        if lengths is not None:
            keep = keep & (j < lengths[b])
        if padding is not None:
            keep = keep & padding[b, j]
        if documents is not None:
            keep = keep & (documents[b, i] == documents[b, j])
        return keep

    return mask_mod


def _flash(name: str, module: str, unbounded: int | None, least: int) -> Implementation:
    """flash_attn_func of a module, for [B, T, H, D]; it may return (o, lse).

    unbounded: its value for an unbounded side of a window. least: least compute capability.
    """

    def serves(case: Case) -> str | None:
        if not _installed(module):
            return f"{module} is not installed"
        if case.device != "cuda":
            return "it needs a GPU"
        if case.dtype == "float32":
            return "it takes float16 and bfloat16 only"
        if case.lengths is not None or case.option:
            return "it takes packed sequences only, and no options"
        if torch.cuda.get_device_capability()[0] < least:
            return f"it needs a GPU of compute capability {least}.0 or later"
        return None

    def prepare(case: Case, inputs: Inputs) -> Attention:
        function: Callable[..., Any] = import_module(module).flash_attn_func
        sides = (unbounded if side is None else side for side in case.window or ())
        window = {"window_size": tuple(sides)} if case.window else {}

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = (x.transpose(1, 2) for x in (q, k, v))
            result = function(*rows, causal=case.causal, **window)
            o: Tensor = result[0] if isinstance(result, tuple) else result
            return o.transpose(1, 2)

        return call

    return Implementation(name, serves, prepare)


PEERS: tuple[Implementation, ...] = (
    Implementation("flex", _flex_serves, _flex_prepare),
    _flash("flash-attn-2", "flash_attn", -1, 8),
    _flash("flash-attn-3", "flash_attn_interface", -1, 9),
    _flash("flash-attn-4", "flash_attn.cute", None, 9),
)
