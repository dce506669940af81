"""Plans: every token has one place, and ranks have as much to do as the mask allows."""

import pytest
import torch

from fastattn import document_ids, reference
from fastattn.parallel import ContextPlan
from fastattn.parallel.plan import BALANCES, visible_keys


def packed(T: int, median: int, seed: int = 0) -> torch.Tensor:
    """Ids [1, T] of documents whose lengths are log-normal around a median."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (median * torch.randn(T, generator=generator).exp()).long().clamp(min=1)
    ends = lengths.cumsum(0)
    ends = ends[ends < T]
    return document_ids(torch.cat((torch.tensor([0]), ends, torch.tensor([T]))), T)


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize(
    ("T", "ranks", "block"), [(512, 4, 16), (500, 4, 16), (5, 4, 16), (96, 3, 8)]
)
def test_every_token_has_one_place(T, ranks, block, balance):
    plan = ContextPlan.make(T, ranks, causal=True, block=block, balance=balance)
    held = torch.cat([plan.indices(r) for r in range(ranks)])
    assert plan.ranks == ranks and len(held) == plan.length * ranks
    assert torch.equal(held.sort().values, torch.arange(plan.length * ranks))
    assert plan.length * ranks - T < block * ranks
    for r in range(ranks):
        indices = plan.indices(r)
        assert torch.equal(indices, indices.sort().values)
        assert torch.equal(plan.positions(r), indices.int()[None])
        real = torch.cat([torch.arange(*run) for run in plan.runs(r)] or [torch.arange(0)])
        assert torch.equal(indices[: plan.real(r)], real)
        assert (indices[plan.real(r) :] >= T).all()
    assert torch.equal(held[plan.order], torch.arange(T))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": 7},
        {"window": (3, 5), "causal": True},
        {"window": (None, 2)},
        {"causal": True, "documents": torch.tensor([[0] * 9 + [4] * 30 + [-1] * 5 + [0] * 6])},
        {"window": (4, 4), "documents": torch.randint(-1, 3, (3, 50))},
    ],
)
def test_visible_keys_are_those_of_the_mask(options):
    documents = options.get("documents")
    masks = {name: x for name, x in options.items() if name != "documents"}
    mask = reference.visible_mask(50, 50, **masks)[:, 0]
    if documents is not None:
        mask = mask & (documents[:, :, None] == documents[:, None]) & (documents[:, None] >= 0)
    assert torch.equal(visible_keys(50, **options), mask.sum((0, 2)))


def test_imbalance_is_the_most_pairs_over_the_mean():
    assert ContextPlan.make(256, 2, causal=True, balance="contiguous").imbalance == pytest.approx(
        (128 * 129 / 2 + 128 * 128) / (256 * 257 / 4)
    )
    assert ContextPlan.make(256, 2).imbalance == 1.0
    assert ContextPlan.make(1024, 4, causal=True, balance="zigzag").imbalance == 1.0


def test_auto_takes_the_longest_runs_that_are_about_as_even():
    assert ContextPlan.make(4096, 4, window=256).balance == "contiguous"
    causal = ContextPlan.make(4096, 4, causal=True)
    assert causal.balance == "zigzag" and causal.runs(1) == [(512, 1024), (3072, 3584)]
    near = ContextPlan.make(8000, 8, causal=True)
    even = ContextPlan.make(8000, 8, causal=True, balance="longest_first")
    assert near.balance == "zigzag" and even.imbalance < near.imbalance


def test_packed_documents_are_not_sent_around_many_gpus_for_balance():
    documents = torch.arange(1 << 17)[None] // 1500
    given = {"causal": True, "documents": documents}
    near = ContextPlan.make(1 << 17, 64, **given)
    far = ContextPlan.make(1 << 17, 64, balance="longest_first", **given)
    assert near.balance == "contiguous" and far.imbalance < 1.01 < near.imbalance
    assert near.hops(given) <= 2 and far.hops(given) == 63
    # On few ranks long documents, and one of many short ones, are worth the messages.
    for documents in (packed(1 << 17, 20000), torch.arange(1 << 17)[None] // (1 << 15)):
        few = ContextPlan.make(1 << 17, 8, causal=True, documents=documents)
        assert few.balance != "contiguous" and few.imbalance < 1.01


@pytest.mark.parametrize("balance", BALANCES)
def test_little_is_padded(balance):
    plan = ContextPlan.make(131149, 64, causal=True, balance=balance)
    assert plan.length * 64 < 131149 + 4 * 64 and plan.aligned
    assert balance == "contiguous" or plan.imbalance < 1.01


def test_hashes_tell_plans_apart():
    plans = [
        ContextPlan.make(512, 4, causal=True),
        ContextPlan.make(511, 4, causal=True),
        ContextPlan.make(512, 2, causal=True),
        ContextPlan.make(512, 4, balance="zigzag", block=64),
        ContextPlan.make(512, 4, balance="contiguous", block=64),
    ]
    assert len({plan.hash for plan in plans}) == 5
    assert plans[0].hash == ContextPlan.make(512, 4, causal=True).hash
