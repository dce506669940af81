"""Tangents and double backward through other libraries' interfaces, by the kernels."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers as tr
from fuzz.derivatives import by_levels, by_reverse, by_transform
from nightly import gate_cases
from oracles import assert_by_oracle
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask
from transformers_models import decoder_config, layer

import fastattn
from fastattn import reference
from fastattn.compat import diffusers, flash_attn, xformers
from fastattn.compat.flash_attn import version_3, version_4
from fastattn.compat.flex_attention import flex_attention
from fastattn.compat.transformers import attention_forward, register
from fastattn.testing.inputs import draws

pytestmark = pytest.mark.usefixtures("one_thread")
Function = Callable[[Tensor], Tensor]
B, T, H, D = 2, 6, 4, 8
# Which keys of each row are no padding.
SEEN = torch.tensor([[1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
OFFSETS = torch.tensor([0, 2, 6, 12], dtype=torch.int32)
NUMBERS = torch.tensor([[0] * 2 + [1] * 4, [0] * 6])
_BLOCK = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cpu")


def heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [B, H, T, D] of x [B, T, 3, H, D]."""
    q, k, v = (y.transpose(1, 2) for y in x.unbind(2))
    return q, k, v


def bias(x: Tensor) -> Tensor:
    """[B, H, T, T] of x, so that biases have tangents."""
    return x[:, :, 0].sin().transpose(1, 2) @ x[:, :, 1].cos().permute(0, 2, 3, 1)


def seen(x: Tensor) -> Tensor:
    return SEEN.to(x.device)


def sinks(x: Tensor) -> Tensor:
    return x[0, 0, 0, :, 0]


def patched(x: Tensor, **options: Any) -> Tensor:
    with fastattn.patch_sdpa():
        return F.scaled_dot_product_attention(*heads(x), **options).transpose(1, 2)


def of_five_dims(x: Tensor) -> Tensor:
    q, k, v = (y[:, None] for y in heads(x))
    with fastattn.patch_sdpa():
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=bias(x)[:, None])
    return o[:, 0].transpose(1, 2)


def flex(x: Tensor, score_mod: Any = None, block_mask: Any = None) -> Tensor:
    mask = block_mask if block_mask is None else block_mask.to(x.device)
    return flex_attention(*heads(x), score_mod=score_mod, block_mask=mask).transpose(1, 2)


def added(terms: Tensor) -> Any:
    return lambda score, b, h, i, j: score + terms[b, h, i, j]


def packed(x: Tensor) -> Tensor:
    q, k, v = (y.flatten(0, 1) for y in x.unbind(2))
    cu = OFFSETS.to(x.device)
    o = flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, T, T, causal=True)
    return o.unflatten(0, (B, T))


def of_layer(x: Tensor, **options: Any) -> Tensor:
    return attention_forward(layer(), *heads(x), **options)[0]


def without_gradients(x: Tensor) -> Tensor:
    """One query that sees all keys: the decode kernels serve it where nothing is derived."""
    q, k, v = heads(x)
    with torch.no_grad():
        return attention_forward(layer(), q[:, :, -1:], k.contiguous(), v.contiguous(), None)[0]


class Row(NamedTuple):
    """An interface as a function of x, and options of the formula, which may depend on x."""

    ours: Function
    options: Any


