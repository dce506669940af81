"""Every argument check and its message: one function a rule, called before anything is computed."""

import math

import torch
from torch import Tensor

FLOAT_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
BACKENDS = ("auto", "triton", "torch")

Window = int | tuple[int | None, int | None] | None


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: Window,
    key_padding_mask: Tensor | None,
    key_lengths: Tensor | None,
    query_offset: int | Tensor | None,
    scale: float | None,
) -> tuple[int | None, int | None, float]:
    """Check one attention call, after `check_tensors`; return its band (left, right) and scale."""
    check_qkv(q, k, v)
    left, right = check_band(causal, window)
    check_key_padding_mask(key_padding_mask, k)
    check_key_lengths(key_lengths, k)
    check_query_offset(query_offset, q)
    return left, right, check_scale(scale, q.shape[3])


def check_tensors(q: object, k: object, v: object) -> None:
    """Tensors of four dimensions: what has to hold before anything else can be asked of them."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions [B, H, T, D], got {tuple(x.shape)}")


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q [B, H_q, T_q, D], k [B, H_k, T_k, D], v [B, H_k, T_k, D_v] of one dtype and device."""
    dtype, device = q.dtype, q.device
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"q must be float16, bfloat16, float32 or float64, got {dtype}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != dtype:
            raise TypeError(f"{name} must have the dtype of q ({dtype}), got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name} must be on the device of q ({device}), got {x.device}")
    B, H_q, _, D = q.shape
    B_k, H_k, T_k, D_k = k.shape
    if B_k != B or D_k != D:
        raise ValueError(f"k must have shape [{B}, H_k, T_k, {D}] to match q, got {tuple(k.shape)}")
    B_v, H_v, T_v, D_v = v.shape
    if B_v != B or H_v != H_k or T_v != T_k:
        raise ValueError(
            f"v must have shape [{B}, {H_k}, {T_k}, D_v] to match k, got {tuple(v.shape)}"
        )
    if D == 0 or D_v == 0:
        raise ValueError(f"q and v must have a head dim of at least 1, got {D} and {D_v}")
    if H_k == 0 or H_q % H_k:
        raise ValueError(f"k must have a number of heads that divides q's {H_q}, got {H_k}")


def check_band(causal: bool, window: Window) -> tuple[int | None, int | None]:
    """Sides (left, right) of the band around a query's own position; None = unbounded."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, got {type(causal).__name__}")
    left, right = _window_sides(window)
    if causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def _window_sides(window: Window) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if isinstance(window, int) and not isinstance(window, bool):
        if window < 1:
            raise ValueError(f"window as an int counts visible keys, at least 1, got {window}")
        return window - 1, 0
    if not isinstance(window, tuple) or len(window) != 2:
        raise TypeError(f"window must be an int or a tuple (left, right), got {window!r}")
    for name, side in zip(("left", "right"), window, strict=True):
        if side is None:
            continue
        if not isinstance(side, int) or isinstance(side, bool):
            raise TypeError(f"window {name} must be an int or None, got {side!r}")
        if side < 0:
            raise ValueError(
                f"window {name} counts neighbours, at least 0 (None = all), got {side}"
            )
    return window


def check_key_padding_mask(mask: Tensor | None, k: Tensor) -> None:
    """bool [B, T_k] on k's device, True = attend."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"key_padding_mask must be a bool tensor (True = attend), got {got}")
    check_placement("key_padding_mask", mask, (k.shape[0], k.shape[2]), k)


def check_key_lengths(lengths: Tensor | None, k: Tensor) -> None:
    """int32 or int64 [B] on k's device."""
    if lengths is None:
        return
    check_integers("key_lengths", lengths)
    check_placement("key_lengths", lengths, (k.shape[0],), k)


def check_query_offset(offset: int | Tensor | None, q: Tensor) -> None:
    """An int, or int32 or int64 [B] on q's device."""
    if offset is None or isinstance(offset, (int, torch.SymInt)):
        return
    check_integers("query_offset", offset)
    check_placement("query_offset", offset, (q.shape[0],), q)


def check_scale(scale: float | None, D: int) -> float:
    """The factor on q.k: positive and finite, D ** -0.5 unless given."""
    if scale is None:
        return D**-0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a float, got {type(scale).__name__}")
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    return float(scale)


def check_backend(backend: str | None, source: str = "backend") -> str:
    """One of BACKENDS; None means "auto"."""
    if backend is None:
        return "auto"
    if backend not in BACKENDS:
        raise ValueError(f"{source} must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend


def check_integers(name: str, x: object) -> None:
    """An int32 or int64 tensor."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {got}")


def check_placement(name: str, x: Tensor, shape: tuple[int, ...], beside: Tensor) -> None:
    """x has `shape` and lies on the device of `beside`."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(x.shape)}")
    if x.device != beside.device:
        raise ValueError(f"{name} must be on {beside.device}, got {x.device}")
