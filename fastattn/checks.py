"""Checks of arguments, with their messages: one function per rule."""

import difflib
import math
from collections.abc import Collection, Sequence
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

Layout = tuple[str, str, str]
# Dims of q, k and v: see `check_input`.
DENSE = ("B H_q T_q D", "B H_k T_k D", "B H_k T_k D_v")
PACKED = ("total_q H_q D", "total_k H_k D", "total_k H_k D_v")
# Sizes of dims by their names. In a trace they are symbols or tensors.
Sizes = dict[str, Any]
DTYPES = {
    "float": FLOAT_DTYPES,
    "integer": frozenset((torch.int32, torch.int64)),
    "float32 or float64": frozenset((torch.float32, torch.float64)),
    **{name: (getattr(torch, name),) for name in ("bool", "int32", "int64", "float32")},
    "float8_e4m3fn": (torch.float8_e4m3fn,),
}
_SAID = {
    "float": "a float tensor (float16, bfloat16, float32 or float64)",
    "integer": "an int32 or int64 tensor",
    "bool": "a bool tensor (True = attend)",
    "int32": "an int32 tensor",
    "int64": "an int64 tensor",
}
# fastattn's names, and other libraries' names for the same. A function takes one of a row at most.
_NAMES = (
    ("scale", "softmax_scale sm_scale scaling"),
    ("attn_mask key_padding_mask memory_padding_mask", "attention_mask mask"),
    (
        "key_padding_mask memory_padding_mask",
        "padding_mask src_key_padding_mask encoder_attention_mask",
    ),
    ("attn_bias", "bias attention_bias"),
    ("dropout", "dropout_p p_dropout"),
    ("causal", "is_causal casual"),
    ("window", "window_size sliding_window"),
    ("softcap", "soft_cap logits_soft_cap logit_softcapping"),
    ("sinks", "s_aux attention_sinks learnable_sink"),
    ("key_lengths", "seqused_k kv_lengths cache_seqlens"),
    ("documents", "document_ids segment_ids"),
    ("positions", "position_ids"),
    ("mask_mod", "block_mask"),
    ("rotary_tables", "position_embeddings freqs_cis"),
    ("cache", "kv_cache past_key_value past_key_values layer_past"),
)
FOREIGN = {name: ours.split() for ours, names in _NAMES for name in names.split()}


def unexpected(taker: str, name: str, taken: Collection[str]) -> TypeError:
    """The error of an argument that `taker` lacks, with the one of `taken` that is meant."""
    meant = [x for x in FOREIGN.get(name, ()) if x in taken]
    meant = meant or difflib.get_close_matches(name, taken, 1)
    hint = f"; did you mean {meant[0]!r}?" if meant else ""
    call = taker if " " in taker else f"{taker}()"
    return TypeError(f"{call} got an unexpected argument {name!r}{hint}")


def _places(layout: Layout) -> tuple[list[str], list[tuple[int, int]]]:
    """Dims of q, k and v, one after another, and pairs of places of the same dim."""
    dims = " ".join(layout).split()
    return dims, [(dims.index(x), n) for n, x in enumerate(dims) if dims.index(x) < n]


_PLACES = {layout: _places(layout) for layout in (DENSE, PACKED)}


def check_tensor(name: str, x: Any) -> Tensor:
    """Check for a dense tensor on one device, without a tangent: kernels read its memory."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type_name(x)}")
    check_dense(name, x)
    subclass = type(x) is not Tensor
    # Recognised by name: an import of torch.nn.attention.bias takes a second.
    if subclass and type(x).__name__ == "CausalBias":
        raise TypeError(
            f"{name} must be a tensor with values, got a CausalBias: pass causal=True, for "
            "causal_upper_left with query_offset=0"
        )
    # Recognised by its method, without an import of torch.distributed.tensor.
    if subclass and hasattr(x, "to_local"):
        raise TypeError(
            f"{name} must be a tensor of one device, got a {type(x).__name__}: only "
            "fastattn.attention and decode_attention take DTensors, if q, k and v are DTensors "
            "sharded by rows or heads; elsewhere pass its to_local(), or call in "
            "torch.distributed.tensor.experimental.local_map"
        )
    if in_forward_mode():
        refuse_tangent(name, x)
    return x


def check_dense(name: str, x: Tensor) -> None:
    """Check that a tensor is neither nested nor sparse."""
    if x.is_nested:
        raise TypeError(
            f"{name} must be a dense tensor, got a nested one: pass attention_varlen the values() "
            "of a jagged tensor [N, *, H, D], and its offsets() as cu_seqlens_q"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {x.layout}: call to_dense()")


def refuse_tangent(name: str, x: Tensor) -> None:
    """Raise NotImplementedError if x has a forward-mode tangent, which would be dropped."""
    if in_forward_mode() and has_tangent(x):
        raise NotImplementedError(
            f"{name} has a tangent (torch.autograd.forward_ad, torch.func.jvp or jacfwd), which is "
            "not supported here: only attention and attention_varlen support forward mode, for q, "
            "k, v and options with gradients; elsewhere use reverse mode (autograd, "
            "torch.func.vjp, jacrev), or detach it"
        )


def check_tensors(q: Any, k: Any, v: Any, layout: Layout = DENSE) -> None:
    """Check for tensors of a layout's numbers of dims, before any other check."""
    rank = 4 if layout == DENSE else 3
    for name, x in (("q", q), ("k", k), ("v", v)):
        if check_tensor(name, x).dim() != rank:
            raise wrong_shape(name, x, layout["qkv".index(name)], {})


