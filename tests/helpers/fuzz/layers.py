"""A layer of `fastattn.modules` with drawn settings, and drawn arguments of its calls."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fastattn import CausalGQAttention, CrossGQAttention, GQAttention, MultiheadLatentAttention
from fastattn.models.positions import RelativeContent, RelativeScalar, RelativeTransformerXL
from fastattn.modules.options import SelfOptions, SharedOptions, table
from fastattn.modules.sparse import MoBAttention, NativeSparseAttention
from fastattn.modules.sparse.layer import TAKEN
from fastattn.rotary_scaling import LinearScaling, Llama3Scaling, NTKScaling, YarnScaling
from fastattn.testing.calls import Draw

SCALINGS = (
    None, LinearScaling(3.0), NTKScaling(2.5), YarnScaling(4.0, 16), Llama3Scaling(8.0, 32),
    YarnScaling(2.0, 8, attention_factor=1.5, truncate=False),
)  # fmt: skip
_PLACES = frozenset(("backend", "device", "dtype"))
_LATENT = frozenset(
    ("q_latent_dim", "rope_dim", "v_head_dim", "causal", "window", "softcap", "sinks", "rotary",
     "rotary_base", "rotary_scaling", "mscale", "scale", "bias", "dropout", "attention_dropout")
)  # fmt: skip
KINDS: dict[str, Any] = {
    "self": GQAttention, "cross": CrossGQAttention, "latent": MultiheadLatentAttention,
    "moba": MoBAttention, "nsa": NativeSparseAttention,
}  # fmt: skip
OFTEN = {"self": 6, "cross": 2, "latent": 4, "moba": 1, "nsa": 1}
TAKES: dict[str, frozenset[str]] = {
    "self": frozenset((*table(SelfOptions), "causal")) - _PLACES,
    "cross": frozenset((*table(SharedOptions), "memory_dim")) - _PLACES,
    "latent": _LATENT,
    "moba": frozenset(TAKEN) - _PLACES,
    "nsa": frozenset(TAKEN) - _PLACES,
}
# Arguments of a call beside x and a cache.
_ROTATION = ("positions", "rotary_tables")
_PADDING = ("key_padding_mask", "key_lengths")
CALLS: dict[str, tuple[str, ...]] = {
    "self": (*_ROTATION, *_PADDING, "prefix_lengths", "documents"),
    "cross": ("memory_padding_mask", "memory_lengths"),
    "latent": (*_ROTATION, *_PADDING, "documents"),
    "moba": _ROTATION,
    "nsa": _ROTATION,
}
_NEEDS = {
    "keep_first": ("window", "stride"), "rotary_base": ("rotary",), "rotary_dim": ("rotary",),
    "relative_max_distance": ("relative_bias",), "mscale": ("rotary_scaling",),
}  # fmt: skip
TRAITS = {
    "forward": 0.3,  # no gradients
    "poison": 0.5,  # NaN where padding is
    "autocast": 0.04,
    "small": 0.1,  # T of few tokens
}


@dataclass(frozen=True)
class LayerCase:
    """A layer and its calls. options: the constructor's. call: names of arguments of forward."""

    seed: int
    kind: str
    backend: str
    dtype: torch.dtype
    B: int
    H_k: int
    G: int
    T: int
    D: int
    options: Mapping[str, Any]
    call: tuple[str, ...]
    traits: frozenset[str]

    def random(self, name: str) -> Draw:
        """The numbers of one part of the case, the same whatever other parts there are."""
        return Draw(f"{self.seed}/{name}")

    @property
    def has(self) -> Callable[[str], bool]:
        return {*self.options, *self.call}.__contains__

    @property
    def causal(self) -> bool:
        return bool(self.options.get("causal", self.kind != "cross"))


def drawn_layer(seed: int, backend: str) -> LayerCase:
    """The case of a seed."""
    draw = Draw(f"{seed}/layer")
    kind, by_torch = draw.weighted(OFTEN), backend == "torch"
    names = draw.some(sorted(TAKES[kind]), draw.choice(0, 1, 2, 3, 4, 6))
    if kind != "cross" and draw.chance(0.4):  # what moves is seen by where it is
        names = [*names, "rotary", *(["rotary_scaling"] if kind == "latent" else [])]
    case = LayerCase(
        seed=seed,
        kind=kind,
        backend=backend,
        dtype=torch.float64 if by_torch and draw.chance(0.95) else torch.float32,
        B=draw.choice(1, 2, 3) if by_torch else 1,
        H_k=draw.choice(1, 1, 2, 3) if by_torch else 1,
        G=draw.choice(1, 1, 2, 3) if by_torch else draw.choice(1, 2),
        T=draw.integer(6, 14),
        D=draw.choice(8, 8, 4, 6, 16, 10),
        options=dict.fromkeys(names),
        call=tuple(draw.some([*CALLS[kind]], draw.choice(0, 1, 1, 1, 2))),
        traits=frozenset(name for name, share in TRAITS.items() if draw.chance(share)),
    )
    if "small" in case.traits:
        case = replace(case, T=draw.integer(1, 3))
    return legal_layer(case)


