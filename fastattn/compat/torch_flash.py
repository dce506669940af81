"""torch's flash-attention operators, computed by this library through torch's registry.

    fastattn.compat.torch_flash.register()
    torch.nn.attention.activate_flash_attention_impl("fastattn")
    ...
    torch.nn.attention.restore_flash_attention_impl()

Nothing is patched: `torch.nn.attention.varlen.varlen_attn`, torch's context parallelism, C++ code
and every other caller of the operators reach these. `F.scaled_dot_product_attention` calls them
where torch chooses its flash backend: never with a mask, and on sm_90 and sm_100 after cuDNN,
unless `torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)` or the environment variable
TORCH_CUDNN_SDPA_DEPRIORITIZED=1 is set. `fastattn.patch_sdpa` serves more calls. Calls with
`block_table` and `seqused_k` go to `fastattn.attention_paged`.

The operators' contract: torch/nn/attention/_fa4.py and aten/src/ATen/native/native_functions.yaml.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from ..cache.views import view_of_tensors
from ..cache_view import CacheView
from ..functional.block import attention_block_backward, attention_block_forward
from ..functional.paged import attention_paged
from ..torch_backend import dropout
from .flash_attn.conventions import options_of

NAME = "fastattn"


class _Registration:
    """Registered operators; `remove` restores torch's own."""

    def __init__(self, key: str) -> None:
        library: Any = Library("aten", "IMPL", key)  # type: ignore[no-untyped-call]
        for name, function in _OPERATORS.items():
            library.impl(name, function, key)
        self.library: Library | None = library

    def remove(self) -> None:
        # torch unregisters the operators when the last reference dies.
        self.library = None


def register(key: str = "CUDA") -> None:
    """Register "fastattn" for `torch.nn.attention.activate_flash_attention_impl`.

    It takes effect on activation, which deactivates any other implementation.

    Args:
        key: dispatch key of the operators: "CUDA", or "CPU", where torch has none.
    """
    from torch.nn.attention import register_flash_attention_impl

    register_flash_attention_impl(NAME, register_fn=lambda: _Registration(key))


def _refuse(**unserved: Any) -> None:
    refused = [name for name, value in unserved.items() if value is not None and value is not False]
    if refused:
        raise NotImplementedError(
            f"{', '.join(refused)} of torch's flash operators not supported by fastattn: call "
            "fastattn.attention_varlen or fastattn.attention_paged, or restore torch's own by "
            "torch.nn.attention.restore_flash_attention_impl()"
        )


