"""The table of options: one row for each option of a call, and the record of a checked call.

Two classes say all there is to an option. In the first a row stands among those that the same calls
take: its type, its default, its check, and why another call refuses it. In the second, `Options`,
stands what backends read once it is checked, and what they have to know of that.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, get_type_hints

from torch import Tensor

from . import checks, score_checks

Window = int | tuple[int | None, int | None] | None


class Checking(NamedTuple):
    """A call whose options are being checked, in the order of the table.

    B: batch rows, or packed sequences. given: all options. fields: of the record, so far. reach:
    over a cache, how many positions a mask has to reach over.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    B: int
    given: Mapping[str, Any]
    fields: dict[str, Any]
    reach: int | None = None

    @property
    def windowed(self) -> bool:
        """Whether a window or stride hides keys."""
        sides = self.fields.get("left"), self.fields.get("right"), self.given.get("stride")
        return any(side is not None for side in sides)


class Row(NamedTuple):
    """One option.

    default: its value where it is not given, which is not checked.
    check: the value for the record's field; raises what `attention` raises.
    fields: names of the fields, if not one of the option's own name; check makes as many values.
    like_q: torch.autocast casts it as it casts q.
    packed: why `attention_varlen` refuses it. cache: why `decode_attention` does.
    """

    default: Any
    check: Callable[[Any, Checking], Any]
    fields: tuple[str, ...] = ()
    like_q: bool = False
    packed: str = ""
    cache: str = ""


def _prefix_lengths(x: Any, call: Checking) -> Tensor:
    return checks.check_prefix_lengths(x, call.B, call.fields.get("causal", False), call.q)


def _query_offset(x: Any, call: Checking) -> tuple[int, Tensor | None]:
    offset = checks.check_query_offset(x, call.q)
    return (0, offset) if isinstance(offset, Tensor) else (offset, None)


def _attn_mask(x: Any, call: Checking) -> tuple[Tensor | None, Tensor | None]:
    """A mask and a bias, which is what a float tensor is."""
    if call.reach is not None:
        return checks.check_cache_mask(x, call.q, call.reach), None
    return checks.check_attn_mask(x, call.given.get("attn_bias"), call.q, call.k)


def _attn_bias(x: Any, call: Checking) -> Tensor:
    checks.check_floats("attn_bias", x)
    if call.reach is not None:
        return checks.check_per_position("attn_bias", x, call.q, call.reach)
    return checks.check_per_score("attn_bias", x, call.q, call.k)


def _mod_tensors(x: Any, call: Checking) -> tuple[Tensor, ...]:
    used = call.given.get("mask_mod") is not None or call.given.get("score_mod") is not None
    return score_checks.check_mod_tensors(x, call.q, used)


def _mask_mod(x: Any, call: Checking) -> Any:
    return score_checks.check_mask_mod(x, len(call.fields.get("mod_tensors", ())))


def _score_mod(x: Any, call: Checking) -> Any:
    score_checks.check_score_mod(x, len(call.fields.get("mod_tensors", ())))
    inputs = (call.q, call.k, call.v, *(call.fields.get(name) for name in LEARNED))
    score_checks.check_score_mod_gradient(call.given.get("score_mod_grad"), inputs)
    return x


def _score_mod_grad(x: Any, call: Checking) -> Any:
    tensors = len(call.fields.get("mod_tensors", ()))
    return score_checks.check_score_mod_grad(x, call.given.get("score_mod"), tensors)


def _relative_query(x: Any, call: Checking) -> Tensor:
    return score_checks.check_relative_query(x, call.fields.get("relative_keys"), call.q)


def _dropout_seed(x: Any, call: Checking) -> Tensor | None:
    seed = score_checks.check_dropout_seed(x, call.q)
    return seed if call.fields.get("dropout") else None


_NO_TRAINING = "there is no training from a cache"
_NO_GRADIENTS = "there are no gradients"


# The classes say in their names which calls take their options: an option moves to another class
# when one more call takes it. They are in an order in which what an option needs stands before it.
class OfAllCalls(TypedDict, total=False):
    """Options of `attention`, `attention_varlen`, `decode_attention`, `attention_fp8` and
    `additive_attention`.
    """

    causal: Annotated[bool, Row(False, lambda x, call: checks.check_flag("causal", x))]
    window: Annotated[Window, Row(None, lambda x, call: checks.check_window(x), ("left", "right"))]
    keep_first: Annotated[int, Row(0, lambda x, call: checks.check_keep_first(x, call.windowed))]


