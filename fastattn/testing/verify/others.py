"""Cases of statistics, selected blocks and FP8."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ...functional.fp8 import attention_fp8, attention_varlen_fp8, pack_values, quantize_fp8
from ...functional.selected import selected_attention
from ...ops import fp8 as fp8_ops
from ...ops.gradients import as_packed
from ..budget import assert_all_within_budget
from ..compare import assert_matches_reference
from ..fp8 import assert_packed_within_fp8_bounds, assert_within_fp8_bounds, dequantized
from ..inputs import draw, to_device
from ..option_examples import option_examples
from ..orders import worst_naive
from .case import Case, Setting, same_bits
from .scoring import assert_statistics

_B, _H_Q, _H_K = 2, 2, 1
_MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window, lengths": {"window": (9, 2), "key_lengths": torch.tensor([20, 9])},
}
_SCORES: dict[str, dict[str, Any]] = {
    "softcap, sinks": {"softcap": 2.0, "sinks": draw(_H_Q), "causal": True},
    "alibi": {"alibi_slopes": draw(_H_Q).abs()},
    "relative bias": {"relative_bias": draw(_H_Q, 7)},
}


def statistics() -> Iterator[Case]:
    """Entropy, weight received, the largest weights, and the weights."""
    for name, options in {**_MASKS, **_SCORES}.items():
        quick = name in ("causal", "softcap, sinks")
        case = partial(_statistics, options=options)
        yield Case(name, case, quick=quick, interpreted=name == "softcap, sinks")


def selected() -> Iterator[Case]:
    """o, lse and gradients over lists of key blocks, shared by heads or per head."""
    for name, sizes in {"tokens": (1, (1, 16)), "blocks": (_H_Q, (16, 8))}.items():
        case = partial(_selected, H_s=sizes[0], block=sizes[1])
        yield Case(name, case, quick=True, interpreted=name == "tokens")


def fp8(options: bool = True) -> Iterator[Case]:
    """Codes and packed values bitwise, and attention within the FP8 bounds.

    options: also with masks and changes of scores, and packed.
    """
    yield Case("codes", _codes, interpreted=True)
    yield Case("packed values", _packed_values, interpreted=True)
    names = ("full", "causal", "window, lengths", "softcap, sinks")[: None if options else 2]
    for name in names:
        check = partial(_fp8, options={**_MASKS, **_SCORES}[name])
        yield Case(name, check, interpreted=name == "causal")
    if options:
        yield from fp8_packed()
    yield Case("20 repeats", _fp8_repeats)


def fp8_packed() -> Iterator[Case]:
    """Packed sequences in 8 bits."""
    yield Case("packed", _fp8_packed, interpreted=True)


def fp8_example(setting: Setting, *, name: str, reach: int) -> float:
    """Check `attention_fp8` with one of `option_examples`."""
    T_q, T_k = (x.shape[2] for x in _numbers(setting)[:2])
    examples = option_examples(_H_Q, _H_K, T_q, T_k, setting.subject.head_dim, reach=reach)
    return _fp8(setting, options={"causal": True, **examples[name]})


def _statistics(setting: Setting, *, options: dict[str, Any]) -> float:
    q, k, _ = _numbers(setting)
    return assert_statistics(q, k, setting.subject.backend, to_device(options, setting.device))


def _numbers(setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v."""
    T_q, T_k = (18, 21) if setting.small else (70, 90)
    sizes = {"B": _B, "H_q": _H_Q, "H_k": _H_K, "T_q": T_q, "T_k": T_k}
    return setting.qkv(**sizes, requires_grad=False)


