"""Inputs of attention tests and benchmarks."""

import torch
from torch import Tensor


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
    """Unit normal q [B, H_q, T_q, D], k [B, H_k, T_k, D], v [B, H_k, T_k, D_v], drawn in `dtype`.

    layout "bthd" gives the same shapes as transposed views of [B, T, H, D] memory. Equal arguments
    give equal numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    T_k = T_q if T_k is None else T_k
    D_v = D if D_v is None else D_v

    def draw(H: int, T: int, width: int) -> Tensor:
        shape = (B, T, H, width) if layout == "bthd" else (B, H, T, width)
        x = torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
        x = x.transpose(1, 2) if layout == "bthd" else x
        return x.detach().requires_grad_(requires_grad)

    return draw(H_q, T_q, D), draw(H_k, T_k, D), draw(H_k, T_k, D_v)
