"""Attention blocks of other people's models, recognised by their parts and tried out.

Names and sizes only suggest what a block computes. What is taken for attention is therefore run,
on a copy and a random input, beside what would replace it: a block that normalises its queries or
keeps its heads in another order gives other numbers, and is left alone.
"""

import copy
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..functional import attention
from ..rotary import RotaryStyle, apply_rotary, rotary_tables

# Projections, the last one that of the output: queries, keys and values together, or each alone.
_PROJECTIONS = (
    ("c_attn", "c_proj"),
    ("qkv", "proj"),
    ("qkv_proj", "out_proj"),
    ("qkv_proj", "o_proj"),
    ("wqkv", "wo"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("wq", "wk", "wv", "wo"),
)
_HEADS = ("n_head", "n_heads", "num_heads", "num_attention_heads")
_WEIGHT_DROPOUTS = ("attn_dropout", "attn_drop", "attention_dropout", "dropout")
_OUTPUT_DROPOUTS = ("resid_dropout", "resid_drop", "proj_drop", "proj_dropout", "out_dropout")
_LENGTH = 6


class Rotary(NamedTuple):
    """How a block takes its rotary tables, and which channels it pairs.

    form: "halves" cos and sin [T, D / 2]; "doubled" and "repeated" [T, D], each angle twice, half a
    head apart or side by side; "complex" [T, D / 2]; "pairs" [T, D / 2, 2], cos and sin.
    """

    form: str
    style: RotaryStyle

    def arguments(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Tables [T, D / 2] as the block takes them."""
        if self.form == "complex":
            return (torch.complex(cos, sin),)
        if self.form == "pairs":
            return (torch.stack((cos, sin), -1),)
        if self.form == "doubled":
            return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        if self.form == "repeated":
            return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        return cos, sin

    def tables(self, given: tuple[Tensor, ...], T: int, D: int) -> tuple[Tensor, Tensor] | None:
        """cos and sin [T, D / 2] of what the block was given, or None if it looks different."""
        shape = {"halves": (T, D // 2), "complex": (T, D // 2), "pairs": (T, D // 2, 2)}
        expected = shape.get(self.form, (T, D))
        if any(not isinstance(x, Tensor) or tuple(x.shape) != expected for x in given):
            return None
        if self.form == "complex":
            return (given[0].real, given[0].imag) if given[0].is_complex() else None
        if self.form == "pairs":
            return given[0][..., 0], given[0][..., 1]
        if self.form == "halves":
            return given[0], given[1]
        columns = slice(D // 2) if self.form == "doubled" else slice(None, None, 2)
        return given[0][:, columns], given[1][:, columns]


_FORMS = {0: (), 1: ("complex", "pairs"), 2: ("halves", "doubled", "repeated")}


class Plan(NamedTuple):
    """What a block computes: its projections by name, its heads, its mask and its positions."""

    projections: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    rotary: Rotary | None
    inputs: tuple[str, ...]  # names of the arguments that forward needs: x, then rotary tables


class FusedForward:
    """In place of a block's `forward`; a call with more than the plan knows goes to its class."""

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        self.module = module
        self.plan = plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = inspect.signature(type(self.module).forward).parameters
        given = {**dict(zip(list(names)[1:], args, strict=False)), **kwargs}
        more = any(given[name] is not None for name in given if name not in self.plan.inputs)
        if not more and len(args) < len(names) and all(name in given for name in self.plan.inputs):
            out = self._attend(*(given[name] for name in self.plan.inputs))
            if out is not None:
                return out
        return type(self.module).forward(self.module, *args, **kwargs)

    def _attend(self, x: Any, *given: Tensor) -> Tensor | None:
        """The block's output, or None if an input is not what the plan is for."""
        plan, D = self.plan, self.plan.head_dim
        if not isinstance(x, Tensor) or x.dim() != 3 or x.is_nested:
            return None
        tables = None
        if plan.rotary is not None:
            tables = plan.rotary.tables(given, x.shape[1], D)
            if tables is None:
                return None
        *inner, last = (getattr(self.module, name) for name in plan.projections)
        kv_width = plan.num_kv_heads * D
        if len(inner) == 1:
            sizes = [plan.num_heads * D, kv_width, kv_width]
            projected = torch.split(inner[0](x), sizes, dim=-1)
        else:
            projected = tuple(project(x) for project in inner)
        q, k, v = (torch.unflatten(y, -1, (-1, D)).transpose(1, 2) for y in projected)
        if plan.rotary is not None and tables is not None:
            q, k = (apply_rotary(heads, *tables, style=plan.rotary.style) for heads in (q, k))
        p = _probability(self.module, _WEIGHT_DROPOUTS) if self.module.training else 0.0
        o = attention(q, k, v, causal=plan.causal, dropout=p)
        out = last(o.transpose(1, 2).flatten(2))
        for name in _OUTPUT_DROPOUTS:
            dropout = getattr(self.module, name, None)
            out = dropout(out) if isinstance(dropout, nn.Dropout) else out
        return out


def recognise(module: nn.Module) -> Plan | str:
    """The plan of a block that is known, or why it is not.

    Its random input comes from a generator of its own, its hooks do not run, and it is not changed.
    """
    if "forward" in vars(module):
        return "its forward was replaced on the object"
    found = parts(module)
    if isinstance(found, str):
        return found
    projections, heads, kv_heads, D = found
    needed = [
        name
        for name, parameter in list(inspect.signature(type(module).forward).parameters.items())[1:]
        if parameter.default is parameter.empty
    ]
    if not 1 <= len(needed) <= 3:
        return f"forward takes {', '.join(needed) or 'nothing'}; x and rotary tables are known"
    forms = _FORMS[len(needed) - 1]
    styles: tuple[RotaryStyle, ...] = ("half", "interleaved")
    rotaries: list[Rotary | None] = [Rotary(form, style) for form in forms for style in styles]
    if forms and D % 2:
        return f"its head dim {D} is odd, so its other arguments are no rotary tables"
    plans = [
        Plan(projections, heads, kv_heads, D, causal, rotary, tuple(needed))
        for rotary in rotaries or [None]
        for causal in (True, False)
    ]
    return _tried(module, plans)


def parts(module: nn.Module) -> tuple[tuple[str, ...], int, int, int] | str:
    """Projections, heads, key and value heads and head dim by names and sizes, or why not."""
    children = dict(module.named_children())
    known = [names for names in _PROJECTIONS if all(name in children for name in names)]
    if not known:
        return "its parts have no names that are known"
    projections: tuple[str, ...] = known[0]
    layers = [x for x in map(children.get, projections) if isinstance(x, nn.Linear)]
    if len(layers) < len(projections):
        return "its projections are not all nn.Linear"
    for name, child in children.items():
        expected = name in (*projections, *_OUTPUT_DROPOUTS, *_WEIGHT_DROPOUTS[:-1])
        if not expected and not isinstance(child, nn.Identity):
            return f"it has a part that is not known: {name}"
        if name not in projections and not isinstance(child, (nn.Dropout, nn.Identity)):
            return f"it has a part that is not known: {name}"
    if module._parameters:
        return f"it has parameters of its own: {', '.join(module._parameters)}"
    heads = next((getattr(module, name) for name in _HEADS if hasattr(module, name)), None)
    width = layers[-1].in_features
    if not isinstance(heads, int) or heads < 1 or width % heads:
        return f"its number of heads is not found under {', '.join(_HEADS)}"
    D = width // heads
    if len(projections) == 2:
        kv_heads, rest = divmod(layers[0].out_features - width, 2 * D)
    else:
        kv_heads, rest = divmod(layers[1].out_features, D)
    if rest or kv_heads < 1 or heads % kv_heads:
        return "the sizes of its projections fit no number of heads"
    return projections, heads, kv_heads, D


def _tried(module: nn.Module, plans: list[Plan]) -> Plan | str:
    """The first plan that gives what the block gives on a random input, or why none does."""
    if any(x.is_meta for x in module.parameters()):
        return "it is on the meta device and cannot be tried out"
    twin = copy.deepcopy(module).eval().double()
    for part in twin.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    first = getattr(twin, plans[0].projections[0])
    device, generator = first.weight.device, torch.Generator().manual_seed(0)
    x = torch.randn(2, _LENGTH, first.in_features, generator=generator, dtype=torch.float64)
    x = x.to(device)
    D = plans[0].head_dim
    cos, sin = rotary_tables(_LENGTH, D - D % 2 or 2, device=device, dtype=torch.float64)
    error: Exception | None = None
    for plan in plans:
        given = () if plan.rotary is None else plan.rotary.arguments(cos, sin)
        # Whatever the block raises means that this is not how it is called.
        try:
            with torch.no_grad():
                expected = type(twin).forward(twin, x, *given)
        except Exception as raised:
            error = raised
            continue
        with torch.no_grad():
            got = FusedForward(twin, plan)._attend(x, *given)
        if isinstance(expected, Tensor) and got is not None and _equal(got, expected):
            return plan
    if error is not None:
        return f"trying it out failed: {error}"
    return "it computes something else than attention over its projections"


def _equal(x: Tensor, y: Tensor) -> bool:
    """Equal but for rounding; blocks turn positions in fp32 whatever their inputs are."""
    if x.shape != y.shape:
        return False
    return bool((x - y).abs().max() <= 64 * torch.finfo(torch.float32).eps * y.abs().max())


def _probability(module: nn.Module, names: tuple[str, ...]) -> float:
    """Of dropping a weight: that of the first of these attributes that exists."""
    for name in names:
        found = getattr(module, name, None)
        if isinstance(found, nn.Dropout):
            return found.p
        if isinstance(found, float):
            return found
    return 0.0