def _selected(setting: Setting, *, H_s: int, block: tuple[int, int]) -> float:
    q, k, v = (x.requires_grad_() for x in _numbers(setting))
    shape = (_B, H_s, -(-q.shape[2] // block[0]), 3)
    numbers = torch.Generator().manual_seed(3)
    indices = torch.randint(-1, -(-k.shape[2] // block[1]), shape, generator=numbers)
    indices = indices.to(setting.device, torch.int32)
    keep = reference.selected_mask(indices, block, _H_Q, q.shape[2], k.shape[2], None)
    how: dict[str, Any] = {"block": block, "backend": setting.subject.backend}
    return assert_matches_reference(
        partial(selected_attention, indices=indices, **how), q, k, v,
        oracle=partial(reference.attention, attn_mask=keep), causal=True,
    )  # fmt: skip


def _codes(setting: Setting) -> float:
    """Quantize heads of different magnitudes, with shorter rows; compare codes with torch's."""
    x, _, _ = _numbers(setting)
    x = x * torch.tensor([1.0, 1e3], device=setting.device, dtype=x.dtype)[:, None, None]
    lengths = torch.tensor([x.shape[2], x.shape[2] // 3])
    codes, scale = quantize_fp8(x.cpu(), lengths)
    actual, actual_scale = fp8_ops.quantize(x, lengths.to(setting.device), None, False)
    assert torch.equal(actual_scale.cpu(), scale), "scales differ from torch's"
    assert torch.equal(actual.cpu().float(), codes.float()), "codes differ from torch's"
    return 0.0


def _packed_values(setting: Setting) -> float:
    (_, _, v), _ = _fp8_inputs(setting)
    expected = pack_values(v.cpu()).codes
    assert torch.equal(fp8_ops.pack(v).cpu().float(), expected.float()), "values are out of place"
    return 0.0


def _fp8_inputs(setting: Setting) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Codes of q, k and v, and their scales by name."""
    (q, q_scale), (k, k_scale), (v, v_scale) = map(quantize_fp8, _numbers(setting))
    return (q, k, v), {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}


def _fp8(setting: Setting, *, options: dict[str, Any]) -> float:
    codes, scales = _fp8_inputs(setting)
    options = to_device(options, setting.device)
    how: dict[str, Any] = {**scales, **options, "backend": setting.subject.backend}
    o, lse = attention_fp8(*codes, **how, out_dtype=setting.dtype, return_lse=True)
    if setting.subject.backend == "hopper":
        all_scales = tuple(scales.values())
        return assert_within_fp8_bounds(o, lse, codes, all_scales, tensor_cores=True, **options)
    # Other kernels dequantise first, and take weights in the dtype of the output.
    numbers = [dequantized(*both) for both in zip(codes, scales.values(), strict=True)]
    exact = reference.attention(*numbers, return_lse=True, **options)
    rounded = [x.to(setting.dtype) for x in numbers]
    naive = worst_naive(exact, lambda: reference.attention(*rounded, return_lse=True, **options))
    return assert_all_within_budget(("o", "lse"), (o, lse), exact, naive)


def _fp8_packed(setting: Setting) -> float:
    """Quantize two packed sequences, compare codes and scales with torch's, and attend in each."""
    q, k, v = (as_packed(x[:1]) for x in _numbers(setting))
    of_q, of_k = (
        torch.tensor([0, len(x) // 3, len(x)], device=x.device, dtype=torch.int32) for x in (q, k)
    )
    (q, q_scale), (k, k_scale), (v, v_scale) = (
        _packed_codes(x, cu_seqlens) for x, cu_seqlens in ((q, of_q), (k, of_k), (v, of_k))
    )
    o, lse = attention_varlen_fp8(
        q, k, v, of_q, of_k, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, causal=True,
        return_lse=True, out_dtype=setting.dtype, backend=setting.subject.backend,
    )  # fmt: skip
    if setting.subject.backend == "hopper":
        scales = (q_scale, k_scale, v_scale)
        return assert_packed_within_fp8_bounds(
            o, lse, (q, k, v), scales, (of_q, of_k), tensor_cores=True, causal=True
        )
    q, k, v = (
        dequantized(q, q_scale, of_q), dequantized(k, k_scale, of_k), dequantized(v, v_scale, of_k)
    )  # fmt: skip

    def attend(*numbers: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = numbers
        return reference.attention_varlen(q, k, v, of_q, of_k, return_lse=True, causal=True)

    exact = attend(q, k, v)
    naive = worst_naive(exact, lambda: attend(*(x.to(setting.dtype) for x in (q, k, v))))
    return assert_all_within_budget(("o", "lse"), (o, lse), exact, naive)


def _packed_codes(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of packed sequences, bitwise equal to torch's."""
    codes, scale = quantize_fp8(x, cu_seqlens=cu_seqlens)
    expected, expected_scale = quantize_fp8(x.cpu(), cu_seqlens=cu_seqlens.cpu())
    assert torch.equal(scale.cpu(), expected_scale), "scales differ from torch's"
    assert torch.equal(codes.cpu().float(), expected.float()), "codes differ from torch's"
    return codes, scale


def _fp8_repeats(setting: Setting) -> float:
    codes, scales = _fp8_inputs(setting)
    scales["backend"] = setting.subject.backend
    return same_bits(lambda: (attention_fp8(*codes, **scales, causal=True),))
