"""Attention backend "fastattn" of diffusers, with its context parallelism.

Call `register()`, then `model.set_attention_backend("fastattn")`. The contract is
diffusers/models/attention_dispatch.py of diffusers 0.42.1, a private module.
"""

import importlib
from inspect import signature
from typing import Any

from torch import Tensor

from ..functional import attention
from ..functional.block import attention_block_backward, attention_block_forward
from .sdpa import Arguments, bounded_bias

__all__ = ["register"]

NAME = "fastattn"


def register() -> None:
    """Register "fastattn" as an attention backend of diffusers. Idempotent.

    Raises:
        ImportError: diffusers is not installed, or has no attention dispatcher, as before 0.35.
    """
    module = importlib.import_module("diffusers.models.attention_dispatch")
    names, registry = module.AttentionBackendName, module._AttentionBackendRegistry
    member = names._value2member_map_.get(NAME)
    if member is None:
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        names._member_names_.append(NAME.upper())
        names._member_map_[NAME.upper()] = names._value2member_map_[NAME] = member
    parallel = "supports_context_parallel"  # since diffusers 0.36
    given = {parallel: True} if parallel in signature(registry.register).parameters else {}
    constraints = [module._check_device, module._check_shape]
    registry.register(member, constraints=constraints, **given)(attend)


# The dispatcher passes what this signature names.
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Backend function of diffusers' dispatcher.

    Args:
        query: [B, S, H_q, D], fp16, bf16 or fp32.
        key, value: [B, S_k, H, D] and [B, S_k, H, D_v]; H = H_q, or divides H_q with enable_gqa.
        attn_mask: [B, S_k] over keys, or 4 dims that broadcast to [B, H_q, S, S_k]; bool, True =
            attend, or float, added to the scores.
        is_causal: query i sees keys 0..i; excludes attn_mask.
        _parallel_config: diffusers' context parallelism: without dropout; its ring without a mask.

    Returns:
        [B, S, H_q, D_v]; with return_lse also lse, fp32 [B, S, H_q].

    Raises:
        ValueError: a mask of another shape, or an unsupported combination.
    """
    call = Arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if _parallel_config is None:
        options = _options(call)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        o, lse = attention(q, k, v, dropout=dropout_p, return_lse=True, **options)
        o, lse = o.transpose(1, 2), lse.transpose(1, 2)
        return (o, lse) if return_lse else o
    if attn_mask is not None and _parallel_config.context_parallel_config.ring_degree > 1:
        raise ValueError(
            "attn_mask is not supported in diffusers' ring, which does not rotate the mask: "
            "use ulysses_degree"
        )
    if attn_mask is not None and attn_mask.requires_grad:
        raise ValueError("attn_mask must not require grad in diffusers' context parallelism")
    module = importlib.import_module("diffusers.models.attention_dispatch")
    result: Tensor | tuple[Tensor, Tensor] = module._templated_context_parallel_attention(
        *call, return_lse,
        forward_op=forward_op, backward_op=backward_op, _parallel_config=_parallel_config,
    )  # fmt: skip
    return result


def forward_op(
    ctx: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the forward over one rank's keys in context parallelism; shapes as in `attend`."""
    if dropout_p:
        raise ValueError(
            f"dropout_p must be 0 in diffusers' context parallelism, got {dropout_p}: its ranks "
            "share no seed"
        )
    call = Arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    options = _options(call)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    o, lse = attention_block_forward(q, k, v, **options)
    o, lse = o.transpose(1, 2), lse.transpose(1, 2)
    if _save_ctx:
        ctx.save_for_backward(query, key, value, o, lse)
        ctx.fastattn_options = options
    return (o, lse) if return_lse else o


def backward_op(
    ctx: Any,
    grad_out: Tensor,
    *args: Any,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of one part, from the merged out and lse, or as saved."""
    inputs = (query, key, value, out, lse)
    pairs = zip(inputs, ctx.saved_tensors, strict=True)
    q, k, v, o, lse = ((saved if x is None else x).transpose(1, 2) for x, saved in pairs)
    do, lse = grad_out.transpose(1, 2).contiguous(), lse.contiguous()
    gradients = attention_block_backward(do, q, k, v, o, lse, **ctx.fastattn_options)
    dq, dk, dv = (x.transpose(1, 2) for x in gradients[:3])
    return dq, dk, dv


def _options(call: Arguments) -> dict[str, Any]:
    """Translate the call to options of `fastattn.attention`."""
    query, key, _, mask, _, is_causal, scale, enable_gqa = call
    if not enable_gqa and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"key must have query's {query.shape[2]} heads without enable_gqa, got {key.shape[2]}"
        )
    options: dict[str, Any] = {"causal": is_causal, "query_offset": 0, "scale": scale}
    if mask is None:
        return options
    if is_causal:
        raise ValueError("is_causal must be False where attn_mask is given")
    rows = (query.shape[0], key.shape[1])
    if mask.dim() == 2 and tuple(mask.shape) == rows:
        if not mask.dtype.is_floating_point:
            return options | {"key_padding_mask": mask}
        mask = mask[:, None, None]
    if mask.dim() != 4:
        raise ValueError(
            f"attn_mask must be [B, S_k] {rows} or have 4 dims, got {tuple(mask.shape)}"
        )
    if mask.dtype.is_floating_point:
        return options | {"attn_bias": bounded_bias(mask)}
    return options | {"attn_mask": mask}
