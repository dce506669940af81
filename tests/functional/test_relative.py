"""Relative biases, keys and queries on the kernels: against the oracle."""

from functools import partial

import pytest
import torch

import fastattn
from fastattn.testing import assert_matches_reference, make_qkv
from fastattn.testing.compare import results
from fastattn.testing.inputs import draw, to_device

attention = partial(fastattn.attention, backend="triton")

T_q, T_k, D = 37, 45, 16
ROWS = (2, 2, 1)  # B, H_q, H_k


def test_unaligned_vectors_are_copied(device: str) -> None:
    """A view that does not start at a multiple of 16 bytes."""
    q, k, v = make_qkv(*ROWS, T_q, T_k, D, device=device)
    vectors = draw(1, 17, D).to(device)
    shifted = torch.cat((vectors.new_zeros(1), vectors.flatten()))[1:].view_as(vectors)
    assert shifted.data_ptr() % 16
    o = attention(q, k, v, relative_keys=shifted)
    assert torch.equal(o, attention(q, k, v, relative_keys=vectors))


def test_window_on_both_sides_needs_no_offset_on_the_host(monkeypatch, device: str) -> None:
    """Reading a tensor of offsets would wait for the GPU."""
    q, k, v = make_qkv(*ROWS, T_q, T_k, D, device=device)
    arguments = to_device(
        {"relative_bias": draw(2, 7), "query_offset": torch.tensor([8, -7])}, device
    )
    assert_matches_reference(attention, q, k, v, window=(4, 2), **arguments)
    monkeypatch.setattr(torch, "aminmax", None)
    results(attention, q, k, v, window=(4, 2), **arguments)
    with pytest.raises(TypeError):
        results(attention, q, k, v, **arguments)


@pytest.mark.parametrize("placed_by", ["query_offset", "positions"])
def test_rows_far_apart_cost_what_their_distances_do(placed_by: str, device: str) -> None:
    """Few tiles occur of the 2^28 distances between the least and the most."""
    q, k, v = make_qkv(*ROWS, T_q, T_k, D, device=device)
    far, table = -(1 << 28), {"relative_bias": draw(2, 7)}
    if placed_by == "query_offset":
        table["query_offset"] = torch.tensor([8, far])
        hidden = {"causal": True, "prefix_lengths": torch.tensor([0, 5])}
    else:
        q, k, v = make_qkv(*ROWS, 140, 140, D, device=device)
        places = torch.arange(140, dtype=torch.int32).repeat(2, 1)
        places[1, 128:] += -far // 2
        table["positions"] = (places, places)
        hidden = {"causal": True}
    hidden = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in hidden.items()
    }
    assert_matches_reference(attention, q, k, v, **hidden, **to_device(table, device))
