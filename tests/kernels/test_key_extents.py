"""Data that kernels read of a key_padding_mask: begin and end of each row, and a bit a key."""

import pytest
import torch
import triton
import triton.language as tl

from fastattn.kernels.launch import interpreter
from fastattn.kernels.launch.arguments import kernel_mask
from fastattn.kernels.launch.key_extents import launch_padding_extents
from fastattn.kernels.rules.mask import padded_keys, padding_words
from fastattn.kernels.rules.tile import batch_row
from fastattn.options import Options

interpreter.mend()


@triton.jit
def words_kernel(out_ptr, mask, T_k, BLOCK_N: tl.constexpr):
    """The keys that the padding shows of batch row program_id(0), block by block."""
    row = batch_row(tl.program_id(0), T_k, T_k, mask)
    out_ptr += tl.program_id(0) * T_k
    for block in range(tl.cdiv(T_k, BLOCK_N)):
        words = padding_words(block * BLOCK_N, row, mask, BLOCK_N)
        k_pos = block * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(out_ptr + k_pos, padded_keys(words, BLOCK_N), mask=k_pos < T_k)


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


@pytest.mark.parametrize("BLOCK_N", [16, 32, 64, 128])
def test_blocks_of_padding_bits(BLOCK_N: int, device: str) -> None:
    torch.manual_seed(0)
    padding = torch.rand(2, 300, device=device) < 0.6
    mask = kernel_mask(Options(key_padding_mask=padding))
    out = torch.empty_like(padding)
    words_kernel[(2,)](out, mask, 300, BLOCK_N)
    assert torch.equal(out, padding)
