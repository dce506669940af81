"""The Hopper kernels in the Gluon emulator, called by backend="hopper" as on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from gluon_emulator import Emulated, assembly
from gluon_emulator.values import Tensor, elementwise
from torch import Tensor as TorchTensor
from triton.experimental.gluon import language as gl

import fastattn
from fastattn import dispatch
from fastattn.functional import call_memo
from fastattn.functional.call_options import dense_options, packed_options
from fastattn.kernels.hopper import backward, forward, host, pipeline
from fastattn.kernels.hopper.host import why_not_hopper
from fastattn.kernels.hopper.tile_table import HEAD_DIMS
from fastattn.kernels.launch import launches
from fastattn.ops import call
from fastattn.testing.compare import assert_matches_reference
from fastattn.testing.inputs import make_qkv

if TYPE_CHECKING:
    import pytest

_KERNELS = (
    (forward, "hopper_forward_kernel"),
    (backward, "hopper_backward_dq_kernel"),
    (backward, "hopper_backward_dkv_kernel"),
)


def any_factor(factor: Tensor) -> Tensor:
    """`ANY_FACTOR`: of 64 rows each of four warps has 16."""
    flags = (factor.data.view(4, 16) != 1).any(1).repeat_interleave(16)
    return Tensor(flags.int(), factor.layout)


def _times_factors(acc: Tensor, factors: Tensor, flags: Tensor) -> Tensor:
    return elementwise(lambda x, y, flag: torch.where(flag != 0, x * y, x), acc, factors, flags)


def pack_as(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """`pack_code` of this type."""

    def pack(below: Tensor, above: Tensor) -> Tensor:
        low, high = (x.data.to(dtype).view(torch.int16).int() for x in (below, above))
        return Tensor((high << 16) | (low & 0xFFFF))

    return pack


assembly[pipeline.ANY_FACTOR.value] = any_factor
for name in ("bfloat16", "float16"):
    assembly[pipeline.pack_code(getattr(gl, name))] = pack_as(getattr(torch, name))
assembly[pipeline.UNPACK_LOW.value] = lambda pairs: Tensor(pairs.data.to(torch.int16))
assembly[pipeline.UNPACK_HIGH.value] = lambda pairs: Tensor((pairs.data >> 16).to(torch.int16))
assembly.update({pipeline.times_factors(D // 2): _times_factors for D in HEAD_DIMS})


class Counted(Emulated):
    """A kernel in the emulator that counts its launches."""

    launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launches += 1
        return super().__getitem__(grid)


def emulate_hopper(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let backend="hopper" launch `Counted` kernels; the name seeds the order of events."""
    for module, kernel in _KERNELS:
        seed = sum(map(ord, name))
        monkeypatch.setattr(module, kernel, Counted(getattr(module, kernel), seed))
    forget()
    monkeypatch.setattr(host, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(dispatch, "on_hopper", lambda device: True)
    # Serve CPU tensors, with or without Triton's own interpreter.
    monkeypatch.setattr(call, "interpreting", lambda: True)


def forget() -> None:
    """Make every launch anew: those that are kept have kernels, tiles and grids of their own."""
    launches.forget()
    call_memo.forget()


def order_events(seed: int) -> None:
    """Set another order of events in the emulated kernels."""
    for module, kernel in _KERNELS:
        getattr(module, kernel).seed = seed


@contextlib.contextmanager
def grid_of(programs: int) -> Iterator[None]:
    """Limit persistent grids to this many programs in the block."""
    forget()
    with mock.patch.object(host, "multiprocessors", lambda device: programs):
        yield
    forget()


def attention_on_hopper(*inputs: TorchTensor, **arguments: Any) -> Any:
    """Call dense or packed attention, which the Hopper kernels serve in both directions."""
    packed = inputs[0].dim() == 3
    options = {n: x for n, x in arguments.items() if n not in ("return_lse", "return_max")}
    checked = (packed_options if packed else dense_options)(*inputs, **options)
    q, k, v = (x.transpose(0, 1)[None] if packed else x for x in inputs[:3])
    assert why_not_hopper(q, k, v, checked) is None, "another backward would be tested"
    function = fastattn.attention_varlen if packed else fastattn.attention
    return function(*inputs, **arguments, backend="hopper")


def passes() -> int:
    """How many kernels the backwards so far launched, a pass over the scores each."""
    return sum(int(getattr(module, kernel).launches) for module, kernel in _KERNELS[1:])


def hide(keys: TorchTensor, k: TorchTensor, v: TorchTensor) -> None:
    """Fill with NaN where keys [B, T_k] are True."""
    for x in (k, v):
        x.data.masked_fill_(keys[:, None, :, None], float("nan"))


def check_on_hopper(
    attention: Callable[..., Any],
    B: int = 1,
    H_q: int = 2,
    H_k: int = 1,
    T_q: int = 150,
    T_k: int | None = None,
    D: int = 64,
    D_v: int | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "bhtd",
    programs: int = 3,
    key_lengths: list[int] | None = None,
    **arguments: Any,
) -> None:
    """Check results and gradients against the oracle; keys that no query may see are NaN.

    Causal, unless arguments say otherwise.

    Raises:
        AssertionError: see `assert_matches_reference`.
    """
    clean = make_qkv(B, H_q, H_k, T_q, T_k, D, D_v, dtype=dtype, layout=layout)
    q, k, v = (x.detach().clone().requires_grad_() for x in clean)
    if key_lengths is not None:
        arguments["key_lengths"] = torch.tensor(key_lengths, dtype=torch.int32)
        for b, length in enumerate(key_lengths):
            k.data[b, :, length:] = v.data[b, :, length:] = float("nan")
    if (padding := arguments.get("key_padding_mask")) is not None:
        hide(~padding, k, v)
    if (ids := arguments.get("documents")) is not None:
        hide(ids[1] < 0, k, v)
    with grid_of(programs):
        assert_matches_reference(attention, q, k, v, clean=clean, **({"causal": True} | arguments))
