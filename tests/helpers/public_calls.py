"""Public functions by name, each with tensors to call it with, for tests of what tensors may be."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastattn
from fastattn.functional.block import attention_block_backward, attention_block_forward
from fastattn.rotary import rotary_tables
from fastattn.testing.calls import CALLS, Draw, packed_rows
from fastattn.testing.inputs import draws, to_device
from fastattn.testing.option_examples import option_examples, together

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


def named(function: Function, **others: Any) -> Function:
    kernels = function is not fastattn.additive_attention  # which has none
    return lambda backend, **given: function(
        backend=backend if kernels else "torch", **others, **given
    )


def made(name: str, *rows: Tensor, **options: Tensor) -> tuple[Function, Tensors]:
    """A call of `fastattn.testing.calls` on rows q, k and v, and its tensors of floats."""
    given = {**CALLS[name].make(Draw(name), *rows).arguments, **options}
    tensors = {x: y for x, y in given.items() if isinstance(y, Tensor) and y.is_floating_point()}
    others = {x: y for x, y in given.items() if x not in tensors}
    return named(CALLS[name].function, **others), tensors


def calls(device: str) -> dict[str, tuple[Function, Tensors]]:
    """Functions by name, of a backend and tensors, with their tensors."""
    draw = draws(device=device)
    qkv = draw(B, H_Q, T, D), draw(B, H_K, T, D), draw(B, H_K, T, D)
    rows, packed = (dict(zip("qkv", x, strict=True)) for x in (qkv, packed_rows(*qkv)))
    examples = {
        name: to_device(x, device)
        for name, x in option_examples(H_Q, H_K, T, T, D, reach=2).items()
    }
    scores = together(examples, ("sinks", "alibi", "relative-bias", "relative-keys"))
    bias, query = examples["bias"], {"relative_query": draw(B, H_Q, T, D)}
    (o, do), (lse, dlse) = draw(2, B, H_Q, T, D), draw(2, B, H_Q, T)
    grads, of_whole = {"do": do, "dlse": dlse}, {"o": o, "lse": lse + 5}
    tables = dict(zip(("cos", "sin"), rotary_tables(T, D, device=device), strict=True))
    of_rows, sinks = {"q": rows["q"], "k": rows["k"]}, {"sinks": scores["sinks"]}
    selected, of_selected = made("selected_attention", *qkv)
    return {
        "attention": made("attention", *qkv, **scores, **query, **bias),
        "gradients": (partial(with_gradients, fastattn.attention), rows | grads),
        "attention_varlen": made("attention_varlen", *qkv, **scores),
        "decode_attention": (decode, {**rows, "q": draw(B, H_Q, 1, D), **sinks}),
        "additive_attention": made("additive_attention", *qkv),
        "selected_attention": (selected, of_selected | sinks),
        "gradients of selected_attention": (
            lambda backend, **given: with_gradients(selected, backend, **given), rows | grads,
        ),
        "multiplicative_attention": made("multiplicative_attention", *qkv),
        "merge": (
            named(fastattn.merge), {"o1": o, "lse1": lse, "o2": o + 1, "lse2": lse - 1},
        ),
        "attention_statistics": (
            named(fastattn.attention_statistics, top=2), of_rows | {"lse": lse + 5} | bias,
        ),
        "attention_weights": (named(fastattn.attention_weights), of_rows),
        "attention_block_forward": (named(attention_block_forward), rows),
        "attention_block_backward": (
            named(attention_block_backward), {**rows, "do": do, **of_whole, "dlse": dlse},
        ),
        "attention_fp8": made("attention_fp8", *qkv),
        "KVCache.append": (partial(append, False), rows | tables),
        "PagedKVCache.append": (partial(append, True), rows | tables),
        "append_paged": (append_paged, packed | tables),
    }  # fmt: skip
