"""Appending to pages of a server: any strides, and codes by scales that are given."""

import pytest
import torch
from torch import Tensor

from fastattn import view_of_tensors
from fastattn.cache.append import append
from fastattn.quantization import codes_within

P, H, S, D, T = 6, 2, 4, 16, 3
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def pages(codes: str, device: str) -> list[Tensor]:
    """K and V [P, H, S, D] side by side, tokens before heads, in one tensor."""
    both = torch.full((P, S, H, 2 * D), 7, dtype=torch.uint8, device=device).view(DTYPES[codes])
    return [x.transpose(1, 2) for x in (both[..., :D], both[..., D:])]


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("codes", DTYPES)
@pytest.mark.parametrize("per", ["head", "tensor"])
def test_codes_are_made_by_the_given_scale(per: str, codes: str, backend: str, device: str) -> None:
    """Numbers too large for it become the largest code; nothing else is written, nor the scale."""
    k, v = torch.randn(2, 2, H, T, D, device=device)
    scale = torch.rand(H if per == "head" else 1, device=device) / (60 if codes == "int8" else 400)
    before, stored = scale.clone(), pages(codes, device)
    table = torch.tensor([[4, 1], [0, 5]], device=device)
    lengths = torch.tensor([2, 6], device=device)
    view = view_of_tensors(
        *stored, lengths, k_scale=scale, v_scale=scale, block_table=table, dtype=torch.float32
    )
    expected = [x.clone() for x in stored]
    for b, first in enumerate((2, 6)):
        for i in range(T):
            if first + i >= 2 * S:
                continue
            page, slot = table[b, (first + i) // S], (first + i) % S
            for x, new in zip(expected, (k, v), strict=True):
                rows = codes_within(new[b, :, i], scale[:, None], codes)
                x.view(torch.uint8)[page, :, slot] = rows.view(torch.uint8)
    append(view, k, v, backend=backend)
    for x, wanted in zip(stored, expected, strict=True):
        assert torch.equal(x.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scale, before)
    assert (stored[0].float().abs() >= (127 if codes == "int8" else 448)).any(), "none too large"
