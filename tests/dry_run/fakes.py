"""Every public call on fake CUDA tensors, whose kernels are noted instead of launched.

A fake tensor has a device, a shape and no contents. So one on the wrong device is found, and a
launch there; whoever reads one on the host raises, and so does a custom operator without a fake.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import public
import torch
from calls import ones, random
from stage import ANSWERS, Stage
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import fastattn.kernels
from fastattn import attention, tracing
from fastattn.ops import attention_ops as ops
from fastattn.options import Options

_launched: list[str] = []
stage = Stage(lambda: len(_launched))


def _tensors(x: object) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple | list):
        for item in x:
            yield from _tensors(item)
    elif isinstance(base := getattr(x, "base", None), Tensor):  # a descriptor's
        yield base


def _launch(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **named: Any) -> None:
    _launched.append(kernel.__name__)
    devices = {str(x.device) for x in _tensors((*args, *named.values()))}
    if devices != {f"cuda:{_Driver.current}"}:
        what = f"{kernel.__name__} is launched on tensors of {sorted(devices)}"
        stage.fault(f"{what}, by cuda:{_Driver.current}")


def _tensor(make: Any, *args: Any, pin_memory: bool = False, **named: Any) -> Tensor:
    """`torch.tensor`. To pin memory wants a driver; and a known number would be copied for real."""
    x: Tensor = make(*args, **named)
    return torch.empty(x.shape, dtype=x.dtype) if pin_memory else x


class _Driver:
    """Driver of Triton, as far as launchers use it. The current device is not the tensors'."""

    current = 1

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _device_of(x: Tensor) -> Iterator[None]:
    with mock.patch.object(_Driver, "current", x.device.index):
        yield


@contextmanager
def gpu(direct: bool) -> Iterator[None]:
    """Tensors made in the block are fake; direct: kernels are launched as untraced calls do."""
    patches = [
        *[mock.patch.object(torch.cuda, k, lambda *_, v=v: v) for k, v in ANSWERS.items()],
        *[mock.patch.object(kind, "run", _launch) for kind in (JITFunction, GluonJITFunction)],
        mock.patch.object(FakeTensor, "data_ptr", lambda x: 0),
        mock.patch.object(driver, "_active", _Driver()),
        mock.patch.object(torch.cuda, "current_device", lambda: _Driver.current),
        mock.patch.object(torch.cuda, "device_of", _device_of),
        mock.patch.object(torch, "tensor", partial(_tensor, torch.tensor)),
    ]
    if direct:
        patches.append(mock.patch.object(tracing, "may_be_traced", lambda x: False))
        mode = "fastattn.ops.attention_ops.is_in_torch_dispatch_mode"
        patches.append(mock.patch(mode, lambda: False))
    # The mode would try a device that is there when it is made.
    with FakeTensorMode(), ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def direct_path() -> None:
    with gpu(direct=True):
        play_all(launches=True)
    kernels = set(_entry_points()) - public.KERNELS_BY_OPERATOR
    assert kernels
    if left := kernels - set(_launched):
        stage.play("every kernel", lambda: None)
        stage.fault(f"no call launches {sorted(left)}")


def op_path() -> None:
    """Where something traces: custom operators, by their fakes."""
    with gpu(direct=False):
        play_all(launches=False)


def play_all(launches: bool) -> None:
    for name, call in public.all_calls().items():
        if not launches and name in public.UNTRACED:
            continue
        stage.play(name, call, launches=launches and name not in public.BY_OPERATOR)
    for name, call in public.without_launches().items():
        stage.play(name, call, launches=False)


def _entry_points() -> Iterator[str]:
    """The kernels of the package: its jit functions that are called so."""
    for info in pkgutil.walk_packages(fastattn.kernels.__path__, "fastattn.kernels."):
        module = importlib.import_module(info.name)
        for name, x in vars(module).items():
            if isinstance(x, JITFunction) and name.endswith("_kernel"):
                yield name


def planted() -> None:
    with gpu(direct=True):
        stage.play("tensor on the CPU", tensor_on_the_cpu)
        stage.play("read on the way", read_on_the_way)
    with gpu(direct=False):
        stage.play("no fake", operator_without_a_fake)


def tensor_on_the_cpu() -> None:
    """Past the checks of `attention`, which would refuse it."""
    q, k, v = (random(2, 2, 64, 64) for _ in range(3))
    lengths = torch.ones(2, dtype=torch.int32)
    ops.attend(q, k, v, Options(causal=True, scale=0.125, key_lengths=lengths))


def read_on_the_way() -> None:
    q, k, v = (random(2, 2, 64, 64) for _ in range(3))
    attention(q, k, v, window=ones(2).max().item())


def operator_without_a_fake() -> None:
    @torch.library.custom_op("dry_run::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return 2 * x

    attention(double(random(2, 2, 64, 64)), *(random(2, 2, 64, 64) for _ in range(2)))
