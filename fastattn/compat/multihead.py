"""`torch.nn.MultiheadAttention`, served by the kernels."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks, dispatch, tracing
from ..functional import call_options, fused_attention, statistics
from ..functional.inputs import autocast, duals
from ..ops import spread
from ..torch_backend import statistics as formula
from .calls import Calls
from .sdpa import bounded_bias

# A program may put this module's class in the place of torch's.
_torchs_forward = nn.MultiheadAttention.forward


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with fused attention; a subclass, so `isinstance` holds.

    Constructor, parameters, state_dict, `forward` and the meaning of masks (True = masked out) are
    torch's. Differences:

    - A query without visible keys, as in an all-padding row, gets attention 0 (so its output is the
      output projection's bias) and weights 0, where torch gives NaN.
    - NaN in keys and values masked by key_padding_mask does not propagate.
    - With is_causal=True, need_weights=False and no float key_padding_mask, attn_mask is not read,
      as torch documents the flag as a promise.
    - torch's layers, such as nn.TransformerEncoderLayer, do not bypass this module in eval mode.

    Calls that torch refuses raise torch's own errors.

    Args:
        embed_dim: width E of queries and outputs, divided by num_heads.
        num_heads: H.
        dropout: probability to drop an attention weight in training mode.
        bias: whether the projections have a bias.
        add_bias_kv: a learned key and value are appended to every sequence.
        add_zero_attn: a key and value of zeros are appended to every sequence.
        kdim, vdim: widths of keys and values; default embed_dim.
        batch_first: inputs are [N, L, E] in place of [L, N, E].
        device, dtype: of the parameters.
        backend: as for `fastattn.attention`.

    Raises:
        ValueError, AssertionError: as torch's; ValueError for an unknown backend.

    Examples:
        >>> layer = MultiheadAttention(64, num_heads=4, batch_first=True)
        >>> x = torch.randn(2, 10, 64)
        >>> out, _ = layer(x, x, x, need_weights=False)  # [2, 10, 64]
    """

    # Attributes for torch.jit.script.
    __constants__: ClassVar[list[str]] = [*nn.MultiheadAttention.__constants__, "backend"]  # type: ignore[misc]
    # Attribute that torch.jit.script ignores.
    __jit_ignored_attributes__: ClassVar[list[str]] = ["calls"]
    # Class attribute, for modules that `fastattn.swap` converted.
    backend: str | None = None
    # Those of a `fastattn.Swap`.
    calls: Calls | None = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        checks.check_backend(backend)
        extra_keys, widths = (add_bias_kv, add_zero_attn), (kdim, vdim)
        super().__init__(
            embed_dim, num_heads, dropout, bias, *extra_keys, *widths, batch_first, device, dtype
        )
        self.backend = backend
        stay_on_path(self)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from query to key and value; return the weights too, on request.

        Args:
            query: [L, N, E], with batch_first [N, L, E], or unbatched [L, E].
            key: likewise [S, N, kdim].
            value: likewise [S, N, vdim].
            key_padding_mask: [N, S] ([S] unbatched), bool (True = masked out) or float (added to
                the scores).
            need_weights: also return the weights, which takes memory for [N, H, L, S].
            attn_mask: [L, S] or [N * H, L, S], bool (True = masked out) or float (added).
            average_attn_weights: average the weights over the heads.
            is_causal: promises that attn_mask, which must be passed, is the causal mask.

        Returns:
            (output as query, weights). Weights are [N, L, S], with average_attn_weights=False
            [N, H, L, S], and None without need_weights. They are differentiable, and include
            dropout, as in torch.

        Raises:
            Exception: torch's errors. A strided NestedTensor is served only in self-attention
                without masks and weights, as from nn.TransformerEncoder in eval mode.
        """
        others = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            o, weights, projected = self._attend(query, key, value, *others)
        else:  # another thread may undo a swap meanwhile, and self be torch's
            o, weights, projected = MultiheadAttention._attend(self, query, key, value, *others)
        if projected:
            return o, weights
        # As in torch, hooks of out_proj do not run.
        out: Tensor = F.linear(o, self.out_proj.weight, self.out_proj.bias)
        return (out[0] if query.dim() == 2 else out), weights

    @torch.jit.ignore
    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None, bool]:
        """o of `forward`, [1, L, E] if unbatched, its weights, and whether o is projected.

        torch.jit.script calls this uncompiled, with a self that has the parameters and numbers but
        no methods and no callable parts.
        """
        others = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        calls: Calls | None = getattr(self, "calls", None)
        if query.is_nested or key.is_nested or value.is_nested:
            plain = key_padding_mask is None and attn_mask is None and not need_weights
            if plain and query is key and key is value and query.layout is torch.strided:
                if calls is not None:
                    calls.count_served()
                return _nested(self, query), None, False
            fits = False
        else:
            fits = _fits(self, query, key, value, key_padding_mask, attn_mask, is_causal)
        p = self.dropout if self.training else 0.0
        served = fits and p != 1
        if calls is not None:
            why = "every weight is dropped" if fits else "torch refuses the arguments"
            calls.count_served() if served else calls.count_passed(why)
        plain = key_padding_mask is None and attn_mask is None
        if not served or (need_weights and plain and _is_torchs(self, query)):
            out, weights = _torchs_forward(self, query, key, value, *others)
            return out, weights, True
        batched = query.dim() == 3
        if not batched:
            query, key, value = _same(lambda x: x[None], query, key, value)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = _same(lambda x: x.transpose(0, 1), query, key, value)
        q, k, v = _project(self, query, key, value)
        masks = _masks(self, q, k, key_padding_mask, attn_mask, is_causal and not need_weights)
        weights = None
        if need_weights:
            o, weights = _with_weights(self, q, k, v, masks, p)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            o = fused_attention.attention(q, k, v, dropout=p, backend=_backend(self), **masks)
        if weights is not None and not batched:
            weights = weights[0]
        # A projection's result is contiguous, as torch's is.
        rows = (0, 2, 1, 3) if self.batch_first or not batched else (2, 0, 1, 3)
        return o.permute(rows).flatten(2), weights, False


def _backend(layer: nn.Module) -> str | None:
    """The layer's backend; None if another thread has undone a swap since the call began."""
    backend: str | None = getattr(layer, "backend", None)
    return backend


