"""Comparison of a block of attention with its twin that was not swapped."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from attention_blocks import LENGTHS, C
from torch import Tensor, nn

from fastattn.testing import assert_within_budget, worst_naive


def _replica(module: nn.Module) -> nn.Module:
    twin: Any = module._replicate_for_data_parallel()
    twin._parameters = dict(module._parameters)
    return twin


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copy": copy.copy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "replica": _replica,
    "deepcopy": copy.deepcopy,
}


def tokens(name: str = "", T: int = 7, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, LENGTHS.get(name, T), C, generator=generator)


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, and gradients of the input and of every parameter that has one."""
    x = x.detach().clone().requires_grad_()
    out = model(x)
    wanted = [x, *model.parameters()]
    grads = torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)
    return [out, *(g for g in grads if g is not None)]


def assert_equal(model: nn.Module, plain: nn.Module, x: Tensor) -> None:
    """A swapped model gives what its twin gives that was not swapped."""
    ref = results(copy.deepcopy(plain).double(), x.double())
    naive = worst_naive(ref, lambda: results(plain, x))
    for i, triple in enumerate(zip(results(model, x), ref, naive, strict=True)):
        assert_within_budget(f"result {i}", *triple)


def total(done: Any) -> int:
    return sum(calls.served for calls in done.calls.values())