def legal_layer(case: LayerCase) -> LayerCase:
    """The case with what its options need, without what they exclude, and with their values."""
    names = [x for x in case.options if x in TAKES[case.kind]]
    for name in names:
        needs = _NEEDS.get(name, ())
        if needs and not set(needs) & set(names):
            names.append(needs[case.seed % len(needs)])
    drawn = {name: case.random(name) for name in names}
    values = {name: VALUES[name](case, drawn[name]) for name in names}
    if values.get("scoring") == "additive":
        case = replace(case, backend="torch")  # it has no kernel
    if case.kind in ("moba", "nsa"):
        # What rounding selects, the formula may not.
        case = replace(case, dtype=torch.float64, backend="torch")
    for option in _excluded(case, values):
        values.pop(option, None)
    for name, needs in _NEEDS.items():
        if needs and not set(needs) & set(values):
            values.pop(name, None)
    call = [x for x in case.call if x in CALLS[case.kind]]
    for unwanted in _unwanted(case, values, call):
        call = [x for x in call if x != unwanted]
    order = dict.fromkeys([*sorted(TAKES[case.kind])])
    return replace(case, options={x: values[x] for x in order if x in values}, call=tuple(call))


def _excluded(case: LayerCase, values: Mapping[str, Any]) -> Iterator[str]:
    scoring, scheme = values.get("scoring", "scaled_dot"), values.get("relative", "")
    rows = table(SelfOptions)
    if case.kind in ("self", "cross"):
        if scoring != "scaled_dot":
            yield "scale"
        if scoring == "additive":
            yield from (name for name, row in rows.items() if "additive" in row.excluded_by)
        elif scheme.endswith("values"):
            yield from (name for name, row in rows.items() if "values" in row.excluded_by)
        if scheme and scoring != "additive":
            yield from ("relative_bias", "relative_max_distance")
    if case.kind == "latent" and values.get("rope_dim", 1) == 0:
        yield from ("rotary", "rotary_base", "rotary_scaling")
    elif case.kind == "latent" and "scale" in values:
        yield "mscale"


def _unwanted(case: LayerCase, values: Mapping[str, Any], call: list[str]) -> Iterator[str]:
    """Arguments of a call that the layer, or the other arguments, exclude."""
    rotates = "rotary" in values if case.kind != "latent" else values.get("rope_dim", 1) > 0
    if not rotates or set(_ROTATION) <= set(call):
        yield from _ROTATION if not rotates else _ROTATION[:1]
    if not values.get("causal", True):
        yield "prefix_lengths"
    of_values = values.get("relative", "").endswith("values")
    if of_values and values.get("scoring") != "additive":
        yield from ("prefix_lengths", "documents")
    if "batch_invariant" in values:
        yield from ("key_padding_mask", "memory_padding_mask", "documents")


def make_layer(case: LayerCase) -> Any:
    """The layer, with random parameters, none of them left at 0 or 1."""
    options = dict(case.options)
    H_q, D = case.H_k * case.G, case.D
    if case.kind != "latent":
        options.setdefault("head_dim", D)
    if case.kind in ("self", "cross"):
        sizes = {"D": D, "D_v": options.get("v_head_dim", D), "H_q": H_q, "H_k": case.H_k}
        if "relative" in options:
            options["relative"] = SCHEMES[options["relative"]](**sizes)
    wide = H_q * D
    if options.get("head_dim", D) is not None:
        wide = case.random("width").choice(12, wide)
    extra = _EXTRA.get(case.kind, lambda case, draw: {})(case, case.random("extra"))
    if case.kind == "latent":
        heads: tuple[int, ...] = (H_q,)
    else:
        heads = (H_q, case.H_k)
    make = KINDS[case.kind]
    if case.kind == "self" and "causal" not in options and case.seed % 3 == 0:
        make = CausalGQAttention
    torch.manual_seed(case.seed)
    layer = make(wide, *heads, **{**extra, **options}, backend=case.backend)
    for name, parameter in layer.named_parameters():
        if "proj" not in name or name.startswith("relative.") or case.kind == "latent":
            small = 1.0 if "proj" not in name else 0.4
            nn.init.normal_(parameter, std=small)
    return layer.to(case.dtype).eval()


