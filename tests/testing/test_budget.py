"""The error budget: correct results pass it, and typical bugs of attention fail it."""

import itertools
import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from fastattn import decode_attention
from fastattn.testing import assert_matches_reference, assert_within_budget, error_budget, make_qkv
from fastattn.testing.budget import PastBudget
from fastattn.testing.decoding import assert_decoded, assert_paged, fill
from fastattn.testing.option_examples import sets_that_cover_pairs, together

T, D, BLOCK = 96, 32, 16
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def blockwise(
    q, k, v, *, bug=None, causal=True, return_lse=False, scale=None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention by the online softmax, differentiable, with a bug on request."""
    G = q.shape[1] // k.shape[1]
    dtype = q.dtype
    wide = torch.promote_types(dtype, torch.float32)
    k, v = (x.repeat_interleave(G, 1) for x in (k, v))
    steeper = {"scale": 1.01, "scale-a-little": 1.00001}.get(bug, 1.0)
    s = (q.to(wide) @ k.to(wide).mT) * D**-0.5 * steeper
    diagonal = {"diagonal": 0, "late": 2}.get(bug, 1)
    hidden = torch.ones(T, T, dtype=torch.bool).triu(diagonal)
    hidden[0, 0] = False
    if bug == "dropped-block":
        hidden[:, 2 * BLOCK : 3 * BLOCK] = True
    s = s.masked_fill(hidden, -math.inf)
    m = torch.full(s.shape[:3], -1e30, dtype=wide)
    l = torch.zeros_like(m)
    acc = torch.zeros(*s.shape[:3], D, dtype=wide)
    for n in range(0, T, BLOCK):
        block = s[..., n : n + BLOCK]
        m_next = torch.maximum(m, block.amax(-1))
        p = torch.exp(block - m_next[..., None])
        rescale = torch.exp(m - m_next)
        if bug == "coarse-weights":
            p = p + ((p * 256).round() / 256 - p).detach()
        l = l * (1.0 if bug == "sum-not-rescaled" else rescale) + p.sum(-1)
        acc = acc * (1.0 if bug == "output-not-rescaled" else rescale[..., None])
        acc = acc + p.to(dtype).to(wide) @ v[..., n : n + BLOCK, :].to(wide)
        m = m_next
    o = (acc / l[..., None]).to(dtype)
    lse = (m + l.log()).float()
    if bug == "lse-gradient":
        lse = 2 * lse - lse.detach()
    return (o, lse) if return_lse else o


BUGS = ("scale", "diagonal", "late", "dropped-block", "sum-not-rescaled", "output-not-rescaled")
PLANTED: list[tuple[str | None, torch.dtype]] = [
    *((None, dtype) for dtype in FLOATS),
    *itertools.product(BUGS, FLOATS),
    ("scale-a-little", torch.float32),
    ("lse-gradient", torch.float32),
    *(("coarse-weights", dtype) for dtype in FLOATS[:2]),
]


@pytest.mark.parametrize(("bug", "dtype"), PLANTED, ids=str)
def test_planted_bugs_alone_exceed_the_budget(bug: str | None, dtype: torch.dtype) -> None:
    inputs = make_qkv(1, 4, 2, T, D=D, dtype=dtype)
    seen = pytest.raises(AssertionError, match=r"(exceeds the budget|NaN)")
    with seen if bug else nullcontext():
        assert_matches_reference(partial(blockwise, bug=bug), *inputs, causal=True)


def test_the_budget_is_its_formula() -> None:
    ref = torch.tensor([1.0, -4.0, math.inf], dtype=torch.float64)
    naive = torch.tensor([1.25, -4.0, math.inf])
    eps = torch.finfo(torch.bfloat16).eps
    expected = 2 * 0.25 + 4 * eps + 64 * torch.finfo(torch.float32).eps
    assert error_budget(ref, naive, torch.bfloat16) == pytest.approx(expected, rel=1e-12)


def test_uninitialised_memory_is_nan_in_tests() -> None:
    x = torch.zeros(3)
    made = [torch.empty(3), torch.empty_like(x), torch.empty_strided((3,), (1,))]
    made += [x.new_empty(3), x.new_empty_strided((3,), (1,))]
    assert torch.stack(made).isnan().all()


def test_nan_and_infinities_are_named() -> None:
    ref = torch.tensor([1.0, -math.inf], dtype=torch.float64)
    good = ref.float()
    assert_within_budget("lse", good, ref, good)
    wrong = {(math.nan, -math.inf): "lse has NaN or inf", (1.0,): "expected"}
    wrong |= dict.fromkeys(((1.0, math.inf), (1.0, math.nan)), "lse: infinities differ")
    for numbers, message in wrong.items():
        with pytest.raises(AssertionError, match=message):
            assert_within_budget("lse", torch.tensor(numbers), ref, good)
    spoilt = torch.tensor([math.nan, -math.inf])
    for oracle, at in (((ref, spoilt), "naive result is not"), ((spoilt, good), "reference has")):
        with pytest.raises(AssertionError, match=at):
            assert_within_budget("lse", good, *oracle)


def test_an_error_is_a_share_of_its_budget() -> None:
    """A budget is one rounding, and twice the error of the formula."""
    ref = torch.tensor([4.0], dtype=torch.float64)
    for error in (0.0, 0.25):
        budget = error_budget(ref, ref + error, torch.bfloat16)
        assert budget == pytest.approx(2 * error + 4 * 2**-7 + 64 * 2**-23)
    budget = error_budget(ref, ref, torch.float32)
    off = (ref + budget / 2).float()
    assert assert_within_budget("x", off, ref, ref.float()) == pytest.approx(0.5, rel=0.1)
    with pytest.raises(PastBudget) as raised:
        assert_within_budget("x", (ref + 3 * budget).float(), ref, ref.float())
    assert raised.value.share == pytest.approx(3, rel=0.1)


def test_sets_cover_every_pair_that_fits() -> None:
    names = ("causal", "window", "prefix", "mask", "bias", "float-mask", "softcap", "sinks")
    options = {name: {name: 1} for name in names}
    options["prefix"] = {"causal": True, "prefix_lengths": 3}
    options["mask"] = options["float-mask"] = {"attn_mask": 1}
    options["bias"] = {"attn_bias": 1}
    sets = sets_that_cover_pairs(options, 4)
    met = {frozenset(pair) for chosen in sets for pair in itertools.combinations(chosen, 2)}
    apart = {frozenset(x) for x in itertools.combinations(("mask", "bias", "float-mask"), 2)}
    assert met == {frozenset(x) for x in itertools.combinations(options, 2)} - apart
    assert max(map(len, sets)) == 4
    assert len(sets) < len(met) / 2
    both = {"causal": True, "prefix_lengths": 3, "attn_bias": 1}
    assert together(options, ("prefix", "bias")) == both


def test_what_decoding_gives_is_compared() -> None:
    """Results over a cache, and of packed queries; the newest tokens of a row are real."""
    q, k, v = make_qkv(2, 4, 2, 3, 9, 16, requires_grad=False)
    filled = fill("pages-of-3", k, v, torch.tensor([9, 5]))
    o, lse = decode_attention(q, filled.view, return_lse=True)
    rows, packed = o.transpose(1, 2).flatten(0, 1), q.transpose(1, 2).flatten(0, 1)
    offsets = torch.tensor([0, 3, 6])
    for error in (0.0, 0.1):
        with pytest.raises(PastBudget) if error else nullcontext():
            assert_decoded((o + error, lse), q, filled)
        with pytest.raises(PastBudget) if error else nullcontext():
            assert_paged((rows + error, lse.transpose(0, 1).flatten(1)), packed, filled, offsets)
