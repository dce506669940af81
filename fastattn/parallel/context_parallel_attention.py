"""`context_attention`: attention over a sequence sharded over ranks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..block_mask import with_tensors
from ..functional import call_options, inputs
from ..functional.fused_attention import attention, checked_options
from ..ops import spread
from ..options import LEARNED, OPTIONS, along
from ..torch_backend import dropout, formula
from . import heads, hops
from .choose import MethodExplanation, choose, explanation
from .gather import gather_backward, gather_forward
from .parts import Whole
from .pieces import Options, Pair, of_pair, with_leaves
from .plan import ContextPlan
from .ranks import (
    Mesh,
    Ranks,
    agree,
    check_mesh,
    first_rank,
    gather_sequence,
    once,
    replicated,
)
from .ring import ring_backward, ring_forward
from .shard import padded

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..arguments import AttentionArguments

_BY_METHOD = {"gather": (gather_forward, gather_backward), "ring": (ring_forward, ring_backward)}
_MODS = "mod_tensors"
_CALLEE = call_options.DENSE._replace(name="context_attention")
_REFUSED = {
    "query_offset": "the plan has the positions of queries",
    "positions": "the plan has the positions of tokens",
    "batch_invariant": "keys are divided among ranks",
    "query2": "append its columns to q, and key2's to k",
    "key2": "append its columns to k, and query2's to q",
}


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Mesh,
    plan: ContextPlan,
    method: str = "auto",
    return_lse: bool = False,
    sum_tables: bool = True,
    **options: "Unpack[AttentionArguments]",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `fastattn.attention` of a sequence to itself, sharded over ranks.

    Exact for every option, or it raises and names a method that is. Every rank makes the same call;
    the hosts check this before communication, and again before a backward pass.

    Methods, on a mesh of one dim except for the last:

        gather    every rank gathers all keys, a few heads at a time, for its queries
        ring      keys are sent around a ring during compute; memory is proportional to T / ranks
        ulysses   ranks exchange tokens for heads, and attend to the whole sequence
        usp       a mesh (ring, heads): ulysses in the inner dimension, ring in the outer one

    Args:
        q, k, v: this rank's tokens of [B, H, T, D], from `shard(x, 2, plan, mesh)`.
        mesh: a DeviceMesh of one or two dimensions, or a ProcessGroup.
        plan: assignment of tokens to ranks, equal on every rank.
        method: one of these, or "auto": `explain_context` reports the choice.
        return_lse: also return the log of the softmax denominators.
        sum_tables: sum the gradients of tables over the ranks, in order. False leaves each rank its
            share, for callers that reduce all parameters' gradients.
        options: as for `attention`, equal on every rank. Options with tokens are sharded like q:
            documents and key_padding_mask in dim 1, relative_query in dim 2, attn_mask and
            attn_bias in the query dim, [..., plan.length or 1, T or 1]. Positions, key_lengths and
            prefix_lengths refer to the whole sequence. Tables with gradients (relative_bias,
            relative_keys, sinks, an attn_bias for all queries, what score_mod reads) are equal on
            every rank, and with sum_tables also their gradients.

    Returns:
        o as q, [B, H_q, plan.length, D_v], 0 in padding; with return_lse also lse, fp32
        [B, H_q, plan.length], -inf in padding. Both are differentiable: with ulysses as
        `attention`, with other methods once.

    Raises:
        TypeError, ValueError: on every rank, if one rank refuses the call, plans, shapes or options
            differ, or the method does not serve an option.
        RuntimeError: a rank did not make the call within the process group's timeout.
    """
    ranks = Ranks.of(mesh)
    call, error = None, None
    try:
        checks.check_tensors(q, k, v)
        q, k, v, arguments = inputs.autocast(q, k, v, dict(options))
        call = _check(q, k, v, ranks, plan, method, arguments)
    except Exception as problem:
        error = problem
    number = agree(ranks, () if call is None else call.signature, error)
    assert call is not None, "else agree has raised"
    with torch.autocast(q.device.type, enabled=False), spread.attending(None):
        arguments = _spread(call.options, plan, ranks, q.device, sum_tables)
        if call.method in ("ulysses", "usp"):
            o, lse = _by_heads(q, k, v, arguments, call, plan, ranks)
        else:
            o, lse = _along(q, k, v, arguments, call.method, plan, ranks)
    o, lse = _SameBackward.apply(o, lse, ranks, call.method, number)  # type: ignore[no-untyped-call]
    return (o, lse) if return_lse else o


def explain_context(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Mesh,
    plan: ContextPlan,
    method: str = "auto",
    **options: "Unpack[AttentionArguments]",
) -> MethodExplanation:
    """Return the method of a call of `context_attention`, and why others were not used.

    Checks this rank's arguments. Computes and sends nothing.
    """
    ranks = Ranks.of(mesh)
    checks.check_tensors(q, k, v)
    q, k, v, arguments = inputs.autocast(q, k, v, dict(options))
    arguments = _checked_options(q, k, v, ranks, plan, arguments)
    return explanation(q, k, ranks, plan, arguments, method)