def _window(case: LayerCase, draw: Draw) -> Any:
    sides = (draw.choice(None, 0, 2, draw.integer(0, 9)) for _ in range(2))
    if draw.chance(0.6):
        return draw.integer(1, 7)
    left, right = sides
    return (3 if left is right is None else left), right


def _rotary_dim(case: LayerCase, draw: Draw) -> int:
    return int(draw.choice(*(n for n in (2, 4, 6, 8) if n <= case.D)))


VALUES: dict[str, Callable[[LayerCase, Draw], Any]] = {
    "head_dim": lambda case, draw: None,  # embed_dim // num_heads
    "v_head_dim": lambda case, draw: draw.choice(3, 8, 12),
    **dict.fromkeys(
        ("qkv_bias", "out_bias", "qk_norm", "sinks", "batch_invariant", "alibi", "bias"),
        lambda case, draw: True,
    ),
    "causal": lambda case, draw: draw.chance(0.2),
    "output_gate": lambda case, draw: draw.choice("head", "element"),
    "scoring": lambda case, draw: draw.choice("dot", "multiplicative", "additive"),
    "softcap": lambda case, draw: draw.choice(1.5, 20),
    "dropout": lambda case, draw: 0.5,
    "attention_dropout": lambda case, draw: 0.5,
    "scale": lambda case, draw: draw.choice(1, 0.3),
    "window": _window,
    "stride": lambda case, draw: draw.choice(1, 2, 3, 5),
    "keep_first": lambda case, draw: draw.integer(0, 3),
    "rotary": lambda case, draw: draw.choice("half", "interleaved"),
    "rotary_base": lambda case, draw: draw.choice(100.0, 20),
    "rotary_dim": _rotary_dim,
    "rotary_scaling": lambda case, draw: draw.choice(*SCALINGS[1:]),
    "relative_bias": lambda case, draw: draw.choice(4, 6, 8),
    "relative_max_distance": lambda case, draw: draw.choice(6, 9),
    "relative": lambda case, draw: draw.choice(*SCHEMES),
    "memory_dim": lambda case, draw: draw.choice(5, 20),
    "q_latent_dim": lambda case, draw: draw.choice(7, 16),
    "rope_dim": lambda case, draw: draw.choice(0, 4, 6),
    "mscale": lambda case, draw: draw.choice(0.7, 1),
}

SCHEMES: dict[str, Callable[..., nn.Module]] = {}
for _values in ("", "-values"):
    SCHEMES |= {
        f"scalar{_values}": lambda v=_values, **s: RelativeScalar(
            s["H_q"], 3, value_dim=s["D_v"] if v else None
        ),
        f"content{_values}": lambda v=_values, **s: RelativeContent(
            s["D"], 3, value_dim=s["D_v"] if v else None
        ),
        f"content-of-kv-heads-waves{_values}": lambda v=_values, **s: RelativeContent(
            s["D"], 4, num_heads=s["H_k"], table="sinusoidal", value_dim=s["D_v"] if v else None
        ),
        f"transformer-xl{_values}": lambda v=_values, **s: RelativeTransformerXL(
            s["H_q"], s["D"], 3, value_dim=s["D_v"] if v else None
        ),
        f"transformer-xl-trained{_values}": lambda v=_values, **s: RelativeTransformerXL(
            s["H_q"], s["D"], 2, table="trained", value_dim=s["D_v"] if v else None
        ),
    }

# Sizes that a kind needs beside the heads.
_EXTRA: dict[str, Callable[[LayerCase, Draw], dict[str, Any]]] = {
    "latent": lambda case, draw: {
        "kv_latent_dim": draw.choice(5, 8, 16), "nope_dim": draw.choice(4, 7, 12), "rope_dim": 4,
    },
    "moba": lambda case, draw: {"block_k": draw.choice(2, 4), "n": draw.integer(1, 3)},
    "nsa": lambda case, draw: {
        "block_k": 4, "n": draw.integer(3, 4), "window": draw.integer(1, 5),
        "pool": draw.choice((4, 2), (2, 2), (4, 4)), "first": draw.choice(0, 1),
        "latest": draw.integer(1, 2),
    },
}  # fmt: skip


def smaller_layer(case: LayerCase) -> Iterator[LayerCase]:
    """Cases with one thing less."""
    for name in case.options:
        yield legal_layer(replace(case, options={x: 0 for x in case.options if x != name}))
    for name in case.call:
        yield replace(case, call=tuple(x for x in case.call if x != name))
    for trait in sorted(case.traits):
        yield replace(case, traits=case.traits - {trait})
    for name in ("B", "H_k", "G"):
        if getattr(case, name) > 1:
            yield replace(case, **{name: 1})
    if case.T > 2:
        yield replace(case, T=case.T - 1)
