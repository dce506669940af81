"""Checks of arguments, with their messages: one function per rule."""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from . import tracing
from .tracing import decided, has_tangent, in_forward_mode

# Positions of queries are within this distance of the first key: no sequence is as long.
FARTHEST = 2**28
# All distances between a query and a key are shorter.
_TOO_FAR = 2 * FARTHEST
# Under export, sizes and their results are symbols.
_INTEGERS = (int, torch.SymInt)
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
FLOAT_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
BACKENDS = ("auto", "hopper", "triton", "torch")


def check_tensor(name: str, x: Any) -> Tensor:
    """Check for a dense tensor on one device, without a tangent: kernels read its memory."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type_name(x)}")
    if x.is_nested:
        raise TypeError(
            f"{name} must be a dense tensor, got a nested one: attention_varlen takes sequences of "
            "several lengths as the values() of a jagged tensor [N, *, H, D], and its offsets() "
            "as cu_seqlens_q"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, as to_dense() makes one, got {x.layout}")
    # Recognised by its method, without an import of torch.distributed.tensor.
    if type(x) is not Tensor and hasattr(x, "to_local"):
        raise TypeError(
            f"{name} must be the tensor of one device, got a {type(x).__name__}: "
            "fastattn.attention and decode_attention take these for q, k and v, sharded by rows or "
            "heads, and beside them for options; elsewhere pass its to_local(), or call in "
            "torch.distributed.tensor.experimental.local_map"
        )
    refuse_tangent(name, x)
    return x


def refuse_tangent(name: str, x: Tensor) -> None:
    """Raise NotImplementedError if x has a forward-mode tangent, which would be dropped."""
    if in_forward_mode() and has_tangent(x):
        raise NotImplementedError(
            f"{name} has a tangent (torch.autograd.forward_ad, torch.func.jvp or jacfwd), and "
            "fastattn carries none of it: attention and attention_varlen do, of q, k, v and of the "
            "options that learn; elsewhere take derivatives in reverse mode (autograd, "
            "torch.func.vjp, jacrev), or detach it"
        )


def check_tensors(q: Any, k: Any, v: Any) -> None:
    """Check for tensors of four dimensions, before any other check."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if check_tensor(name, x).dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions [B, H, T, D], got {tuple(x.shape)}")


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q [B, H_q, T_q, D], k [B, H_k, T_k, D], v [B, H_k, T_k, D_v] of one dtype and device."""
    check_dtypes_and_devices(q, k, v)
    check_shapes(q, k, v)


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q [B, H_q, T_q, D], k [B, H_k, T_k, D], v [B, H_k, T_k, D_v]."""
    B, H_q, _, D = q.shape
    B_k, H_k, T_k, D_k = k.shape
    if B_k != B or D_k != D:
        raise ValueError(f"k must have shape [{B}, H_k, T_k, {D}] to match q, got {tuple(k.shape)}")
    B_v, H_v, T_v, D_v = v.shape
    if B_v != B or H_v != H_k or T_v != T_k:
        raise ValueError(
            f"v must have shape [{B}, {H_k}, {T_k}, D_v] to match k, got {tuple(v.shape)}"
        )
    _check_heads(H_q, H_k, D, D_v)


def check_packed_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q [total_q, H_q, D], k [total_k, H_k, D], v [total_k, H_k, D_v]."""
    _, H_q, D = q.shape
    total_k, H_k, D_k = k.shape
    if D_k != D:
        raise ValueError(f"k must have shape [total_k, H_k, {D}] to match q, got {tuple(k.shape)}")
    if tuple(v.shape[:2]) != (total_k, H_k):
        raise ValueError(
            f"v must have shape [{total_k}, {H_k}, D_v] to match k, got {tuple(v.shape)}"
        )
    _check_heads(H_q, H_k, D, v.shape[2])


def check_dtypes_and_devices(q: Tensor, k: Tensor, v: Tensor) -> None:
    """k and v are of q's dtype, a float one, and on its device."""
    dtype, device = q.dtype, q.device
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"q must be float16, bfloat16, float32 or float64, got {dtype}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != dtype:
            raise TypeError(f"{name} must have the dtype of q ({dtype}), got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name} must be on the device of q ({device}), got {x.device}")


def _check_heads(H_q: int, H_k: int, D: int, D_v: int) -> None:
    if D == 0 or D_v == 0:
        raise ValueError(f"q and v must have a head dim of at least 1, got {D} and {D_v}")
    check_group("k", H_q, H_k)


def check_group(name: str, H_q: int, H: int) -> None:
    """Raise ValueError if q's heads cannot share the heads of `name` evenly."""
    if H == 0 or H_q % H:
        raise ValueError(f"{name} must have a number of heads that divides q's {H_q}, got {H}")


def as_python(x: Any) -> Any:
    """Convert numpy's numbers and tensors without dims to bool, int or float; others unchanged.

    For every option that is a number. Tensors must be on the CPU, as checks do not wait for a
    device, and must not require grad, as options have no gradient.
    """
    if x is None or type(x) in (bool, int, float):
        return x
    if isinstance(x, Tensor):
        return x.item() if x.dim() == 0 and x.is_cpu and not x.requires_grad else x
    # Recognised by name: numpy may not be installed.
    return x.item() if type(x).__module__ == "numpy" and getattr(x, "ndim", 1) == 0 else x