class _Call(NamedTuple):
    """A checked call: its method, options, and signature, which must be equal on every rank."""

    method: str
    options: Options
    signature: tuple[Any, ...]


def _check(
    q: Tensor, k: Tensor, v: Tensor, ranks: Ranks, plan: Any, method: str, options: dict[str, Any]
) -> _Call:
    arguments = _checked_options(q, k, v, ranks, plan, options)
    chosen = choose(explanation(q, k, ranks, plan, arguments, method), method)
    return _Call(chosen, arguments, _signature(q, k, v, plan, chosen, arguments))


def _checked_options(
    q: Tensor, k: Tensor, v: Tensor, ranks: Ranks, plan: Any, options: dict[str, Any]
) -> Options:
    """Given options, checked as by `attention` for the whole sequence."""
    check_mesh(plan, ranks)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[2] != plan.length:
            raise ValueError(
                f"{name} must have {plan.length} tokens, as a rank has by the plan for "
                f"{plan.T} tokens on {plan.ranks} ranks, got {tensor.shape[2]}"
            )
    for name, reason in _REFUSED.items():
        if not _is_default(name, options.get(name)):
            raise TypeError(f"context_attention does not support {name}: {reason}")
    _CALLEE.refuse_others(options)
    arguments = {name: x for name, x in options.items() if not _is_default(name, x)}
    arguments = with_tensors(arguments, q.device)
    mask = arguments.get("attn_mask")
    if isinstance(mask, Tensor) and mask.is_floating_point() and "attn_bias" not in arguments:
        arguments["attn_bias"] = arguments.pop("attn_mask")
    for name in ("attn_mask", "attn_bias"):
        x = arguments.get(name)
        if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[-2] not in (1, plan.length):
            raise ValueError(
                f"{name} must be sharded by its queries, [..., {plan.length} or 1, {plan.T} or 1], "
                f"got {list(x.shape)}: shard(x, -2, plan, mesh) does it"
            )
    # Check against a rank's queries and all keys, as tensors without memory.
    everything = dict(arguments)
    B, T = q.shape[0], plan.T
    keys, values = (x[:, :, :1].detach().expand(-1, -1, T, -1) for x in (k, v))
    if "documents" in arguments:
        ids = arguments["documents"]
        if isinstance(ids, tuple):
            raise TypeError("documents must be one tensor: a sequence attends to itself")
        checks.check_input("documents", ids, "integer", "B T", q, {"B": B, "T": plan.length})
        everything["documents"] = (ids, ids[:, :1].expand(-1, T))
    if "key_padding_mask" in arguments:
        mask, sizes = arguments["key_padding_mask"], {"B": B, "T_k": k.shape[2]}
        checks.check_input("key_padding_mask", mask, "bool", "B T_k", k, sizes)
        everything["key_padding_mask"] = mask[:, :1].expand(-1, T)
    checked_options(q, keys, values, everything, None)
    return arguments


def _is_default(name: str, x: Any) -> bool:
    return x is None or (isinstance(x, (bool, int, float)) and x == OPTIONS[name].default)


def _signature(
    q: Tensor, k: Tensor, v: Tensor, plan: ContextPlan, method: str, options: Options
) -> tuple[Any, ...]:
    def seen(x: Any) -> Any:
        if isinstance(x, Tensor):
            return str(x.dtype), tuple(x.shape), x.requires_grad and torch.is_grad_enabled()
        if isinstance(x, (bool, int, float, tuple)):
            return x
        function = getattr(x, "fn", x)  # the Python function of a @triton.jit function
        return getattr(function, "__qualname__", type(x).__name__)

    tensors = tuple(seen(x) for x in (q, k, v))
    named = tuple((name, seen(options[name])) for name in sorted(options) if name != _MODS)
    # The messages of a ring depend on it.
    marked = hops.marked(options.get("documents")) is not None
    learn = tuple(x.requires_grad and torch.is_grad_enabled() for x in options.get(_MODS, ()))
    return (method, plan.hash, marked, learn, *tensors, *named)


def _spread(
    arguments: Options, plan: ContextPlan, ranks: Ranks, device: torch.device, sum_tables: bool
) -> Options:
    """Options for `pieces`, from this rank's parts."""
    options = dict(arguments)
    for name in ("documents", "key_padding_mask"):
        if name in options:
            options[name] = gather_sequence(options[name], 1, plan, ranks)
    if (marked := hops.marked(arguments.get("documents"))) is not None:
        hops.remember(options["documents"], marked)
    if "dropout" in options and "dropout_seed" not in options:
        options["dropout_seed"] = first_rank(dropout.draw_seed(device), ranks)
    behind = along("T_q")
    for name in LEARNED if sum_tables else ():
        x = options.get(name)
        if x is None or not x.requires_grad:
            continue
        if name not in behind or x.shape[-1 - behind[name]] == 1 != plan.length:
            options[name] = replicated(x, ranks)
    if sum_tables and _MODS in options:
        options[_MODS] = tuple(
            replicated(x, ranks) if x.requires_grad else x for x in options[_MODS]
        )
    return options


