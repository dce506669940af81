"""How far keys go around a ring: no farther than they are seen, and what is sent and computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastattn import reference
from fastattn.parallel import ContextPlan, explain_context, ring
from fastattn.parallel.hops import Hops, hops, hops_by_positions, seen
from fastattn.parallel.parts import Whole
from fastattn.testing import make_qkv

pytestmark = pytest.mark.usefixtures("one_thread")

RANKS, BLOCK = 8, 8
T = 2 * RANKS * BLOCK - 5
FAR = RANKS - 1


def documents(length: int) -> dict[str, torch.Tensor]:
    return {"documents": (torch.arange(T) // length).expand(2, T).contiguous()}


# By how tokens are dealt out and what hides keys.
WAYS: dict[str, tuple[str, dict[str, Any], Hops]] = {
    "all": ("contiguous", {}, Hops(FAR, 0)),
    "causal": ("contiguous", {"causal": True}, Hops(FAR, 0)),
    "window": ("contiguous", {"causal": True, "window": 14}, Hops(1, 0)),
    "wider": ("contiguous", {"causal": True, "window": 18}, Hops(2, 0)),
    "ahead": ("contiguous", {"window": (0, 9)}, Hops(0, 1)),
    "both-sides": ("contiguous", {"window": (40, 9)}, Hops(3, 1)),
    "first": ("contiguous", {"causal": True, "window": 14, "keep_first": 3}, Hops(FAR, 0)),
    "stride": ("contiguous", {"causal": True, "window": 14, "stride": 40}, Hops(FAR, 0)),
    "prefix": ("contiguous", {"causal": True, "prefix_lengths": 40}, Hops(FAR, 0)),
    "zigzag": ("zigzag", {"causal": True}, Hops(FAR, 0)),
    "zigzag-window": ("zigzag", {"causal": True, "window": 6}, Hops(1, 1)),
    "documents": ("contiguous", documents(16), Hops(0, 0)),
    "long-documents": ("contiguous", documents(40), Hops(2, 2)),
    "causal-documents": ("contiguous", {"causal": True, **documents(40)}, Hops(2, 0)),
    "scattered-documents": ("zigzag", documents(16), Hops(FAR, 0)),
}


def case(name: str) -> tuple[ContextPlan, dict[str, Any], Hops]:
    balance, options, way = WAYS[name]
    return ContextPlan.make(T, RANKS, block=BLOCK, balance=balance), options, way


@pytest.mark.parametrize("name", WAYS)
def test_keys_go_as_far_as_they_are_seen(name: str) -> None:
    plan, options, way = case(name)
    assert hops(seen(plan, options)) == way
    without = {key: x for key, x in options.items() if key != "documents"}
    assert hops_by_positions(plan, 1, without) == hops(seen(plan, without))
    assert hops_by_positions(plan, RANKS, without) == Hops(0, 0)


@pytest.mark.parametrize("name", WAYS)
def test_no_pair_that_sees_each_other_is_left_out(name: str) -> None:
    """Where ranks hold one stretch each, and no keys are shown apart, every other pair is."""
    plan, options, _ = case(name)
    ids = options.get("documents")
    options = {key: x for key, x in options.items() if key != "documents"}
    mask = reference.visible_mask(T, T, **options)[0, 0]
    mask = mask if ids is None else mask & (ids[0, :, None] == ids[0])
    found = seen(plan, WAYS[name][1])
    for r in range(RANKS):
        for s in range(RANKS):
            rows, keys = (plan.indices(n)[: plan.real(n)] for n in (r, s))
            shown = bool(mask[rows][:, keys].any())
            exact = plan.balance == "contiguous" and not options.keys() & {
                "stride",
                "prefix_lengths",
            }
            assert found[r][s] == shown if exact else found[r][s] >= shown


def test_padding_and_ranks_without_tokens_are_seen_by_nobody() -> None:
    plan = ContextPlan.make(20, 4, block=8, balance="contiguous")
    ids = torch.full((1, 20), -1)
    assert not any(map(any, seen(plan, {"documents": ids})))
    assert [any(row) for row in seen(plan, {})] == [True, True, True, False]


@contextmanager
def group_without_messages(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


# Of rank 3, to whom it sends and whose keys it computes with: forward, then backward.
MESSAGES: dict[str, list[list[int]]] = {
    "all": [[4] * 7, [3, 2, 1, 0, 7, 6, 5, 4], [4] * 15, [3, 2, 1, 0, 7, 6, 5, 4]],
    "wider": [[4, 4], [3, 2, 1], [4, 4, 4, 4, 1], [3, 2, 1]],
    "both-sides": [
        [4, 4, 4, 2],
        [3, 2, 1, 0, 4],
        # The gradients of the keys follow, and go home from where these have ended.
        [4, 4, 4, 4, 4, 4, 2, 0, 4],
        [3, 2, 1, 0, 4],
    ],
    "documents": [[], [3], [], [3]],
    # What only other ranks see passes, and is not computed with.
    "causal-documents": [[4, 4], [3, 2], [4, 4, 4, 4, 1], [3, 2]],
}


@pytest.mark.parametrize("name", MESSAGES)
def test_nothing_is_sent_or_computed_that_is_hidden(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, options, _ = case(name)
    q, k, v = make_qkv(1, 2, 2, plan.length, D=8, requires_grad=False)
    rank_of = {tuple(plan.runs(rank)): rank for rank in range(RANKS)}
    found: list[list[int]] = []
    batch = dist.batch_isend_irecv

    def send(ops: list[dist.P2POp]) -> Any:
        found[-2] += {op.group_peer for op in ops if op.op is dist.isend}
        return batch(ops)

    def compute(k_runs: list[tuple[int, int]]) -> None:
        found[-1].append(rank_of[tuple(k_runs)])

    monkeypatch.setattr(dist, "batch_isend_irecv", send)
    monkeypatch.setattr(ring, "part_forward", lambda *given: compute(given[6]))
    monkeypatch.setattr(ring, "part_backward", lambda *given: compute(given[5]))
    with group_without_messages(3, RANKS):
        found += [], []
        o, lse = ring.ring_forward(q, k, v, options, plan, dist.group.WORLD)
        found += [], []
        ring.ring_backward(q, k, v, options, [], Whole(o, None, o, lse), plan, dist.group.WORLD)
    assert found == MESSAGES[name]


def test_the_model_of_costs_knows_how_far_keys_go() -> None:
    plan = case("window")[0]
    own = make_qkv(1, 8, 8, plan.length, D=8, requires_grad=False)
    with group_without_messages(0, RANKS):
        far, near = (
            explain_context(*own, mesh=dist.group.WORLD, plan=plan, **options).seconds
            for options in ({"causal": True}, {"causal": True, "window": 14})
        )
    # Latencies are all that tokens this few take: of seven hops, and of one.
    assert near["ring"] < far["ring"] / 3
    assert near["gather"] == pytest.approx(far["gather"], rel=0.1)


@pytest.mark.parametrize(("blocks", "served"), [((0, 1, 2, 3), True), ((0, 2, 1, 3), False)])
def test_what_goes_by_positions_wants_them_of_groups_of_ranks(
    blocks: tuple[int, ...], served: bool
) -> None:
    plan = ContextPlan(32, tuple((n,) for n in blocks), 8, "contiguous", 1.0)
    own = make_qkv(1, 2, 2, 8, D=8, requires_grad=False)
    with group_without_messages(0, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        found = explain_context(*own, mesh=mesh, plan=plan, method="usp", dropout=0.5)
    assert (found.method == "usp") == served
    assert served or found.reasons["usp"].startswith("dropout goes by positions")