def check_flag(name: str, x: Any) -> bool:
    """Check for True or False, not merely a truth value; returns a Python bool."""
    x = as_python(x)
    if not isinstance(x, (bool, torch.SymBool)):
        raise TypeError(f"{name} must be a bool, got {got(x)}")
    return decided(x)


def check_window(window: Any) -> tuple[int | None, int | None]:
    """The window's sides (left, right) around a query's own position; None = unbounded."""
    window = as_python(window)
    if window is None:
        return None, None
    if _is_integer(window):
        if window < 1:
            raise ValueError(f"window as an int counts visible keys, at least 1, got {window}")
        return _within_reach(window - 1), 0
    if not isinstance(window, tuple) or len(window) != 2:
        raise TypeError(f"window must be an int or a tuple (left, right), got {window!r}")
    return _window_side("left", window[0]), _window_side("right", window[1])


def _window_side(name: str, side: Any) -> int | None:
    side = as_python(side)
    if side is None:
        return None
    if not _is_integer(side):
        raise TypeError(f"window {name} must be an int or None, got {side!r}")
    if side < 0:
        raise ValueError(f"window {name} counts neighbours, at least 0 (None = all), got {side}")
    return _within_reach(side)


def _within_reach(x: int) -> int:
    """x, clamped to the longest distance: int64 may not hold it."""
    return x if isinstance(x, torch.SymInt) else min(x, _TOO_FAR)


def check_key_padding_mask(mask: Tensor, k: Tensor) -> Tensor:
    """bool [B, T_k] on k's device, True = attend."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask must be a bool tensor (True = attend), got {kind(mask)}")
    return check_placement("key_padding_mask", mask, (k.shape[0], k.shape[2]), k)


def check_key_lengths(lengths: Tensor, B: int, q: Tensor) -> Tensor:
    """int32 or int64 [B] on q's device."""
    check_integers("key_lengths", lengths)
    return check_placement("key_lengths", lengths, (B,), q)


def check_query_offset(offset: Any, q: Tensor) -> tuple[int, Tensor | None]:
    """An int, or int32 or int64 [B] on q's device; returns it as the first or the second."""
    offset = as_python(offset)
    if not _is_integer(offset):
        check_integers("query_offset", offset)
        return 0, check_placement("query_offset", offset, (q.shape[0],), q)
    if not torch.compiler.is_compiling() and not -FARTHEST <= offset <= FARTHEST:
        raise ValueError(f"query_offset must be within 2**28 of 0, got {offset}")
    return offset, None


def check_prefix_lengths(prefix: Any, B: int, causal: bool, q: Tensor) -> Tensor:
    """An int of at least 0, or int32 or int64 [B] on q's device; returned as a tensor."""
    if not causal:
        raise ValueError(
            "prefix_lengths makes keys visible that causal hides: it needs causal=True"
        )
    prefix = as_python(prefix)
    if _is_integer(prefix):
        if prefix < 0:
            raise ValueError(f"prefix_lengths must be at least 0, got {prefix}")
        return torch.full((B,), _within_reach(prefix), dtype=torch.int32, device=q.device)
    check_integers("prefix_lengths", prefix)
    assert isinstance(prefix, Tensor), "check_integers lets only tensors through"
    return check_placement("prefix_lengths", prefix, (B,), q)


def check_keep_first(x: Any, windowed: bool) -> int:
    """Check for an int >= 0, with an option that hides the first keys."""
    count = check_count("keep_first", x, 0)
    if count and not windowed:
        raise ValueError(
            f"keep_first={count} keeps keys that a window or stride hides; neither is given"
        )
    return _within_reach(count)


def check_stride(x: Any) -> int:
    """An int of at least 1."""
    return _within_reach(check_count("stride", x, 1))


def check_count(name: str, x: Any, least: int) -> int:
    """An int of at least `least`, returned as Python's own."""
    count = check_int(name, x)
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {x}")
    return count


def check_int(name: str, x: Any) -> int:
    """Check for an int, not a bool or float; returns a Python int."""
    x = as_python(x)
    if not _is_integer(x):
        raise TypeError(f"{name} must be an int, got {got(x)}")
    number: int = x
    return number


def _is_integer(x: object) -> bool:
    return isinstance(x, _INTEGERS) and not isinstance(x, bool)


