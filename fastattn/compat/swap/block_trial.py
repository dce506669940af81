"""Test whether a block computes what a plan says, on random weights and inputs.

A trial shows what a block does with what it is given, and no more. So a copy is given what makes
every difference show: weights that are not 0; scores small and far beyond any softcap; inputs
longer than every number that its forward reads, as a window is one; training mode, with dropout
noted and left out; half precision, and gradients. What a trial cannot decide is refused.
"""

import copy
import math

import torch
from torch import Tensor, nn

from ...rotary import rotary_tables
from ..fused_block import FusedForward, Plan
from .block_twin import Refused, Twin, own_generators

_LENGTH = 7
# A window that stands in the code as a number is seen up to here.
_LONG = 130
# Elements of the scores of one row in a trial: 512 MiB in fp64.
_MOST_SCORES = 2**26
# Of the inputs of a row: scores of about 1, 64 and 4096.
_SIZES = (1.0, 8.0, 64.0)


def tried(module: nn.Module, plans: list[Plan]) -> Plan | str:
    """The one plan that gives what the block gives, or why there is none."""
    if any(x.is_meta for x in (*module.parameters(), *module.buffers())):
        return "it is on the meta device and cannot be tried out"
    # Whatever a foreign block raises means that this is not how it is copied or called.
    device = getattr(module, plans[0].projections[0]).weight.device
    try:
        with (
            torch.inference_mode(False),  # gradients are on in it, too
            torch.autocast(device.type, enabled=False),
            torch.device(device),
        ):
            return _Trial(module, plans[0], device).plan(plans)
    except Refused as reason:
        return str(reason)
    except Exception as error:
        return f"trying it out failed: {error}"


