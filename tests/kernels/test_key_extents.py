"""Data that kernels read of a key_padding_mask: begin and end of each row, and a bit a key."""

import pytest
import torch

from fastattn.kernels.launch import interpreter
from fastattn.kernels.launch.key_extents import launch_padding_extents

interpreter.patch_interpreter()


@pytest.mark.parametrize("T_k", [1, 8, 31, 64, 100, 1024, 3000])
def test_extents_and_bits_of_padding(T_k: int, device: str) -> None:
    """A bit a key, and hidden ones to the end of the last block of 128."""
    keys, holes = torch.arange(T_k, device=device), torch.rand(5, T_k, device=device) < 0.6
    holes[1] = (keys >= T_k // 3) & (keys < 9 * T_k // 10)
    holes[2], holes[3] = True, False
    holes[4] = (keys == T_k // 2) | (keys == T_k - 1)
    extents, words = launch_padding_extents(holes).tensor_split([3], dim=1)
    for mask, extent in zip(holes, extents.tolist(), strict=True):
        places = mask.nonzero().flatten().tolist() or [0]
        first, end = places[0], places[-1] + bool(mask.any())
        assert extent == [first, end, int((~mask[first:end]).sum())]
    bits = (words[:, :, None] >> torch.arange(32, device=device)) & 1
    assert bits.shape[1] * 32 == -(-T_k // 128) * 128
    assert torch.equal(bits.flatten(1).bool(), torch.nn.functional.pad(holes, (0, -T_k % 128)))
