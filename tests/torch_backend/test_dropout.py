"""Dropout: Philox against its published vectors and Triton's; weights dropped on a CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn import reference
from fastattn.testing import make_qkv, worst_naive
from fastattn.testing.budget import assert_all_within_budget
from fastattn.testing.option_examples import option_examples
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


def test_parts_of_a_mask_and_a_traced_one_have_the_bits_of_the_whole(monkeypatch) -> None:
    seed, sizes = torch.tensor([-5, 2**62 + 3]), (2, 3, 7, 10)
    positions = torch.arange(14).int().view(2, 7) * 1000, torch.arange(10).int()[None] + 2**20
    for options in ({}, {"positions": positions, "heads": (4, 9), "first_row": 3}):
        whole = dropout.keep_mask(seed, 0.5, *sizes, **options)
        with FlopCounterMode(display=False):
            assert torch.equal(dropout.keep_mask(seed, 0.5, *sizes, **options), whole)
        with monkeypatch.context() as patch:
            patch.setattr(dropout, "_AT_ONCE", 5)
            assert torch.equal(dropout.keep_mask(seed, 0.5, *sizes, **options), whole)


B, H_q, H_k, T_q, T_k, D = 2, 4, 2, 9, 13, 8
SEED = torch.tensor([3, 4])
EXAMPLES = option_examples(H_q, H_k, T_q, T_k, D, reach=3)
NAMES = ("causal", "window", "lengths", "padding", "mask", "bias", "bias-of-keys", "prefix")
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: EXAMPLES[name] for name in NAMES},
    "nothing": {},
    "blind rows": {"key_lengths": torch.tensor([0, 5]), "attn_bias": torch.zeros(H_q, 1, 1)},
    "blind by bias": {"attn_bias": EXAMPLES["bias-with-holes"]["attn_bias"]},
}


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return fastattn.attention(q, k, v, backend="torch", dropout=0.4, **options)


def with_gradients(attend: Callable[..., Tensor], *inputs: Tensor, **how: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = attend(*leaves, **how)
    do = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_weights_and_gradients_are_dropped_by_one_mask(name, seeded, dtype) -> None:
    """On a CPU with a seed the promised one, else what torch's own dropout draws."""
    options = {
        name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in OPTIONS[name].items()
    }
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_k, D, dtype=dtype)
    ones = torch.ones(B, H_q, T_q, T_k)
    torch.manual_seed(1)
    keep = dropout.keep_mask(SEED, 0.4, *ones.shape) if seeded else F.dropout(ones, 0.4) > 0
    exist = options.get("key_lengths", torch.tensor([T_k] * B))
    hidden = (torch.arange(T_k) >= exist[:, None])[:, None, :, None]
    spoilt = (x.masked_fill(hidden, torch.nan) for x in (k, v))
    torch.manual_seed(1)
    given = {"dropout_seed": SEED} if seeded else {}
    ours = with_gradients(attend, q, *spoilt, **options, **given)

    def theirs(of: torch.dtype) -> list[Tensor]:
        how = {"dropout": 0.4, "dropout_keep": keep}
        return with_gradients(reference.attention, *(x.to(of) for x in (q, k, v)), **options, **how)

    exact = theirs(torch.float64)
    naive = worst_naive(tuple(exact), lambda: tuple(theirs(dtype)))
    assert_all_within_budget(("o", "dq", "dk", "dv"), ours, exact, naive)


@pytest.mark.parametrize("seed", [None, SEED])
def test_weights_show_the_mask(seed) -> None:
    """Weights by v = identity: dropped one by one, the others scaled."""
    q, k, _ = make_qkv(B, H_q, H_q, 64, 64, D, requires_grad=False)
    v = torch.eye(64).expand(B, H_q, 64, 64)
    whole = fastattn.attention(q, k, v, backend="torch")
    once, again = (attend(q, k, v, dropout_seed=seed) for _ in range(2))
    assert torch.equal(once, again) == (seed is not None)
    kept = once != 0
    torch.testing.assert_close(once, torch.where(kept, whole / 0.6, 0.0))
    assert abs(kept.float().mean().item() - 0.6) < 5 * 0.5 / kept.numel() ** 0.5
    if seed is not None:
        assert torch.equal(kept, dropout.keep_mask(seed, 0.4, B, H_q, 64, 64))


def test_a_known_call_keeps_no_seed() -> None:
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_k, D, requires_grad=False)
    for _ in range(2):
        drawn, first, other = (attend(q, k, v, dropout_seed=x) for x in (None, SEED, SEED + 1))
        assert torch.equal(first, attend(q, k, v, dropout_seed=SEED))
        assert not torch.equal(first, other)
        assert not torch.equal(drawn, attend(q, k, v))


PARTS: dict[str, dict[str, Any]] = {
    "heads": {"heads": (2, 8)},
    "positions": {"positions": (torch.arange(T_q).int()[None], torch.arange(T_k).int()[None])},
    "lse": {"return_lse": True},
    "softcap": {"softcap": 3.0},
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_other_calls_and_those_by_the_formula_draw_a_seed(name) -> None:
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_k, D, requires_grad=False)
    for number in (5, 6):  # the second is known
        torch.manual_seed(number)
        drawn = attend(q, k, v, **PARTS[name])
        torch.manual_seed(number)
        given = attend(q, k, v, **PARTS[name], dropout_seed=dropout.draw_seed(q.device))
        assert torch.equal(*(x[0] if isinstance(x, tuple) else x for x in (drawn, given)))


@pytest.mark.parametrize("seed", [None, SEED])
def test_nan_of_a_later_key_stays_with_the_rows_that_see_it(seed) -> None:
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_q, D, requires_grad=False)
    k[:, :, 5] = torch.nan
    o = attend(q, k, v, causal=True, dropout_seed=seed)
    assert o[:, :, :5].isfinite().all()
    assert o[:, :, 5:].isnan().all()


@pytest.mark.parametrize("seed", [None, SEED])
def test_second_derivatives(seed) -> None:
    inputs = make_qkv(1, 2, 1, 3, 4, 2, dtype=torch.float64)

    def drop(*inputs: Tensor) -> Tensor:
        torch.manual_seed(2)
        return attend(*inputs, causal=True, dropout_seed=seed)

    assert torch.autograd.gradgradcheck(drop, inputs)


def test_packed_sequences_without_a_seed() -> None:
    q, k, v = (x.detach()[0].transpose(0, 1) for x in make_qkv(1, H_q, H_k, T_q, T_q, D))
    starts = torch.tensor([0, 4, 4, 7])
    torch.manual_seed(6)
    o = fastattn.attention_varlen(q, k, v, starts, backend="torch", dropout=0.4)
    torch.manual_seed(6)
    for rows in (slice(0, 4), slice(4, 7)):
        alone = attend(*(x[rows].transpose(0, 1)[None] for x in (q, k, v)))[0].transpose(0, 1)
        assert torch.equal(o[rows], alone)
    assert not o[7:].any()