class OfAllButFp8(TypedDict, total=False):
    stride: Annotated[int | None, Row(None, lambda x, call: checks.check_count("stride", x, 1))]
    mod_tensors: Annotated[tuple[Tensor, ...], Row((), _mod_tensors)]
    mask_mod: Annotated[Any, Row(None, _mask_mod)]


class OfAllButCaches(TypedDict, total=False):
    prefix_lengths: Annotated[
        int | Tensor | None,
        Row(None, _prefix_lengths, cache="new tokens stand behind every prefix"),
    ]
    key_lengths: Annotated[
        Tensor | None,
        Row(
            None,
            lambda x, call: checks.check_key_lengths(x, call.B, call.q),
            cache="the cache knows the lengths of its rows",
        ),
    ]


class OfDenseFp8AndAdditive(TypedDict, total=False):
    query_offset: Annotated[
        int | Tensor | None,
        Row(
            None,
            _query_offset,
            ("query_offset", "query_offsets"),
            packed="the last query of each sequence stands at its last key",
            cache="the last query of each row stands at its last key",
        ),
    ]


class OfDenseCachesAndAdditive(TypedDict, total=False):
    attn_mask: Annotated[
        Tensor | None,
        Row(
            None,
            _attn_mask,
            ("attn_mask", "attn_bias"),
            packed="mask_mod computes a mask inside the kernels",
        ),
    ]


class OfDenseAndAdditive(TypedDict, total=False):
    key_padding_mask: Annotated[
        Tensor | None,
        Row(
            None,
            lambda x, call: checks.check_key_padding_mask(x, call.k),
            packed="key_lengths [N] says how many keys of each sequence exist",
            cache="the cache's starts say where rows are padded",
        ),
    ]
    documents: Annotated[
        Tensor | tuple[Tensor, Tensor] | None,
        Row(
            None,
            lambda x, call: checks.check_documents(x, call.q, call.k),
            ("q_documents", "k_documents"),
            packed="cu_seqlens separates the sequences",
            cache="a row of a cache is one document; attn_mask and mask_mod hide parts of it",
        ),
    ]


class OfAllButAdditive(TypedDict, total=False):
    scale: Annotated[float | None, Row(None, lambda x, call: checks.check_positive("scale", x))]
    softcap: Annotated[float | None, Row(None, lambda x, call: checks.check_positive("softcap", x))]
    sinks: Annotated[
        Tensor | None,
        Row(None, lambda x, call: score_checks.check_sinks(x, call.q.shape[1], call.q)),
    ]


class OfDenseAndCaches(TypedDict, total=False):
    attn_bias: Annotated[
        Tensor | None,
        Row(
            None,
            _attn_bias,
            packed="relative_bias and score_mod compute a bias inside the kernels",
        ),
    ]


class OfDenseAndPacked(TypedDict, total=False):
    relative_keys: Annotated[
        Tensor | None,
        Row(
            None,
            lambda x, call: score_checks.check_relative_keys(x, call.k.shape[1], call.q),
            like_q=True,
            cache="there is no kernel for them",
        ),
    ]
    relative_query: Annotated[
        Tensor | None,
        Row(None, _relative_query, like_q=True, cache="there is no kernel for relative keys"),
    ]
    score_mod_grad: Annotated[Any, Row(None, _score_mod_grad, cache=_NO_GRADIENTS)]
    # An int: torch.compile would make a default that is a float dynamic.
    dropout: Annotated[
        float, Row(0, lambda x, call: score_checks.check_dropout(x), cache=_NO_TRAINING)
    ]
    dropout_seed: Annotated[Tensor | None, Row(None, _dropout_seed, cache=_NO_TRAINING)]
    deterministic: Annotated[
        bool,
        Row(
            True,
            lambda x, call: (not checks.check_flag("deterministic", x),),
            ("atomic_dq",),
            cache=_NO_GRADIENTS,
        ),
    ]


