"""torch's counter of products knows every operator, and counts as it does torch's own attention."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import fastattn
from fastattn.ops import flops
from fastattn.testing import make_qkv

# D_v is not D, H_k not H_q, and every size another.
B, H_Q, H_K, T_Q, T_K, D, D_V = 2, 4, 2, 5, 7, 16, 8
# As if each query head had keys of its own, which torch 2.11 wants.
SHAPES = (B, H_Q, T_Q, D), (B, H_Q, T_K, D), (B, H_Q, T_K, D_V)
FORWARD = sdpa_flop_count(*SHAPES)
BACKWARD = sdpa_backward_flop_count((B, H_Q, T_Q, D_V), *SHAPES)
SCORES = 2 * B * H_Q * T_Q * T_K * D


def inputs(device: str) -> tuple[Tensor, Tensor, Tensor]:
    return make_qkv(B, H_Q, H_K, T_Q, T_K, D=D, D_v=D_V, device=device)


def counted(function: Any, *arguments: Any, **options: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*arguments, **options)
    return counter.get_total_flops()


def test_every_operator_has_a_formula() -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name[:10] == "fastattn::"]
    packets = {getattr(torch.ops.fastattn, name[10:].split(".")[0]) for name in names}
    assert len(packets) >= 18
    assert packets <= flop_registry.keys()


def test_a_counter_that_is_imported_later_knows_them() -> None:
    """And importing this package does not import it, which imports Triton."""
    program = """
import sys, torch, fastattn
assert "torch.utils.flop_counter" not in sys.modules and "triton" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    q = torch.empty(2, 4, 5, 16, device="meta")
    fastattn.ops.attention_ops.attention_forward.by_op(q, q, q, fastattn.options.Options(scale=1.0))
assert counter.get_total_flops() == 4 * 2 * 4 * 5 * 5 * 16
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def bias() -> Tensor:
    return torch.zeros(H_Q, T_Q, T_K, requires_grad=True)


def table() -> Tensor:
    return torch.zeros(H_Q, 5, requires_grad=True)


@pytest.mark.parametrize(
    ("options", "backward"),
    [
        ({"causal": True, "window": 3}, BACKWARD),
        ({"attn_bias": bias}, BACKWARD + FORWARD),
        ({"relative_bias": table}, BACKWARD + FORWARD),
    ],
    ids=["band", "bias", "relative"],
)
def test_attention(options: dict[str, Any], backward: int, device: str) -> None:
    q, k, v = inputs(device)
    given = {name: x().to(device) if callable(x) else x for name, x in options.items()}
    o = []

    def forward() -> None:
        o[:] = [fastattn.attention(q, k, v, backend="triton", **given)]

    def grads() -> None:
        leaves = [x for x in (q, k, v, *given.values()) if isinstance(x, Tensor)]
        torch.autograd.grad(o[0].sum(), leaves)

    # The second forward is found by the memo, where nothing counts.
    for _ in range(2):
        assert counted(forward) == FORWARD
        assert counted(grads) == backward
        forward()
        assert counted(grads) == backward


@pytest.mark.parametrize(
    ("asked", "products", "kernels"),
    [
        ("q", (2, 1), ["attention_backward_dq_kernel"]),
        ("k", (2, 1), ["start_dq_kernel", "attention_backward_dkv_kernel"]),
        ("v", (1, 1), ["attention_backward_dkv_kernel"]),
        ("qv", (2, 2), ["attention_backward_dq_kernel", "attention_backward_dkv_kernel"]),
        ("kv", (2, 2), ["start_dq_kernel", "attention_backward_dkv_kernel"]),
    ],
)  # fmt: skip
def test_gradients_that_are_not_asked_for(asked, products, kernels, launched, device: str) -> None:
    """Are not computed, with either backward, and others do not change by a bit."""
    every_head = make_qkv(B, H_Q, H_Q, T_Q, T_K, D=D, D_v=D_V, device=device)
    tensors = dict(zip("qkv", every_head, strict=True))
    leaves = [tensors[name] for name in asked]
    for how in ({}, {"deterministic": False}):
        given = [x if name in asked else x.detach() for name, x in tensors.items()]
        o = fastattn.attention(*given, causal=True, backend="triton", **how)
        launched.clear()
        grads = torch.autograd.grad(o.sum(), leaves, retain_graph=True)
        assert launched == kernels
        wide, of_values = products
        count = (wide * D + of_values * D_V) * 2 * B * H_Q * T_Q * T_K
        assert counted(torch.autograd.grad, o.sum(), leaves) == count
        whole = fastattn.attention(*tensors.values(), causal=True, backend="triton")
        every = torch.autograd.grad(whole.sum(), leaves)
        assert all(map(torch.equal, grads, every))


