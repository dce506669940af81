"""The one-pass backward for Hopper in the emulator: numbers within the error budget, no fault."""

import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from emulated_hopper import check_on_hopper, emulate_hopper, forget, grid_of
from torch import Tensor

import fastattn
from fastattn import reference
from fastattn.functional.call_options import dense_options
from fastattn.kernels.hopper import backward
from fastattn.ops import attend as ops
from fastattn.testing import assert_matches_reference, make_qkv

# Tiles are too small to share between threads.
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    emulate_hopper(monkeypatch, request.node.name)
    yield
    forget()


def passes() -> int:
    """How many kernels the backwards so far launched, a pass over the scores each."""
    return int(
        backward.hopper_backward_dq_kernel.launches + backward.hopper_backward_dkv_kernel.launches
    )


def attention(*inputs: Tensor, **arguments: Any) -> Any:
    packed = inputs[0].dim() == 3
    function = fastattn.attention_varlen if packed else fastattn.attention
    return function(*inputs, **arguments, backend="hopper", deterministic=False)


def check(**case: Any) -> None:
    check_on_hopper(attention, **case)
    assert passes() == 1


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(dict(T_q=256), id="causal-whole-tiles"),
        pytest.param(dict(T_q=1, T_k=300), id="one-query"),
        pytest.param(dict(T_q=400, T_k=100, causal=False), id="full-every-stage-used-again"),
        pytest.param(dict(T_q=200, window=(20, 0), keep_first=3), id="window-first-keys-kept"),
        pytest.param(dict(B=2, H_q=1, T_q=150, prefix_lengths=torch.tensor([90, 0])), id="prefix"),
        pytest.param(dict(H_q=6, H_k=2, T_q=140), id="gqa"),
        pytest.param(
            dict(H_q=3, H_k=1, T_q=140, layout="bthd", dtype=torch.float16), id="mqa-strided-fp16"
        ),
        pytest.param(dict(D=128, T_q=290, programs=2), id="d128"),
        pytest.param(dict(B=3, H_q=1, T_q=140, T_k=300, key_lengths=[300, 170, 0]), id="lengths"),
        pytest.param(
            dict(B=2, T_k=200, key_lengths=[128, 1], causal=False, D=128), id="d128-lengths"
        ),
        pytest.param(
            dict(B=2, H_q=1, T_k=300, query_offset=torch.tensor([5, 250])), id="offset-a-row"
        ),
        pytest.param(dict(T_k=400, query_offset=-40, programs=1), id="tiles-without-queries"),
        pytest.param(
            dict(T_q=70, scale=1.0, softcap=4.0, key_lengths=[50], causal=False), id="softcap"
        ),
        pytest.param(dict(B=2, T_q=70, T_k=40, sinks=torch.tensor([0.5, -9.0])), id="sinks"),
    ],
)
def test_matches_the_reference(case: dict[str, Any]) -> None:
    check(**case)


@pytest.mark.parametrize("softcap", [None, 500.0])
def test_weights_of_keys_that_do_not_exist_are_never_made(softcap: float | None) -> None:
    """Beside scores far below 0 they would be infinite."""
    q, k, v = (x.detach() for x in make_qkv(1, 1, 1, 64, 70, 64, dtype=torch.bfloat16))
    inputs = [x.requires_grad_() for x in (q.abs(), -k.abs(), v)]
    arguments = {"scale": 6.0, "softcap": softcap}
    lse = reference.attention(*inputs, **arguments, return_lse=True)[1]
    assert lse.max() < -89, "exp(-lse) would be finite in fp32"
    assert_matches_reference(attention, *inputs, **arguments)


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def packed_inputs(total_q: int, total_k: int, D: int) -> tuple[Tensor, ...]:
    q, k, v = make_qkv(1, 2, 1, total_q, total_k, D, dtype=torch.bfloat16, layout="bthd")
    return tuple(x.detach()[0].transpose(0, 1).requires_grad_() for x in (q, k, v))


def check_packed(
    q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], D: int, **options: Any
) -> None:
    """Packed sequences in one pass, causal, against the oracle."""
    inputs = packed_inputs(sum(q_lengths), sum(k_lengths), D)
    with grid_of(2):
        assert_matches_reference(
            attention,
            *inputs,
            starts(*q_lengths),
            starts(*k_lengths),
            oracle=reference.attention_varlen,
            causal=True,
            **options,
        )
    assert passes() == 1


@pytest.mark.parametrize(
    ("q_lengths", "k_lengths", "D", "options"),
    [
        pytest.param((150, 0, 70, 1), (200, 5, 0, 130), 64, {}, id="ragged-and-empty"),
        pytest.param(
            (130, 20),
            (140, 100),
            128,
            {"window": (60, 0), "key_lengths": torch.tensor([100, 70])},
            id="d128-window-lengths",
        ),
    ],
)
def test_packed_sequences(q_lengths: Any, k_lengths: Any, D: int, options: dict[str, Any]) -> None:
    check_packed(q_lengths, k_lengths, D, **options)


def test_sequences_see_nothing_of_each_other() -> None:
    """One of them is NaN throughout, and the others have bit for bit what they have alone.

    They have one tile of keys each, so that no order of additions can differ.
    """
    lengths = (70, 40, 100)
    offsets = starts(*lengths)

    def gradients(rows: list[Tensor], offsets: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in rows]
        o, lse = attention(*leaves, offsets, offsets, causal=True, return_lse=True)
        return torch.autograd.grad((o, lse), leaves, (o.detach(), lse.detach()))

    inputs = packed_inputs(sum(lengths), sum(lengths), 64)
    spoilt = [x.detach().clone() for x in inputs]
    for x in spoilt:
        x[70:110] = float("nan")
    together = gradients(spoilt, offsets)
    for n in (0, 2):
        mine = slice(int(offsets[n]), int(offsets[n + 1]))
        alone = gradients([x[mine] for x in inputs], starts(lengths[n]))
        for ours, expected in zip(together, alone, strict=True):
            assert torch.equal(ours[mine], expected)