ROWS: dict[str, Row] = {
    "sdpa": Row(patched, {}),
    "sdpa-causal": Row(partial(patched, is_causal=True), {"causal": True}),
    "sdpa-causal-bias": Row(
        lambda x: patched(x, attn_mask=causal_lower_right(T, T)), {"causal": True}
    ),
    "sdpa-mask": Row(
        lambda x: patched(x, attn_mask=seen(x)[:, None, None]), {"key_padding_mask": SEEN}
    ),
    "sdpa-bias": Row(lambda x: patched(x, attn_mask=bias(x)), lambda x: {"attn_bias": bias(x)}),
    "sdpa-five-dims": Row(of_five_dims, lambda x: {"attn_bias": bias(x)}),
    "flash_attn": Row(
        lambda x: flash_attn.flash_attn_qkvpacked_func(x, causal=True, window_size=(2, 0)),
        {"causal": True, "window": (2, None)},
    ),
    "flash_attn-packed": Row(packed, {"causal": True, "documents": NUMBERS}),
    "flash_attn-3": Row(
        lambda x: version_3.flash_attn_func(*x.unbind(2), softcap=2.0), {"softcap": 2.0}
    ),
    "flash_attn-4": Row(
        lambda x: version_4.flash_attn_func(*x.unbind(2), learnable_sink=sinks(x))[0],
        lambda x: {"sinks": sinks(x)},
    ),
    "flex-block-mask": Row(partial(flex, block_mask=_BLOCK), {"causal": True}),
    "flex-captured": Row(
        lambda x: flex(x, score_mod=added(bias(x))), lambda x: {"attn_bias": bias(x)}
    ),
    "xformers": Row(
        lambda x: xformers.memory_efficient_attention(*x.unbind(2), bias(x)),
        lambda x: {"attn_bias": bias(x)},
    ),
    "diffusers": Row(
        lambda x: diffusers.attend(*x.unbind(2), attn_mask=seen(x)), {"key_padding_mask": SEEN}
    ),
    "transformers": Row(
        lambda x: of_layer(x, attention_mask=None, s_aux=sinks(x)),
        lambda x: {"causal": True, "sinks": sinks(x)},
    ),
}


def formula(x: Tensor, options: Any) -> Tensor:
    given = options(x) if callable(options) else options
    return reference.attention(*heads(x), **given).transpose(1, 2)


def tangent(f: Function, x: Tensor, dx: Tensor, push: Any = by_transform) -> Tensor:
    (pair,) = push(lambda x: (f(x),), {"x": x}, {"x": dx})
    assert pair[1] is not None, "the tangent is dropped"
    return pair[1]


