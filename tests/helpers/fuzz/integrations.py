"""Functions of other projects, as integrations have them, called as `attention` is."""

import math
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, reduce
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask

from fastattn import attention, dispatch, reference
from fastattn.compat import diffusers, flex_attention, sdpa, xformers
from fastattn.compat.flash_attn import version_2, version_3, version_4
from fastattn.compat.transformers import hf_attention
from fastattn.functional import fused_attention
from fastattn.testing.calls import Draw

from . import mods
from .cases import Case

Given = dict[str, Any]
Function = Callable[..., Any]


class Integration(NamedTuple):
    """Makes a function in the signature of `attention` for a case.

    lse: whether it is returned on request. packs: whether packed sequences have a function too.
    spoils: whether NaN in hidden keys reaches results, with these options. values: of options, in
    place of those of `attention`.
    """

    make: Callable[[Case, Draw], Function]
    lse: bool = False
    packs: bool = False
    spoils: Callable[[set[str]], object] = lambda names: False
    values: Mapping[str, Function] = MappingProxyType({})


def stand_in(case: Case) -> tuple[Case, Function]:
    """The call that an integration's function replaces, and that function in its signature."""
    draw, integration = case.random("integration"), INTEGRATIONS[case.call]
    packed = integration.packs and draw.chance(0.4)
    traits = case.traits if integration.lse else (case.traits | {"o"}) - {"lse", "spoilt"}
    traits -= {"nan"} if integration.spoils({*case.options}) else set()
    case = replace(case, call="attention_varlen" if packed else "attention", traits=traits)
    return case, integration.make(case, draw)


def _flash_attn(case: Case, draw: Draw) -> Function:
    names = set(case.options)
    modules: list[Any] = [version_2]
    if "alibi_slopes" not in names:
        modules += [version_4] if "sinks" in names else [version_3, version_4]
    module = draw.choice(*modules)
    beside = draw.choice({}, _WITHOUT_EFFECT) if module is version_2 else {}
    flag = "return_attn_probs" if module is version_3 else "return_lse"

    def call(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **given: Any) -> Any:
        theirs = by_flash_attn(given, None if module is version_4 else -1) | beside
        if return_lse:
            theirs[flag] = True
        if case.packed:
            longest = {"max_seqlen_q": q.shape[0], "max_seqlen_k": k.shape[0]}
            result = module.flash_attn_varlen_func(q, k, v, **longest, **theirs)
        else:
            result = module.flash_attn_func(*_turned(q, k, v), **theirs)
        o = result[0] if isinstance(result, tuple) else result
        o = o if case.packed else o.transpose(1, 2)
        return (o, result[1]) if return_lse else o

    return call


def by_flash_attn(given: Given, none: int | None = -1) -> Given:
    """A call's options by flash-attn's names; none: a window's side without an end."""
    given = given | {"window": tuple(none if side is None else side for side in _sides(given))}
    return {_FLASH.get(name, name): x for name, x in given.items()}


_FLASH = {"scale": "softmax_scale", "window": "window_size", "sinks": "learnable_sink"}
_WITHOUT_EFFECT = {"num_splits": 3, "pack_gqa": True, "qv": None, "attention_chunk": 0}


