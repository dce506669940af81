"""Host-to-device copies through pinned memory, which do not wait for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(
    values: Tensor | Sequence[int] | Sequence[float] | Sequence[Sequence[int]],
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A tensor of the host's numbers on a device; the host goes on before it is there.

    A copy from plain memory makes the host wait until all that the GPU has to do before is done.

    Args:
        values: numbers, lists of them of one length, or a tensor on the CPU.
        device: where to.
        dtype: default: torch's own for such numbers, or the tensor's.
    """
    x = torch.as_tensor(values, dtype=dtype)
    if torch.device(device).type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
