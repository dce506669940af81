"""Cases of statistics, selected blocks and FP8."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...functional.fp8 import attention_fp8, attention_varlen_fp8, pack_values, quantize_fp8
from ...ops import fp8 as fp8_ops
from ..calls import Draw, Made, block_lists, made, packed_rows, quantized
from ..fp8 import assert_packed_within_fp8_bounds, assert_within_fp8_bounds
from ..inputs import to_device
from ..option_examples import option_examples, together
from .case import Case, Setting, same_bits
from .scoring import assert_statistics

_B, _H_Q, _H_K, _REACH = 2, 2, 1, 9
# Names of `option_examples`, by cases of statistics; those of FP8 first.
_EXAMPLES: dict[str, tuple[str, ...]] = {
    "full": (),
    "causal": ("causal",),
    "window, lengths": ("window", "lengths"),
    "softcap, sinks": ("softcap", "sinks", "causal"),
    "alibi": ("alibi",),
    "relative bias": ("relative-bias",),
}


def statistics() -> Iterator[Case]:
    """Entropy, weight received, the largest weights, and the weights."""
    for name, names in _EXAMPLES.items():
        quick = name in ("causal", "softcap, sinks")
        case = partial(_statistics, names=names)
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
    for name in list(_EXAMPLES)[: 4 if options else 2]:
        check = partial(fp8_example, names=_EXAMPLES[name])
        yield Case(name, check, interpreted=name == "causal")
    if options:
        yield from fp8_packed()
    yield Case("20 repeats", _fp8_repeats)


def fp8_packed() -> Iterator[Case]:
    """Packed sequences in 8 bits."""
    yield Case("packed", _fp8_packed, interpreted=True)


def fp8_example(setting: Setting, *, names: tuple[str, ...]) -> float:
    """Check `attention_fp8` with some of `option_examples`."""
    given, options = _fp8_inputs(setting), _options(setting, names)
    if setting.subject.backend != "hopper":
        return setting.check("attention_fp8", given, **options)
    o, lse = attention_fp8(**given.arguments, **options, return_lse=True, backend="hopper")
    how = {"tensor_cores": True, **options}
    return assert_within_fp8_bounds(o, lse, *_codes_and_scales(given), **how)


def _statistics(setting: Setting, *, names: tuple[str, ...]) -> float:
    q, k, _ = _numbers(setting)
    return assert_statistics(q, k, setting.subject.backend, _options(setting, names))


def _options(setting: Setting, names: tuple[str, ...]) -> dict[str, Any]:
    T_q, T_k = (x.shape[2] for x in _numbers(setting)[:2])
    examples = option_examples(_H_Q, _H_K, T_q, T_k, setting.subject.head_dim, reach=_REACH)
    return to_device(together(examples, names), setting.device)


def _numbers(setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v."""
    T_q, T_k = (18, 21) if setting.small else (70, 90)
    sizes = {"B": _B, "H_q": _H_Q, "H_k": _H_K, "T_q": T_q, "T_k": T_k}
    return setting.qkv(**sizes, requires_grad=False)


def _selected(setting: Setting, *, H_s: int, block: tuple[int, int]) -> float:
    q, k, v = (x.requires_grad_() for x in _numbers(setting))
    lists = block_lists(Draw("lists"), q, k, H_s, block, 3)
    return setting.check("selected_attention", made(q, k, v, **lists), causal=True)


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
    v = _fp8_inputs(setting).qkv[2]
    expected = pack_values(v.cpu()).codes
    assert torch.equal(fp8_ops.pack(v).cpu().float(), expected.float()), "values are out of place"
    return 0.0


def _fp8_inputs(setting: Setting) -> Made:
    return quantized(*_numbers(setting))


def _codes_and_scales(given: Made) -> Any:
    return given.qkv, tuple(given.alone[f"{name}_scale"] for name in "qkv")


def _fp8_packed(setting: Setting) -> float:
    """Quantize two packed sequences, compare codes and scales with torch's, and attend in each."""
    rows = packed_rows(*(x[:1] for x in _numbers(setting)))
    offsets = [
        torch.tensor([0, len(x) // 3, len(x)], device=x.device, dtype=torch.int32) for x in rows[:2]
    ]
    given, by_torch = (
        quantized(*(x.to(device) for x in rows), cu_seqlens_q=of_q, cu_seqlens_k=of_k)
        for device in (setting.device, "cpu")
        for of_q, of_k in [(x.to(device) for x in offsets)]
    )
    (codes, scales), (expected, expected_scales) = map(_codes_and_scales, (given, by_torch))
    assert all(map(torch.equal, (x.cpu() for x in scales), expected_scales)), "scales differ"
    same = (torch.equal(x.cpu().float(), y.float()) for x, y in zip(codes, expected, strict=True))
    assert all(same), "codes differ from torch's"
    if setting.subject.backend != "hopper":
        return setting.check("attention_varlen_fp8", given, causal=True)
    o, lse = attention_varlen_fp8(**given.arguments, causal=True, return_lse=True, backend="hopper")
    how: dict[str, Any] = {"tensor_cores": True, "causal": True}
    return assert_packed_within_fp8_bounds(o, lse, codes, scales, (offsets[0], offsets[1]), **how)


def _fp8_repeats(setting: Setting) -> float:
    arguments = {**_fp8_inputs(setting).arguments, "backend": setting.subject.backend}
    return same_bits(lambda: (attention_fp8(**arguments, causal=True),))
