"""The bits of dropout: Philox against its published vectors and against Triton's."""

import pytest
import torch
import triton
import triton.language as tl

import fastattn
from fastattn.torch_backend import dropout

# From kat_vectors of the Random123 distribution, philox4x32: rounds, key and counter, and words.
PUBLISHED = """
7   0 0  0 0 0 0  5f6fb709 0d893f64 4f121f81 4f730a48
10  0 0  0 0 0 0  6627e8d5 e169c58d bc57ac4c 9b00dbd8
10  ffffffff ffffffff  ffffffff ffffffff ffffffff ffffffff  408f276d 41c83b0e a20bc7c6 6d5451fd
10  a4093822 299f31d0  243f6a88 85a308d3 13198a2e 03707344  d16cfe09 94fdcceb 5001e420 24126ea1
"""


@pytest.mark.parametrize("vector", PUBLISHED.strip().splitlines())
def test_published_vectors(vector) -> None:
    rounds, *numbers = vector.split()
    words = [int(x, 16) for x in numbers]
    key, *counter = (tuple(map(torch.tensor, x)) for x in (words[:2], words[2:6]))
    drawn = dropout.philox(key, *counter, int(rounds))
    assert [*map(int, drawn)] == words[6:]


@triton.jit
def words_kernel(seed_ptr, out_ptr, H_q, row, key_blocks: tl.constexpr):
    """Draw for query `row` of head program_id(0) as a kernel does, four words a block of keys."""
    seed = tl.load(seed_ptr)
    high = tl.load(seed_ptr + 1)
    block = tl.arange(0, key_blocks)
    words = tl.philox(seed, block, row, tl.program_id(0), high.to(tl.int32), 7)
    place = out_ptr + (tl.program_id(0) * key_blocks + block) * 4
    for n in tl.static_range(4):
        tl.store(place + n, words[n].to(tl.uint32, bitcast=True).to(tl.int64))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999])
def test_the_same_bits_as_triton(p: float, device: str) -> None:
    B, H_q, T_q, T_k = 2, 3, 4, 27
    seed = torch.tensor([0x1234_5678_9ABC_DEF0, 0x7FFF_0000_8765_4321], device=device)
    kept = dropout.keep_mask(seed, p, B, H_q, T_q, T_k)
    for row in range(T_q):
        words = torch.zeros(B * H_q, 8, 4, dtype=torch.int64, device=device)
        words_kernel[(B * H_q,)](seed, words, H_q, row, 8)
        expected = words.reshape(B, H_q, 32)[..., :T_k] >= int(p * 2**32)
        assert torch.equal(kept[:, :, row], expected)


def test_a_part_of_a_batch_has_its_own_bits() -> None:
    seed = torch.tensor([1, 2])
    whole = fastattn.dropout_keep_mask(seed, 0.5, 3, 2, 4, 5)
    assert torch.equal(whole[2:], dropout.keep_mask(seed, 0.5, 1, 2, 4, 5, first_row=2))


def test_every_place_and_both_seeds_count() -> None:
    kept = dropout.keep_mask(torch.tensor([1, 2]), 0.5, 2, 2, 64, 64)
    assert len({tuple(x.flatten().tolist()) for x in kept.flatten(0, 1)}) == 4
    assert abs(kept.float().mean().item() - 0.5) < 5 * 0.5 / kept.numel() ** 0.5
    for other in ([2, 2], [1, 3], [1 + (1 << 32), 2]):
        assert not torch.equal(kept, dropout.keep_mask(torch.tensor(other), 0.5, 2, 2, 64, 64))


def test_seeds_come_from_torchs_generator() -> None:
    torch.manual_seed(3)
    first = dropout.draw_seed(torch.device("cpu"))
    second = dropout.draw_seed(torch.device("cpu"))
    torch.manual_seed(3)
    assert first.dtype == torch.int64
    assert torch.equal(first, dropout.draw_seed(torch.device("cpu")))
    assert not torch.equal(first, second)
