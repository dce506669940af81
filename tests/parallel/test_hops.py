"""How far keys go around a ring: no farther than they are seen; what is sent, computed and held.

Also parts of a call without other ranks: their options, and their merge.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn import KVCache, reference
from fastattn.parallel import ContextPlan, decode, explain_context, gather, hops, ring
from fastattn.parallel.hops import Assignment, Documents, Hops, needs
from fastattn.parallel.parts import Whole
from fastattn.parallel.pieces import Pair, of_pair
from fastattn.testing import make_qkv
from fastattn.testing.inputs import draw

pytestmark = pytest.mark.usefixtures("one_thread")

RANKS, BLOCK = 8, 8
T = 2 * RANKS * BLOCK - 5
FAR = RANKS - 1


def documents(length: int) -> dict[str, torch.Tensor]:
    return {"documents": (torch.arange(T) // length).expand(2, T).contiguous()}


# By how tokens are assigned and what hides keys.
WAYS: dict[str, tuple[str, dict[str, Any], Hops]] = {
    "all": ("contiguous", {}, Hops(FAR, 0)),
    "causal": ("contiguous", {"causal": True}, Hops(FAR, 0)),
    "window": ("contiguous", {"causal": True, "window": 14}, Hops(1, 0)),
    "wider": ("contiguous", {"causal": True, "window": 18}, Hops(2, 0)),
    "ahead": ("contiguous", {"window": (0, 9)}, Hops(0, 1)),
    "both-sides": ("contiguous", {"window": (40, 9)}, Hops(3, 1)),
    "first": ("contiguous", {"causal": True, "window": 14, "keep_first": 3}, Hops(FAR, 0)),
    "first-ahead": ("contiguous", {"window": (14, 0), "keep_first": 30}, Hops(FAR, 0)),
    "stride": ("contiguous", {"causal": True, "window": 14, "stride": 40}, Hops(FAR, 0)),
    "prefix": ("contiguous", {"causal": True, "prefix_lengths": 40}, Hops(FAR, 0)),
    "zigzag": ("zigzag", {"causal": True}, Hops(FAR, 0)),
    "zigzag-window": ("zigzag", {"causal": True, "window": 6}, Hops(1, 1)),
    "documents": ("contiguous", documents(16), Hops(0, 0)),
    "long-documents": ("contiguous", documents(40), Hops(2, 2)),
    "causal-documents": ("contiguous", {"causal": True, **documents(40)}, Hops(2, 0)),
    "scattered-documents": ("zigzag", documents(16), Hops(1, 1)),
    "longest-first-documents": ("longest_first", documents(16), Hops(1, 1)),
}


def case(name: str) -> tuple[ContextPlan, dict[str, Any], Hops]:
    balance, options, way = WAYS[name]
    return ContextPlan.make(T, RANKS, block=BLOCK, balance=balance), options, way


@pytest.mark.parametrize("name", WAYS)
def test_keys_go_as_far_as_they_are_seen(name: str) -> None:
    plan, options, way = case(name)
    assert needs(plan.assignment, options).hops == way
    assert needs(plan.merged(RANKS).assignment, options).hops == Hops(0, 0)


@pytest.mark.parametrize("name", WAYS)
def test_no_key_is_left_out_and_none_is_sent_that_nobody_sees(name: str) -> None:
    """Where ranks hold one stretch each, and no keys are shown apart, every other one is left."""
    plan, options, _ = case(name)
    ids = options.get("documents")
    masks = {key: x for key, x in options.items() if key != "documents"}
    mask = reference.visible_mask(T, T, **masks)[0, 0]
    mask = mask if ids is None else mask & (ids[0, :, None] == ids[0])
    actual = needs(plan.assignment, options)
    exact = plan.balance == "contiguous" and not masks.keys() & {"stride", "prefix_lengths"}
    ways = [range(1, actual.hops.after + 1), range(-1, -actual.hops.before - 1, -1)]
    for s in range(RANKS):
        for r in range(RANKS):
            rows, keys = (plan.indices(n)[: plan.real(n)] for n in (r, s))
            shown = bool(mask[rows][:, keys].any())
            assert actual.seen[r][s] == shown if exact else actual.seen[r][s] >= shown
        for way in ways:
            for step in way:
                beyond = [(s + n) % RANKS for n in way if abs(n) >= abs(step)]
                rows = torch.cat([plan.indices(r)[: plan.real(r)] for r in beyond])
                wanted = mask[rows].any(0)
                sent = torch.zeros(T, dtype=torch.bool)
                for run in actual.runs(s, step):
                    sent[slice(*run)] = True
                own = torch.zeros(T, dtype=torch.bool)
                own[plan.indices(s)[: plan.real(s)]] = True
                assert not (wanted & own & ~sent).any() and not (sent & ~own).any()
                if exact and "keep_first" not in masks:  # but for the rest of a block, and gaps
                    ends = (wanted & own).nonzero()
                    extent = int(ends[-1] - ends[0]) + 1 if len(ends) else 0
                    assert int(sent.sum()) < extent + 2 * BLOCK if extent else not sent.any()


def test_a_window_sends_what_it_spans_of_long_stretches() -> None:
    plan = ContextPlan.make(4 * 16384, 4, causal=True, window=4096, balance="contiguous")
    actual = needs(plan.assignment, {"causal": True, "window": 4096})
    assert actual.runs(1, 1) == ((2 * 16384 - 4096, 2 * 16384),)
    assert actual.hops == (1, 0)


def test_a_document_is_found_wherever_it_goes_on() -> None:
    ids = torch.tensor([[0] * 8 + [1] * 8 + [-1] * 8 + [0] * 8, [3] * 8 + [-1] * 16 + [4] * 8])
    assignment = Assignment(32, tuple(((8 * r, 8 * r + 8),) for r in range(4)), 8)
    spans = Documents(ids)
    actual = spans.needs(assignment, {})
    assert actual.seen[0][3] and actual.seen[3][0] and not any(actual.seen[2])
    assert not spans.needs(assignment, {"causal": True}).seen[0][3]
    assert Documents(ids[1:]).needs(assignment, {}).hops == Hops(0, 0)


def test_ids_that_a_plan_was_made_for_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = documents(16)["documents"]
    plan = ContextPlan.make(T, RANKS, block=BLOCK, balance="contiguous", documents=ids)
    own = ids[:, :16].clone()
    monkeypatch.setattr(hops, "Documents", None)
    assert hops.marked(own) is None
    plan.mark(own)
    actual, whole = hops.marked(own), ids.clone()
    assert actual is plan.documents
    hops.remember(whole, actual)
    assert needs(plan.assignment, {"documents": whole}).hops == Hops(0, 0)
    own += 1
    assert hops.marked(own) is None
    with pytest.raises(ValueError, match="the plan was made without documents"):
        case("all")[0].mark(own)


def test_padding_and_ranks_without_tokens_are_seen_by_nobody() -> None:
    plan = ContextPlan.make(20, 4, block=8, balance="contiguous")
    ids = torch.full((1, 20), -1)
    assert not any(map(any, needs(plan.assignment, {"documents": ids}).seen))
    few = Assignment(20, (((0, 8),), ((8, 16),), ((16, 20),), ()), 8)
    assert [any(row) for row in needs(few, {}).seen] == [True, True, True, False]


@contextmanager
def group_without_messages(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


# Of rank 3, to whom it sends and whose keys it computes with: forward, then backward.
MESSAGES: dict[str, list[list[int]]] = {
    "all": [[4] * 7, [3, 2, 1, 0, 7, 6, 5, 4], [4] * 14, [3, 2, 1, 0, 7, 6, 5, 4]],
    "wider": [[4, 4], [3, 2, 1], [4, 4, 4, 1], [3, 2, 1]],
    "both-sides": [
        [4, 4, 4, 2],
        [3, 2, 1, 0, 4],
        # The gradients of the keys follow, and go home from where these have ended.
        [4, 4, 4, 4, 4, 2, 0, 4],
        [3, 2, 1, 0, 4],
    ],
    "documents": [[], [3], [], [3]],
    # What only other ranks see passes, and is not computed with.
    "causal-documents": [[4, 4], [3, 2], [4, 4, 4, 1], [3, 2]],
}


@pytest.mark.parametrize("name", MESSAGES)
def test_nothing_is_sent_or_computed_that_is_hidden(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, options, _ = case(name)
    q, k, v = make_qkv(1, 2, 2, plan.length, D=8, requires_grad=False)
    rank_of = {n: r for r in range(RANKS) for run in plan.runs(r) for n in range(*run)}
    messages: list[list[int]] = []
    batch = dist.batch_isend_irecv

    def send(ops: list[dist.P2POp]) -> Any:
        messages[-2] += {op.group_peer for op in ops if op.op is dist.isend}
        sizes = {op.tensor.numel() for op in ops}
        assert 0 not in sizes
        return batch(ops)

    def compute(k_runs: list[tuple[int, int]]) -> None:
        messages[-1].append(rank_of[k_runs[0][0]])

    monkeypatch.setattr(dist, "batch_isend_irecv", send)
    monkeypatch.setattr(ring.parts, "part_forward", lambda *arguments: compute(arguments[6]))
    monkeypatch.setattr(ring.parts, "part_backward", lambda *arguments: compute(arguments[5]))
    with group_without_messages(3, RANKS):
        messages += [], []
        o, lse = ring.ring_forward(q, k, v, options, plan, dist.group.WORLD)
        messages += [], []
        ring.ring_backward(q, k, v, options, [], Whole(o, None, o, lse), plan, dist.group.WORLD)
    assert messages == MESSAGES[name]


@pytest.mark.parametrize(("options", "gathered"), [({}, 1), ({"window": 3}, 2)])
def test_a_plain_decoding_step_gathers_once(
    options: dict[str, Any], gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths of all ranks are known where options go by position."""
    sent, all_gather = [], decode.all_gather
    monkeypatch.setattr(decode, "all_gather", lambda *a: sent.append(a) or all_gather(*a))
    cache = KVCache(1, 2, 8, 8)
    k, v = (torch.zeros(1, 2, 4, 8) for _ in "kv")
    cache.append(k, v)
    with group_without_messages(0, 4):
        decode.decode_attention(k[:, :, :1], cache, group=dist.group.WORLD, **options)
    assert len(sent) == gathered


