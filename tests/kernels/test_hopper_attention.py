"""The Hopper kernels in the emulator: numbers within the error budget, no fault of protocol."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated_hopper import attention_on_hopper as attention
from emulated_hopper import check_on_hopper, forget, grid_of, order_events, passes
from gluon_emulator import machine, memory, products
from nightly import gate_cases
from torch import Tensor

from fastattn import reference
from fastattn.bench.tune.candidates import hopper_candidates
from fastattn.functional.call_options import dense_options
from fastattn.kernels.hopper import backward, forward, host
from fastattn.kernels.hopper.host import why_not_hopper
from fastattn.kernels.launch import tiles
from fastattn.ops import attention_ops as ops
from fastattn.options import Options
from fastattn.testing import assert_matches_reference, make_qkv

pytestmark = pytest.mark.usefixtures("emulated")


@pytest.fixture
def by(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, bool]]:
    """The arguments of a backward of two passes, of one, of one whose threads add to dQ, or of two
    whose tiles of keys are split among five programs each.
    """
    table, add = backward.backward_config, backward.launch_add_parts

    def added(sums: Tensor, x: Tensor, *rest: Any) -> None:
        assert sums.shape[1] == 5 * x.shape[1]
        add(sums, x, *rest)

    def choose(way: str) -> dict[str, bool]:
        if way == "threads":
            monkeypatch.setattr(
                backward, "backward_config", lambda *x: table(*x)._replace(DQ_BY_TMA=False)
            )
        if way == "parts":
            monkeypatch.setattr(host, "_key_parts", lambda *call: 5)
            monkeypatch.setattr(backward, "launch_add_parts", added)
        return {"deterministic": way in ("two", "parts")}

    return choose


def of_blocks(*blocks: int) -> Tensor:
    """Positions int32 of these blocks of 128 tokens of a sequence, in this order."""
    return torch.cat([torch.arange(128) + 128 * n for n in blocks]).int()


# Out of order, with gaps; the queries end within a block.
SPREAD = dict(
    H_q=1, T_q=300, T_k=384, positions=(of_blocks(2, 4, 0)[None, :300], of_blocks(3, 1, 0)[None])
)
BEFORE = (of_blocks(0, 3)[None], of_blocks(1, 2)[None])
FULL, TWO_ROWS = {"causal": False}, dict(B=2, H_q=1)
LENGTHS = dict(B=3, H_q=1, T_q=140, T_k=300, key_lengths=[300, 170, 0])
# Backwards, behind a slash those by night; and what differs from a causal call of 150 tokens with D
# 64 and two heads of queries.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "causal-whole-tiles": ("two one", dict(T_q=256)),
    "one-query": ("two threads", dict(T_q=1, T_k=300)),
    "one-key": ("/ two", dict(T_q=300, T_k=1)),
    "fewer-queries": ("/ two", dict(T_q=200, T_k=333)),
    "rows-before-the-first-key": ("two", dict(T_q=333, T_k=200)),
    "full-every-stage-used-again": ("two", dict(FULL, T_q=70, T_k=640)),
    "full-every-stage-of-queries": ("one", dict(FULL, T_q=400, T_k=100)),
    "window": ("two", dict(T_q=300, window=(70, None))),
    "window-ahead": ("/ two", dict(FULL, T_q=270, H_q=1, window=(0, 140))),
    "own-key-only": ("/ two", dict(T_q=200, window=(0, 0))),
    "first-keys-kept": ("two one", dict(T_q=200, window=(20, 0), keep_first=3)),
    "prefix": ("two / one", dict(TWO_ROWS, prefix_lengths=torch.tensor([90, 0]))),
    "gqa": ("one / two", dict(H_q=6, H_k=2, T_q=140)),
    "mqa-lengths": ("parts", dict(B=2, H_q=7, T_q=140, key_lengths=[140, 70])),
    "gqa-batch": ("threads", dict(B=2, H_q=4, H_k=2)),
    "mqa-strided": ("/ two", dict(H_q=3, T_q=140, layout="bthd")),
    "fp16": ("one / two", dict(H_q=3, T_q=140, layout="bthd", dtype=torch.float16)),
    "d128": ("two one / threads", dict(D=128, T_q=290, programs=2)),
    "d128-full": ("parts / two", dict(FULL, D=128, T_q=130, T_k=290)),
    "d128-full-of-queries": ("/ threads", dict(FULL, D=128, T_q=400, T_k=100)),
    "lengths": ("two one / threads", LENGTHS),
    "d128-lengths": ("two / one", dict(FULL, B=2, T_k=200, key_lengths=[128, 1], D=128)),
    "offset-a-row": ("two one", dict(TWO_ROWS, T_k=300, query_offset=torch.tensor([5, 250]))),
    "negative-offset": ("/ two", dict(T_k=200, query_offset=-40)),
    "tiles-without-queries": ("one threads", dict(T_k=400, query_offset=-40, programs=1)),
    "past-every-key": ("/ two", dict(T_k=200, query_offset=1000, window=(20, None))),
    "d256": ("two / parts", dict(D=256, T_k=200, programs=2)),
    "d256-gqa": ("/ two", dict(FULL, D=256, T_q=70, T_k=140)),
    "d256-softcap": ("two", dict(TWO_ROWS, D=256, T_k=140, key_lengths=[130, 1], softcap=0.5)),
    "scale": ("/ two", dict(T_q=70, scale=0.5)),
    "softcap": ("two", dict(T_q=200, scale=1.0, softcap=4.0)),
    "softcap-lengths": ("/ one", dict(FULL, T_q=70, scale=1.0, softcap=4.0, key_lengths=[50])),
    "d128-softcap": ("two", dict(FULL, D=128, T_k=200, softcap=0.5, key_lengths=[150])),
    "sinks": ("two one", dict(B=2, T_q=70, T_k=40, sinks=torch.tensor([0.5, -9.0]))),
    "softcap-and-sinks": ("/ two", dict(T_q=70, softcap=2.0, sinks=torch.tensor([3.0, 0.0]))),
    "positions": ("two / parts", SPREAD),
    "d128-positions-window": ("/ two", dict(SPREAD, D=128, window=(150, None))),
    "positions-lengths-softcap": ("/ two", dict(SPREAD, key_lengths=[260], softcap=2.0)),
    "positions-first-keys-kept": (
        "two",
        dict(SPREAD, window=(20, 0), keep_first=3, sinks=torch.tensor([0.5])),
    ),
    "positions-prefix": ("one", dict(SPREAD, prefix_lengths=torch.tensor([400]))),
    # One block is computed for all that, and gives nothing.
    "queries-before-every-key": ("two", dict(H_q=1, T_q=256, T_k=256, positions=BEFORE)),
    # Which only dropout and functions look at.
    "part-of-the-heads": ("two", dict(T_q=100, heads=(2, 8))),
    "heads-in-groups": ("two", dict(B=2, H_k=2, T_q=140, programs=4)),
    # Tiles of queries and of keys are assigned to programs, the first two heads in pairs.
    "one-program": ("two", dict(H_q=4, H_k=2, T_q=290, programs=1)),
    "five-programs": ("/ two", dict(T_q=290, programs=5)),
    "more-programs-than-tiles": ("/ two", dict(T_q=290, programs=100)),
    "one-program-of-one-pass": ("/ one", dict(H_k=2, T_q=290, programs=1)),
    "five-programs-of-one-pass": ("one", dict(H_k=2, T_q=290, programs=5)),
}


def turns(night: bool) -> list[tuple[str, str]]:
    ways = {name: (f"{ways}/").split("/")[night].split() for name, (ways, _) in CASES.items()}
    return [(name, way) for name in ways for way in ways[name]]


@pytest.mark.parametrize(("name", "way"), gate_cases(turns(False), turns(True)))
def test_matches_the_reference(
    name: str, way: str, by: Callable[[str], dict[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "heads-in-groups":
        monkeypatch.setattr(host, "heads_in_l2", lambda x: 1)
    check_on_hopper(attention, **CASES[name][1], **by(way))
    assert (passes() == 1) == (way in ("one", "threads"))


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def packed_inputs(total_q: int, total_k: int, D: int = 64) -> tuple[Tensor, ...]:
    q, k, v = make_qkv(1, 2, 1, total_q, total_k, D, dtype=torch.bfloat16, layout="bthd")
    return tuple(x.detach()[0].transpose(0, 1).requires_grad_() for x in (q, k, v))


RAGGED = (150, 0, 70, 1), (200, 5, 0, 130)
BAND = {"window": (60, 0), "key_lengths": torch.tensor([100, 70])}


@pytest.mark.parametrize(
    ("way", "q_lengths", "k_lengths", "D", "rounds", "options"),
    [
        pytest.param("two", *RAGGED, 64, 1, {}, id="ragged-and-empty"),
        pytest.param("parts", *RAGGED, 64, 1, {}, id="ragged-parts"),
        pytest.param("two", (128, 64), (128, 192), 64, 99, FULL, id="whole-tiles"),
        pytest.param("two", (40, 90, 60), (40, 90, 60), 128, 1,
                     {"sinks": torch.tensor([0.5, -1.0])}, id="d128"),
        pytest.param("two", (70, 40), (40, 90), 256, 99, {}, id="d256"),
        pytest.param("two", (130, 20), (140, 100), 64, 1, {**BAND, "softcap": 2.0}, id="band"),
        pytest.param("one", *RAGGED, 64, 4, {}, id="one-pass"),
        pytest.param("parts", *RAGGED, 64, 4, {}, id="parts"),
        pytest.param("one", (130, 20), (140, 100), 128, 4, BAND, id="d128-one-pass-band"),
        # Each to tiles of its own: what threads add past its end is nobody's.
        pytest.param("threads", *RAGGED, 64, 4, {}, id="threads"),
        pytest.param("threads", *RAGGED, 128, 4, {}, id="d128-threads"),
    ],
)  # fmt: skip
def test_packed_sequences(
    way: str, q_lengths: Any, k_lengths: Any, D: int, rounds: int, options: dict[str, Any],
    by: Callable[[str], dict[str, bool]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The last rows are of none. rounds: of tiles, from which on they are put in order."""
    monkeypatch.setattr(host, "_ROUNDS", rounds)
    inputs = packed_inputs(sum(q_lengths) + 3, sum(k_lengths) + 5, D)
    with grid_of(2):
        assert_matches_reference(
            attention,
            *inputs,
            starts(*q_lengths),
            starts(*k_lengths),
            oracle=reference.attention_varlen,
            **({"causal": True} | options | by(way)),
        )
    assert (passes() == 1) == (way in ("one", "threads"))