def check_qkv(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout = DENSE, dtype: str = "float"
) -> Sizes:
    """Check q, k and v, which `check_tensors` checked; return the sizes of their dims.

    dtype: of q; "" if dtypes are checked elsewhere.
    """
    shapes = (*q.shape, *k.shape, *v.shape)
    dims, equal = _PLACES[layout]
    right = q.device == k.device == v.device
    for first, later in equal:
        if shapes[first] != shapes[later]:
            right = False
    if not right or (dtype and not (q.dtype in FLOAT_DTYPES and q.dtype == k.dtype == v.dtype)):
        sizes: Sizes = {}
        for name, x, own in zip("qkv", (q, k, v), layout, strict=True):
            check_input(name, x, dtype, own, q, sizes)
            dtype = dtype and "as q"
    sizes = dict(zip(dims, shapes))  # noqa: B905  faster
    D, D_v = sizes["D"], sizes["D_v"]
    if D == 0 or D_v == 0:
        raise ValueError(f"q and v must have a head dim of at least 1, got {D} and {D_v}")
    check_group("k", "q", sizes["H_q"], sizes["H_k"])
    return sizes


def sizes_of(q: Tensor) -> Sizes:
    """Sizes of q's dims, as `check_qkv` returns them."""
    return dict(zip((DENSE if q.dim() == 4 else PACKED)[0].split(), q.shape, strict=True))


def check_group(name: str, of: str, heads: int, H: int) -> None:
    """Raise ValueError if the heads of `of` cannot share the H heads of `name` evenly."""
    if H == 0 or heads % H:
        raise ValueError(f"{name} must have a number of heads that divides {of}'s {heads}, got {H}")


def check_input(
    name: str, x: Any, dtype: str, dims: str, like: Tensor, sizes: Sizes, *, dense: bool = True
) -> Any:
    """Return x if it is a dense tensor of this dtype and shape on the device of `like`.

    dtype: a key of DTYPES, "as NAME" for that of `like`, which NAME is, or "" for any.
    dims: names of dims, such as "B T_k". Sizes that `sizes` lacks are free, and added to it. A
        number is the size, 2R+1 an odd one; (T) may be 1, and [B] be 1 or missing; T? may be
        missing. "...": any dims.
    dense: False for any kind of tensor, whose memory is not read.
    """
    if dtype and not (isinstance(x, Tensor) and x.dtype in (DTYPES.get(dtype) or (like.dtype,))):
        raise _wrong_dtype(name, x, dtype, like)
    if dense:
        check_tensor(name, x)
    if dims != "..." and not _fits(x.shape, dims.split(), sizes):
        raise wrong_shape(name, x, dims, sizes)
    if x.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {x.device}")
    return x


def _wrong_dtype(name: str, x: Any, dtype: str, like: Tensor) -> TypeError:
    expected = f"be {_SAID.get(dtype) or f'a {dtype} tensor'}"
    if dtype not in DTYPES:
        expected = f"have the dtype of {dtype[3:]} ({like.dtype})"
    hint = ""
    if name.endswith(("padding_mask", "attn_mask")) and kind(x) in DTYPES["integer"]:
        hint = "; for a Hugging Face attention_mask pass mask.bool()"
    return TypeError(f"{name} must {expected}, got {kind(x)}{hint}")


def _fits(shape: Sequence[int], dims: list[str], sizes: Sizes) -> bool:
    """Whether a shape is that of the dims; adds free sizes if it is."""
    count = len(sizes)
    while len(shape) < len(dims) and dims[0][-1] in "?]":
        dims = dims[1:]
    fits = len(shape) == len(dims)
    for dim, n in zip(dims, shape):  # noqa: B905  faster
        if dim in sizes:
            fits = fits and n == sizes[dim]
        elif dim == "2R+1":
            fits = fits and n % 2 == 1
        elif dim[-1] in ")]?":
            size = sizes.setdefault(dim.strip("[]()?"), n)
            fits = fits and (n == size or (n == 1 and dim[-1] != "?"))
        else:
            fits = fits and (not dim.isdigit() or n == int(dim))
            sizes[dim] = n
    if not fits:
        for dim in list(sizes)[count:]:
            del sizes[dim]
    return fits