def twice_backward(f: Function, x: Tensor, dx: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    grad = torch.autograd.grad(f(leaf).sin().sum(), leaf, create_graph=True)[0]
    return torch.autograd.grad(grad, leaf, dx)[0]


def assert_derived(ours: Function, plain: Callable[[torch.dtype], Function], x: Tensor) -> None:
    """Check a function of x: tangents in both ways, and a Hessian's product.

    plain: the function in plain torch, on a CPU, in any dtype.
    """
    dx = draws(seed=1)(*x.shape).to(x)

    def oracle(dtype: torch.dtype) -> list[Tensor]:
        given = plain(dtype), x.cpu().to(dtype), dx.cpu().to(dtype)
        first = tangent(*given, by_reverse)
        return [y.detach() for y in (first, first, twice_backward(*given))]

    actual = [tangent(ours, x, dx, push) for push in (by_transform, by_levels)]
    actual.append(twice_backward(ours, x, dx))
    names = "jvp forward_ad double-backward"
    assert_by_oracle([y.detach().cpu() for y in actual], oracle, names=names)


# Calls of `attention` as others make them.
ALIKE = ("sdpa-causal", "sdpa-causal-bias", "flash_attn-3", "flash_attn-4")


@pytest.mark.parametrize("name", gate_cases([x for x in ROWS if x not in ALIKE], ALIKE))
def test_functions(name: str, draw: Callable[..., Tensor]) -> None:
    ours, options = ROWS[name]
    assert_derived(ours, lambda _: partial(formula, options=options), draw(B, T, 3, 2, D))


def test_a_query_alone_without_gradients(draw: Callable[..., Tensor]) -> None:
    x = draw(B, T, 3, 2, D)
    actual = tangent(without_gradients, x, x.cos())
    wanted = tangent(partial(formula, options={}), x.cpu().double(), x.cpu().double().cos())
    torch.testing.assert_close(actual.cpu(), wanted[:, -1:].float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_what_no_kernel_carries(dtype: torch.dtype) -> None:
    """fp64, and tangents of tangents: by the formula, where torch's function has none."""
    x = draws(dtype=dtype)(1, 3, 3, 1, 8)

    def twice(f: Function) -> Tensor:
        return tangent(lambda y: tangent(f, y, y.sin()), x, x.cos())

    for derive in (partial(tangent, x=x, dx=x.cos()), twice):
        by_formula = partial(formula, options={})
        torch.testing.assert_close(derive(patched), derive(by_formula))


class Own(nn.Module):
    """Attention as a model computes it: by torch's function, or by a softmax of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.qkv = False, nn.Linear(H * D, 3 * H * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        if self.fused:
            o = F.scaled_dot_product_attention(q, k, v)
        else:
            o = (q @ k.mT * D**-0.5).softmax(-1) @ v
        return o.transpose(1, 2).flatten(2)


def fused(swap: Any, model: nn.Module) -> None:
    model.fused = True
    swap(model)


def by_weights(module: nn.Module, x: Tensor, weights: bool) -> Tensor:
    """nn.MultiheadAttention, and its weights; with weights torch's is made of plain products."""
    o, shares = module(x, x, x, need_weights=weights, key_padding_mask=~seen(x))
    return torch.cat((o, shares), -1) if weights else o


def of_products(module: nn.Module, x: Tensor) -> Tensor:
    return by_weights(module, x, True)[..., : H * D]


def transformer() -> nn.Module:
    config = decoder_config("llama-gqa", num_hidden_layers=1)
    config._attn_implementation = "eager"
    return tr.AutoModel.from_config(config).eval()


def of_embeddings(model: nn.Module, x: Tensor) -> Tensor:
    # Padding on the right: a row without keys has NaN in second derivatives of "eager".
    mask = torch.arange(T, device=x.device) < torch.tensor([[4], [T]], device=x.device)
    return model(inputs_embeds=x, attention_mask=mask.long()).last_hidden_state[mask]


def under_patch(model: nn.Module, x: Tensor) -> Tensor:
    with fastattn.patch_sdpa():
        return of_embeddings(model, x)


class Model(NamedTuple):
    """A model of plain torch, what makes it ours, and both as functions of embeddings x."""

    make: Callable[[], nn.Module]
    change: Callable[[Any, nn.Module], Any]
    ours: Callable[[nn.Module, Tensor], Tensor]
    plain: Callable[[nn.Module, Tensor], Tensor]


def implementation(name: str) -> Callable[[Any, Any], Any]:
    register()
    return lambda _, model: model.set_attn_implementation(name)


def swapped(swap: Any, model: nn.Module) -> None:
    swap(model)


_LAYER = partial(nn.MultiheadAttention, H * D, H, batch_first=True)
MODELS: dict[str, Model] = {
    "swap": Model(Own, fused, Own.__call__, Own.__call__),
    "swap-eager": Model(Own, lambda swap, x: swap(x, eager=True), Own.__call__, Own.__call__),
    "multihead": Model(_LAYER, swapped, partial(by_weights, weights=False), of_products),
    "multihead-weights": Model(
        _LAYER, swapped, partial(by_weights, weights=True), partial(by_weights, weights=True)
    ),
    "transformers": Model(transformer, implementation("fastattn"), of_embeddings, of_embeddings),
    "transformers-sdpa": Model(transformer, implementation("sdpa"), under_patch, of_embeddings),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, swap: Any, device: str, draw: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    make, change, ours, plain = MODELS[name]
    model = make().requires_grad_(name != "multihead-weights")  # also where nothing is trained
    by_dtype = {dtype: copy.deepcopy(model).to(dtype) for dtype in (torch.float32, torch.float64)}
    change(swap, model.to(device))
    assert_derived(
        partial(ours, model), lambda dtype: partial(plain, by_dtype[dtype]), draw(B, T, H * D)
    )


def test_transforms_leave_a_captured_forward_in_use(swap: Any, device: str) -> None:
    """torch.compile captures none of torch.func; calls before and after are served."""
    model = Own().to(device)
    done = swap(model, eager=True)
    x = draws(device=device)(B, T, H * D)
    tangent(model, x, x)
    assert "torch.func transforms the call" in str(done)
    model(x)
    tangent(model, x, x, by_levels)
    assert (done.calls[""].served, done.calls[""].passed) == (2, 1), str(done)