def _is_torchs(layer: nn.Module, query: Tensor) -> bool:
    """Whether torch's own forward gives the weights of a call without masks: no kernel serves.

    In half precision it rounds the scores; of empty inputs it may give none.
    """
    wide = query.dtype in (torch.float32, torch.float64) and not tracing.autocasting(query.device)
    if not wide or not tracing.always(query.numel() > 0):
        return False
    asked = dispatch.requested_backend(_backend(layer))
    no_kernel = asked == "auto" and dispatch.why_no_kernel({"query": query}) is not None
    return (asked == "torch" or no_kernel) and spread.why_partial() is None


def _fits(
    layer: MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> bool:
    """Whether torch would accept these arguments."""
    dims = query.dim()
    if dims not in (2, 3) or key.dim() != dims or value.dim() != dims:
        return False
    widths = (query.shape[-1], key.shape[-1], value.shape[-1])
    if widths != (layer.embed_dim, layer.kdim, layer.vdim) or key.shape[:-1] != value.shape[:-1]:
        return False
    if dims == 2:
        N, L, S = 1, query.shape[0], key.shape[0]
    else:
        batch = 0 if layer.batch_first else 1
        N, L, S = query.shape[batch], query.shape[1 - batch], key.shape[1 - batch]
        if key.shape[batch] != N:
            return False
    if (layer.bias_k is None) != (layer.bias_v is None) or (is_causal and attn_mask is None):
        return False
    shapes = ((L, S), (N * layer.num_heads, L, S))
    return _is_mask(attn_mask, *shapes) and _is_mask(
        key_padding_mask, (S,) if dims == 2 else (N, S)
    )


def _project(
    layer: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Project [N, L, E] to q [N, H, L, D], k and v [N, H, S, D], with the appended keys."""
    E, bias = layer.embed_dim, layer.in_proj_bias
    if layer.in_proj_weight is None:
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    elif query is key and key is value:
        qkv = F.linear(query, layer.in_proj_weight, bias)
        if layer.bias_k is None and not layer.add_zero_attn:
            heads = qkv.view(*qkv.shape[:2], 3, layer.num_heads, layer.head_dim)
            q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
            return q, k, v
        q, k, v = torch.split(qkv, E, dim=-1)
        return _heads(layer, q), *_appended(layer, k, v)
    else:
        weights = torch.split(layer.in_proj_weight, E)
    biases = (None, None, None) if bias is None else torch.split(bias, E)
    q, k, v = (
        F.linear(x, weight, b)
        for x, weight, b in zip((query, key, value), weights, biases, strict=True)
    )
    return _heads(layer, q), *_appended(layer, k, v)


def _nested(layer: MultiheadAttention, x: Tensor) -> Tensor:
    """Self-attention within each sequence of a strided NestedTensor [N, *, E], nested too."""
    padded = x.to_padded_tensor(0.0)
    lengths = [part.shape[0] for part in x.unbind()]
    q, k, v = _project(layer, padded, padded, padded)
    key_lengths = torch.tensor(lengths, device=padded.device)
    p = layer.dropout if layer.training else 0.0
    o = fused_attention.attention(
        q, k, v, key_lengths=key_lengths, dropout=p, backend=_backend(layer)
    )
    rows = o.transpose(1, 2).flatten(2)
    parts = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    return torch.nested.as_nested_tensor(parts)


def _heads(layer: MultiheadAttention, x: Tensor) -> Tensor:
    return torch.unflatten(x, -1, (layer.num_heads, layer.head_dim)).transpose(1, 2)


def _appended(layer: MultiheadAttention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    N = k.shape[0]
    if layer.bias_k is not None and layer.bias_v is not None:
        k = torch.cat((k, layer.bias_k.to(k.dtype).expand(N, 1, -1)), dim=1)
        v = torch.cat((v, layer.bias_v.to(v.dtype).expand(N, 1, -1)), dim=1)
    if layer.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    return _heads(layer, k), _heads(layer, v)


def _masks(
    layer: MultiheadAttention,
    q: Tensor,
    k: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    causal: bool,
) -> dict[str, Any]:
    """Translate torch's masks to options of `fastattn.attention`."""
    N, H, L, _ = q.shape
    more = int(layer.bias_k is not None) + int(layer.add_zero_attn)
    options: dict[str, Any] = {}
    # Without padding torch masks appended keys like others; with padding, the given mask applies.
    flagged = not more and key_padding_mask is not None and key_padding_mask.dtype == torch.bool
    if causal and (key_padding_mask is None or flagged):
        options, attn_mask = {"causal": True, "query_offset": 0}, None
    padding, mask = (
        x if x is None or not more else F.pad(x, (0, more)) for x in (key_padding_mask, attn_mask)
    )
    if mask is not None and mask.dim() == 3:
        mask = mask.view(N, H, L, -1)
    if padding is not None and padding.dtype == torch.bool:
        options["key_padding_mask"] = ~padding
        padding = None
    if mask is not None and mask.dtype == torch.bool:
        options["attn_mask"] = ~mask
        mask = None
    padding = None if padding is None else padding[:, None, None]
    if biases := [x for x in (mask, padding) if x is not None]:
        options["attn_bias"] = sum(map(bounded_bias, biases))
    return options


def _with_weights(
    layer: MultiheadAttention, q: Tensor, k: Tensor, v: Tensor, masks: dict[str, Any], p: float
) -> tuple[Tensor, Tensor]:
    """Compute o and the differentiable weights [N, H, L, S], after dropout; scores once."""
    # Autocast on CUDA computes softmax in fp32, so torch's weights are fp32.
    narrow = torch.float32 if q.is_cuda and tracing.autocasting(q.device) else q.dtype
    q, k, v, _ = autocast(q, k, v, {})
    options = call_options.dense_options(q, k, v, **masks)
    backend = _backend(layer)
    choice = dispatch.choose(q, k, v, options, backend, family="statistics")
    tensors = (q, k, v, options.attn_bias)
    trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if p or trains or duals(q, k, v, masks) or choice.backend == "torch":
        dispatch.warn_if_slow(choice, q.device)
        o, weights = formula.attention_with_weights(q, k, v, options, p)
        return o, weights.to(narrow)
    o, lse = fused_attention.attention(q, k, v, return_lse=True, backend=backend, **masks)
    weights = statistics.attention_weights(
        q, k, lse=lse, max_elements=2**63, backend=backend, **masks
    )
    return o, weights.to(narrow)


def stay_on_path(layer: nn.MultiheadAttention) -> None:
    """Make torch's layers call this module, by a no-op hook."""
    # In eval mode nn.TransformerEncoderLayer computes attention itself from self_attn's parameters,
    # unless self_attn or a submodule has a hook. On out_proj, as torch.jit.script compiles hooks
    # for each call's arguments, and out_proj is called in one way.
    layer.out_proj.register_forward_pre_hook(_nothing)


def leave_path(layer: nn.MultiheadAttention) -> None:
    """Remove the hook of `stay_on_path`."""
    hooks = layer.out_proj._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _nothing]:
        del hooks[key]


def _nothing(self: nn.Module, input: tuple[Tensor]) -> None:
    """Hook with the names and types that torch.jit.script requires."""


def _is_mask(mask: Tensor | None, *shapes: tuple[int, ...]) -> bool:
    if mask is None:
        return True
    right_dtype = mask.dtype == torch.bool or mask.is_floating_point()
    return right_dtype and tuple(mask.shape) in shapes


def _same(change: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Change all three; a tensor passed twice is changed once."""
    changed = change(query)
    new_key = changed if key is query else change(key)
    return changed, new_key, new_key if value is key else change(value)