def wrong_shape(name: str, x: Tensor, dims: str, sizes: Sizes) -> ValueError:
    """Error for a wrong shape, with the names of the dims and their known sizes."""
    names = [dim.strip("[]()?") for dim in dims.split()]
    forms = []
    for named in (names, [str(sizes.get(name, name)) for name in names]):
        marked = zip(named, dims.split(), strict=True)
        each = [f"{n} or 1" if "(" in dim and "[" not in dims else n for n, dim in marked]
        short = f"{', '.join(each[1:])}] or [" if "?" in dims else ""
        forms.append(f"[{short}{', '.join(each)}]")
    must = "have shape"
    if "[" in dims:
        must = f"have {len(names) - dims.count('[')} to {len(names)} dimensions that broadcast to"
    return ValueError(f"{name} must {must} {' = '.join(dict.fromkeys(forms))}, got {list(x.shape)}")


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
    if is_integer(window):
        if window < 1:
            raise ValueError(f"window as an int counts visible keys, at least 1, got {window}")
        return within_reach(window - 1), 0
    check_pair("window", window, "(left, right), or an int")
    return _window_side("left", window[0]), _window_side("right", window[1])


def _window_side(name: str, side: Any) -> int | None:
    side = as_python(side)
    if side is None:
        return None
    if not is_integer(side):
        raise TypeError(f"window {name} must be an int or None, got {side!r}")
    if side < 0:
        raise ValueError(f"window {name} counts neighbours, at least 0 (None = all), got {side}")
    return within_reach(side)


def within_reach(x: int) -> int:
    """x, clamped to the longest distance: int64 may not hold it."""
    return x if isinstance(x, torch.SymInt) else min(x, _TOO_FAR)


def check_keep_first(x: Any, windowed: bool) -> int:
    """Check for an int >= 0, with an option that hides the first keys."""
    count = check_count("keep_first", x, 0)
    if count and not windowed:
        raise ValueError(f"keep_first={count} needs a window or stride; neither is given")
    return within_reach(count)


def check_count(name: str, x: Any, least: int) -> int:
    """Check for an int of at least `least`; returns a Python int."""
    count = check_int(name, x)
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {x}")
    return count


def check_int(name: str, x: Any) -> int:
    """Check for an int, not a bool or float; returns a Python int."""
    x = as_python(x)
    if not is_integer(x):
        raise TypeError(f"{name} must be an int, got {got(x)}")
    number: int = x
    return number


def is_integer(x: object) -> bool:
    """Whether x is an int, which a bool is not here."""
    return isinstance(x, _INTEGERS) and not isinstance(x, bool)


def check_offsets(
    name: str, offsets: Tensor, total: int, q: Tensor, least: int = 2, N: int | None = None
) -> None:
    """int32 or int64 [N+1] on q's device, at least `least` if there are rows, else 1; see
    `check_offset_values`, on the CPU.
    """
    check_input(name, offsets, "integer", "N+1", q, {} if N is None else {"N+1": N + 1})
    if offsets.shape[0] < (least if total else 1):
        raise ValueError(
            f"{name} must have shape [N + 1] for {total} rows, got [{offsets.shape[0]}]"
        )
    if tracing.host_knows(offsets):
        check_offset_values(name, offsets, total)


def check_offset_values(name: str, offsets: Tensor, total: int) -> None:
    """Check offsets: from 0, non-decreasing, at most `total`. Waits for the device."""
    values = offsets.tolist()
    if values[0] != 0 or values[-1] > total:
        raise ValueError(
            f"{name} must run from 0 to at most {total}, got {values[0]} to {values[-1]}"
        )
    for n, (start, end) in enumerate(pairwise(values)):
        if end < start:
            raise ValueError(f"{name} must be non-decreasing, got {start}, {end} at sequence {n}")


def check_scale(scale: Any, D: int) -> float:
    """The factor on q.k: positive and finite, D ** -0.5 unless given."""
    return D**-0.5 if scale is None else check_positive("scale", scale)


def check_is(name: str, x: Any, *kinds: type) -> None:
    """Raise TypeError unless x is of one of the classes."""
    if not isinstance(x, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{name} must be of class {wanted}, got {type_name(x)}")


def check_pair(name: str, x: Any, what: str) -> None:
    """Raise TypeError unless x is a tuple of two, which `what` names."""
    if not isinstance(x, tuple) or len(x) != 2:
        got = f"a tuple of {len(x)}" if isinstance(x, tuple) else type_name(x)
        raise TypeError(f"{name} must be a pair {what}, got {got}")


def check_number(name: str, x: Any) -> float:
    """Check for an int or a float; returns a float."""
    x = as_python(x)
    if isinstance(x, bool) or not isinstance(x, _NUMBERS):
        raise TypeError(f"{name} must be a float, got {got(x)}")
    return float(x)


def check_float_dtype(name: str, x: Any) -> torch.dtype:
    """Check for a floating dtype."""
    if not isinstance(x, torch.dtype) or not x.is_floating_point:
        raise TypeError(f"{name} must be a floating dtype, got {x!r}")
    return x


def check_positive(name: str, x: Any) -> float:
    """Check for a positive, finite number."""
    x = check_number(name, x)
    if not 0 < x < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {x}")
    return x


def check_fraction(name: str, x: Any) -> float:
    """Check for a number in [0, 1)."""
    x = check_number(name, x)
    if not 0 <= x < 1:
        raise ValueError(f"{name} must be in [0, 1), got {x}")
    return x


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