class OfDensePackedAndCaches(TypedDict, total=False):
    alibi_slopes: Annotated[
        Tensor | None,
        Row(
            None,
            lambda x, call: score_checks.check_alibi_slopes(x, call.B, call.q.shape[1], call.q),
        ),
    ]
    relative_bias: Annotated[
        Tensor | None,
        Row(None, lambda x, call: score_checks.check_relative_bias(x, call.q.shape[1], call.q)),
    ]
    score_mod: Annotated[Any, Row(None, _score_mod)]


class AttentionArguments(
    OfAllCalls, OfAllButFp8, OfAllButCaches, OfDenseFp8AndAdditive, OfDenseCachesAndAdditive,
    OfDenseAndAdditive, OfAllButAdditive, OfDenseAndCaches, OfDenseAndPacked,
    OfDensePackedAndCaches,
    total=False,
):  # fmt: skip
    """Keyword arguments of `attention` that say what is computed; see there."""


class ScoreArguments(
    OfAllCalls, OfAllButFp8, OfAllButCaches, OfAllButAdditive, OfDenseAndPacked,
    OfDensePackedAndCaches,
    total=False,
):  # fmt: skip
    """Those of `attention_varlen`."""


class DecodeArguments(
    OfAllCalls, OfAllButFp8, OfDenseCachesAndAdditive, OfAllButAdditive, OfDenseAndCaches,
    OfDensePackedAndCaches,
    total=False,
):  # fmt: skip
    """Those of `decode_attention`."""


class Fp8Arguments(
    OfAllCalls, OfAllButCaches, OfDenseFp8AndAdditive, OfAllButAdditive, total=False
):
    """Those of `attention_fp8`."""


class MaskArguments(
    OfAllCalls, OfAllButFp8, OfAllButCaches, OfDenseFp8AndAdditive, OfDenseCachesAndAdditive,
    OfDenseAndAdditive,
    total=False,
):  # fmt: skip
    """Those of `additive_attention`."""


ROWS: dict[str, Row] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(AttentionArguments, include_extras=True).items()
}
# Options that torch.autocast casts as it casts q.
LIKE_Q = tuple(name for name, row in ROWS.items() if row.like_q)


class Tags(NamedTuple):
    """What is known of a field of `Options` beside its type.

    dims: of a tensor; those that may be 1 in brackets.
    learned: autograd gives it a gradient.
    strided: kernels read it by its strides; any other tensor has to be contiguous.
    registers: kernels that read it have to be as economical of registers as with a mask ("masked"),
    a change of scores ("heavy"), or vectors for distances ("relative").
    table: launchers make a tensor of it.
    """

    dims: str = ""
    learned: bool = False
    strided: bool = False
    registers: Literal["", "masked", "heavy", "relative"] = ""
    table: bool = False