def _turned(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def _sides(given: Given) -> tuple[int | None, int | None]:
    """Keys that a query sees before and after it, by a call's window."""
    window = given.get("window", (None, None))
    return (window - 1, 0) if isinstance(window, int) else window


def _one_mask(case: Case, given: Given) -> Tensor | None:
    """Take the masks and the bias from a call, as one mask: bool, or float, -inf where hidden."""
    bias, mask = given.pop("attn_bias", None), given.pop("attn_mask", None)
    if mask is not None and mask.is_floating_point():
        bias, mask = mask, None
    rules = {x: given.pop(x) for x in ("causal", "window", "key_padding_mask") if x in given}
    if rules:
        with torch.device(case.device):
            seen = reference.visible_mask(case.T_q, case.T_k, **rules)
        mask = seen if mask is None else seen & mask
    if bias is not None:
        if bias.dtype != case.dtype or "autocast" in case.traits:  # as torch takes it beside q
            bias = bias.to(torch.promote_types(case.dtype, torch.float32))
        mask = bias if mask is None else torch.where(mask, bias, -math.inf)
    return None if mask is None else mask[(None,) * (4 - mask.dim())]


def _sdpa(case: Case, draw: Draw) -> Function:
    """torch's function in 3, 4 or 5 dims, as if every case had kernels."""
    dims, at = draw.choice(4, 5, 3 if case.B == 1 else 4), draw.choice(0, 1)
    as_bias, upper = draw.chance(0.5), case.T_q == case.T_k and draw.chance(0.5)
    bias_class = causal_upper_left if upper else causal_lower_right

    def to(x: Tensor) -> Tensor:
        return x if dims == 4 else x.unsqueeze(at) if dims == 5 else x[0]

    def call(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **given: Any) -> Tensor:
        by_flag = not {"attn_mask", "attn_bias"} & given.keys() and case.T_q <= case.T_k
        mask: Any = None
        causal = by_flag and given.pop("causal", False)
        if causal and (case.T_q != case.T_k or as_bias):
            causal, mask = False, bias_class(case.T_q, case.T_k)
        elif not causal and (whole := _one_mask(case, given)) is not None:
            mask = to(whole)
        tensors, theirs = [to(x) for x in (q, k, v)], _named(case, given)
        ours = mock.Mock(side_effect=partial(attention, backend=case.backend))
        with (
            mock.patch.dict(os.environ, {dispatch.ENVIRONMENT: ""}),
            mock.patch.object(dispatch, "why_not_triton", lambda *_: None),
            mock.patch.object(fused_attention, "attention", ours),
        ):
            o = sdpa.scaled_dot_product_attention(*tensors, mask, is_causal=causal, **theirs)
        assert ours.called or 0 in (q.numel(), k.numel(), v.numel())
        return o if dims == 4 else o.squeeze(at) if dims == 5 else o[None]

    return call


def _named(case: Case, given: Given) -> Given:
    """Further arguments of a call, by torch's names; what the call does not need is left out."""
    theirs = {"dropout_p" if name == "dropout" else name: x for name, x in given.items()}
    return theirs | ({"enable_gqa": True} if case.G > 1 else {})


def _diffusers(case: Case, draw: Draw) -> Function:
    as_bias = draw.chance(0.5)

    def call(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **given: Any) -> Any:
        masks, mask = given.keys() - {"dropout", "scale"}, None
        if masks == {"key_padding_mask"}:
            mask = given.pop("key_padding_mask")
            if as_bias and not {"nan", "spoilt"} & case.traits:
                mask = torch.where(mask, 0.0, -math.inf)
        elif masks == {"causal"} and case.T_q == case.T_k:
            given["is_causal"] = given.pop("causal")
        else:
            mask = _one_mask(case, given)
        theirs = _named(case, given) | ({"return_lse": True} if return_lse else {})
        results = diffusers.attend(*_turned(q, k, v), mask, **theirs)
        return tuple(_turned(*results)) if return_lse else results.transpose(1, 2)

    return call


# Classes of xformers by causal, and whether there is a window.
_BIASES = {
    (True, False): "LowerTriangularFromBottomRightMask",
    (True, True): "LowerTriangularFromBottomRightLocalAttentionMask",
    (False, True): "LocalAttentionFromBottomRightMask",
}


def _xformers(case: Case, draw: Draw) -> Function:
    """Heads of keys are expanded, as its users do, in 4 or 5 dims."""
    grouped, groups = draw.chance(0.5), (case.H_k, case.G)

    def heads(x: Tensor) -> Tensor:
        x = x.unflatten(2, (case.H_k, -1)).expand(-1, -1, *groups, -1)
        return x if grouped else x.flatten(2, 3)

    def bias_of(given: Given) -> Any:
        causal, window, sides = given.get("causal", False), given.get("window"), _sides(given)
        windowed = sides != (None, None)
        if not {"attn_bias", "attn_mask"} & given.keys():
            if causal and not windowed and case.T_q == case.T_k:
                return type("LowerTriangularMask", (), {})()
            if causal and (not windowed or isinstance(window, int)):
                return type(_BIASES[True, windowed], (), {"_window_size": window})()
            if windowed and not causal and None not in sides:
                fields = dict(zip(("window_left", "window_right"), sides, strict=True))
                return type(_BIASES[False, True], (), fields)()
        mask = _one_mask(case, given)
        if mask is None:
            return None
        if mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, -math.inf)
        if not grouped:
            return mask
        return mask.unsqueeze(1) if mask.shape[1] == 1 else mask.unflatten(1, groups)

    def call(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **given: Any) -> Tensor:
        theirs = {
            {"dropout": "p"}.get(x, x): given.pop(x) for x in ("dropout", "scale") if x in given
        }
        tensors, bias = [heads(x) for x in _turned(q, k, v)], bias_of(given)
        o = xformers.memory_efficient_attention(*tensors, bias, **theirs)
        return (o.flatten(2, 3) if grouped else o).transpose(1, 2)

    return call


