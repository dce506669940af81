"""Inputs of attention tests and benchmarks."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._device import _device_constructors


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Draw normal numbers, equal at each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draws(
    seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Callable[..., Tensor]:
    """Make draw(*shape): normal numbers on the device, new ones at each call."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = dtype, grad: bool = False) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(grad)

    return draw


def to_device(options: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    """Copy every tensor of `options`, in tuples too, to the device."""

    def move(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(move, x))
        return x.to(device) if isinstance(x, Tensor) else x

    return {name: move(x) for name, x in options.items()}


def make_qkv(
    B: int = 2,
    H_q: int = 4,
    H_k: int = 2,
    T_q: int = 64,
    T_k: int | None = None,
    D: int = 32,
    D_v: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layout: str = "bhtd",
    seed: int = 0,
    requires_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw unit normal q [B, H_q, T_q, D], k [B, H_k, T_k, D], v [B, H_k, T_k, D_v] in `dtype`.

    layout "bthd" gives the same shapes as transposed views of [B, T, H, D] memory. Equal arguments
    give equal numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    T_k = T_q if T_k is None else T_k
    D_v = D if D_v is None else D_v

    def heads(H: int, T: int, width: int) -> Tensor:
        shape = (B, T, H, width) if layout == "bthd" else (B, H, T, width)
        x = torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
        x = x.transpose(1, 2) if layout == "bthd" else x
        return x.detach().requires_grad_(requires_grad)

    return heads(H_q, T_q, D), heads(H_k, T_k, D), heads(H_k, T_k, D_v)


@contextmanager
def nan_filled_empty() -> Iterator[None]:
    """Fill uninitialised floating-point memory with NaN, to reveal unwritten outputs."""
    _device_constructors()  # a default device knows them by identity: cached before they change
    with ExitStack() as stack:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (Tensor, "new_empty"),
            (Tensor, "new_empty_strided"),
        ):
            poisoned = _with_nan_contents(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, poisoned))
        yield


def _with_nan_contents(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocate_and_fill(*args: Any, **kwargs: Any) -> Tensor:
        out = allocate(*args, **kwargs)
        # Traced allocations stay unchanged, as the graph is under test.
        if (
            not torch.compiler.is_compiling()
            and out.is_floating_point()
            and out.layout is torch.strided
        ):
            with torch.no_grad():
                out.fill_(math.nan)
        return out

    return allocate_and_fill
