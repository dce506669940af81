"""A case: a call of a public function, drawn from a seed."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from nightly import gate_sets

from fastattn.kernels.hopper import host
from fastattn.options import OPTIONS, Options
from fastattn.testing.calls import CALLS, Draw
from fastattn.testing.option_examples import cover_pairs

from . import mods

# Integrations by the options that their functions express.
_MASKED = "causal window key_padding_mask attn_mask attn_bias scale dropout"
OF_INTEGRATIONS = {
    "flash_attn": "causal window scale softcap sinks alibi_slopes",
    "sdpa": "causal attn_mask attn_bias scale dropout",
    "diffusers": _MASKED,
    "xformers": "causal window attn_mask attn_bias scale dropout",
    "transformers": f"{_MASKED} softcap sinks",
    "flex_attention": "causal window prefix_lengths key_lengths key_padding_mask documents "
    "mask_mod scale softcap attn_bias alibi_slopes score_mod",
}
# Functions by the options that they take.
TAKES: dict[str, frozenset[str]] = {
    **{name: call.takes for name, call in CALLS.items()},
    "cascade_attention": frozenset(("scale", "softcap", "sinks")),
    "append": frozenset(),
    "flash_attn_with_kvcache": frozenset(OF_INTEGRATIONS["flash_attn"].split()),
    **{name: frozenset(options.split()) for name, options in OF_INTEGRATIONS.items()},
}
# How often each is called.
OFTEN = {
    "attention": 10, "attention_varlen": 4, "decode_attention": 4, "attention_paged": 3,
    "attention_statistics": 2, "selected_attention": 2,
    "additive_attention": 2, "attention_block": 2, "append": 1, "merge": 1, "attention_fp8": 1,
    "attention_varlen_fp8": 1, "cascade_attention": 1, "dot_product_attention": 1,
    "multiplicative_attention": 1, "flash_attn_with_kvcache": 1,
    **dict.fromkeys(OF_INTEGRATIONS, 1),
}  # fmt: skip
_NEEDS: dict[str, tuple[str, ...]] = {
    "keep_first": ("window", "stride"),
    "mod_tensors": ("mask_mod", "score_mod"),
    "prefix_lengths": ("causal",),
    "score_mod_grad": ("score_mod",),
    "relative_query": ("relative_keys",),
    "query2": ("key2",),
    "key2": ("query2",),
    "dropout_seed": ("dropout",),
}
# Codes come back in 32 bits at most, and a part's lse goes with its gradients.
_WITHOUT_FP64 = ("attention_fp8", "attention_varlen_fp8", "attention_block")
# Of caches there is none of no rows, and packed sequences are those of a first row.
_OF_CACHES = (
    "append", "decode_attention", "cascade_attention", "attention_varlen_fp8",
    "flash_attn_with_kvcache",
)  # fmt: skip
_CASTS = (
    "attention", "attention_varlen", "dot_product_attention", "multiplicative_attention",
    "selected_attention", "additive_attention", "attention_statistics",
    *(name for name in OF_INTEGRATIONS if name != "flash_attn"),
)  # fmt: skip
_HIDING = frozenset(
    ("window", "stride", "mask_mod", "score_mod", "key_lengths", "query_offset", "attn_mask",
     "attn_bias", "key_padding_mask", "documents", "positions")
)  # fmt: skip
_SECOND, _RELATIVE = ("query2", "key2"), ("relative_keys", "relative_query")
_APART = (
    frozenset(("positions", "query_offset")),
    *(frozenset((x, y)) for x in _SECOND for y in _RELATIVE),
    *(
        frozenset((x, "batch_invariant"))
        for x in ("dropout", "key_padding_mask", "documents", "positions")
    ),
)
# Of summation, see `worst_naive`: of thousands of cases some have results of a handful of numbers.
ORDERS = 40
# Batch rows times heads that the interpreter has time for.
_HEADS = 6
LAYOUTS = (
    "plain", "plain", "bthd", "wide", "odd", "shifted", "every-second", "columns", "negative",
    "heads-last", "one-row", "one-head", "one-token",
)  # fmt: skip
# Dims of expanded tensors, by layout.
EXPANDED = {"one-row": 0, "one-head": 1, "one-token": 2}
TRAITS = {
    "hot": 0.08,  # scores of up to 10^4
    "nan": 0.4,  # keys and values that no query may see are NaN, and biases where they are hidden
    "forward": 0.35,  # no gradients
    "split": 0.5,  # few queries split their keys
    "again": 0.25,  # calls of other numbers and layouts, which the memo may know
    "environment": 0.15,  # FASTATTN_BACKEND names the backend
    "parts": 0.3,  # heads of dK and dV are split among programs
    "o": 0.4,  # a call without lse
    "lse": 0.1,  # gradients of lse alone
    "some": 0.3,  # gradients of some inputs
    "chunks": 0.7,  # torch holds the scores of few queries at once
    "elsewhere": 0.2,  # tensors are made on another device unless it is named
    "tangents": 0.08,  # in forward mode
    "twice": 0.08,  # double backward
    "max": 0.2,  # the largest score of each query is returned too
    "spoilt": 0.3,  # queries are NaN in another call
    "shared": 0.1,  # keys and values are columns of one tensor
    "autocast": 0.2,  # fp32, which autocast casts to the 16 bits of the case, or fp64
}
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Case:
    """A call. tile: BLOCK_M and BLOCK_N of the kernels. options, traits: names."""

    seed: int
    call: str
    backend: str
    B: int
    H_k: int
    G: int
    T_q: int
    T_k: int
    D: int
    D_v: int
    dtype: torch.dtype
    layouts: tuple[str, str, str]
    tile: tuple[int, int]
    options: tuple[str, ...]
    traits: frozenset[str]
    device: str = "cpu"

    @property
    def H_q(self) -> int:
        return self.H_k * self.G

    @property
    def packed(self) -> bool:
        """Whether the call's sequences are packed."""
        return self.call in CALLS and CALLS[self.call].packed

    @property
    def learns(self) -> bool:
        """Whether gradients are requested."""
        able = self.call in OF_INTEGRATIONS or (self.call in CALLS and CALLS[self.call].learns)
        return able and "forward" not in self.traits

    @property
    def learns_a_table(self) -> bool:
        """Whether gradients of a tensor that a score function reads are requested."""
        reads = {"score_mod", "mod_tensors"} <= {*self.options} and not DERIVED & self.traits
        return reads and self.learns and self.call != "multiplicative_attention"  # has a weight

    def call_of(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function, with the case's default device."""
        with torch.device("meta") if "elsewhere" in self.traits else nullcontext():
            return function(*args, **kwargs)

    def random(self, name: str) -> Draw:
        """The numbers of one part of the case, the same whatever other parts there are."""
        return Draw(f"{self.seed}/{name}")


def drawn(seed: int, backend: str) -> Case:
    """The case of a seed, by one backend."""
    draw = Draw(f"{seed}/case")
    call = draw.weighted(OFTEN)
    tile = draw.choice((16, 16), (32, 16), (16, 32))
    T_q, T_k = (_length(draw, block) for block in tile)
    if draw.chance(0.15):
        T_q = T_k
    D = draw.choice(8, 16, 16, 24, 32, 5, 64, 1, 80, 136)
    case = Case(
        seed=seed,
        call=call,
        backend=backend,
        B=draw.choice(1, 1, 2, 2, 3),
        H_k=draw.choice(1, 1, 2, 3),
        G=draw.choice(1, 1, 2, 3, 4, 5),
        T_q=T_q,
        T_k=T_k,
        D=D,
        D_v=draw.choice(D, D, 8, 16, 3, 40),
        dtype=draw.choice(*DTYPES),
        layouts=(draw.choice(*LAYOUTS), draw.choice(*LAYOUTS), draw.choice(*LAYOUTS)),
        tile=tile,
        options=tuple(
            draw.some(sorted(TAKES[call]), draw.choice(0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 5, 7))
        ),
        traits=frozenset(name for name, share in TRAITS.items() if draw.chance(share)),
    )
    if draw.chance(0.04):
        some = ("T_q", "T_k") if call in _OF_CACHES else ("T_q", "T_k", "B")
        case = replace(case, **{draw.choice(*some): 0})
    return legal(case)


def _length(draw: Draw, block: int) -> int:
    """Around whole blocks, and beside them; two blocks and a remainder most of all."""
    near = draw.choice(1, 2, 2, 2, 2, 3) * block + draw.integer(-1, 1)
    return int(
        draw.choice(1, 2, draw.integer(3, block), near, near, 2 * block + draw.integer(2, 9))
    )


def legal(case: Case) -> Case:
    """The case with the options that its own need, and without those that contradict them."""
    if case.backend != "torch" and case.dtype is torch.float64:
        case = replace(case, dtype=torch.float32)
    if case.call in _WITHOUT_FP64 and case.dtype is torch.float64:
        case = replace(case, dtype=torch.float32)
    if case.backend == "hopper":
        case = _for_hopper(case)
    if case.call == "additive_attention":
        case = replace(case, backend="torch")  # it has no kernel
    if case.dtype is torch.float32 or case.call not in _CASTS:
        case = replace(case, traits=case.traits - {"autocast"})
    if case.call not in _CASTS[:2] or DERIVED & case.traits or case.backend == "hopper":
        case = replace(case, traits=case.traits - {"max"})
    if "max" in case.traits:  # of weights that are not 0
        case = replace(case, traits=case.traits - {"hot"})
    if case.call in _OF_CACHES:
        case = replace(case, B=max(1, case.B))
    if case.call in ("flex_attention", "transformers"):  # torch makes no mask of nothing
        sizes = {name: max(1, getattr(case, name)) for name in ("B", "T_q", "T_k")}
        case = replace(case, **sizes)
    if case.call == "flex_attention":  # few tensors are captured
        case = replace(case, options=case.options[:4])
    if case.call in OF_INTEGRATIONS and case.seed % 2:
        case = replace(case, T_k=case.T_q)
    if case.call in (*OF_INTEGRATIONS, "flash_attn_with_kvcache"):  # without an argument for it
        case = replace(case, traits=case.traits | {"environment"})
    if case.call == "selected_attention" and case.H_k == 3:
        case = replace(case, H_k=4, G=1)  # of which two share a list
    if case.backend == "triton":
        # The interpreter takes its time for every head.
        H_k = min(case.H_k, max(1, _HEADS // case.G))
        case = replace(case, H_k=H_k, B=min(case.B, max(1, _HEADS // (case.G * H_k))))
    options = [x for x in case.options if x in TAKES[case.call]]
    if set(options) & set(_SECOND):
        options = [x for x in options if x not in _RELATIVE]
    for name in options:
        needs = [x for x in _NEEDS.get(name, ()) if x in TAKES[case.call]]
        if case.backend == "hopper":
            needs = [x for x in needs if _hopper_knows(x)]
        if needs and not set(needs) & set(options):
            options.append(needs[case.seed % len(needs)])
    if "score_mod" in options and case.learns and "score_mod_grad" not in options:
        options.append("score_mod_grad")
    if "key2" in options and "scale" in TAKES[case.call] and "shared" in case.traits:
        options.append("scale")  # of which shared widths say nothing
    elif "key2" in options:
        case = replace(case, traits=case.traits - {"shared"})
    # A seed that is drawn in the call would be another one for each sequence, or part.
    if "dropout" in options and case.call in ("attention_varlen", "attention_block"):
        options.append("dropout_seed")
    if "batch_invariant" in options and "max" in case.traits:
        options = [x for x in options if x != "sinks"]  # which come last then
    for pair in _APART:
        if pair <= set(options):
            options.remove(max(pair, key=options.index))
    if case.call in ("attention_statistics", "additive_attention") or case.T_k < 8:
        # A weight that even fp64 has as 0 looks like that of a hidden key, and tanh is 1. Of few
        # keys one has all the weight: exactly, in the formula alone.
        case = replace(case, traits=case.traits - {"hot"})
    if case.call == "additive_attention" and case.layouts[0] == "one-token":
        # Rows are alike then, and so few numbers say nothing of the rounding of projections.
        case = replace(case, layouts=("plain", *case.layouts[1:]))
    # Where rows see a key or two, what is left of dQ is the rounding of o, by which fused kernels
    # take delta and the formula does not.
    few = case.T_k < 8 or set(options) & _HIDING
    if few and "dropout" in options and case.dtype in (torch.float16, torch.bfloat16):
        case = replace(case, traits=case.traits | {"forward"})
    # The checks go through the table in its order, and so do the values here.
    case = replace(case, options=tuple(name for name in OPTIONS if name in options))
    return _of_derivatives(case) if DERIVED & case.traits else case


DERIVED = frozenset(("tangents", "twice"))
# Options whose second derivatives no kernel computes, and biases, whose gradients none does.
FORMULA = frozenset(
    ("score_mod", "score_mod_grad", "relative_bias", "attn_bias", "attn_mask", *_SECOND, *_RELATIVE)
)  # fmt: skip
_BACKWARD_ALONE = ("multiplicative_attention", "additive_attention")
_DERIVES = (*_CASTS[:3], *_BACKWARD_ALONE, *OF_INTEGRATIONS)


def _of_derivatives(case: Case) -> Case:
    """The case with one of their traits, or none where the call has no such derivatives."""
    left = {"again"}
    if case.call not in _DERIVES or case.backend == "hopper" or not case.B:
        left |= DERIVED
    else:
        twice = "twice" in case.traits and case.learns
        left |= {"tangents"} if twice or case.call in _BACKWARD_ALONE else {"twice"}
    if case.dtype is torch.float16:  # whose squares of large numbers are infinite
        left |= {"hot"}
    case = replace(case, traits=case.traits - left)
    if "tangents" in case.traits:  # which some tensors of torch cannot have
        plain = tuple("plain" if x in (*EXPANDED, "negative") else x for x in case.layouts)
        case = replace(case, layouts=plain)
    if "tangents" in case.traits and case.backend == "triton":  # no kernel has these
        left = {*_SECOND, *_RELATIVE, *("attn_bias",) * (case.call == "flex_attention")}
        options = tuple(x for x in case.options if x not in left)
        case = replace(case, options=options)
    return case


def _for_hopper(case: Case) -> Case:
    """The case in sizes, dtypes and options that the kernels for Hopper know."""
    draw = case.random("hopper")
    call = case.call if case.call in ("attention", "attention_varlen") else "attention"
    dims = ((64, 64), (64, 64), (128, 128), (40, 48), (96, 64), (128, 56))
    of_scores = {"mod_tensors", "score_mod", "score_mod_grad"} & set(case.options)
    D, D_v = draw.choice(*dims, (64, 64) if of_scores else (192, 128))
    lengths = (1, 2, 63, 65, 128, 129, draw.integer(130, 200))
    # A function may differ between heads that share keys.
    most = 1 if {"mask_mod", "mod_tensors"} & set(case.options) else 3
    return replace(
        case, call=call, B=draw.choice(1, 1, 2), H_k=draw.choice(1, 1, 2), G=draw.integer(1, most),
        T_q=draw.choice(*lengths), T_k=draw.choice(*lengths), D=D, D_v=D_v,
        dtype=draw.choice(torch.bfloat16, torch.float16),
        options=tuple(name for name in case.options if _hopper_knows(name)),
        traits=case.traits - {"again", "elsewhere"},  # the emulator makes tensors of its own
    )  # fmt: skip


@cache
def _hopper_knows(name: str) -> bool:
    x = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16, device="meta")
    if name in ("attn_mask", "attn_bias"):
        return False  # their strides and heads decide
    given = mods.striped if name.startswith(("mask_mod", "score_mod")) else object()
    fields: dict[str, Any] = dict.fromkeys(OPTIONS[name].fields or (name,), given)
    return host.why_not_hopper(x, x, x, Options(**fields)) is None


def pair_cases(backend: str, largest: int) -> list[Case]:
    """Cases in which every two options that `attention` takes together meet.

    Each has two blocks and a remainder of queries and of keys, and gradients of all that learns.
    Kernels have one head, since the interpreter takes as long for each, in two rows of a batch.
    """
    names = cover_pairs(OPTIONS, lambda a, b: {a, b} not in _APART, largest)
    by_torch = backend == "torch"
    dtype = torch.float64 if by_torch else torch.float32
    B, H_k, G = (2, 2, 3) if by_torch else (2, 1, 1)
    like = Case(
        seed=0, call="attention", backend=backend, B=B, H_k=H_k, G=G, T_q=37, T_k=39, D=8, D_v=8,
        dtype=dtype, layouts=("plain",) * 3, tile=(16, 16), options=(), traits=frozenset(("nan",)),
    )  # fmt: skip
    return [legal(replace(like, seed=seed, options=options)) for seed, options in enumerate(names)]


def further_cases(backend: str, trait: str) -> list[Case]:
    """Cases of `pair_cases` with a further trait, one of wide heads; of options with kernels."""
    left = FORMULA if (backend, trait) == ("triton", "twice") else frozenset[str]()
    cases = {}
    for case in pair_cases(backend, 6):
        D = case.D if cases else 136
        options = tuple(x for x in case.options if x not in left)
        case = legal(replace(case, options=options, D=D, D_v=D, traits=case.traits | {trait}))
        cases[case.options] = case
    return [cases[x] for x in (gate_sets(cases) if backend == "triton" else cases)]


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the largest first."""
    for name in case.options:
        yield legal(replace(case, options=tuple(x for x in case.options if x != name)))
    for trait in sorted(case.traits):
        yield replace(case, traits=case.traits - {trait})
    if case.backend == "hopper":
        return
    for name, least in (("B", 1), ("H_k", 1), ("G", 1), ("G", 2), ("T_q", 1), ("T_k", 1)):
        if getattr(case, name) > least:
            yield replace(case, **{name: least})
    if case.layouts != ("plain",) * 3:
        yield replace(case, layouts=("plain",) * 3)
    if case.dtype not in (torch.float32, torch.float64):
        yield replace(case, dtype=torch.float32)
    for name in ("T_q", "T_k"):
        if getattr(case, name) > 2:
            yield replace(case, **{name: getattr(case, name) // 2})
            yield replace(case, **{name: getattr(case, name) - 1})
    if case.D > 8 or case.D_v > 8:
        yield replace(case, D=8, D_v=8)
