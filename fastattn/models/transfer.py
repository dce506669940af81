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
    """Copy host values to a device asynchronously.

    A copy from pageable memory waits for all earlier work of the GPU.
    """
    x = torch.as_tensor(values, dtype=dtype, device="cpu")
    if torch.device(device).type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
