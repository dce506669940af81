"""The table of options, and the record of a checked call.

`OPTIONS` holds the type, calls, default and rule of each option, and why other calls refuse it.
`Options` holds the checked values that backends read, with their tags: of a tensor its dtype and
dims, off which it is checked. `arguments.pyi` is generated from the table.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

from torch import Tensor

from . import checks, score_checks
from .score_checks import Checking

Window = int | tuple[int | None, int | None] | None

# Functions that take options.
CALLS = (
    "attention",
    "attention_varlen",
    "decode_attention",
    "attention_paged",
    "attention_fp8",
    "attention_varlen_fp8",
    "additive_attention",
    "selected_attention",
)
_DENSE, _PACKED, _DECODE, _PAGED, _FP8, _PACKED_FP8, _ADDITIVE, _SELECTED = (
    frozenset((call,)) for call in CALLS
)
_CACHE = _DECODE | _PAGED
_EVERY = frozenset(CALLS) - _SELECTED
_ALL_BUT_FP8 = _EVERY - _FP8 - _PACKED_FP8
_SCALED = (_EVERY | _SELECTED) - _ADDITIVE
_TRAINED = _DENSE | _PACKED


class OptionSpec(NamedTuple):
    """An option of a call.

    type: of the argument.
    calls: names of the functions that take it.
    rule: returns the value of the record's field from the argument; raises the errors of
        `attention`. A tensor, unless it has other forms, was checked by its tags before. Default:
        of its type.
    default: value if it is not passed; not checked.
    fields: names of the fields, one for each value of rule; default: the option's name.
    needs: the option that it belongs to, without which it is refused.
    packed, cache: why `attention_varlen` and `decode_attention` refuse it; `attention_paged`
        refuses it for either reason.
    """

    type: Any
    calls: frozenset[str]
    rule: Callable[[Any, Checking], Any] | None = None
    default: Any = None
    fields: tuple[str, ...] = ()
    needs: str = ""
    packed: str = ""
    cache: str = ""


_NO_TRAINING = "there is no training from a cache"
_NO_GRADIENTS = "there are no gradients"
_IN_LATENT_CACHE = "a LatentCache holds the keys of both products"

# An option follows the options that its check needs.
OPTIONS: dict[str, OptionSpec] = {
    "causal": OptionSpec(bool, _EVERY | _SELECTED, default=False),
    "window": OptionSpec(
        Window,
        _EVERY | _SELECTED,
        lambda x, call: checks.check_window(x),
        fields=("left", "right"),
    ),
    "keep_first": OptionSpec(
        int, _EVERY, lambda x, call: checks.check_keep_first(x, call.windowed), 0
    ),
    "stride": OptionSpec(
        int | None,
        _ALL_BUT_FP8,
        lambda x, call: checks.within_reach(checks.check_count("stride", x, 1)),
    ),
    "mod_tensors": OptionSpec(tuple[Tensor, ...], _ALL_BUT_FP8, score_checks.check_mod_tensors, ()),
    "mask_mod": OptionSpec(Any, _ALL_BUT_FP8, score_checks.check_mask_mod),
    "heads": OptionSpec(
        tuple[int, int] | None,
        _ALL_BUT_FP8,
        score_checks.check_heads,
        fields=("first_head", "all_heads"),
    ),
    "prefix_lengths": OptionSpec(
        int | Tensor | None,
        _EVERY - _CACHE,
        score_checks.check_prefix_lengths,
        cache="new tokens follow every prefix",
    ),
    "key_lengths": OptionSpec(
        Tensor | None,
        (_EVERY | _SELECTED) - _CACHE,
        cache="the cache knows the lengths of its rows",
    ),
    "query_offset": OptionSpec(
        int | Tensor | None,
        _DENSE | _FP8 | _ADDITIVE | _SELECTED,
        score_checks.check_query_offset,
        fields=("query_offset", "query_offsets"),
        packed="the last query of each sequence is at its last key",
        cache="the last query of each row is at its last key",
    ),
    "attn_mask": OptionSpec(
        Tensor | None,
        _DENSE | _DECODE | _ADDITIVE,
        score_checks.check_mask_or_bias,
        fields=("attn_mask", "attn_bias"),
        packed="mask_mod computes a mask inside the kernels",
    ),
    "key_padding_mask": OptionSpec(
        Tensor | None,
        _DENSE | _ADDITIVE | _SELECTED,
        packed="key_lengths [N] says how many keys of each sequence exist",
        cache="the cache's starts say where rows are padded",
    ),
    "documents": OptionSpec(
        Tensor | tuple[Tensor, Tensor] | None,
        _DENSE | _ADDITIVE | _SELECTED,
        score_checks.check_documents,
        fields=("q_documents", "k_documents"),
        packed="cu_seqlens separates the sequences",
        cache="a row of a cache is one document; attn_mask and mask_mod hide parts of it",
    ),
    "positions": OptionSpec(
        tuple[Tensor, Tensor] | None,
        _DENSE,
        score_checks.check_positions,
        fields=("q_positions", "k_positions"),
        packed="tokens of a sequence have consecutive positions",
        cache="the cache knows the positions of its keys",
    ),
    "query2": OptionSpec(
        Tensor | None, _TRAINED, score_checks.check_query2, needs="key2", cache=_IN_LATENT_CACHE
    ),
    "key2": OptionSpec(
        Tensor | None, _TRAINED, score_checks.check_key2, needs="query2", cache=_IN_LATENT_CACHE
    ),
    "scale": OptionSpec(float | None, _SCALED),
    "softcap": OptionSpec(float | None, _SCALED),
    "sinks": OptionSpec(Tensor | None, _SCALED),
    "attn_bias": OptionSpec(
        Tensor | None,
        _DENSE | _DECODE,
        score_checks.check_bias,
        packed="relative_bias and score_mod compute a bias inside the kernels",
    ),
    "relative_keys": OptionSpec(
        Tensor | None,
        _TRAINED,
        score_checks.check_relative_keys,
        cache="there is no kernel for them",
    ),
    "relative_query": OptionSpec(
        Tensor | None,
        _TRAINED,
        needs="relative_keys",
        cache="there is no kernel for relative keys",
    ),
    "score_mod_grad": OptionSpec(
        Any, _TRAINED, score_checks.check_score_mod_grad, needs="score_mod", cache=_NO_GRADIENTS
    ),
    # An int: torch.compile would make a float default dynamic.
    "dropout": OptionSpec(float, _TRAINED, score_checks.check_dropout, 0, cache=_NO_TRAINING),
    "dropout_seed": OptionSpec(
        Tensor | None, _TRAINED, score_checks.check_dropout_seed, cache=_NO_TRAINING
    ),
    "deterministic": OptionSpec(
        bool,
        _TRAINED,
        lambda x, call: (not checks.check_flag("deterministic", x),),
        True,
        ("atomic_dq",),
        cache=_NO_GRADIENTS,
    ),
    "batch_invariant": OptionSpec(
        bool, _TRAINED | _CACHE, score_checks.check_batch_invariant, False
    ),
    "alibi_slopes": OptionSpec(Tensor | None, _TRAINED | _CACHE, score_checks.check_alibi_slopes),
    "relative_bias": OptionSpec(Tensor | None, _TRAINED | _CACHE),
    "score_mod": OptionSpec(Any, _TRAINED | _CACHE, score_checks.check_score_mod),
}


# The most registers first: a call belongs to the first kind that has one of its options.
Registers = Literal["relative", "heavy", "scores", "bias", "masked", ""]


class Tags(NamedTuple):
    """Properties of a field of `Options`.

    dims, dtype: of a tensor, as `checks.check_input` has them.
    learned: it has a gradient.
    strided: may have any strides; other tensors must be contiguous.
    registers: kind of work per score, which decides a kernel's registers: a simple mask ("masked"),
        a bias ("bias"), another test or change ("scores"), a bias with a test or change ("heavy",
        only of several options), or vectors for distances ("relative").
    table: launchers convert it to a tensor.
    weighs: changes scores or weights in a way that torch's own attention lacks ("more"), or that it
        has as a bias ("bias").
    placing: the mask by positions, or the positions, depend on it.
    """

    dims: str = ""
    dtype: str = ""
    learned: bool = False
    strided: bool = False
    registers: Registers = ""
    table: bool = False
    weighs: Literal["", "bias", "more"] = ""
    placing: bool = False


class Options(NamedTuple):
    """The options of one checked call. None, 0 and False mean that an option is not used.

    Tensors are on q's device. Dims that broadcast are not expanded.
    """

    key_padding_mask: Annotated[Tensor | None, Tags("B T_k", "bool", registers="masked")] = None
    key_lengths: Annotated[Tensor | None, Tags("B", "integer")] = None
    # In place of query_offset
    query_offsets: Annotated[Tensor | None, Tags("B", "integer", placing=True)] = None
    prefix_lengths: Annotated[
        Tensor | None, Tags("B", "integer", registers="masked", placing=True)
    ] = None
    q_documents: Annotated[Tensor | None, Tags("B T_q", "integer", registers="masked")] = None
    k_documents: Annotated[Tensor | None, Tags("B T_k", "integer")] = None
    attn_mask: Annotated[
        Tensor | None, Tags("[B] [H_q] (T_q) (T_k)", "bool", strided=True, registers="scores")
    ] = None  # bool
    alibi_slopes: Annotated[
        Tensor | None, Tags("B? H_q", "float32", registers="masked", weighs="bias")
    ] = None
    dropout_seed: Annotated[Tensor | None, Tags("2", "int64")] = None  # given if dropout > 0
    cu_seqlens_q: Annotated[Tensor | None, Tags("N+1", "integer")] = (
        None  # q is packed, [total_q, H_q, D]
    )
    cu_seqlens_k: Annotated[Tensor | None, Tags("N+1", "integer")] = None
    # With packed queries over a cache: bool, see `attention_paged`; row offsets if it is flat.
    tree_mask: Annotated[Tensor | None, Tags(dtype="bool", strided=True, registers="scores")] = None
    tree_starts: Annotated[Tensor | None, Tags("B", "integer")] = None
    # Positions rise by 1 within each block of 128
    q_positions: Annotated[
        Tensor | None, Tags("(B) T_q", "int32", registers="masked", placing=True)
    ] = None
    k_positions: Annotated[Tensor | None, Tags("(B) T_k", "int32", placing=True)] = None
    # The next fields have gradients.
    attn_bias: Annotated[
        Tensor | None,
        Tags("[B] [H_q] (T_q) (T_k)", "float", learned=True, strided=True, registers="bias"),
    ] = None
    relative_bias: Annotated[
        Tensor | None, Tags("H_q 2R+1", "float", learned=True, registers="scores", weighs="bias")
    ] = None
    relative_keys: Annotated[
        Tensor | None, Tags("H 2R+1 D", "as q", learned=True, registers="relative", weighs="more")
    ] = None  # H one of H_q, H_k and 1
    relative_query: Annotated[
        Tensor | None, Tags("B H_q T_q D", "as q", learned=True, strided=True)
    ] = None
    # A second product, which is added to q.k.
    query2: Annotated[
        Tensor | None, Tags("B H_q T_q D2", "as q", learned=True, strided=True, weighs="more")
    ] = None
    key2: Annotated[
        Tensor | None, Tags("B H_k2 T_k D2", "as q", learned=True, strided=True, weighs="more")
    ] = None  # H_k2 divides H_k
    sinks: Annotated[Tensor | None, Tags("H_q", "float", learned=True, weighs="more")] = None

    mod_tensors: tuple[Tensor, ...] = ()
    # None: packed, each sequence has its own
    query_offset: Annotated[int | None, Tags(placing=True)] = 0
    left: Annotated[int | None, Tags(registers="masked", placing=True)] = None
    right: Annotated[int | None, Tags(placing=True)] = None
    causal: Annotated[bool, Tags(placing=True)] = False
    keep_first: Annotated[int, Tags(registers="masked", placing=True)] = 0
    stride: Annotated[int | None, Tags(registers="scores", table=True, placing=True)] = None
    scale: float = 1.0
    softcap: Annotated[float | None, Tags(registers="masked", weighs="more")] = None
    # An int: torch.compile would make a float default dynamic.
    dropout: Annotated[float, Tags(registers="scores", weighs="more")] = 0
    # Whether atomics may accumulate dQ, in an order that varies between runs.
    atomic_dq: bool = False
    # Whether o and lse of a token have the same bits in any batch, in chunks and over caches.
    batch_invariant: bool = False
    # Whether o, dQ, dK, dV and dquery stay in fp32, as terms of a sum.
    fp32_results: bool = False
    # Number of all heads if this call has a part of them, for dropout and functions; else None.
    first_head: int = 0
    all_heads: int | None = None
    mask_mod: Annotated[Any, Tags(registers="scores")] = None
    score_mod: Annotated[Any, Tags(registers="scores", weighs="more")] = None
    score_mod_grad: Any = None

    @property
    def band(self) -> tuple[int | None, int | None] | None:
        """(left, right) if `causal` and `window` form one band around each query, else None."""
        bare = not self.keep_first and self.stride is None
        if not self.causal:
            return (self.left, self.right) if bare else None
        if not bare or self.prefix_lengths is not None:
            return None
        return self.left, 0 if self.right is None else min(self.right, 0)

    @property
    def plain(self) -> bool:
        """Whether there are no tensors, no functions and no stride, which becomes a table."""
        for index in _NOT_PLAIN:  # noqa: SIM110  a generator would be slower
            if self[index] is not None:
                return False
        return True

    @property
    def launched_anew(self) -> bool:
        """Whether a launch cannot be replayed: Triton checks the globals of users' functions."""
        for index in _LAUNCHED_ANEW:  # noqa: SIM110  a generator would be slower
            if self[index] is not None:
                return True
        return False

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The option tensors with gradients, in the order of LEARNED."""
        fields: tuple[Any, ...] = self
        return tuple([fields[index] for index in _LEARNED])

    @property
    def registers(self) -> Registers:
        """Kind of work per score, which decides the kernels' registers; see `Tags`."""
        for registers, places in _REGISTERS.items():
            if self._has(places):
                both = registers == "scores" and self.attn_bias is not None
                return "heavy" if both else registers
        return ""

    @property
    def weighs(self) -> bool:
        """Whether an option changes scores or weights in a way that torch's own attention lacks."""
        return self._has(_WEIGHS)

    @property
    def placing(self) -> "Options | None":
        """The numbers that the mask by positions depends on; None if it depends on tensors."""
        given = {name: getattr(self, name) for name in _PLACING}
        return Options(**given) if all(given[x] is None for x in TENSORS if x in given) else None

    @property
    def biases(self) -> bool:
        """Whether an option other than attn_bias is added to scores."""
        return self._has(_BIASES)

    def _has(self, fields: "_Fields") -> bool:
        """Whether one of the fields differs from its default."""
        for index, default in fields:
            x = self[index]
            if x is not None if default is None else x != default:
                return True
        return False


