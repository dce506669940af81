"""Cases of the Hopper kernels: a family for each option in each direction, the most used first.

A kernel that hangs or is wrong loses the verdict on its own family, so forward's cases have no
gradients, and no case needs options of another family that it can do without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import reference
from ...functional import call_options
from ...kernels.hopper import host
from ...options import OPTIONS
from ...tuned.families import NAMES, of_call
from ..calls import made
from ..compare import assert_all_near
from ..option_examples import option_examples
from . import attention, others
from .case import Case, Setting

_HEADS, _REACH = 4, 9


class _Example(NamedTuple):
    """One of `option_examples`. alone: number of families of its options."""

    alone: int
    name: str
    one_pass: bool
    in_8_bits: bool


def _by_option() -> dict[str, list[_Example]]:
    """The examples that the kernels serve by option: those with the fewest other options."""
    q, k, v = (torch.zeros(2, _HEADS, T, 64) for T in (20, 24, 24))
    qkv = q.bfloat16(), k.bfloat16(), v.bfloat16()
    found: dict[str, list[_Example]] = {}
    for name, arguments in option_examples(_HEADS, _HEADS, 20, 24, 64, reach=_REACH).items():
        options = call_options.dense_options(q, k, v, **arguments)
        if options.attn_bias is not None:
            options = options._replace(attn_bias=options.attn_bias.bfloat16())
        if host.why_not_hopper(*qkv, options) is None:
            families = of_call("hopper", ("forward",), *qkv, options)[1:]
            one_pass = host.why_not_one_pass(q, k, options) is None
            in_8_bits = all("attention_fp8" in OPTIONS[x].calls for x in arguments)
            for family in families:
                example = _Example(len(families), name, one_pass, in_8_bits)
                found.setdefault(family.partition("+")[2], []).append(example)
    return {
        option: [x for x in found[option] if x.alone == min(found[option]).alone]
        for option in NAMES
        if option in found
    }


def _families() -> Iterator[tuple[str, Callable[[], Iterator[Case]]]]:
    """Names and cases, the most used first."""
    ways: dict[str, dict[str, Any]] = {"forward": {"backward": False}, "backward": {}}
    yield "forward", partial(attention.forward, options=False)
    yield "backward", partial(attention.backward, options=False)
    yield "backward+parts", _in_parts
    yield "one-pass", partial(attention.one_pass, options=False)
    for direction, how in ways.items():
        yield f"{direction}+packed", partial(attention.packed, **how)
    by_option = _by_option()
    for option, examples in by_option.items():
        for direction, how in ways.items():
            yield f"{direction}+{option}", partial(_of_option, option, examples, **how)
    for direction, how in ways.items():
        yield f"{direction}+head_dim", partial(_head_dims, **how)
    yield "fp8", partial(others.fp8, options=False)
    for option, examples in by_option.items():
        if served := [x for x in examples if x.in_8_bits]:
            yield f"fp8+{option}", partial(_of_fp8, served)
    yield "fp8+packed", others.fp8_packed
    for direction in ways:
        yield f"{direction}+fp32_results", partial(iter, (Case("causal", partial(_fp32, **how)),))
    yield "return_max", partial(iter, (Case("causal", _maximum),))
    one_pass = {"deterministic": False}
    yield "one-pass+packed", partial(attention.packed, **one_pass)
    for option, examples in by_option.items():
        if served := [x for x in examples if x.one_pass]:
            yield f"one-pass+{option}", partial(_of_option, option, served, **one_pass)


def _of_option(option: str, examples: list[_Example], **how: Any) -> Iterator[Case]:
    if option == "key_lengths":
        yield Case("NaN past lengths", partial(attention.past_lengths, causal=True, **how))
    for example in examples:
        quick = example is examples[0] and option != "key_lengths"
        check: Callable[..., float] = partial(_with_example, name=example.name, **how)
        yield Case(f"{example.name}, causal", partial(check, causal=True), quick=quick)
        yield Case(example.name, check, quick=False)


def _with_example(setting: Setting, *, name: str, **how: Any) -> float:
    T_q, T_k = setting.lengths
    # Rows of a bias are at multiples of 16 bytes. Heads with their own masks share no keys.
    T_k += -T_k % 8 if name.startswith("bias") else 0
    H_k = _HEADS if name.startswith("mask") else _HEADS // 2
    examples = option_examples(_HEADS, H_k, T_q, T_k, setting.subject.head_dim, reach=_REACH)
    sizes = {"H_q": _HEADS, "H_k": H_k, "T_q": T_q, "T_k": T_k}
    return setting.compare(sizes=sizes, **{**examples[name], **how})


def _in_parts() -> Iterator[Case]:
    """dK and dV of one K/V head, whose tiles of keys several programs share."""
    sizes = {"B": 1, "H_q": 32, "H_k": 1, "T_q": 300, "T_k": 333}
    for name, causal in (("causal", True), ("full", False)):
        yield Case(name, partial(Setting.compare, sizes=sizes, causal=causal))


def _head_dims(**how: Any) -> Iterator[Case]:
    """Three quarters of a class, as D 96, and narrower values, as 192 and 128."""
    for name, narrower in (("three quarters", False), ("narrower values", True)):
        yield Case(name, partial(_head_dim, narrower=narrower, causal=True, **how))


def _head_dim(setting: Setting, *, narrower: bool, **how: Any) -> float:
    widest = setting.subject.head_dim
    D = widest * 3 // 4
    return setting.compare(sizes={"D": D, "D_v": max(40, widest // 2) if narrower else D}, **how)


def _of_fp8(examples: list[_Example]) -> Iterator[Case]:
    for name in (x.name for x in examples):
        yield Case(name, partial(others.fp8_example, names=("causal", name)))


def _fp32(setting: Setting, *, backward: bool = True) -> float:
    """Attention to a part of the keys, whose results stay in fp32."""
    part = made(*setting.qkv())._replace(alone={"out_dtype": torch.float32})
    return setting.check("attention_block", part, causal=True, backward=backward)


def _maximum(setting: Setting) -> float:
    """o, lse and the largest score of each row."""
    q, k, v = setting.qkv(requires_grad=False)
    seen = reference.visible_mask(q.shape[2], k.shape[2], causal=True, device=q.device)

    def run(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        wide = (x.to(dtype) for x in (q, k, v))
        scores = q.to(dtype) @ k.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        largest = (scores * q.shape[3] ** -0.5).masked_fill(~seen, -torch.inf).amax(-1)
        return *reference.attention(*wide, causal=True, return_lse=True), largest

    ours = setting.attention(q, k, v, causal=True, return_lse=True, return_max=True)
    return assert_all_near(
        ("o", "lse", "max"), ours, run(torch.float64), lambda: run(setting.dtype)
    )


FAMILIES = dict(_families())
