"""The forward of a swapped block: its own projections and dropouts around `attention`."""

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..functional.attend import attention
from ..rotary import RotaryStyle, apply_rotary


class Rotary(NamedTuple):
    """How a block takes its rotary tables, and which channels it pairs.

    form: "halves" cos and sin [T, D / 2]; "doubled" and "repeated" [T, D], each angle twice, half a
    head apart or side by side; "complex" [T, D / 2]; "pairs" [T, D / 2, 2], cos and sin.
    leading: what may stand before these dims: nothing (""), a 1 ("1"), the batch ("B").
    """

    form: str
    style: RotaryStyle
    leading: tuple[str, ...] = ("",)

    def arguments(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Tables [..., T, D / 2] as the block takes them."""
        if self.form == "complex":
            return (torch.complex(cos, sin),)
        if self.form == "pairs":
            return (torch.stack((cos, sin), -1),)
        if self.form == "doubled":
            return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        if self.form == "repeated":
            return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        return cos, sin

    def tables(
        self, given: tuple[Any, ...], B: int, T: int, D: int
    ) -> tuple[Tensor, Tensor] | None:
        """cos and sin, [T, D / 2] or [B, T, D / 2], of what a block was given.

        None if it looks different.
        """
        shape = {"halves": (T, D // 2), "complex": (T, D // 2), "pairs": (T, D // 2, 2)}
        expected = shape.get(self.form, (T, D))
        allowed = {"": (), "1": (1,), "B": (B,)}
        shapes = [(*allowed[name], *expected) for name in self.leading]
        if not all(isinstance(x, Tensor) and tuple(x.shape) in shapes for x in given):
            return None
        if self.form == "complex":
            if not given[0].is_complex():
                return None
            cos, sin = given[0].real, given[0].imag
        elif any(x.is_complex() or x.shape != given[0].shape for x in given):
            return None
        elif self.form == "pairs":
            cos, sin = given[0][..., 0], given[0][..., 1]
        elif self.form == "halves":
            cos, sin = given
        else:
            columns = slice(D // 2) if self.form == "doubled" else slice(None, None, 2)
            cos, sin = given[0][..., columns], given[1][..., columns]
        if cos.dim() == 3 and cos.shape[0] == 1:
            return cos[0], sin[0]
        return cos, sin


class Plan(NamedTuple):
    """What a block computes: its projections by name, its heads, its mask and its positions.

    Dropouts are given by path, such as "attn_drop" or "config.dropout": an nn.Dropout, or a number.
    """

    projections: tuple[str, ...]  # of queries, keys and values together or each, then the output's
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    rotary: Rotary | None
    inputs: tuple[str, ...]  # names of the arguments that forward needs: x, then rotary tables
    weight_dropout: str | None = None
    output_dropouts: tuple[str, ...] = ()

    def __str__(self) -> str:
        kind = "causal" if self.causal else "bidirectional"
        heads = f"{self.num_heads} query and {self.num_kv_heads} key/value heads"
        turned = "" if self.rotary is None else f", rotary positions ({self.rotary.style})"
        return f"{kind} attention, {heads}{turned}"


class Calls:
    """How often a swapped module was called.

    Under torch.compile a call counts when it is traced, not when the compiled code runs.

    Attributes:
        served: calls computed by `fastattn`.
        passed: calls with more than x and rotary tables, computed by the block's own forward.
    """

    def __new__(cls) -> "Calls":
        # torch.compile runs functions marked so while it traces, and puts nothing into the graph.
        # Marked here, for copies too, and not at import: this imports torch._dynamo.
        for function in (cls.count_served, cls.count_passed):
            torch.compiler.assume_constant_result(function)  # type: ignore[no-untyped-call]
        return super().__new__(cls)

    def __init__(self) -> None:
        self.served = 0
        self.passed = 0

    def count_served(self) -> None:
        self.served += 1

    def count_passed(self) -> None:
        self.passed += 1

    def __repr__(self) -> str:
        return f"Calls(served={self.served}, passed={self.passed})"


class FusedForward:
    """In place of a block's `forward`; a call with more than the plan knows goes to its class."""

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        self.module = module
        self.plan = plan
        self.calls = Calls()
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.names = [x.name for x in parameters if x.kind in by_place]
        self.defaults = {x.name: x.default for x in parameters if x.default is not x.empty}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self._inputs(args, kwargs)
        out = None if inputs is None else self.attend(*inputs)
        if out is None:
            self.calls.count_passed()
            return type(self.module).forward(self.module, *args, **kwargs)
        self.calls.count_served()
        return out

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """What the plan needs of a call, or None if the call says more."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if len(given) < len(args) + len(kwargs):
            return None
        for name, value in given.items():
            if name not in self.plan.inputs and not self._is_default(name, value):
                return None
        if any(name not in given for name in self.plan.inputs):
            return None
        return [given[name] for name in self.plan.inputs]

    def _is_default(self, name: str, value: Any) -> bool:
        if name not in self.defaults:
            return False
        default = self.defaults[name]
        if value is default:
            return True
        # Tensors and arrays have an == of their own.
        plain = isinstance(value, (bool, int, float, str))
        return plain and type(value) is type(default) and value == default

    def attend(self, x: Any, *given: Any, backend: str | None = None) -> Tensor | None:
        """The block's output, or None if an input is not what the plan is for."""
        plan, D = self.plan, self.plan.head_dim
        if not isinstance(x, Tensor) or x.dim() != 3 or x.is_nested:
            return None
        tables = None
        if plan.rotary is not None:
            tables = plan.rotary.tables(given, x.shape[0], x.shape[1], D)
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
        o = attention(q, k, v, causal=plan.causal, dropout=self._dropout(), backend=backend)
        out: Tensor = last(o.transpose(1, 2).flatten(2))
        for path in plan.output_dropouts:
            found = find(self.module, path)
            if isinstance(found, nn.Dropout):
                out = found(out)
            else:
                out = F.dropout(out, found, self.module.training)
        return out

    def _dropout(self) -> float:
        """The probability of dropping an attention weight."""
        if self.plan.weight_dropout is None:
            return 0.0
        found = find(self.module, self.plan.weight_dropout)
        if isinstance(found, nn.Dropout):
            return found.p if found.training else 0.0
        return float(found) if self.module.training else 0.0


def find(holder: Any, path: str) -> Any:
    """The attribute of a module by a path such as "config.dropout"."""
    for name in path.split("."):
        holder = getattr(holder, name)
    return holder