_HINTS = get_type_hints(Options, include_extras=True)
TAGS: dict[str, Tags] = {
    name: getattr(hint, "__metadata__", (Tags(),))[0] for name, hint in _HINTS.items()
}


def _tagged(**wanted: Any) -> tuple[str, ...]:
    """Names of the fields with these tags."""
    return tuple(name for name, tags in TAGS.items() if wanted.items() <= tags._asdict().items())


TENSORS = tuple(name for name, hint in get_type_hints(Options).items() if hint == Tensor | None)
FUNCTIONS = tuple(name for name, hint in get_type_hints(Options).items() if hint is Any)
LEARNED = _tagged(learned=True)
# Options that are multiplied with q or another query, in q's dtype.
LIKE_Q = _tagged(dtype="as q")
# Options with the rows of q or k, packed if q and k are.
LAID_AS = {
    name: match[1]
    for name, tags in TAGS.items()
    if (match := re.fullmatch(r"B H\w+ T_([qk]) D2?", tags.dims))
}
# Dtype and dims of each field, and dims in a call of packed sequences.
EXPECTED = {
    name: (tags.dtype, tags.dims, re.sub(r"^B (H\w+) T_(.)", r"total_\2 \1", tags.dims))
    for name, tags in TAGS.items()
}
# Tensors that kernels read in a fixed order of elements.
CONTIGUOUS = tuple(name for name in TENSORS if not TAGS[name].strided)

_place = Options._fields.index
_LEARNED = tuple(map(_place, LEARNED))
# mod_tensors are read by functions alone.
_NOT_PLAIN = tuple(map(_place, {*TENSORS, *FUNCTIONS, *_tagged(table=True)}))
_LAUNCHED_ANEW = tuple(map(_place, FUNCTIONS))
_Fields = tuple[tuple[int, Any], ...]  # places, and defaults


def _fields(**tags: Any) -> _Fields:
    return tuple((_place(name), Options._field_defaults[name]) for name in _tagged(**tags))


_PLACING = _tagged(placing=True)
_WEIGHS, _BIASES = _fields(weighs="more"), _fields(weighs="bias")
_REGISTERS = {kind: _fields(registers=kind) for kind in get_args(Registers) if kind}

# Tensors whose dims may all be 1, to broadcast.
BROADCAST = tuple(name for name, tags in TAGS.items() if "(T_q)" in tags.dims)


def along(dim: str) -> dict[str, int]:
    """Fields whose tensors have this dim, each with its number of later dims."""
    return {
        name: len(dims) - 1 - dims.index(dim)
        for name, dims in ((name, re.findall(r"[\w+]+", tags.dims)) for name, tags in TAGS.items())
        if dim in dims
    }
