"""Check flash-attn's arguments and translate them to options of `fastattn.attention`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ... import checks

Window = tuple[int | None, int | None]
Result = Any  # o, or (o, lse, None), or (o, lse): the caller's flags say which

# Arguments of versions 3 and 4 that do not change the result, or not with these values.
_WITHOUT_EFFECT = frozenset(
    (
        *("num_splits", "pack_gqa", "sm_margin", "scheduler_metadata"),
        *("min_seqlen_k", "seqlen_k_per_split", "disable_scheduler_metadata"),
    )
)
_NEUTRAL_AT_NONE = (
    *("qv", "q_descale", "k_descale", "v_descale", "gather_kv_indices"),
    *("score_mod", "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars"),
    *("block_sparse_tensors", "block_sparse_tensors_bwd"),
    *("rotary_seqlens", "seqused_q", "cu_seqlens_q", "cu_seqlens_k_new"),
)
_NEUTRAL: dict[str, Any] = {**dict.fromkeys(_NEUTRAL_AT_NONE), "attention_chunk": 0}


@contextmanager
def errors_of_flash_attn() -> Iterator[None]:
    """Turn errors about tensors into RuntimeError, as flash-attn's."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise RuntimeError(str(error)) from error


def options_of(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> dict[str, Any]:
    """Options of `fastattn.attention` that are set."""
    window = _window(window_size)
    options = {
        "window": None if window == (None, None) else window,
        "dropout": dropout_p or None,
        "scale": softmax_scale,
        "softcap": softcap or None,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
    }
    return {"causal": bool(causal), **{name: x for name, x in options.items() if x is not None}}


def sides(window_size: Any) -> Window:
    """Convert to (left, right) as Python ints or None."""
    if not isinstance(window_size, (tuple, list, Tensor)) or len(window_size) != 2:
        raise RuntimeError(f"window_size must be (left, right), got {window_size!r}")
    left, right = (checks.as_python(side) for side in window_size)
    return left, right


def _window(window_size: Any) -> Window:
    """Convert to (left, right) as Python ints, None = all."""
    left, right = sides(window_size)
    return (
        None if left is None or left < 0 else left,
        None if right is None or right < 0 else right,
    )


def refuse(newer: dict[str, Any]) -> None:
    """Raise for arguments of other versions that would change the result, and for unknown ones."""
    for name, x in newer.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name not in _NEUTRAL:
            raise TypeError(f"got an unexpected keyword argument {name!r}")
        neutral = _NEUTRAL[name]
        if x is not None and (neutral is None or x != neutral):
            raise NotImplementedError(
                f"{name} is not supported by fastattn.compat.flash_attn; fastattn.attention has "
                "custom masks and scores"
            )


def e4m3_scales(
    q: Any, k: Any, newer: dict[str, Any], rows: int
) -> dict[str, Tensor | None] | None:
    """Scales of `attention_fp8` for e4m3 tensors, popped from `newer`; None for other dtypes.

    In flash-attn all three are fp32 [B, H_k]; B counts packed sequences too.
    """
    if not isinstance(q, Tensor) or q.dtype != torch.float8_e4m3fn:
        return None
    scales: dict[str, Tensor | None] = {}
    shape = (rows, k.shape[-2])
    for name in ("q", "k", "v"):
        x = newer.pop(f"{name}_descale", None)
        if x is not None and (not isinstance(x, Tensor) or tuple(x.shape) != shape):
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise RuntimeError(f"{name}_descale must have shape {list(shape)}, got {got}")
        if x is not None and name == "q":
            x = x.repeat_interleave(q.shape[-2] // shape[1], dim=1)
        scales[f"{name}_scale"] = x
    return scales


def second_product(
    qv: Any, q: Tensor, v: Tensor, options: dict[str, Any], heads: int
) -> dict[str, Any]:
    """Options for version 3's qv: s = q k + qv v.

    heads: the dim of the heads.
    """
    if qv is None:
        return {}
    second = checked("qv", qv, q.dim()), v
    scale = (q.shape[-1] + qv.shape[-1]) ** -0.5
    query, key = (x.transpose(1, 2) if heads == 2 else x for x in second)
    return {"query2": query, "key2": key, "scale": options.get("scale", scale)}


def one_of(name: str, x: Tensor | None, other: str, y: Tensor | None) -> Tensor | None:
    if x is not None and y is not None:
        raise RuntimeError(f"{name} and {other} are two names of one argument, got both")
    return y if x is None else x


def checked(name: str, x: Tensor, dims: int, packed: tuple[int, int] | None = None) -> Tensor:
    """Check that x has `dims` dims, and size packed[1] in dim packed[0]."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() != dims:
        raise RuntimeError(f"{name} must have {dims} dimensions, got {list(x.shape)}")
    if packed is not None and x.shape[packed[0]] != packed[1]:
        raise RuntimeError(
            f"{name} must have size {packed[1]} in dim {packed[0]}, got {list(x.shape)}"
        )
    return x


def returned(
    result: Any, with_lse: bool, triple: bool, layout: Callable[[Tensor], Tensor]
) -> Result:
    """Arrange o and lse as flash-attn returns them for these flags."""
    if not with_lse:
        return layout(result).contiguous()
    o, lse = result
    return (layout(o).contiguous(), lse, None) if triple else (layout(o).contiguous(), lse)