def _transformers(case: Case, draw: Draw) -> Function:
    """A layer's call: without a mask of four dims, which has them in its entries, rules count."""
    module, said = nn.Module(), draw.chance(0.5)
    names = {"scale": "scaling", "sinks": "s_aux", "attn_bias": "position_bias"}

    def call(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **given: Any) -> Tensor:
        causal, window, mask = given.get("causal", False), given.get("window"), None
        # A layer has one window for both sides, and one that is not causal sees ahead.
        rule = _sides(given) == (None, None) or (causal and isinstance(window, int))
        if rule and "attn_mask" not in given:
            given = {name: x for name, x in given.items() if name not in ("causal", "window")}
            if isinstance(window, int):
                given["sliding_window"] = window
            mask = given.pop("key_padding_mask", None)
            if mask is None and causal:
                mask = torch.ones(case.B, case.T_k, dtype=torch.int64, device=case.device)
            if mask is not None and not said:
                mask = mask.long()
        else:
            causal, bias = False, {x: given.pop(x) for x in ("attn_bias",) if x in given}
            mask = _one_mask(case, given)
            given |= bias
        if "scale" in given and said and case.dtype.itemsize > 2:
            given["scale"] = torch.tensor(given["scale"], device=case.device)
        module.is_causal = causal if not said else not causal  # type: ignore[assignment]
        theirs = {names.get(name, name): x for name, x in given.items()}
        theirs |= {"is_causal": causal} if said else {}
        o, weights = hf_attention.attention_forward(module, q, k, v, mask, **theirs)
        assert weights is None and o.is_contiguous()
        return o.transpose(1, 2)

    return call


# Masks of FlexAttention by option: of its value, the call's options, and the place of query 0.
_MASKS: dict[str, Callable[[Any, Given, int], Function]] = {
    "causal": lambda x, given, at: (
        lambda b, h, i, j: (j <= i + at) | (j < _entry(given.get("prefix_lengths", 0), b))
    ),
    "left": lambda x, given, at: lambda b, h, i, j: i + at - j <= x,
    "right": lambda x, given, at: lambda b, h, i, j: j - i - at <= x,
    "key_padding_mask": lambda x, given, at: lambda b, h, i, j: x[b, j],
    "key_lengths": lambda x, given, at: lambda b, h, i, j: j < x[b],
    "documents": lambda x, given, at: (
        lambda b, h, i, j: (x[0][b, i] == x[1][b, j]) & (x[1][b, j] >= 0)
    ),
    "mask_mod": lambda x, given, at: lambda b, h, i, j: x(b, h, i + at, j),
}
# Changes of scores, in the order of `attention`.
_SCORES: dict[str, Callable[[Any, int], Function]] = {
    "softcap": lambda x, at: lambda s, b, h, i, j: x * torch.tanh(s / x),
    "alibi_slopes": lambda x, at: lambda s, b, h, i, j: s - _slope(x, b, h) * (i + at - j).abs(),
    "attn_bias": lambda x, at: lambda s, b, h, i, j: s + x[b, h, i, j],
    "score_mod": lambda x, at: lambda s, b, h, i, j: x(s, b, h, i + at, j),
}


