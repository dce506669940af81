"""FP8 attention: quantised outside the timer, checked against its own bound."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...functional.fp8 import attention_fp8, pack_values, quantize_fp8
from ...kernels.hopper.tile_table import HEAD_DIMS
from ...testing.fp8 import assert_output_within_fp8_bounds, dequantized
from .case import Case
from .correctness import rows_at_once, sampled_heads
from .inputs import Attention, Implementation, Inputs


def _serves(case: Case) -> str | None:
    """Return why it cannot serve a case, by sizes alone; the call may refuse further ones."""
    if case.family == "decode" or case.direction != "forward":
        return "FP8 has only a forward of many queries"
    if case.D not in HEAD_DIMS:
        return f"its kernels have head dims {HEAD_DIMS} only"
    if case.option or (case.lengths is not None and case.padding_side == "left"):
        return "its kernels support only key_lengths of padding and options"
    return None


def _implementation(name: str, packed: bool) -> Implementation:
    def prepare(case: Case, inputs: Inputs) -> Attention:
        (q, q_scale), (k, k_scale), (v, v_scale) = (
            quantize_fp8(x, ends) for x, ends in _with_ends(inputs)
        )
        values = pack_values(v) if packed else v
        options: dict[str, Any] = {"causal": case.causal, "window": case.window}
        options |= {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        options |= {"key_lengths": inputs.key_lengths, "out_dtype": getattr(torch, case.dtype)}
        return lambda *_: attention_fp8(q, k, values, backend="hopper", **options)

    return Implementation(name, _serves, prepare, check=_check)


def _with_ends(inputs: Inputs) -> tuple[tuple[Tensor, Tensor | None], ...]:
    """q, k and v with their lengths: scales ignore padding."""
    ends = inputs.key_lengths
    return (inputs.q, None), (inputs.k, ends), (inputs.v, ends)


def _check(case: Case, inputs: Inputs, o: Tensor) -> None:
    """o against the oracle on dequantised inputs: every element of the sampled heads."""
    assert o.isfinite().all(), "o has NaN or inf"
    G = case.H_q // case.H_k
    for b, h in sampled_heads(case):
        row, queries = slice(b, b + 1), slice(h * G, (h + 1) * G)
        heads = (queries, slice(h, h + 1), slice(h, h + 1))
        q, k, v = (
            dequantized(*quantize_fp8(x[row, head], ends if ends is None else ends[row]))
            for (x, ends), head in zip(_with_ends(inputs), heads, strict=True)
        )
        lengths = None if inputs.key_lengths is None else inputs.key_lengths[row]
        arguments: dict[str, Any] = {"causal": case.causal, "window": case.window}
        arguments["key_lengths"] = lengths
        rows = rows_at_once(case, q.dtype)
        for first in range(0, case.T_q, rows):
            chunk = slice(first, first + rows)
            arguments |= {"query_offset": case.T_k - case.T_q + first, "tensor_cores": o.is_cuda}
            assert_output_within_fp8_bounds(
                o[row, queries, chunk], q[:, :, chunk], k, v, **arguments
            )


# The first packs values in each call, the second before timing.
EIGHT_BITS = (
    _implementation("fastattn-hopper-fp8", packed=False),
    _implementation("fastattn-hopper-fp8-packed", packed=True),
)