@pytest.mark.parametrize("deterministic", [True, False])
def test_sequences_see_nothing_of_each_other(deterministic: bool) -> None:
    """One of them is NaN throughout, and the others have bit for bit what they have alone."""
    lengths = (70, 40, 100)
    offsets = starts(*lengths)

    def results(rows: list[Tensor], offsets: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in rows]
        how = {"causal": True, "return_lse": True, "deterministic": deterministic}
        o, lse = attention(*leaves, offsets, offsets, **how)
        grads = torch.autograd.grad((o, lse), leaves, (o.detach(), lse.detach()))
        return [o.detach(), lse.detach().T, *grads]

    inputs = packed_inputs(sum(lengths), sum(lengths))
    spoilt = [x.detach().clone() for x in inputs]
    for x in spoilt:
        x[70:110] = float("nan")
    together = results(spoilt, offsets)
    for n in (0, 2):
        mine = slice(int(offsets[n]), int(offsets[n + 1]))
        alone = results([x[mine] for x in inputs], starts(lengths[n]))
        for ours, expected in zip(together, alone, strict=True):
            assert torch.equal(ours[mine], expected)


@pytest.mark.parametrize(("softcap", "hidden"), [(None, False), (500.0, False), (None, True)])
def test_weights_of_keys_that_do_not_exist_are_never_made(
    softcap: float | None, hidden: bool
) -> None:
    """Beside scores far below 0 they would be infinite."""
    q, k, v = (x.detach() for x in make_qkv(1, 1, 1, 64, 70, 64, dtype=torch.bfloat16))
    inputs = [x.requires_grad_() for x in (q.abs(), -k.abs(), v)]
    arguments: dict[str, Any] = {"scale": 6.0, "softcap": softcap}
    if hidden:
        arguments["key_padding_mask"] = (torch.arange(70) % 9 != 4)[None]
    lse = reference.attention(*inputs, **arguments, return_lse=True)[1]
    assert lse.max() < -89, "exp(-lse) would be finite in fp32"
    assert_matches_reference(attention, *inputs, **arguments, deterministic=False)


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Sets whether the consumers of forward take turns."""
    configured = forward.forward_config

    def choose(turns: bool) -> None:
        forget()
        monkeypatch.setattr(
            forward, "forward_config", lambda *a: configured(*a)._replace(PING_PONG=turns)
        )

    return choose


@pytest.mark.parametrize("turns", [False, True])
def test_three_consumers_serve_forward(turns: bool) -> None:
    """Tiles of 192 queries: of a last one, one consumer or two have none."""
    shapes = hopper_candidates("hopper_forward", 64)
    config = next(c for c in shapes if c.CONSUMERS == 3 and c.PING_PONG is turns)
    with tiles.forced(hopper_forward=config):
        check_on_hopper(attention, T_q=290 - 40 * turns, T_k=333, programs=1)
    forget()


@pytest.mark.parametrize("seed", [0, 1])
def test_consumers_that_take_turns_alternate(
    seed: int, in_turn: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block's scores are started by one consumer, then by the other; o and lse stay."""
    started: list[str] = []

    class Recorded(products.Product):
        def __init__(self, a: Any, *others: Any) -> None:
            super().__init__(a, *others)
            if isinstance(a, memory.SharedView):
                started.append(machine.current().name)

    monkeypatch.setattr(products, "Product", Recorded)
    forward.hopper_forward_kernel.seed = seed
    inputs = make_qkv(1, 1, 1, 200, 500, 64, dtype=torch.bfloat16, requires_grad=False)
    results = []
    for turns in (False, True):
        in_turn(turns)
        started.clear()
        with grid_of(1):
            results.append(attention(*inputs, causal=True, return_lse=True))
        taken = list(started)
        both = taken[:2] * (len(taken) // 2)
        assert (taken == both) == turns, "nothing alternates by itself"
    assert len(set(taken)) == 2 and len(taken) == 2 * (4 + 4)
    assert all(map(torch.equal, *results))


def test_turns_and_packed_sequences(in_turn: Callable[[bool], None]) -> None:
    """Skipped tiles count for neither consumer."""
    offsets = starts(140, 0, 20, 130)
    q, k, v = (x.detach() for x in packed_inputs(290, 290))
    results = []
    for turns in (True, False):
        in_turn(turns)
        with grid_of(2):
            results.append(attention(q, k, v, offsets, offsets, causal=True, return_lse=True))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(("deterministic", "T_q", "seeds"), [(True, 300, 3), (False, 260, 2)])
def test_many_orders_of_events(deterministic: bool, T_q: int, seeds: int) -> None:
    for seed in range(seeds):
        order_events(1000 * seed)
        check_on_hopper(attention, H_q=1, T_q=T_q, programs=2, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [True, False])
def test_no_queries(deterministic: bool) -> None:
    q, k, v = make_qkv(1, 2, 2, 0, 8, 64, dtype=torch.bfloat16)
    o, lse = attention(q, k, v, return_lse=True, deterministic=deterministic)
    assert (o.shape, lse.shape) == ((1, 2, 0, 64), (1, 2, 0))
    dq, dk, dv = torch.autograd.grad(o.sum(), (q, k, v))
    assert dq.shape == q.shape and not dk.any() and not dv.any()


def test_gradients_repeat_bit_for_bit() -> None:
    """Whatever the order of events and the size of the grid."""

    def gradients(seed: int, programs: int) -> tuple[Tensor, ...]:
        order_events(seed)
        q, k, v = make_qkv(1, 2, 1, 200, None, 64, dtype=torch.bfloat16)
        with grid_of(programs):
            o = attention(q, k, v, causal=True)
            return torch.autograd.grad(o.float().square().sum(), (q, k, v))

    assert all(map(torch.equal, gradients(1, 1), gradients(2, 7)))


def test_dk_and_dv_are_those_of_two_passes() -> None:
    """Bit for bit; dQ, summed in another order, is not asked."""
    q, k, v = make_qkv(1, 4, 2, 200, None, 128, dtype=torch.bfloat16)
    gradients = []
    for deterministic in (True, False):
        o = attention(q, k, v, causal=True, deterministic=deterministic)
        gradients.append(torch.autograd.grad(o[..., 0].float().square().sum(), (q, k, v))[1:])
    assert passes() == 3
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("D", [64, 256])
@pytest.mark.parametrize("asked", ["q", "k", "v"])
def test_gradients_that_are_not_asked_for(asked: str, D: int, launched: list[str]) -> None:
    """Take no launch, and others do not change by a bit."""
    inputs = dict(zip("qkv", make_qkv(1, 2, 1, 140, None, D, dtype=torch.bfloat16), strict=True))
    grads = []
    for names in (asked, "qkv"):
        o = attention(*(x if n in names else x.detach() for n, x in inputs.items()), causal=True)
        launched.clear()
        grads.append(torch.autograd.grad(o.float().square().sum(), inputs[asked]))
        if names == asked:
            dkv = ["start_dq_kernel", "hopper_backward_dkv_kernel"]
            assert launched == (["hopper_backward_dq_kernel"] if asked == "q" else dkv)
    assert all(map(torch.equal, *grads))


def test_the_flag_of_torch_rules_one_pass_out() -> None:
    q, k, v = make_qkv(1, 1, 1, 40, None, 64, dtype=torch.bfloat16)
    o = attention(q, k, v, deterministic=False)
    torch.use_deterministic_algorithms(True)
    try:
        torch.autograd.grad(o.sum(), (q, k, v))
    finally:
        torch.use_deterministic_algorithms(False)
    assert passes() == 2


def test_a_softcap_takes_two_passes_at_head_dim_128() -> None:
    q, k, v = make_qkv(1, 1, 1, 40, None, 128, dtype=torch.bfloat16)
    options = dense_options(q, k, v, softcap=3.0, deterministic=False)
    assert ops.why_not_one_pass_on_hopper(q[..., :64], k[..., :64], options) is None
    reason = ops.why_not_one_pass_on_hopper(q, k, options)
    assert reason == "softcap at head dim 128 needs too many registers"
    assert_matches_reference(attention, q, k, v, softcap=3.0, deterministic=False)
    assert passes() == 2


@pytest.mark.parametrize(("H_k", "reason"), [(1, "it would leave the GPU idle"), (16, None)])
def test_few_kv_heads_take_two_passes(H_k: int, reason: str | None) -> None:
    q, k = (torch.empty(1, H, 8192, 128, device="meta") for H in (32, H_k))
    options = Options(right=0, scale=0.1, atomic_dq=True)
    with grid_of(132):
        actual = ops.why_not_one_pass_on_hopper(q, k, options)
        packed = [x[0].transpose(0, 1) for x in (q, k)]
        assert ops.why_not_one_pass_on_hopper(*packed, options) == actual
    assert actual == reason or (reason and actual and reason in actual)


def test_too_long_to_count() -> None:
    q = torch.empty(1, 1, 1 << 28, 64, dtype=torch.bfloat16, device="meta")
    assert "positions, more than" in str(why_not_hopper(q, q, q, Options()))


def test_the_largest_score_comes_with_the_output() -> None:
    """No row lags behind it, the sink is not in it, and rows without a key have none."""

    def with_max(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **how: Any) -> Any:
        o, lse, largest = attention(q, k, v, return_lse=True, return_max=True, **how)
        x = how["scale"] * q.float() @ k.detach().nan_to_num().float().mT
        seen = torch.ones(x.shape[2:], dtype=torch.bool).tril(x.shape[3] - x.shape[2])
        seen = seen & (torch.arange(x.shape[3]) < how["key_lengths"][:, None, None, None])
        torch.testing.assert_close(largest, x.masked_fill(~seen, -torch.inf).amax(-1))
        assert not largest.requires_grad
        return (o, lse) if return_lse else o

    # Scores so large that the largest of later blocks is above, but within the slack.
    how = dict(T_q=200, T_k=300, scale=0.4, key_lengths=[300, 0], sinks=torch.tensor([9.0, -9.0]))
    check_on_hopper(with_max, B=2, **how)
    assert passes() == 2