@pytest.mark.parametrize(("starts", "served"), [((0, 8, 16, 24), True), ((0, 16, 8, 24), False)])
def test_what_goes_by_positions_wants_them_of_groups_of_ranks(
    starts: tuple[int, ...], served: bool
) -> None:
    plan = ContextPlan(32, tuple(((n, n + 8),) for n in starts), 8, "contiguous", 1.0)
    own = make_qkv(1, 2, 2, 8, D=8, requires_grad=False)
    with group_without_messages(0, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        actual = explain_context(*own, mesh=mesh, plan=plan, method="usp", dropout=0.5)
    assert (actual.method == "usp") == served
    assert served or actual.reasons["usp"].startswith("dropout depends on pos")


@pytest.mark.parametrize(
    ("heads", "options", "method", "because"),
    [
        (4, {"causal": True, "window": 8}, "ring", "whose keys go 1 of 3 hops"),
        (4, {"causal": True}, "ulysses", "as 4 ranks divide 4 K/V heads"),
        (2, {"causal": True}, "gather", "which takes any heads"),
    ],
)
def test_auto_says_its_reason(heads: int, options: Any, method: str, because: str) -> None:
    plan = ContextPlan.make(64, 4, block=8, balance="contiguous")
    own = make_qkv(1, 4, heads, plan.length, D=8, requires_grad=False)
    with group_without_messages(0, 4):
        actual = explain_context(*own, mesh=dist.group.WORLD, plan=plan, **options)
    assert (actual.method, actual.because) == (method, because)
    assert str(actual).startswith(f"method: {method}, {because}\n  not usp: it takes a mesh of two")


def test_gathered_heads_have_their_own_options() -> None:
    """Four of 8 K/V heads are gathered at a time on 8 ranks."""
    plan, _, _ = case("all")
    own = make_qkv(1, 8, 8, plan.length, D=8, requires_grad=False)
    with group_without_messages(0, RANKS):
        groups = gather._by_heads(*own, {"sinks": torch.arange(8)}, plan, dist.group.WORLD)
        assert [x["sinks"].tolist() for *_, x in groups] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_lengths_of_scattered_keys_add_to_their_padding() -> None:
    given = {"key_lengths": torch.tensor([6]), "key_padding_mask": torch.arange(8)[None] % 2 == 0}
    pair = Pair(slice(0, 4), slice(0, 4), ((0, 4),), ((0, 2), (4, 8)), by_positions=True)
    actual = of_pair(given, pair, torch.device("cpu"))["key_padding_mask"]
    assert actual.tolist() == [[True, False, True, False, False, False]]


def test_an_odd_number_of_parts_is_merged() -> None:
    o, lse = draw(3, 1, 2, 4, 8).double(), draw(3, 1, 2, 4).double()
    actual = decode._merged(list(zip(o, lse, strict=True)))
    expected = (lse.softmax(0)[..., None] * o).sum(0), lse.logsumexp(0)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


class Live(TorchDispatchMode):
    """The bytes of tensors that are made in this mode and live, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.tensors: Counter[int] = Counter()  # by where their memory is

    def _end(self, memory: int, count: int) -> None:
        self.tensors[memory] -= 1
        if not self.tensors[memory]:
            self.bytes -= count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        actual = func(*args, **(kwargs or {}))
        for x in actual if isinstance(actual, (tuple, list)) else (actual,):
            if isinstance(x, torch.Tensor) and x.numel():
                memory, count = x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()
                self.bytes += 0 if self.tensors[memory] else count
                self.tensors[memory] += 1
                weakref.finalize(x, self._end, memory, count)
        self.peak = max(self.peak, self.bytes)
        return actual


def peak_of_a_ring(T: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that a rank of a group without messages holds at most, beside its own q, k and v."""
    plan = ContextPlan.make(T, ranks, block=16)
    needs(plan.assignment, {}).runs(0, 1)  # which keys go where is worked out once
    sizes = {"B": 1, "H_q": 2, "H_k": 2, "T_q": plan.length, "D": 16, "requires_grad": False}
    q, k, v = make_qkv(**sizes)
    # What a kernel holds is its own affair: here parts are computed by nobody.
    for name in ("part_forward", "part_backward"):
        monkeypatch.setattr(ring.parts, name, lambda *_: None)
    with group_without_messages(0, ranks), torch.no_grad(), Live() as live:
        o, lse = ring.ring_forward(q, k, v, {}, plan, dist.group.WORLD)
        ring.ring_backward(q, k, v, {}, [], Whole(o, None, o, lse), plan, dist.group.WORLD)
    return live.peak


def test_a_ring_holds_as_much_as_its_share_of_the_tokens(on_torch, monkeypatch):
    one = peak_of_a_ring(1024, 8, monkeypatch)
    assert peak_of_a_ring(4096, 32, monkeypatch) == one
    assert peak_of_a_ring(1024, 16, monkeypatch) == one / 2
    own = 2 * 2 * 16 * 128 * 4  # k and v of 128 tokens in fp32
    assert one <= 8 * own