def _options(
    dropout_p: float, is_causal: bool, scale: float | None,
    left: int | None = None, right: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Options of `fastattn.attention`. Causal masks are aligned bottom-right in both."""
    window = (left, None if is_causal and right == 0 else right)
    return options_of(dropout_p, scale, is_causal, window, 0.0, None, None)


def _no_rng(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Placeholder results besides o and lse: two generator states, a mask."""
    state, unused = (q.new_zeros(n, dtype=torch.uint64) for n in ((2,), ()))
    return state, unused, q.new_empty(0)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Compute o, lse and further results for q [B, H, T, D], or packed [total, H, D]."""
    state, unused, mask = _no_rng(q)
    if "dropout" in options:
        seed = dropout.draw_seed(q.device)
        state = seed.view(torch.uint64)
        options["dropout_seed"] = seed
    o, lse = attention_block_forward(q, k, v, *offsets, **options)
    return o, lse.contiguous(), (state, unused, mask)


def _backward(
    tensors: list[Tensor],
    lse: Tensor,
    offsets: tuple[Any, ...],
    state: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, ...]:
    """Compute dq, dk and dv from do, q, k, v and o."""
    if "dropout" in options:
        options["dropout_seed"] = state.view(torch.int64)
    # The gradient of a sum has zero strides.
    grad, q, k, v, o = tensors
    inputs = (grad.contiguous(), q, k, v, o, lse.contiguous())
    # Autograd, which torch disables in operators, for the torch backend.
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.ADInplaceOrView, keys.AutogradCPU):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        return attention_block_backward(*inputs, *offsets, **options)[:3]


def _flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Implement the operator for query [B, T, H, D], or packed [total, H, D] with cum_seq_q.

    num_splits = 1 requests batch-invariant results; only caches are split. out is written if
    possible.
    """
    _refuse(return_debug_mask=return_debug_mask)
    options = _options(dropout_p, is_causal, scale, window_size_left, window_size_right)
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    if seqused_k is not None or block_table is not None:
        view = _rows_of(key, value, cum_seq_q, cum_seq_k, max_k, seqused_k, block_table)
        o, lse = _of_rows(query, view, cum_seq_q, max_q, num_splits, out, options)
        return o, lse, *_no_rng(query)
    if cum_seq_q is not None:
        o, lse, rest = _forward(query, key, value, (cum_seq_q, cum_seq_k), options)
        return o.contiguous(), lse, *rest
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    o, lse, rest = _forward(q, k, v, (), options)
    return o.transpose(1, 2).contiguous(), lse, *rest


def _flash_attention_forward_in_place(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    o, lse, *_ = _flash_attention_forward(*args, out=out, **kwargs)
    if o is not out:
        out.copy_(o)
    return lse


def _rows_of(
    k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_k: int,
    used: Tensor | None, table: Tensor | None,
) -> CacheView:  # fmt: skip
    """Cache rows of pages [P, S, H_k, D], or of partly used packed keys [total, H_k, D]."""
    if cu_q is None or used is None or (table is None) == (cu_k is None):
        raise ValueError(
            "seqused_k needs cum_seq_q, and one of block_table and cum_seq_k, got "
            f"seqused_k {used is not None}, cum_seq_q {cu_q is not None}, "
            f"block_table {table is not None}, cum_seq_k {cu_k is not None}"
        )
    if table is None:
        # Pages of one token, as sequences may begin anywhere.
        assert cu_k is not None
        table = cu_k[:-1, None] + torch.arange(max_k, device=k.device, dtype=cu_k.dtype)
        table = table.clamp(max=max(k.shape[0] - 1, 0))
        k, v = k[:, None], v[:, None]
    pages = k.transpose(1, 2), v.transpose(1, 2)
    return view_of_tensors(*pages, used, block_table=table.contiguous())


def _of_rows(
    q: Tensor, view: CacheView, cu_q: Tensor | None, max_q: int, num_splits: int | None,
    out: Tensor | None, options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute o (in out, if passed) and lse [H, total]; inference only."""
    assert cu_q is not None
    _refuse(dropout_p=options.pop("dropout", None))
    with torch.no_grad():
        o, lse = attention_paged(
            q, view, cu_q, max_seqlen_q=int(max_q), out=out, batch_invariant=num_splits == 1,
            return_lse=True, **options,
        )  # fmt: skip
    return o, lse.contiguous()


def _flash_attention_backward(
    *arguments: Any,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """Backward of `_flash_attention_forward`; arguments in the order of torch's schema."""
    *tensors, lse, cu_q, cu_k, _, _, dropout_p, is_causal, state, _ = arguments
    options = _options(dropout_p, is_causal, scale, window_size_left, window_size_right)
    if cu_q is not None:
        return _backward(tensors, lse, (cu_q, cu_k), state, options)
    gradients = _backward([x.transpose(1, 2) for x in tensors], lse, (), state, options)
    return tuple(x.transpose(1, 2) for x in gradients)


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Implement the operator for query [B, H, T, D]; the output has query's memory layout."""
    _refuse(return_debug_mask=return_debug_mask)
    options = _options(dropout_p, is_causal, scale)
    o, lse, (state, unused, mask) = _forward(query, key, value, (), options)
    out = torch.empty_like(query).copy_(o)
    return out, lse, None, None, query.shape[2], key.shape[2], state, unused, mask


def _sdpa_backward(*arguments: Any, scale: float | None = None) -> tuple[Tensor, ...]:
    """Backward of `_sdpa_forward`; arguments in the order of torch's schema."""
    *tensors, lse, _, _, _, _, dropout_p, is_causal, state, _ = arguments
    return _backward(tensors, lse, (), state, _options(dropout_p, is_causal, scale))


_OPERATORS = {
    "_flash_attention_forward": _flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_attention_forward_in_place,
    "_flash_attention_backward": _flash_attention_backward,
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
}
