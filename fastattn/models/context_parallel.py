"""Context parallelism for unchanged models: attention over a sequence sharded over ranks.

While active, `attention`, layers that call it and torch's `scaled_dot_product_attention` treat a
rank's tokens as a part of a sequence.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from ..compat.multihead import MultiheadAttention
from ..compat.transformers.context_parallel import SpreadModels
from ..modules.cross_attention import CrossGQAttention
from ..modules.latent_attention import MultiheadLatentAttention
from ..modules.self_attention import GQAttention
from ..ops import spread
from ..parallel import ContextPlan, context_attention
from ..parallel.ranks import Mesh, Ranks, count_targets
from ..rotary import RotaryPositions
from ..tracing import uncompiled
from . import stack
from .positions import LearnedPositions, SinusoidalPositions


class ContextParallel(ParallelStyle):
    """Attention over a sharded sequence: a style for `parallelize_module`, and a context manager.

    As a style it applies to one `GQAttention` or `CausalGQAttention`. As a context manager it
    applies to all calls in it:

        with ContextParallel(mesh, plan):
            loss = model(shard(tokens, 1, plan, mesh), ...)
        loss.backward()

    Rotary, learned and sinusoidal positions follow the plan, in our models and in models of
    transformers with attn_implementation="fastattn". The latter take input_ids, position_ids,
    labels and a padding mask from `shard`; windows and sequences packed by position_ids span all
    ranks. The mean loss of both is this rank's share. Masks with a query dim must be
    [..., plan.length or 1, T or 1]. A cache, relative values, cross-attention,
    `torch.nn.MultiheadAttention`, other functions of attention (`attention_varlen`, statistics,
    selected blocks, torch's flex_attention), a softmax of scores between a rank's own tokens and
    models that mix tokens in other ways raise. In compiled models these layers and calls run
    outside the graphs. What torch.utils.checkpoint recomputes after the context enters it again.

    Gradients of parameters are each rank's share; their sum over the ranks is the whole sequence's.

    Args:
        mesh, plan, method: as for `context_attention`.
    """

    def __init__(self, mesh: Mesh, plan: ContextPlan, method: str = "auto") -> None:
        super().__init__()
        self.mesh, self.plan, self.method = mesh, plan, method
        self._undo: list[Callable[[], None]] = []
        self._mode: _Mode | None = None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, GQAttention):
            raise TypeError(
                "ContextParallel is a style of GQAttention and CausalGQAttention, got "
                f"{type(module).__name__}: as a context manager it serves other models"
            )
        inner = self._placed(module.forward, module)

        @wraps(inner)
        def forward(x: Tensor, **kwargs: Any) -> Tensor:
            if isinstance(kwargs.get("rotary_tables"), (tuple, Tensor)):
                raise ValueError(
                    "rotary_tables may have other positions: as a context manager "
                    "ContextParallel sees to them"
                )
            return inner(x, **kwargs)

        setattr(module, "forward", uncompiled(forward))  # noqa: B010
        return module

    def __enter__(self) -> "ContextParallel":
        if spread.attend is not None:
            raise RuntimeError("a ContextParallel is active already: leave it before another one")
        forward, style = GQAttention.forward, self

        @wraps(forward)
        def placed(layer: GQAttention, *args: Any, **kwargs: Any) -> Tensor:
            whole = forward.__get__(layer)
            output: Tensor = style._placed(whole, layer)(*args, **kwargs)
            return output

        self._set(GQAttention, "forward", uncompiled(placed))
        self._set(MultiheadLatentAttention, "forward", _refuse_latents)
        for owner in (RotaryPositions, LearnedPositions, SinusoidalPositions):
            self._set(owner, "at", self._placed_at(owner.at))
        for of_two in (MultiheadAttention, CrossGQAttention):
            self._set(of_two, "forward", _refuse_two_sequences)
        for owner, name, value in SpreadModels(self.mesh, self.plan, self.attention).replacements():
            self._set(owner, name, value)
        self._set(stack, "token_loss", self._share_of(stack.token_loss))
        for owner, name in _CHECKPOINTS:
            self._set(owner, name, self._recomputed(getattr(owner, name)))
        self._set(spread, "attend", uncompiled(self.attention))
        self._mode = _Mode(self.plan)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(*error)  # type: ignore[no-untyped-call]
        while self._undo:
            self._undo.pop()()

    def _set(self, owner: Any, name: str, value: Any) -> None:
        own, before = name in vars(owner), getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before) if own else delattr(owner, name))

    def _share_of(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap a mean loss of a rank's targets to be its share of the whole sequence's."""

        @wraps(loss)
        def call(logits: Tensor, targets: Tensor, *rest: Any, count: Any = None) -> Tensor:
            count = count_targets(targets, Ranks.of(self.mesh)) if count is None else count
            return loss(logits, targets, *rest, count=count)

        return uncompiled(call)

    def _recomputed(self, checkpointed: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap torch's checkpoint: a backward pass may recompute after the `with`."""

        @wraps(checkpointed)
        def call(function: Callable[..., Any], *rest: Any, **kwargs: Any) -> Any:
            def within(*args: Any, **options: Any) -> Any:
                with self if spread.attend is None else nullcontext():
                    return function(*args, **options)

            return checkpointed(within, *rest, **kwargs)

        return call

    def _placed_at(self, at: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a look-up of `count` positions from `first` to use this rank's positions."""
        plan = self.plan

        @wraps(at)
        def call(owner: Any, first: Any, count: int, *rest: Any) -> Any:
            if isinstance(first, Tensor) or (first, count) != (0, plan.length):
                return at(owner, first, count, *rest)
            device = rest[-1]
            positions = plan.indices(Ranks.of(self.mesh).rank).to(device)
            bound = () if len(rest) == 1 else (plan.length * plan.ranks,)
            tables = at(owner, positions, 1, *bound, device)
            return tuple(x[:, 0] for x in tables) if isinstance(tables, tuple) else tables[:, 0]

        return uncompiled(call)

    def _placed(self, forward: Callable[..., Tensor], layer: GQAttention) -> Callable[..., Tensor]:
        """Wrap a layer's forward to use the plan's positions."""

        @wraps(forward)
        def call(x: Tensor, **kwargs: Any) -> Tensor:
            if kwargs.get("cache") is not None:
                raise ValueError("cache is not supported under ContextParallel")
            if layer.scoring == "additive":
                raise ValueError('scoring="additive" is not supported under ContextParallel')
            if layer.relative is not None and layer.relative.has_values:
                raise ValueError("relative values are not supported under ContextParallel")
            tables = kwargs.get("rotary_tables")
            # Tables of positions from 0 on are the layer's own.
            of_start = tables is None or isinstance(tables, RotaryPositions)
            if kwargs.get("positions") is None and of_start:
                rank = Ranks.of(self.mesh).rank
                positions = self.plan.indices(rank).to(x.device) if layer.rotary else None
                kwargs |= {"positions": positions, "rotary_tables": None}
            with spread.attending(self.attention):
                return forward(x, **kwargs)

        return call

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *,
        return_max: bool = False, backend: str | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Compute `fastattn.attention` of this rank's queries over all ranks' keys."""
        if backend not in (None, "auto"):
            raise ValueError(f"backend {backend!r} cannot be chosen under ContextParallel")
        if return_max:
            raise ValueError("return_max is not supported under ContextParallel")
        where: dict[str, Any] = {"mesh": self.mesh, "plan": self.plan, "method": self.method}
        return context_attention(q, k, v, sum_tables=False, **where, **options)


def _refuse_latents(layer: nn.Module, *_: Any, **__: Any) -> Tensor:
    raise TypeError(
        f"{type(layer).__name__} does not support context parallelism; GQAttention does"
    )


# What torch.utils.checkpoint calls, reentrant and not.
_CHECKPOINTS: tuple[tuple[Any, str], ...] = (
    (checkpoint.CheckpointFunction, "apply"),
    (checkpoint, "_checkpoint_without_reentrant_generator"),
)
_SOFTMAX = {torch.softmax, F.softmax, Tensor.softmax}
# While it is traced, functions are known by identity and not by name.
_TRACED: set[Any] = {torch.ops.higher_order.flex_attention}
for _name in torch._C._dispatch_get_all_op_names():
    if _name.startswith("aten::") and "attention" in _name and "." not in _name:
        _packet = getattr(torch.ops.aten, _name.removeprefix("aten::"))
        _TRACED |= {_packet, _packet.default}


class _Mode(TorchFunctionMode):
    """Intercepts torch's attention, and refuses other functions of that name."""

    def __init__(self, plan: ContextPlan) -> None:
        super().__init__()
        self.own = plan.length if plan.ranks > 1 else -1

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.multi_head_attention_forward:
            _refuse_two_sequences()
        traced = torch.compiler.is_compiling()
        if traced or spread.attend is not None:
            if func is spread.TORCH_ATTENTION:
                return _as_torch(*args, **(kwargs or {}))
            if func in _SOFTMAX:
                x = args[0] if args else kwargs["input"]
                if x.dim() > 2 and x.shape[-2] == x.shape[-1] == self.own:
                    spread.refuse(f"softmax of scores {list(x.shape)}")
        if (func in _TRACED) if traced else "attention" in getattr(func, "__name__", ""):
            spread.refuse(func.__name__)
        return func(*args, **(kwargs or {}))


@torch.compiler.disable
def _as_torch(
    query: Tensor, key: Tensor, value: Tensor,
    attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Translate torch's arguments. With T_q = T_k both causal masks are equal."""
    if query.dim() != 4:
        raise ValueError(f"query must have 4 dimensions [B, H, T, D], got {list(query.shape)}")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(f"{key.shape[1]} heads of key for {query.shape[1]} want enable_gqa=True")
    assert spread.attend is not None
    output: Tensor = spread.attend(
        query, key, value,
        attn_mask=attn_mask, dropout=dropout_p, causal=is_causal, scale=scale,
    )  # fmt: skip
    return output


def _refuse_two_sequences(layer: nn.Module | None = None, *_: Any, **__: Any) -> Any:
    name = "MultiheadAttention" if layer is None else type(layer).__name__
    raise ValueError(
        f"{name} is not supported under ContextParallel: its keys are another sequence; "
        "GQAttention and scaled_dot_product_attention are"
    )
