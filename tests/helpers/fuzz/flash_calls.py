"""flash-attn's functions, called as `attention` and `attention_varlen` are."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from fastattn.compat.flash_attn import version_2, version_3, version_4

from .cases import Case

_NAMES = {"scale": "softmax_scale", "window": "window_size", "sinks": "learnable_sink"}
_WITHOUT_EFFECT = {"num_splits": 3, "pack_gqa": True, "qv": None, "attention_chunk": 0}


def flash_case(case: Case) -> tuple[Case, Callable[..., Any]]:
    """The call that a function of flash-attn stands for, and that function in its signature."""
    draw, names = case.random("flash"), set(case.options)
    modules: list[Any] = [version_2]
    if "alibi_slopes" not in names:
        modules += [version_4] if "sinks" in names else [version_3, version_4]
    module = draw.choice(*modules)
    beside = draw.choice({}, _WITHOUT_EFFECT) if module is version_2 else {}
    flag = "return_attn_probs" if module is version_3 else "return_lse"

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        return_lse: bool,
        window: Any = (None, None),
        **given: Any,
    ) -> Any:
        sides = (window - 1, 0) if isinstance(window, int) else window
        none = None if module is version_4 else -1
        given["window"] = tuple(none if side is None else side for side in sides)
        theirs = {_NAMES.get(name, name): x for name, x in given.items()} | beside
        if return_lse:
            theirs[flag] = True
        if packed:
            longest = {"max_seqlen_q": q.shape[0], "max_seqlen_k": k.shape[0]}
            result = module.flash_attn_varlen_func(q, k, v, **longest, **theirs)
        else:
            heads_last = (x.transpose(1, 2) for x in (q, k, v))
            result = module.flash_attn_func(*heads_last, **theirs)
        o = result[0] if isinstance(result, tuple) else result
        o = o if packed else o.transpose(1, 2)
        return (o, result[1]) if return_lse else o

    packed = draw.chance(0.4)
    return replace(case, call="attention_varlen" if packed else "attention"), call