class _Trial:
    """A block's twin, and inputs for it."""

    def __init__(self, module: nn.Module, plan: Plan, device: torch.device) -> None:
        self.twin = Twin(module)
        self.width, self.device = getattr(module, plan.projections[0]).in_features, device
        self.generator = torch.Generator("cpu").manual_seed(1)

    def plan(self, plans: list[Plan]) -> Plan:
        """The plan of the block, its dropouts in it."""
        plan = self._chosen(plans)
        if plan.rotary is not None:
            leading = tuple(
                x for x in ("", "1", "B") if self._runs_and_agrees(_with_leading(plan, x))
            )
            plan = plan._replace(rotary=plan.rotary._replace(leading=leading))
        self._try_lengths(plan)
        self._try_dtypes(plan)
        return self._with_dropouts(plan)

    def _chosen(self, plans: list[Plan]) -> Plan:
        """The plan that agrees, with rotary tables without a batch or, failing that, with one."""
        errors: list[Exception] = []
        for leading in ("", "1") if plans[0].rotary else ("",):
            found = []
            for plan in (_with_leading(plan, leading) for plan in plans):
                try:
                    if self._agrees(plan):
                        found.append(plan)
                except Refused:
                    raise
                except Exception as raised:
                    errors.append(raised)
            if len(found) > 1:
                raise Refused(f"a trial cannot tell whether it is {found[0]} or {found[1]}")
            if found:
                return found[0]
        # Where it ran for none of them.
        if len(errors) == len(plans) * (2 if plans[0].rotary else 1):
            raise errors[-1]
        raise Refused("it computes something else than attention over its projections")

    def _runs_and_agrees(self, plan: Plan) -> bool:
        try:
            return self._agrees(plan)
        except Exception:
            return False

    def _agrees(self, plan: Plan, T: int = _LENGTH) -> bool:
        """Whether the block gives what the plan gives, for T tokens."""
        sizes = torch.tensor(_SIZES if T <= _LENGTH else _SIZES[:1], dtype=torch.float64)
        x = self._input(len(sizes), T, sizes)
        given = self._tables(plan, len(sizes), T)
        with torch.no_grad():
            expected, _ = self.twin.run(x, *given)
            got = self._attend(self.twin.exact, plan, x, *given)
        return got is not None and _equal(got, expected, plan.head_dim, sizes=sizes)

    def _attend(self, block: nn.Module, plan: Plan, x: Tensor, *given: Tensor) -> Tensor | None:
        return FusedForward(block, plan).attend(x, *given, backend="torch")

    def _input(self, B: int, T: int, sizes: Tensor | None = None) -> Tensor:
        shape = (B, T, self.width)
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64, device="cpu")
        return (x if sizes is None else x * sizes[:, None, None]).to(self.device)

    def _tables(self, plan: Plan, B: int, T: int) -> tuple[Tensor, ...]:
        if plan.rotary is None:
            return ()
        leading = plan.rotary.leading[0]
        positions = torch.arange(T)
        if leading:
            rows = torch.arange(B if leading == "B" else 1)
            positions = positions + 3 * rows[:, None]
        tables = rotary_tables(positions, plan.head_dim, dtype=torch.float64)
        return plan.rotary.arguments(*tables)

    def _try_lengths(self, plan: Plan) -> None:
        """One token, and the longest inputs that can show a window, or that the block takes."""
        self._try_length(plan, 1)
        most = math.isqrt(_MOST_SCORES // plan.num_heads)
        numbers = self.twin.numbers()
        ends = {T for n in (_LONG, *numbers.values()) for T in (n, n + 2) if _LENGTH < T <= most}
        beyond = [
            path
            for path, n in numbers.items()
            if n + 2 > most and not self.twin.breaks_without(path, lambda: self._agrees(plan))
        ]
        if beyond and self._try_length(plan, most):
            read = _shown(beyond[0], numbers[beyond[0]])
            raise Refused(
                f"its forward reads {read}: a window of so many tokens would not show in a trial, "
                f"which takes {most}"
            )
        # Where a length fails, as beyond a mask in a buffer, the next shorter one is the longest.
        any(self._try_length(plan, T) for T in sorted(ends, reverse=True))

    def _try_length(self, plan: Plan, T: int) -> bool:
        """Whether the block takes T tokens."""
        try:
            agrees = self._agrees(plan, T)
        except Refused:
            raise
        except Exception:
            return False
        if not agrees:
            numbers = self.twin.numbers().items()
            read = [_shown(path, n) for path, n in numbers if _LENGTH <= n < T]
            cause = f"; its forward reads {', '.join(read)}" if read else ""
            raise Refused(
                f"of {T} tokens it computes something else than attention over its projections"
                + cause
            )
        return True

    def _try_dtypes(self, plan: Plan) -> None:
        """In the dtypes of models it has to compute the same, as far as it runs in them."""
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            block = copy.deepcopy(self.twin.block).to(dtype)
            x = self._input(2, _LENGTH).to(dtype)
            tables = self._tables(plan, 2, _LENGTH)
            given = [y.to(torch.complex64 if y.is_complex() else dtype) for y in tables]
            try:
                with torch.no_grad(), own_generators(self.device):
                    out = type(block).forward(block, x, *given)
            except Exception:
                continue
            wide = [y.to(torch.complex128 if y.is_complex() else torch.float64) for y in given]
            with torch.no_grad():
                got = self._attend(block.double(), plan, x.double(), *wide)
            if out.dtype != dtype or got is None or not _equal(got, out, plan.head_dim, dtype):
                raise Refused(f"in {dtype} it computes something else than in torch.float64")

    def _with_dropouts(self, plan: Plan) -> Plan:
        """The plan with the dropouts that the block applies while it trains."""
        x, given = self._input(2, _LENGTH), self._tables(plan, 2, _LENGTH)
        x.requires_grad_()
        for parameter in self.twin.parameters():
            parameter.requires_grad_()
        out, dropped = self.twin.run(x, *given, training=True)
        got = self._attend(self.twin.exact, plan, x, *given)
        if got is None or not _equal(got, out, plan.head_dim):
            raise Refused("in training mode it computes something else than in eval mode")
        if not self._same_gradients(x, got, out, plan.head_dim):
            raise Refused("its gradients are not those of attention over its projections")
        weights, outputs = [], []
        for p, tensor in dropped:
            path = self.twin.paths.get(p)
            if path is None:
                raise Refused(f"it drops with a probability of {p}, found under no name with drop")
            if tensor is None or _are_weights(tensor):
                weights.append(path)
            elif tensor is out:
                outputs.append(path)
            else:
                raise Refused(f"it drops by {path} something else than weights and its output")
        if len(weights) > 1:
            raise Refused(f"it drops weights more than once, by {' and '.join(weights)}")
        weight_dropout = weights[0] if weights else None
        return plan._replace(weight_dropout=weight_dropout, output_dropouts=tuple(outputs))

    def _same_gradients(self, x: Tensor, got: Tensor, out: Tensor, D: int) -> bool:
        leaves = [x, *self.twin.parameters()]
        weight = torch.randn(out.shape, generator=self.generator, dtype=torch.float64, device="cpu")

        def gradients(y: Tensor) -> Tensor:
            loss = (y * weight.to(y.device)).sum()
            found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            return torch.cat([g.flatten() for g in found])[None]

        return out.requires_grad and _equal(gradients(got), gradients(out), D)


def _with_leading(plan: Plan, leading: str) -> Plan:
    if plan.rotary is None:
        return plan
    return plan._replace(rotary=plan.rotary._replace(leading=(leading,)))


def _shown(path: str, n: int) -> str:
    return path if path.startswith(f"{n} ") else f"{path} = {n}"


def _are_weights(x: Tensor) -> bool:
    """Whether these are attention weights [B, H, T, T]."""
    square = x.dim() == 4 and x.shape[-2:] == (_LENGTH, _LENGTH)
    return square and torch.allclose(x.sum(-1), torch.ones_like(x[..., 0]), atol=1e-3)


def _equal(
    got: Tensor,
    expected: Tensor,
    D: int,
    dtype: torch.dtype = torch.float32,
    sizes: Tensor | None = None,
) -> bool:
    """Equal row by row but for rounding of scores to dtype; blocks turn positions in fp32.

    sizes: of the inputs of each row; their square, and that of D, bounds the scores.
    """
    if got.shape != expected.shape:
        return False
    largest = torch.ones(1) if sizes is None else sizes.square()
    scores = 1 + largest * math.sqrt(D)
    allowed = (16 * torch.finfo(dtype).eps * scores).clamp(max=0.25)
    error, size = ((x.abs().flatten(1).amax(1)) for x in (got - expected, expected))
    return bool((error <= allowed * size).all())
