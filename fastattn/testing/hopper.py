"""The Hopper kernels in the emulator, behind the same calls as on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from ..kernels.hopper import backward, forward
from ..ops import attention as ops
from ..ops import call
from .compare import assert_matches_reference
from .gluon_emulator import Emulated
from .inputs import make_qkv

if TYPE_CHECKING:
    import pytest

_KERNELS = (
    (forward, "hopper_forward_kernel"),
    (backward, "hopper_backward_dq_kernel"),
    (backward, "hopper_backward_dkv_kernel"),
)


class Counted(Emulated):
    """A kernel in the emulator that counts its launches."""

    launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launches += 1
        return super().__getitem__(grid)


def emulate_hopper(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """backend="hopper" launches `Counted` kernels; the order of events comes from the name."""
    for module, kernel in _KERNELS:
        seed = sum(map(ord, name))
        monkeypatch.setattr(module, kernel, Counted(getattr(module, kernel), seed))
    monkeypatch.setattr(ops, "on_hopper", lambda device: True)
    # Tensors on the CPU are served, with or without Triton's own interpreter.
    monkeypatch.setattr(call, "interpreting", lambda: True)


def order_events(seed: int) -> None:
    """Let the emulated kernels go by another order of events from here on."""
    for module, kernel in _KERNELS:
        getattr(module, kernel).seed = seed


@contextlib.contextmanager
def grid_of(programs: int) -> Iterator[None]:
    """Persistent grids have this size in the block, where there are as many tiles."""
    with (
        mock.patch.object(forward, "multiprocessors", lambda device: programs),
        mock.patch.object(backward, "multiprocessors", lambda device: programs),
    ):
        yield


def check_on_hopper(
    attention: Callable[..., Any],
    B: int = 1, H_q: int = 2, H_k: int = 1, T_q: int = 150, T_k: int | None = None, D: int = 64, *,
    dtype: torch.dtype = torch.bfloat16, layout: str = "bhtd", programs: int = 3,
    key_lengths: list[int] | None = None, **arguments: Any,
) -> None:  # fmt: skip
    """Results and gradients against the oracle's; what lies behind key_lengths is NaN.

    Causal, unless arguments say otherwise.

    Raises:
        AssertionError: see `assert_matches_reference`.
    """
    clean = make_qkv(B, H_q, H_k, T_q, T_k, D, dtype=dtype, layout=layout)
    q, k, v = (x.detach().clone().requires_grad_() for x in clean)
    if key_lengths is not None:
        arguments["key_lengths"] = torch.tensor(key_lengths, dtype=torch.int32)
        for b, length in enumerate(key_lengths):
            k.data[b, :, length:] = v.data[b, :, length:] = float("nan")
    with grid_of(programs):
        assert_matches_reference(attention, q, k, v, clean=clean, **({"causal": True} | arguments))