class Options(NamedTuple):
    """One checked call. None, 0 and False mean that an option was not given.

    Tensors lie on q's device. Those with dims of one size or another are not expanded.
    """

    key_padding_mask: Annotated[Tensor | None, Tags("B T_k", registers="masked")] = None  # bool
    # int32 or int64
    key_lengths: Annotated[Tensor | None, Tags("B")] = None
    query_offsets: Annotated[Tensor | None, Tags("B")] = None  # in place of query_offset
    prefix_lengths: Annotated[Tensor | None, Tags("B", registers="masked")] = None
    q_documents: Annotated[Tensor | None, Tags("B T_q", registers="masked")] = None
    k_documents: Annotated[Tensor | None, Tags("B T_k")] = None
    attn_mask: Annotated[
        Tensor | None, Tags("[B] [H_q] [T_q] [T_k]", strided=True, registers="heavy")
    ] = None  # bool
    alibi_slopes: Annotated[Tensor | None, Tags("[B] H_q", registers="masked")] = None  # fp32
    dropout_seed: Annotated[Tensor | None, Tags("2")] = None  # int64, given if dropout > 0
    cu_seqlens_q: Annotated[Tensor | None, Tags("N+1")] = None  # q is packed, [total_q, H_q, D]
    cu_seqlens_k: Annotated[Tensor | None, Tags("N+1")] = None
    # What follows has gradients, and any float dtype; what q is multiplied by, that of q.
    attn_bias: Annotated[
        Tensor | None,
        Tags("[B] [H_q] [T_q] [T_k]", learned=True, strided=True, registers="heavy"),
    ] = None
    relative_bias: Annotated[Tensor | None, Tags("H_q 2R+1", learned=True, registers="heavy")] = (
        None
    )
    relative_keys: Annotated[
        Tensor | None, Tags("H 2R+1 D", learned=True, registers="relative")
    ] = None  # H one of H_q, H_k and 1
    relative_query: Annotated[Tensor | None, Tags("B H_q T_q D", learned=True, strided=True)] = None
    sinks: Annotated[Tensor | None, Tags("H_q", learned=True)] = None

    mod_tensors: tuple[Tensor, ...] = ()
    query_offset: int | None = 0  # None: packed, each sequence has its own
    left: Annotated[int | None, Tags(registers="masked")] = None
    right: int | None = None
    causal: bool = False
    keep_first: Annotated[int, Tags(registers="masked")] = 0
    stride: Annotated[int | None, Tags(registers="heavy", table=True)] = None
    scale: float = 1.0
    softcap: Annotated[float | None, Tags(registers="masked")] = None
    # An int: torch.compile would make a default that is a float dynamic.
    dropout: Annotated[float, Tags(registers="heavy")] = 0
    # Whether dQ may be added up by atomics, in an order that is another in each run.
    atomic_dq: bool = False
    mask_mod: Annotated[Any, Tags(registers="heavy")] = None
    score_mod: Annotated[Any, Tags(registers="heavy")] = None
    score_mod_grad: Any = None

    @property
    def band(self) -> tuple[int | None, int | None] | None:
        """(left, right) if `causal` and `window` come to one band around each query, else None."""
        bare = not self.keep_first and self.stride is None
        if not self.causal:
            return (self.left, self.right) if bare else None
        if not bare or self.prefix_lengths is not None:
            return None
        return self.left, 0 if self.right is None else min(self.right, 0)

    @property
    def plain(self) -> bool:
        """Whether numbers say it all: there are no tensors, and no functions.

        Nor a stride, of which launchers make a table.
        """
        for place in _NOT_PLAIN:  # noqa: SIM110  a generator would be slower
            if self[place] is not None:
                return False
        return True

    @property
    def launched_anew(self) -> bool:
        """Whether a launch serves no other call: users' functions read globals, and Triton looks at
        those again at each launch.
        """
        for place in _LAUNCHED_ANEW:  # noqa: SIM110  a generator would be slower
            if self[place] is not None:
                return True
        return False

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The tensors beside q, k and v that have gradients, in the order of LEARNED."""
        fields: tuple[Any, ...] = self
        return tuple([fields[place] for place in _LEARNED])

    @property
    def registers(self) -> Literal["", "masked", "heavy", "relative"]:
        """How economical of registers kernels have to be; see `Tags`."""
        for registers, places in _REGISTERS.items():
            for place, default in places:
                x = self[place]
                if x is not None if default is None else x != default:
                    return registers
        return ""


_HINTS = get_type_hints(Options, include_extras=True)
TAGS: dict[str, Tags] = {
    name: getattr(hint, "__metadata__", (Tags(),))[0] for name, hint in _HINTS.items()
}
TENSORS = tuple(name for name, hint in get_type_hints(Options).items() if hint == Tensor | None)
FUNCTIONS = tuple(name for name, hint in get_type_hints(Options).items() if hint is Any)
LEARNED = tuple(name for name, tags in TAGS.items() if tags.learned)
# Tensors that kernels read in a fixed order of elements.
CONTIGUOUS = tuple(name for name in TENSORS if not TAGS[name].strided)

_place = Options._fields.index
# mod_tensors are read by functions alone.
_NOT_PLAIN = tuple(
    _place(name)
    for name, tags in TAGS.items()
    if name in TENSORS or name in FUNCTIONS or tags.table
)
_LAUNCHED_ANEW = tuple(map(_place, FUNCTIONS))
_LEARNED = tuple(map(_place, LEARNED))
_KINDS: tuple[Literal["relative", "heavy", "masked"], ...] = ("relative", "heavy", "masked")
_REGISTERS = {
    kind: [
        (_place(name), Options._field_defaults[name])
        for name, tags in TAGS.items()
        if tags.registers == kind
    ]
    for kind in _KINDS
}