def _entry(x: Any, b: Tensor) -> Any:
    return x[b] if isinstance(x, Tensor) else x


def _slope(slopes: Tensor, b: Tensor, h: Tensor) -> Tensor:
    return slopes[b, h] if slopes.dim() == 2 else slopes[h]


def _flex_attention(case: Case, draw: Draw) -> Function:
    """Every option is a function of positions, with the tensors that it reads."""
    at, block, shared = case.T_k - case.T_q, draw.choice(1, 4, 16, 128), draw.chance(0.3)
    sizes = (case.B, case.H_q, case.T_q, case.T_k)

    def call(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **given: Any) -> Any:
        documents, sides = (
            given.get("documents"),
            zip(("left", "right"), _sides(given), strict=True),
        )
        given |= {name: side for name, side in sides if side is not None}
        if isinstance(documents, Tensor):
            given["documents"] = (documents, documents)
        if "attn_bias" in given:  # gradients are summed in its dtype
            wide = torch.promote_types(case.dtype, torch.float32)
            given["attn_bias"] = given["attn_bias"] + torch.zeros(
                sizes, dtype=wide, device=case.device
            )
        if not given.get("causal", True):
            del given["causal"]
        masks = [make(given[x], given, at) for x, make in _MASKS.items() if x in given]
        changes = [make(given[x], at) for x, make in _SCORES.items() if x in given]

        def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
            return reduce(operator.and_, (x(b, h, i, j) for x in masks))

        def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return reduce(lambda s, change: change(s, b, h, i, j), changes, s)

        block_mask = None
        if masks:
            alike = shared and not _OF_ROWS & given.keys()
            rows = (None, None) if alike else sizes[:2]
            how = {"device": case.device, "BLOCK_SIZE": block}
            block_mask = create_block_mask(mask_mod, *rows, *sizes[2:], **how)
        return flex_attention.flex_attention(
            q, k, v, score_mod if changes else None, block_mask, given.get("scale"),
            enable_gqa=case.G > 1, return_lse=return_lse,
        )  # fmt: skip

    return call


_PADDED, _OTHER_MASKS = {"key_padding_mask"}, {"causal", "window", "attn_mask", "attn_bias"}
_HIDDEN = {*_PADDED, "key_lengths", "documents"}
_OF_ROWS = {*_HIDDEN, "mask_mod", "prefix_lengths"}
# Values of options that torch's functions can be.
_OF_TORCH: dict[str, Function] = {
    "mask_mod": lambda *_: mods.of_scope, "score_mod": lambda *_: mods.ramped,
}  # fmt: skip
INTEGRATIONS: dict[str, Integration] = {
    "flash_attn": Integration(_flash_attn, lse=True, packs=True),
    "sdpa": Integration(_sdpa),
    "diffusers": Integration(
        _diffusers, lse=True, spoils=lambda names: names >= _PADDED and names & _OTHER_MASKS
    ),
    "xformers": Integration(_xformers),
    "transformers": Integration(
        _transformers, spoils=lambda names: names >= _PADDED and names & {"window", "attn_mask"}
    ),
    "flex_attention": Integration(
        _flex_attention,
        lse=True,
        spoils=lambda names: names & {*_HIDDEN, "attn_bias"},
        values=_OF_TORCH,
    ),
}
