"""The bits of dropout: Philox against its published vectors and against Triton's."""

import pytest
import torch
import triton
import triton.language as tl

import fastattn
from fastattn.torch_backend import dropout

FULL = 0xFFFFFFFF
# From kat_vectors of the Random123 distribution, philox4x32: rounds, key, counter, words.
PUBLISHED = [
    (7, (0, 0), (0, 0, 0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (10, (0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, (FULL, FULL), (FULL,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        10,
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("rounds", "key", "counter", "words"), PUBLISHED)
def test_published_vectors(rounds, key, counter, words) -> None:
    counters = tuple(map(torch.tensor, counter))
    drawn = dropout.philox(tuple(map(torch.tensor, key)), counters, rounds)
    assert tuple(map(int, drawn)) == words


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


@pytest.mark.parametrize(
    ("seed", "dropout", "error", "message"),
    [
        (torch.tensor([1, 2]), 1.5, ValueError, r"dropout must be in \[0, 1\), got 1.5"),
        (torch.tensor([1, 2]), 1, ValueError, r"dropout must be in \[0, 1\), got 1.0"),
        (torch.tensor([1, 2]), -0.1, ValueError, r"dropout must be in \[0, 1\), got -0.1"),
        (torch.tensor([1, 2]), "0.1", TypeError, "dropout must be a float, got str"),
        (torch.tensor([1, 2, 3]), 0.1, ValueError, r"seed must have shape \[2\], got \[3\]"),
        (torch.tensor([1, 2]).int(), 0.1, TypeError, "seed must be an int64 tensor, got torch.int"),
    ],
)
def test_bad_arguments_of_a_keep_mask(seed, dropout, error, message) -> None:
    with pytest.raises(error, match=message):
        fastattn.dropout_keep_mask(seed, dropout, 1, 1, 4, 4)
