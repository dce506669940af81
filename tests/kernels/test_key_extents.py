"""Data that kernels read of a key_padding_mask: begin and end of each row, and a bit a key."""

import pytest
import torch

from fastattn.kernels.launch import interpreter
from fastattn.kernels.launch.key_extents import launch_padding_extents

interpreter.mend()


@pytest.mark.parametrize("pattern", ["11110000", "00011100", "01110110", "00000000", "11111111"])
def test_padding_extents(pattern: str, device: str) -> None:
    mask = torch.tensor([[c == "1" for c in pattern]], device=device)
    extents = launch_padding_extents(mask)
    if "1" not in pattern:
        assert extents[0, :3].tolist() == [0, 0, 0]
        return
    first, end = pattern.index("1"), pattern.rindex("1") + 1
    assert extents[0, :3].tolist() == [first, end, pattern[first:end].count("0")]


def test_padding_extents_across_blocks(device: str) -> None:
    mask = torch.zeros(2, 3000, dtype=torch.bool, device=device)
    mask[0, 1500:2900] = True
    mask[1, 7] = mask[1, 2999] = True
    extents = launch_padding_extents(mask)[:, :3]
    assert extents.tolist() == [[1500, 2900, 0], [7, 3000, 2991]]


@pytest.mark.parametrize("T_k", [1, 31, 64, 100, 1024, 2500])
def test_padding_bits(T_k: int, device: str) -> None:
    """A bit a key, and hidden ones to the end of the last block."""
    torch.manual_seed(0)
    mask = torch.rand(3, T_k, device=device) < 0.6
    words = launch_padding_extents(mask)[:, 3:]
    bits = (words[:, :, None] >> torch.arange(32, device=device)) & 1
    assert bits.shape[1] * 32 == -(-T_k // 128) * 128
    shown = bits.flatten(1).bool()
    assert torch.equal(shown[:, :T_k], mask)
    assert not shown[:, T_k:].any()
