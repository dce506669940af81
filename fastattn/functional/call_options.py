"""Check the keyword arguments of a call and make its `Options`."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from .. import checks, dispatch
from ..options import OPTIONS, Checking, Options, OptionSpec

Function = TypeVar("Function", bound=Callable[..., Any])


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
        raise TypeError(f"{self.name} takes no {name}" + (f": {reason}" if reason else ""))

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
    "additive_attention", lambda row: "of attention's options it takes the masks alone"
)
SELECTED = _callee("selected_attention", lambda row: "lists of key blocks go with simpler options")

_Rule = Callable[[Any, Checking], Any]


def _rule(name: str, row: OptionSpec) -> _Rule | None:
    """The rule of an option, or that of its type."""
    of_type: dict[Any, _Rule] = {
        bool: lambda x, call: checks.check_flag(name, x),
        float | None: lambda x, call: checks.check_positive(name, x),
    }
    return row.rule or of_type.get(row.type)


# Plain tuples, as named tuples look up every field by name.
_OPTIONS = tuple(
    (name, row.default, row.needs, row.checked_by_tags, _rule(name, row), row.fields)
    for name, row in OPTIONS.items()
)


def _checked(call: Checking) -> Options:
    """`Options` of a call. On the critical path of GPU calls, so only given options are checked."""
    arguments, fields = call.arguments, call.fields
    for name, default, needs, by_tags, rule, names in _OPTIONS:
        if name in arguments:
            x = arguments[name]
            if x is default:
                continue
            if needs and arguments.get(needs) is None:
                raise ValueError(f"{name} needs {needs}, which is not given")
            if by_tags:
                call.tensor(name, x)
            value = x if rule is None else rule(x, call)
            if names:
                fields.update(zip(names, value))  # noqa: B905
            else:
                fields[name] = value
    return Options(**fields)


def dense_options(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Options:
    """Options of a call of `attention`, after `checks.check_tensors`."""
    sizes = checks.check_qkv(q, k, v)
    return _of_dense(Checking(q, k, v, sizes, options, _defaults(q, k)))


def fp8_options(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Options:
    """Options of a call of `attention_fp8`, with checked dtypes and devices."""
    sizes = checks.check_qkv(q, k, v, dtype="")
    return _of_dense(Checking(q, k, v, sizes, options, _defaults(q, k)))


def _of_dense(call: Checking) -> Options:
    """`_checked`; warns once of tensors that look like [B, T, H, D].

    Of these, grouped heads are fewer keys than queries. A transposed view was laid by someone who
    knows.
    """
    q, T_q, T_k = call.q, call.sizes["T_q"], call.sizes["T_k"]
    checked = _checked(call)
    # Sizes are no ints in a trace.
    if checked.causal and type(T_q) is type(T_k) is int and 0 < T_k < T_q and not T_q % T_k:
        placed = call.arguments.keys() & {"query_offset", "positions"}
        if q.stride(1) >= q.stride(2) and not placed:
            dispatch.warn_once(
                "attention takes [B, H, T, D]: of these causal queries, which are the last ones, "
                "most come before the first key, and get 0. Of tensors [B, T, H, D], as flash-attn "
                "has them, pass x.transpose(1, 2); if the first query is at the first key, "
                "query_offset=0"
            )
    return checked


def _defaults(q: Tensor, k: Tensor) -> dict[str, Any]:
    """Fields that follow from the sizes: the last query is at the last key."""
    offset, scale = k.shape[2] - q.shape[2], q.shape[3] ** -0.5
    if isinstance(offset, Tensor):
        # torch.jit.trace records sizes as tensors, and an int would become a constant.
        return {"query_offsets": offset.to(q.device).expand(q.shape[0]), "scale": scale}
    return {"query_offset": offset, "scale": scale}


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
        "scale": q.shape[2] ** -0.5,
    }
    sizes["B"] = N
    return _checked(Checking(q, k, v, sizes, options, fields))


def paged_options(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, options: dict[str, Any]
) -> Options:
    """Options of a call of `attention_paged`: `cache_options` for q [total, H_q, D]."""
    PAGED.refuse_others(options)
    sizes = {"B": cu_seqlens.shape[0] - 1, "total_q": q.shape[0], "H_q": q.shape[1]}
    fields = {"query_offset": 0, "scale": q.shape[2] ** -0.5}
    return _checked(Checking(q, k, v, sizes, {"causal": True, **options}, fields))


def cache_options(q: Tensor, k: Tensor, v: Tensor, bound: int, options: dict[str, Any]) -> Options:
    """Options of a call of `decode_attention`.

    Args:
        q: [B, H_q, T_q, D].
        k, v: [P, H_k, S, D or D_v], of the cache.
        bound: positions that a mask or bias must cover.
        options: causal by default.
    """
    CACHE.refuse_others(options)
    sizes = dict(zip(("B", "H_q", "T_q"), q.shape, strict=False))
    fields = {"query_offset": 0, "scale": q.shape[3] ** -0.5}
    return _checked(Checking(q, k, v, sizes, {"causal": True, **options}, fields, bound))