@pytest.fixture
def by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the threads add to dQ, in place of TMA."""
    table = backward.backward_config

    def config(*call: Any) -> Any:
        return table(*call)._replace(DQ_BY_TMA=False)

    monkeypatch.setattr(backward, "backward_config", config)


@pytest.mark.usefixtures("by_threads")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(dict(B=2, H_q=4, H_k=2, T_q=150), id="gqa-batch"),
        pytest.param(dict(T_q=1, T_k=300), id="one-query"),
        pytest.param(dict(D=128, T_q=290, programs=2), id="d128"),
        pytest.param(dict(T_q=400, T_k=100, causal=False, D=128), id="d128-full"),
        pytest.param(dict(B=3, H_q=1, T_q=140, T_k=300, key_lengths=[300, 170, 0]), id="lengths"),
        pytest.param(dict(T_k=400, query_offset=-40, programs=1), id="tiles-without-queries"),
    ],
)
def test_threads_add_as_tma_does(case: dict[str, Any]) -> None:
    check(**case)


@pytest.mark.usefixtures("by_threads")
@pytest.mark.parametrize("D", [64, 128])
def test_threads_add_packed_sequences(D: int) -> None:
    """Each to tiles of its own: what they add past its end is nobody's."""
    check_packed((150, 0, 70, 1), (200, 5, 0, 130), D)


@pytest.mark.usefixtures("by_threads")
def test_threads_add_to_the_sum_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gets no descriptor of the sum, and starts it where TMA would."""
    q, k, v = make_qkv(1, 1, 1, 40, None, 64, dtype=torch.bfloat16)
    kernel = mock.MagicMock()
    monkeypatch.setattr(backward, "hopper_backward_dkv_kernel", kernel)
    torch.autograd.grad(attention(q, k, v).sum(), q)
    dq_ptr, *_, dq_desc = kernel.__getitem__.return_value.call_args.args[:12]
    assert dq_ptr.shape == (1, 1, 128, 64) and dq_desc is None


@pytest.mark.parametrize("programs", [1, 5])
def test_any_grid_covers_all_tiles(programs: int) -> None:
    """3 tiles of keys of each of 2 heads: `programs` deal them out among themselves."""
    check(H_q=2, H_k=2, T_q=290, programs=programs)


def test_many_orders_of_events() -> None:
    for seed in range(2):
        backward.hopper_backward_dkv_kernel.seed = 1000 * seed
        backward.hopper_backward_dkv_kernel.launches = 0
        check(H_q=1, T_q=260, programs=2)


def test_dk_and_dv_are_those_of_two_passes() -> None:
    """Bit for bit; dQ, summed in another order, is not asked.

    Nor is delta, which two kernels sum in two orders: of one column of dO it is one product.
    """
    q, k, v = make_qkv(1, 4, 2, 200, None, 128, dtype=torch.bfloat16)
    gradients = []
    for deterministic in (True, False):
        o = fastattn.attention(q, k, v, causal=True, backend="hopper", deterministic=deterministic)
        gradients.append(torch.autograd.grad(o[..., 0].float().square().sum(), (q, k, v)))
    assert passes() == 3
    for once, again in zip(gradients[0][1:], gradients[1][1:], strict=True):
        assert torch.equal(once, again)


def test_the_flag_of_torch_rules_it_out() -> None:
    q, k, v = make_qkv(1, 1, 1, 40, None, 64, dtype=torch.bfloat16)
    o = attention(q, k, v)
    torch.use_deterministic_algorithms(True)
    try:
        torch.autograd.grad(o.sum(), q)
    finally:
        torch.use_deterministic_algorithms(False)
    assert passes() == 2


def test_a_softcap_takes_two_passes_at_head_dim_128() -> None:
    q, k, v = make_qkv(1, 1, 1, 40, None, 128, dtype=torch.bfloat16)
    options = dense_options(q, k, v, softcap=3.0, deterministic=False)
    assert ops.why_not_one_pass_on_hopper(64, options) is None
    reason = ops.why_not_one_pass_on_hopper(128, options)
    assert reason == "softcap and head dim 128 do not leave it registers"
    assert_matches_reference(attention, q, k, v, softcap=3.0)
    assert passes() == 2


@pytest.mark.parametrize("D", [64, 128])
def test_half_of_the_columns_are_whole_pieces(D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products read half of the columns of K. The emulator has no layouts; wgmma wants pieces."""
    q, k, v = make_qkv(1, 1, 1, 40, None, D, dtype=torch.bfloat16)
    kernel = mock.MagicMock()
    monkeypatch.setattr(backward, "hopper_backward_dkv_kernel", kernel)
    torch.autograd.grad(attention(q, k, v).sum(), q)
    launched = kernel.__getitem__.return_value.call_args.args
    _q, k_desc, _v, _do, dk_desc, *_others = launched[5:]
    assert k_desc.layout == dk_desc.layout
    assert k_desc.layout.swizzle_byte_width // k.element_size() == min(64, D // 2)


def test_no_queries() -> None:
    q, k, v = make_qkv(1, 2, 2, 0, 8, 64, dtype=torch.bfloat16)
    dq, dk, dv = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    assert dq.shape == q.shape
    assert not dk.any() and not dv.any()
