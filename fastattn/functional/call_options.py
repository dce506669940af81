"""Check the keyword arguments of a call and make its `Options`."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from .. import checks, dispatch
from ..block_mask import with_tensors
from ..options import EXPECTED, OPTIONS, Options, OptionSpec
from ..score_checks import Checking

Function = TypeVar("Function", bound=Callable[..., Any])
# o, or o and what flags ask for; the package's stub, `__init__.pyi`, has which.
Results: TypeAlias = Any


class Callee(NamedTuple):
    """A function with options: those it takes, and why it refuses the others."""

    name: str
    taken: dict[str, OptionSpec]
    refusal: Callable[[OptionSpec], str]
    defaults: dict[str, Any]

    def default(self, name: str) -> Any:
        """The value of an option that is not given."""
        return self.defaults.get(name, self.taken[name].default)

    def refuse_others(self, options: dict[str, Any]) -> None:
        """Raise TypeError for the first option that the function does not take."""
        if options.keys() <= self.taken.keys():
            return
        name = next(name for name in options if name not in self.taken)
        if name not in OPTIONS:
            raise checks.unexpected(self.name, name, self.taken)
        reason = self.refusal(OPTIONS[name])
        raise TypeError(f"{self.name} does not support {name}" + (f": {reason}" if reason else ""))

    def sign(self, function: Function) -> Function:
        """Replace **options in the signature of the function by its options."""
        own = inspect.signature(function)
        *named, _ = own.parameters.values()
        kind = inspect.Parameter.KEYWORD_ONLY
        for name, row in self.taken.items():
            default = self.default(name)
            named.append(inspect.Parameter(name, kind, default=default, annotation=row.type))
        setattr(function, "__signature__", own.replace(parameters=named))  # noqa: B010
        return function


def _callee(
    name: str, refusal: Callable[[OptionSpec], str] = lambda row: "", **defaults: Any
) -> Callee:
    taken = {option: row for option, row in OPTIONS.items() if name in row.calls}
    return Callee(name, taken, refusal, defaults)


DENSE = _callee("attention")
PACKED = _callee("attention_varlen", lambda row: row.packed)
CACHE = _callee("decode_attention", lambda row: row.cache, causal=True)
PAGED = _callee("attention_paged", lambda row: row.cache or row.packed, causal=True)
FP8 = _callee("attention_fp8")
PACKED_FP8 = _callee("attention_varlen_fp8")
ADDITIVE = _callee(
    "additive_attention", lambda row: "of attention's options it supports only the masks"
)
SELECTED = _callee("selected_attention", lambda row: "it supports only simpler masks and scores")


def _expected(name: str, row: OptionSpec) -> tuple[str, str, str] | None:
    """Dtype, dims and packed dims of an option that is one tensor; rules of others check parts."""
    return EXPECTED[name] if row.type == Tensor | None and not row.fields else None


_Rule = Callable[[Any, Checking], Any]


def _rule(name: str, row: OptionSpec) -> _Rule | None:
    """The rule of an option, or that of its type."""
    of_type: dict[Any, _Rule] = {
        bool: lambda x, call: checks.check_flag(name, x),
        float | None: lambda x, call: checks.check_positive(name, x),
    }
    return row.rule or of_type.get(row.type)


# Plain tuples, as named tuples look up every field by name.
# None for a default of (): torch 2.11 compares no tuples by `is`.
_OPTIONS = {
    name: (
        row.default if row.default != () else None,
        row.needs,
        _expected(name, row),
        _rule(name, row),
        row.fields,
    )
    for name, row in OPTIONS.items()
}

_PLACES = {name: n for n, name in enumerate(_OPTIONS)}


def _checked_options(call: Checking) -> Options:
    """`Options` of a call. On the critical path of GPU calls, so only given options are checked."""
    if "mask_mod" in call.arguments or "score_mod" in call.arguments:
        call = call._replace(arguments=with_tensors(dict(call.arguments), call.q.device))
    arguments, fields, sizes = call.arguments, call.fields, call.sizes
    for name in arguments if len(arguments) < 2 else sorted(arguments, key=lambda x: _PLACES[x]):
        default, needs, expected, rule, names = _OPTIONS[name]
        x = arguments[name]
        if x is default:
            continue
        if needs and arguments.get(needs) is None:
            raise ValueError(f"{name} needs {needs}, which is not given")
        if expected is not None:
            dtype, dims, packed = expected
            dims = packed if "total_q" in sizes else dims
            checks.check_input(name, x, dtype, dims, call.q, sizes)
        value = x if rule is None else rule(x, call)
        if names:
            fields.update(zip(names, value))  # noqa: B905
        else:
            fields[name] = value
    return Options(**fields)


def dense_options(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Options:
    """Options of a call of `attention`, after `checks.check_tensors`."""
    return _dense(q, k, v, checks.check_qkv(q, k, v), options)


def fp8_options(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Options:
    """Options of a call of `attention_fp8`, with checked dtypes and devices."""
    return _dense(q, k, v, checks.check_qkv(q, k, v, dtype=""), options)


def _dense(
    q: Tensor, k: Tensor, v: Tensor, sizes: checks.Sizes, options: dict[str, Any]
) -> Options:
    """Options of checked tensors. By default the last query is at the last key."""
    T_q, T_k = sizes["T_q"], sizes["T_k"]
    offset, scale = T_k - T_q, float(sizes["D"]) ** -0.5
    if isinstance(offset, Tensor):
        # torch.jit.trace records sizes as tensors: an int would be a constant, a power fp32.
        fields = {"query_offsets": offset.to(q.device).expand(q.shape[0]), "scale": scale}
        return _checked_options(Checking(q, k, v, EXPECTED, options, fields, sizes))
    fields = {"query_offset": offset, "scale": scale}
    checked = _checked_options(Checking(q, k, v, EXPECTED, options, fields, sizes))
    if checked.causal and type(offset) is int and offset < 0:
        _warn_of_layout(q, T_q, T_k, options)
    return checked


def _warn_of_layout(q: Tensor, T_q: int, T_k: int, options: dict[str, Any]) -> None:
    """Warn once about tensors that look like [B, T, H, D]: T_q is a multiple of T_k."""
    # Not about transposed views: their caller knows the layout.
    if T_k and not T_q % T_k and q.stride(1) >= q.stride(2):  # noqa: SIM102
        if not options.keys() & {"query_offset", "positions"}:
            dispatch.warn_once(
                "attention takes [B, H, T, D]: the last of these causal queries is at the last "
                "key, so most come before the first key and get 0. If the tensors are [B, T, H, "
                "D], as in flash-attn, pass x.transpose(1, 2); if the first query is at the first "
                "key, pass query_offset=0"
            )


def packed_options(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None,
    **options: Any,
) -> Options:  # fmt: skip
    """Options of a call of `attention_varlen`, after `checks.check_tensors`."""
    PACKED.refuse_others(options)
    sizes = checks.check_qkv(q, k, v, checks.PACKED)
    return _packed(q, k, v, sizes, cu_seqlens_q, cu_seqlens_k, options)


def packed_fp8_options(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None,
    **options: Any,
) -> Options:  # fmt: skip
    """Options of a call of `attention_varlen_fp8`, with checked dtypes."""
    sizes = checks.check_qkv(q, k, v, checks.PACKED, dtype="")
    return _packed(q, k, v, sizes, cu_seqlens_q, cu_seqlens_k, options)


def _packed(
    q: Tensor, k: Tensor, v: Tensor, sizes: checks.Sizes, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None, options: dict[str, Any],
) -> Options:  # fmt: skip
    checks.check_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0], q)
    N = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k is None:
        if k.shape[0] != q.shape[0]:
            raise ValueError(
                f"cu_seqlens_k must be given where k and q differ in length, got {k.shape[0]} keys "
                f"and {q.shape[0]} queries"
            )
        cu_seqlens_k = cu_seqlens_q
    else:
        checks.check_offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0], q, N=N)
    fields = {
        "query_offset": None,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "scale": float(q.shape[2]) ** -0.5,
    }
    sizes["B"] = N
    return _checked_options(Checking(q, k, v, EXPECTED, options, fields, sizes))


def paged_options(
    q: Tensor, k: Tensor, v: Tensor, sizes: checks.Sizes, options: dict[str, Any]
) -> Options:
    """Options of a call of `attention_paged`: `cache_options` for q [total, H_q, D]."""
    PAGED.refuse_others(options)
    fields = {"query_offset": 0, "scale": q.shape[2] ** -0.5}
    return _checked_options(Checking(q, k, v, EXPECTED, {"causal": True, **options}, fields, sizes))


def cache_options(
    q: Tensor, k: Tensor, v: Tensor, sizes: checks.Sizes, bound: int, options: dict[str, Any]
) -> Options:
    """Options of a call of `decode_attention` with q [B, H_q, T_q, D], causal by default.

    k, v: [P, H_k, S, D or D_v], of the cache. bound: positions that a mask or bias must cover.
    """
    CACHE.refuse_others(options)
    fields = {"query_offset": 0, "scale": q.shape[3] ** -0.5}
    return _checked_options(
        Checking(q, k, v, EXPECTED, {"causal": True, **options}, fields, sizes, bound)
    )