def check_documents(
    documents: Tensor | tuple[Tensor, Tensor], q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    """int32 or int64 ids [B, T], or a pair of them for queries [B, T_q] and keys [B, T_k]."""
    B, T_q, T_k = q.shape[0], q.shape[2], k.shape[2]
    if isinstance(documents, tuple):
        if len(documents) != 2:
            raise TypeError(f"documents must be ids or a pair of them, got {len(documents)}")
        names, (q_ids, k_ids) = ("documents[0]", "documents[1]"), documents
    elif T_q != T_k:
        raise ValueError(
            f"documents must be a pair (q_ids [B, T_q], k_ids [B, T_k]) where T_q and T_k differ, "
            f"got one tensor for {T_q} queries and {T_k} keys"
        )
    else:
        names, q_ids, k_ids = ("documents", "documents"), documents, documents
    for name, ids, T in zip(names, (q_ids, k_ids), (T_q, T_k), strict=True):
        check_integers(name, ids)
        check_placement(name, ids, (B, T), q)
    return q_ids, k_ids


def check_packed(q: Any, k: Any, v: Any) -> None:
    """q [total_q, H_q, D], k [total_k, H_k, D], v [total_k, H_k, D_v]: tensors of 3 dimensions."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if check_tensor(name, x).dim() != 3:
            raise ValueError(f"{name} must have 3 dimensions [total, H, D], got {tuple(x.shape)}")


def check_offsets(name: str, offsets: Tensor, total: int, q: Tensor) -> None:
    """int32 or int64 [N + 1] on q's device, N > 0 if there are rows; see `check_offset_values`, on
    the CPU.
    """
    check_integers(name, offsets)
    if offsets.dim() != 1 or offsets.shape[0] < (2 if total else 1):
        of_rows = f" for {total} rows" if total else ""
        raise ValueError(f"{name} must have shape [N + 1]{of_rows}, got {list(offsets.shape)}")
    check_device(name, offsets, q)
    if tracing.host_knows(offsets):
        check_offset_values(name, offsets, total)


def check_offset_values(name: str, offsets: Tensor, total: int) -> None:
    """Check that offsets start at 0, never fall and do not exceed `total`. Waits for the device."""
    values = offsets.tolist()
    if values[0] != 0 or values[-1] > total:
        raise ValueError(
            f"{name} must run from 0 to at most {total}, got {values[0]} to {values[-1]}"
        )
    for n, (start, end) in enumerate(pairwise(values)):
        if end < start:
            raise ValueError(f"{name} must not fall, got {start} then {end} at sequence {n}")


def check_scale(scale: Any, D: int) -> float:
    """The factor on q.k: positive and finite, D ** -0.5 unless given."""
    return D**-0.5 if scale is None else check_positive("scale", scale)


def check_number(name: str, x: Any) -> float:
    """An int or a float, returned as a float."""
    x = as_python(x)
    if isinstance(x, bool) or not isinstance(x, _NUMBERS):
        raise TypeError(f"{name} must be a float, got {got(x)}")
    return float(x)


def check_float_dtype(name: str, x: Any) -> torch.dtype:
    """A dtype of floating numbers."""
    if not isinstance(x, torch.dtype) or not x.is_floating_point:
        raise TypeError(f"{name} must be a floating dtype, got {x!r}")
    return x


def check_positive(name: str, x: Any) -> float:
    """A positive, finite number."""
    x = check_number(name, x)
    if not 0 < x < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {x}")
    return x


def check_fraction(name: str, x: Any) -> float:
    """A number from 0 to 1, without 1."""
    x = check_number(name, x)
    if not 0 <= x < 1:
        raise ValueError(f"{name} must be in [0, 1), got {x}")
    return x


def check_seed(name: str, x: Any) -> None:
    """int64 [2]: Philox's key and counter."""
    if not isinstance(x, Tensor) or x.dtype != torch.int64:
        raise TypeError(f"{name} must be an int64 tensor, got {kind(x)}")
    if tuple(check_tensor(name, x).shape) != (2,):
        raise ValueError(f"{name} must have shape [2], got {list(x.shape)}")


def check_backend(backend: str | None, source: str = "backend") -> str:
    """Check for one of BACKENDS; None means "auto"."""
    if backend is None:
        return "auto"
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"{source} must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend


def kind(x: object) -> object:
    """Name x for an error message: a tensor's dtype, or a type's name."""
    return x.dtype if isinstance(x, Tensor) else type_name(x)


def type_name(x: object) -> str:
    """The name of x's type with its module: numpy has its own bool."""
    cls = type(x)
    whole = f"{cls.__module__}.{cls.__qualname__}"
    return whole.removeprefix("builtins.")


def got(x: object) -> str:
    """Describe x for an error message that expected a number."""
    if not isinstance(x, Tensor):
        return type_name(x)
    gradient = " that requires grad" if x.requires_grad else ""
    return f"a tensor of {x.dtype} and shape {list(x.shape)} on {x.device}{gradient}"


def check_integers(name: str, x: object) -> None:
    """An int32 or int64 tensor."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {kind(x)}")


def check_floats(name: str, x: object) -> None:
    """A tensor of float16, bfloat16, float32 or float64."""
    if not isinstance(x, Tensor) or x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be a float tensor, got {kind(x)}")
    check_tensor(name, x)


def check_device(name: str, x: Tensor, like: Tensor) -> Tensor:
    """Return x if it is on the device of `like`."""
    if check_tensor(name, x).device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {x.device}")
    return x


def check_placement(name: str, x: Tensor, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return x if it has `shape` and is on the device of `like`."""
    if tuple(check_tensor(name, x).shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(x.shape)}")
    return check_device(name, x, like)
