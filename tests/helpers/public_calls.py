"""Public functions by name, each with tensors to call it with, for tests of what tensors may be."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastattn
from fastattn.functional.block import attention_block_backward, attention_block_forward
from fastattn.testing.inputs import draws

B, H_Q, H_K, T, D = 2, 4, 2, 8, 16
Tensors = dict[str, Tensor]
Function = Callable[..., Any]


def decode(backend: str, q: Tensor, k: Tensor, v: Tensor, **options: Tensor) -> Tensor:
    lengths = torch.tensor([T, T - 3], dtype=torch.int32, device=q.device)
    view = fastattn.view_of_tensors(k, v, lengths)
    return fastattn.decode_attention(q, view, backend=backend, **options)


def append(paged: bool, backend: str, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor):
    how: Any = {"q": q, "rotary": (cos, sin), "backend": backend}
    if paged:
        cache = fastattn.PagedKVCache(4, T, H_K, D, device=q.device)
        rows = [cache.allocate(), cache.allocate()]
        turned = cache.append(rows, k, v, **how)
        return turned, cache.k[0, :2], cache.v[0, :2]
    cache = fastattn.KVCache(B, H_K, T, D, device=q.device)
    return cache.append(k, v, **how), cache.k, cache.v


def append_paged(backend: str, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor):
    pages = torch.zeros(2, B, H_K, T, D, device=q.device)
    slots = torch.arange(B * T, device=q.device)
    how: Any = {"q": q, "positions": slots % T, "rotary": (cos, sin), "backend": backend}
    return fastattn.append_paged(tuple(pages), k, v, slots, **how), pages


def with_gradients(function: Function, backend: str, *, do: Tensor, dlse: Tensor, **given: Tensor):
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    actual = function(**leaves, return_lse=True, backend=backend)
    return torch.autograd.grad(actual, tuple(leaves.values()), (do, dlse))


def calls(device: str) -> dict[str, tuple[Function, Tensors]]:
    """Functions by name, of a backend and tensors, with their tensors."""
    draw = draws(device=device)
    rows = {"q": draw(B, H_Q, T, D), "k": draw(B, H_K, T, D), "v": draw(B, H_K, T, D)}
    packed = {name: x.transpose(1, 2).flatten(0, 1) for name, x in rows.items()}
    scores = {
        "sinks": draw(H_Q),
        "alibi_slopes": draw(H_Q).abs(),
        "relative_bias": draw(H_Q, 5),
        "relative_keys": draw(H_Q, 5, D),
    }
    query = {"relative_query": draw(B, H_Q, T, D)}
    bias = {"attn_bias": draw(B, H_Q, T, T)}
    o, lse = draw(B, H_Q, T, D), draw(B, H_Q, T)
    results = {"do": draw(B, H_Q, T, D), "o": o, "lse": lse + 5, "dlse": draw(B, H_Q, T)}
    grads = {"do": results["do"], "dlse": results["dlse"]}
    offsets = torch.tensor([0, 5, B * T], device=device)
    codes = {f"{name}_codes": fastattn.quantize_fp8(x)[0] for name, x in rows.items()}
    scales = {f"{name}_scale": draw(B, x.shape[1]).abs() for name, x in rows.items()}
    cos, sin = fastattn.rotary.rotary_tables(T, D, device=device)
    tables = {"cos": cos, "sin": sin}

    def fp8(backend: str, q_codes: Tensor, k_codes: Tensor, v_codes: Tensor, **scales: Tensor):
        return fastattn.attention_fp8(q_codes, k_codes, v_codes, backend=backend, **scales)

    def varlen(backend: str, **given: Tensor):
        return fastattn.attention_varlen(cu_seqlens_q=offsets, backend=backend, **given)

    def named(function: Function) -> Function:
        return lambda backend, **given: function(backend=backend, **given)

    def additive(backend: str, **given: Any) -> Any:
        return fastattn.additive_attention(backend="torch", **given)  # it has no kernel

    small = {name: draw(1, 2, 4, 4) for name in ("q", "k", "v")} | {"u": draw(4)}
    weights = {"w_query": draw(4, 4), "w_key": draw(4, 4)}
    lists = torch.zeros(B, 1, T, 1, dtype=torch.int32, device=device)
    selected = partial(fastattn.selected_attention, indices=lists, block=(1, T // 2))
    of_rows = {name: rows[name] for name in ("q", "k")}
    return {
        "attention": (named(fastattn.attention), rows | scores | query | bias),
        "gradients": (partial(with_gradients, fastattn.attention), rows | grads),
        "attention_varlen": (varlen, packed | scores),
        "decode_attention": (
            decode, rows | {"q": draw(B, H_Q, 1, D), "sinks": scores["sinks"]},
        ),
        "additive_attention": (additive, small | weights),
        "selected_attention": (named(selected), rows | {"sinks": scores["sinks"]}),
        "gradients of selected_attention": (partial(with_gradients, selected), rows | grads),
        "multiplicative_attention": (
            named(fastattn.multiplicative_attention), rows | {"weight": draw(D, D)},
        ),
        "merge": (
            named(fastattn.merge), {"o1": o, "lse1": lse, "o2": o + 1, "lse2": lse - 1},
        ),
        "attention_statistics": (
            named(partial(fastattn.attention_statistics, top=2)), of_rows | {"lse": lse + 5} | bias,
        ),
        "attention_weights": (named(fastattn.attention_weights), of_rows),
        "attention_block_forward": (named(attention_block_forward), rows),
        "attention_block_backward": (named(attention_block_backward), rows | results),
        "attention_fp8": (fp8, codes | scales),
        "KVCache.append": (partial(append, False), rows | tables),
        "PagedKVCache.append": (partial(append, True), rows | tables),
        "append_paged": (append_paged, packed | tables),
    }  # fmt: skip