def _by_heads(
    q: Tensor, k: Tensor, v: Tensor, options: Options, call: _Call, plan: ContextPlan, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """Exchange tokens for heads, attend along the outer dim, and exchange back."""
    if call.method == "ulysses":
        ranks = Ranks(None, ranks.outer)
    part = heads.to_heads(q, k, v, options, plan, ranks)
    merged = plan.merged(ranks.degree)
    o, lse = _along(part.q, part.k, part.v, part.options, "ring", merged, Ranks(ranks.outer))
    return heads.to_tokens(o, plan, ranks), heads.to_tokens(lse, plan, ranks)


def _along(
    q: Tensor, k: Tensor, v: Tensor, options: Options, method: str, plan: ContextPlan, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """Attention over a sequence that is sharded only along its tokens."""
    if ranks.outer is None:
        rows, runs = slice(0, plan.T), ((0, plan.T),)
        q, k, v = (x[:, :, rows] for x in (q, k, v))
        arguments = of_pair(options, Pair(rows, rows, runs, runs), q.device)
        o, lse = attention(q, k, v, return_lse=True, **_narrowed(arguments, q))
        return padded(o, 2, plan.length), padded(lse, 2, plan.length, float("-inf"))
    names = [name for name in LEARNED if options.get(name) is not None]
    others = {name: x for name, x in options.items() if name not in names}
    tensors = (*(options[name] for name in names), *options.get(_MODS, ()))
    real = plan.real(ranks.rank)
    o, lse = _Attention.apply(  # type: ignore[no-untyped-call]
        q[:, :, :real], k, v, others, method, plan, ranks, names, *tensors
    )
    return padded(o, 2, plan.length), padded(lse.float(), 2, plan.length, float("-inf"))


def _narrowed(options: Options, q: Tensor) -> Options:
    """Options with relative_keys, which `replicated` widens, in q's dtype again."""
    keys = options.get("relative_keys")
    return options if keys is None else options | {"relative_keys": keys.to(q.dtype)}


def _given(others: Options, names: list[str], tensors: Sequence[Tensor]) -> Options:
    """The options: others, those of these names, and mod_tensors."""
    options = others | dict(zip(names, tensors, strict=False))
    return options | {_MODS: tuple(tensors[len(names) :])} if _MODS in others else options


class _SameBackward(torch.autograd.Function):
    """Identity; its backward checks that all ranks differentiate this call.

    After several calls, ranks might differentiate different ones.
    """

    @staticmethod
    def forward(
        ctx: Any, o: Tensor, lse: Tensor, ranks: Ranks, method: str, number: int
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.call = (ranks, method, number)
        return o.view_as(o), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Any:
        ranks, method, number = ctx.call
        call: tuple[Any, ...] = ("backward of call", number, method)
        if method in ("ulysses", "usp"):  # each gradient is exchanged separately
            call += (do is not None, dlse is not None)
        agree(ranks, call)
        return do, dlse, None, None, None


class _Attention(torch.autograd.Function):
    """Autograd of attention along a sequence; each rank saves its own q, k, v, o and lse."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, others: Options, method: str, plan: ContextPlan,
        ranks: Ranks, names: list[str], *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        options = _given(others, names, tensors)
        forward, _ = _BY_METHOD[method]
        assert ranks.outer is not None, "one rank needs no messages"
        o, lse = forward(q, k, v, _narrowed(options, q), plan, ranks.outer)
        ctx.call = (others, method, plan, ranks, names)
        ctx.save_for_backward(q, k, v, o, lse, *tensors)
        return o, lse

    @staticmethod
    @once("context_attention by ring, gather or usp")
    def backward(ctx: Any, saved: Sequence[Tensor], do: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, o, lse, *tensors = saved
        others, method, plan, ranks, names = ctx.call
        whole = Whole(torch.zeros_like(o) if do is None else do, dlse, o, lse)
        options = _given(others, names, tensors)
        options.pop("sinks", None)
        keyed = [name for name in names if name != "sinks"]
        options, leaves = with_leaves(_narrowed(options, q), keyed)
        _, backward = _BY_METHOD[method]
        with torch.autocast(q.device.type, enabled=False):
            totals = backward(q, k, v, options, leaves, whole, plan, ranks.outer)
        grads = dict(zip(keyed, totals.learned, strict=False))
        fields = dict(zip(names, tensors, strict=False))
        grads |= formula.denominator_gradients(fields, whole.lse, whole.delta)
        of_mods = iter(totals.learned[len(keyed) :])
        mods = (next(of_mods) if x.requires_grad else None for x in tensors[len(names) :])
        found = [
            grad if grad is None else grad.to(x.dtype)
            for grad, x in zip((*(grads[name] for name in names), *mods), tensors, strict=True)
        ]
        three = (totals.q.to(q.dtype), totals.k.to(k.dtype), totals.v.to(v.dtype))
        return *three, None, None, None, None, None, *found
