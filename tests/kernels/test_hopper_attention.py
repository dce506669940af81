"""The Hopper kernels in the emulator: numbers within the error budget, no fault of protocol."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from emulated_hopper import check_on_hopper, emulate_hopper, forget, grid_of, order_events
from gluon_emulator import machine, memory, products
from torch import Tensor

import fastattn
from fastattn import reference
from fastattn.bench.tune.candidates import hopper_candidates
from fastattn.functional.call_options import dense_options, packed_options
from fastattn.kernels.hopper import forward, host
from fastattn.kernels.hopper.host import why_not_hopper
from fastattn.kernels.launch import tiles
from fastattn.options import Options
from fastattn.testing import assert_matches_reference, make_qkv

# Tiles are too small to share between threads.
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    emulate_hopper(monkeypatch, request.node.name)
    yield
    forget()


def attention(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
    options = {name: x for name, x in arguments.items() if name != "return_lse"}
    reason = why_not_hopper(q, k, v, dense_options(q, k, v, **options))
    assert reason is None, "another backward would be tested"
    return fastattn.attention(q, k, v, **arguments, backend="hopper")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(dict(T_q=256), id="causal-whole-tiles"),
        pytest.param(dict(T_q=1, T_k=300), id="one-query"),
        pytest.param(dict(T_q=300, T_k=1), id="one-key"),
        pytest.param(dict(T_q=200, T_k=333), id="fewer-queries"),
        pytest.param(dict(T_q=333, T_k=200), id="rows-before-the-first-key"),
        pytest.param(dict(causal=False, T_q=70, T_k=640), id="full-every-stage-used-again"),
        pytest.param(dict(T_q=300, window=(70, None)), id="window"),
        pytest.param(dict(T_q=270, H_q=1, causal=False, window=(0, 140)), id="window-ahead"),
        pytest.param(dict(T_q=200, window=(0, 0)), id="own-key-only"),
        pytest.param(dict(T_q=200, window=(20, 0), keep_first=3), id="first-keys-kept"),
        pytest.param(dict(B=2, H_q=1, T_q=150, prefix_lengths=torch.tensor([90, 0])), id="prefix"),
        pytest.param(dict(H_q=6, H_k=2, T_q=140), id="gqa"),
        pytest.param(dict(H_q=3, H_k=1, T_q=140, layout="bthd"), id="mqa-strided"),
        pytest.param(dict(dtype=torch.float16), id="fp16"),
        pytest.param(dict(D=128, T_q=290, programs=2), id="d128"),
        pytest.param(dict(D=128, T_q=130, T_k=290, causal=False), id="d128-full"),
        pytest.param(dict(B=3, H_q=1, T_q=140, T_k=300, key_lengths=[300, 170, 0]), id="lengths"),
        pytest.param(
            dict(B=2, T_k=200, key_lengths=[128, 1], causal=False, D=128), id="d128-lengths"
        ),
        pytest.param(
            dict(B=2, H_q=1, T_k=300, query_offset=torch.tensor([5, 250])), id="offset-a-row"
        ),
        pytest.param(dict(T_k=200, query_offset=-40), id="negative-offset"),
        pytest.param(dict(T_k=200, query_offset=1000, window=(20, None)), id="past-every-key"),
        pytest.param(dict(D=256, T_q=150, T_k=200, programs=2), id="d256"),
        pytest.param(dict(D=256, H_q=2, H_k=1, T_q=70, T_k=140, causal=False), id="d256-gqa"),
        pytest.param(
            dict(B=2, H_q=1, D=256, T_k=140, key_lengths=[130, 1], softcap=0.5), id="d256-softcap"
        ),
        pytest.param(dict(T_q=70, scale=0.5), id="scale"),
        pytest.param(dict(T_q=200, scale=1.0, softcap=4.0), id="softcap"),
        pytest.param(
            dict(D=128, T_k=200, softcap=0.5, key_lengths=[150], causal=False), id="d128-softcap"
        ),
        pytest.param(dict(B=2, T_q=70, T_k=40, sinks=torch.tensor([0.5, -9.0])), id="sinks"),
        pytest.param(
            dict(T_q=70, softcap=2.0, sinks=torch.tensor([3.0, 0.0])), id="softcap-and-sinks"
        ),
    ],
)
def test_matches_the_reference(case: dict[str, Any]) -> None:
    check_on_hopper(attention, **case)


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def packed(q: Tensor, k: Tensor, v: Tensor, *offsets: Tensor, **arguments: Any) -> Any:
    """`fastattn.attention_varlen` for sequences laid behind one another."""
    options = {name: x for name, x in arguments.items() if name != "return_lse"}
    checked = packed_options(q, k, v, *offsets, **options)
    rows = (x.transpose(0, 1)[None] for x in (q, k, v))
    assert why_not_hopper(*rows, checked) is None
    return fastattn.attention_varlen(q, k, v, *offsets, **arguments, backend="hopper")


def packed_inputs(total_q: int, total_k: int, D: int, H_q: int = 2) -> tuple[Tensor, ...]:
    q, k, v = make_qkv(1, H_q, 1, total_q, total_k, D, dtype=torch.bfloat16, layout="bthd")
    return tuple(x.detach()[0].transpose(0, 1).requires_grad_() for x in (q, k, v))


@pytest.mark.parametrize(
    ("q_lengths", "k_lengths", "D", "rounds", "options"),
    [
        pytest.param((150, 0, 70, 1), (200, 5, 0, 130), 64, 1, {}, id="ragged-and-empty"),
        pytest.param((128, 64), (128, 192), 64, 99, {"causal": False}, id="whole-tiles"),
        pytest.param(
            (40, 90, 60), (40, 90, 60), 128, 1, {"sinks": torch.tensor([0.5, -1.0])}, id="d128"
        ),
        pytest.param((70, 40), (40, 90), 256, 99, {}, id="d256"),
        pytest.param(
            (130, 20),
            (140, 100),
            64,
            1,
            {"window": (60, 0), "softcap": 2.0, "key_lengths": torch.tensor([100, 70])},
            id="window-softcap-lengths",
        ),
    ],
)
def test_packed_sequences(
    q_lengths: Any,
    k_lengths: Any,
    D: int,
    rounds: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """rounds: of tiles, from which on they are put in order."""
    monkeypatch.setattr(host, "_ROUNDS", rounds)
    inputs = packed_inputs(sum(q_lengths), sum(k_lengths), D)
    with grid_of(2):
        assert_matches_reference(
            packed, *inputs, starts(*q_lengths), starts(*k_lengths),
            oracle=reference.attention_varlen, **({"causal": True} | options),
        )  # fmt: skip


def test_sequences_see_nothing_of_each_other() -> None:
    """One of them is NaN throughout, and the others have bit for bit what they have alone."""
    lengths = (70, 40, 100)
    offsets = starts(*lengths)

    def results(rows: list[Tensor], offsets: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in rows]
        o, lse = packed(*leaves, offsets, offsets, causal=True, return_lse=True)
        grads = torch.autograd.grad((o, lse), leaves, (o.detach(), lse.detach()))
        return [o.detach(), lse.detach().T, *grads]

    inputs = packed_inputs(sum(lengths), sum(lengths), 64)
    spoilt = [x.detach().clone() for x in inputs]
    for x in spoilt:
        x[70:110] = float("nan")
    together = results(spoilt, offsets)
    for n in (0, 2):
        mine = slice(int(offsets[n]), int(offsets[n + 1]))
        alone = results([x[mine] for x in inputs], starts(lengths[n]))
        for ours, expected in zip(together, alone, strict=True):
            assert torch.equal(ours[mine], expected)


@pytest.mark.parametrize(("programs", "heads"), [(1, 4), (5, 2), (100, 2)])
def test_any_grid_covers_all_tiles(programs: int, heads: int) -> None:
    """3 tiles of queries a head and 3 or 6 of keys: `programs` deal them out among themselves.

    One program takes two heads' tiles in pairs.
    """
    check_on_hopper(attention, H_q=heads, H_k=heads // 2, T_q=290, programs=programs)


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
    forget()
    with tiles.forced(hopper_forward=config):
        check_on_hopper(attention, H_q=2, H_k=1, T_q=290 - 40 * turns, T_k=333, programs=1)
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
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_turns_and_packed_sequences(in_turn: Callable[[bool], None]) -> None:
    """Skipped tiles count for neither consumer."""
    in_turn(True)
    offsets = starts(140, 0, 20, 130)
    q, k, v = (x.detach() for x in packed_inputs(290, 290, 64))
    with grid_of(2):
        ours = packed(q, k, v, offsets, offsets, causal=True, return_lse=True)
        in_turn(False)
        plain = packed(q, k, v, offsets, offsets, causal=True, return_lse=True)
    for x, y in zip(ours, plain, strict=True):
        assert torch.equal(x, y)


def test_heads_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "heads_in_l2", lambda x: 1)
    check_on_hopper(attention, B=2, H_q=2, H_k=2, T_q=140, programs=4)


def test_many_orders_of_events() -> None:
    for seed in range(3):
        order_events(1000 * seed)
        check_on_hopper(attention, H_q=1, T_q=300, programs=2)


def test_an_empty_batch() -> None:
    inputs = make_qkv(0, 2, 1, 70, 90, 64, dtype=torch.bfloat16)
    o, lse = attention(*inputs, causal=True, return_lse=True)
    assert (o.shape, lse.shape) == ((0, 2, 70, 64), (0, 2, 70))
    found = torch.autograd.grad(o.sum(), inputs)
    assert [x.shape for x in found] == [x.shape for x in inputs]


def test_gradients_repeat_bit_for_bit() -> None:
    """Whatever the order of events and the size of the grid."""

    def gradients(seed: int, programs: int) -> tuple[Tensor, ...]:
        order_events(seed)
        q, k, v = make_qkv(1, 2, 1, 200, None, 64, dtype=torch.bfloat16)
        with grid_of(programs):
            o = attention(q, k, v, causal=True)
            return torch.autograd.grad(o.float().square().sum(), (q, k, v))

    for once, again in zip(gradients(1, 1), gradients(2, 7), strict=True):
        assert torch.equal(once, again)


def test_no_queries() -> None:
    q, k, v = make_qkv(1, 2, 2, 0, 8, 64, dtype=torch.bfloat16)
    o, lse = attention(q, k, v, return_lse=True)
    assert o.shape == (1, 2, 0, 64)
    assert lse.shape == (1, 2, 0)
    dk, dv = torch.autograd.grad(o.sum(), (k, v))
    assert not dk.any() and not dv.any()


@pytest.mark.parametrize(
    ("sizes", "arguments", "reason"),
    [
        (dict(dtype=torch.float32), {}, "q is float32; they take bfloat16 and float16"),
        (dict(D=64, D_v=128), {}, r"head dims of q and v differ \(64 and 128\)"),
        (dict(D=96), {}, "head dim 96 is none of 64, 128, 256"),
        (dict(T_k=0), {}, "there are no keys"),
        (dict(), {"stride": 2}, "they do not know stride"),
        (dict(T_k=64), {"key_padding_mask": torch.ones(1, 64, dtype=torch.bool)}, "key_padding"),
    ],
)
def test_says_what_it_does_not_serve(sizes: Any, arguments: Any, reason: str) -> None:
    q, k, v = make_qkv(**(dict(B=1, D=64, dtype=torch.bfloat16) | sizes))
    options = dense_options(q, k, v, **arguments)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(why_not_hopper(q, k, v, options))


def test_too_long_to_count() -> None:
    q = torch.empty(1, 1, 1 << 28, 64, dtype=torch.bfloat16, device="meta")
    assert "they count to" in str(why_not_hopper(q, q, q, Options()))