def test_packed_sequences(device: str) -> None:
    """Pairs within sequences; where offsets are not known, as if all were of one length."""
    shapes = (2 * T_Q, H_Q, D), (2 * T_K, H_K, D), (2 * T_K, H_K, D_V)
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for shape in shapes)
    q_starts, k_starts = torch.tensor([[0, 2, 2 * T_Q], [0, 9, 2 * T_K]], device=device)

    def both() -> None:
        o = fastattn.attention_varlen(q, k, v, q_starts, k_starts, backend="triton")
        torch.autograd.grad(o.sum(), (q, k, v))

    pairs = 2 * 9 + (2 * T_Q - 2) * (2 * T_K - 9)
    assert counted(both) * B * T_Q * T_K == (FORWARD + BACKWARD) * pairs
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": q_starts, "cu_seqlens_k": k_starts}
    rows = {name: x.to("meta") for name, x in given.items()}
    rows |= {name: rows[name].transpose(0, 1)[None] for name in "qkv"}
    assert flops.attended(1, 1)(rows) == FORWARD


def test_packed_queries_count_what_their_rows_hold(device: str) -> None:
    k, v = (torch.randn(4, H_K, 8, width, device=device) for width in (D, D_V))
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=device)
    view = fastattn.view_of_tensors(k, v, table[0] + 9, block_table=table)
    q, offsets = torch.randn(7, H_Q, D, device=device), torch.tensor([0, 5, 7], device=device)
    actual = counted(fastattn.attention_paged, q, view, offsets, backend="triton")
    assert actual == 2 * H_Q * (D + D_V) * (5 * 9 + 2 * 10)


def decoding(cache: Any, device: str, **options: Any) -> int:
    """Pairs of a query and a key that decoding was counted to multiply."""
    q = torch.randn(B, H_Q, 2, D, device=device)
    actual = counted(fastattn.decode_attention, q, cache, backend="triton", **options)
    pairs, rest = divmod(actual, 2 * H_Q * 2 * (D + D_V))
    assert rest == 0
    return pairs


def test_decoding_counts_what_rows_hold(device: str) -> None:
    """All that they may hold, where that is not known."""
    k, v = (torch.randn(4, H_K, 8, width, device=device) for width in (D, D_V))
    lengths = torch.tensor([3, 7], dtype=torch.int32, device=device)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=device)
    rows = fastattn.view_of_tensors(k[:2], v[:2], lengths)
    assert decoding(rows, device) == 10
    second = torch.tensor([1, 1], device=device)
    assert decoding(rows._replace(batch_index=second), device) == 14
    pages = fastattn.view_of_tensors(k, v, lengths + 6, block_table=table)
    assert decoding(pages, device) == 22
    ring = fastattn.KVCache(B, H_K, 6, D, value_dim=D_V, window=5, device=device)
    for _ in range(7):
        ring.append(*(torch.randn(B, H_K, 1, width, device=device) for width in (D, D_V)))
    room = ring.view().k.shape[2]
    assert decoding(ring, device, window=5) == B * min(7, room)
    with FakeTensorMode():
        unknown = fastattn.KVCache(B, H_K, 16, D, value_dim=D_V, device=device)
        assert decoding(unknown, device) == B * 16


def test_other_operators(device: str) -> None:
    q, k, v = inputs(device)
    with torch.no_grad():
        weights = fastattn.attention_weights
        assert counted(weights, q, k, backend="triton") == 2 * SCORES
        statistics = fastattn.attention_statistics
        assert counted(statistics, q, k, backend="triton") == 3 * SCORES
        o, lse = fastattn.attention(q, k, v, return_lse=True, backend="triton")
        assert counted(fastattn.merge, o, lse, o, lse, backend="triton") == 0
