"""The oracle, against masks drawn by hand and against sums written out."""

import math
from typing import Any

import pytest
import torch

from fastattn import checks, reference
from fastattn.testing import make_qkv

THREE, LAST_THREE = torch.tensor([3]), torch.tensor([[False, True, True, True]])
# Of each the options, and for each query the keys that it sees.
DRAWN: list[tuple[dict[str, Any], str]] = [
    ({"causal": True}, "100 110 111"),
    ({"causal": True}, "1110 1111"),
    ({"causal": True}, "00 00 10 11"),
    ({"window": 2}, "100 110 011"),
    ({"window": 1}, "100 010 001"),
    ({"window": (1, 1)}, "1100 1110 0111 0011"),
    ({"window": (0, None)}, "111 011 001"),
    ({"window": (None, 0)}, "100 110 111"),
    ({"window": (1, 2), "causal": True}, "100 110 011"),
    ({"causal": True, "query_offset": 0}, "1000 1100"),
    ({"causal": True, "query_offset": torch.tensor([2])}, "1110 1111"),
    ({"key_lengths": torch.tensor([2])}, "1100 1100"),
    ({"key_padding_mask": torch.tensor([[False, True, True, False]])}, "0110"),
    ({"key_padding_mask": LAST_THREE, "causal": True}, "0000 0100 0110 0111"),
    ({"causal": True, "prefix_lengths": THREE}, "11100 11100 11100 11110 11111"),
    ({"causal": True, "window": 2, "keep_first": 1}, "10000 11000 11100 10110 10011"),
    ({"causal": True, "stride": 2}, "10000 01000 10100 01010 10101"),
    ({"causal": True, "window": 2, "stride": 3}, "10000 11000 01100 10110 01011"),
    ({"stride": 2, "keep_first": 1}, "1101 1010 1101"),
    ({"stride": 2, "key_lengths": THREE}, "1010 0100"),
]


@pytest.mark.parametrize(("arguments", "drawn"), DRAWN)
def test_drawn_masks(arguments, drawn) -> None:
    rows = [[c == "1" for c in row] for row in drawn.split()]
    actual = reference.visible_mask(len(rows), len(rows[0]), **arguments)[0, 0]
    assert actual.tolist() == rows


def test_offsets_and_lengths_of_each_row_of_the_batch() -> None:
    keep = reference.visible_mask(
        1, 3, causal=True, query_offset=torch.tensor([0, 2]), key_lengths=torch.tensor([3, 2])
    )
    assert keep[:, 0].tolist() == [[[True, False, False]], [[True, True, False]]]


def test_numbers_past_int32_beside_positions() -> None:
    at = torch.arange(3, dtype=torch.int32)[None]
    assert reference.visible_mask(3, 3, window=(2**40, 2**40), positions=(at, at)).all()
    far = reference.torch_places(1, 1, 3, 3, torch.tensor([2**40]), torch.device("cpu"))
    assert (far.q_pos >= checks.FARTHEST).all()
    # Taken within 2^28, of which such a window shows all.
    assert reference.visible_mask(2, 1, window=2**40, query_offset=torch.tensor([2**40])).all()


def test_one_row_written_out() -> None:
    q = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[2.0, 5.0], [0.0, 1.0]]]], dtype=torch.float64)
    v = torch.tensor([[[[1.0], [3.0]]]], dtype=torch.float64)
    o, lse = reference.attention(q, k, v, scale=0.5, return_lse=True)
    denominator = math.exp(1.0) + math.exp(0.0)
    assert o.item() == pytest.approx((math.exp(1.0) + 3.0) / denominator, rel=1e-12)
    assert lse.item() == pytest.approx(math.log(denominator), rel=1e-12)


def test_scores_written_out() -> None:
    """One query at position 1 of three keys, every change of the score in turn."""
    x = [0.5, -1.0, 2.0]
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor(x, dtype=torch.float64).reshape(1, 1, 3, 1)
    v = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64).reshape(1, 1, 3, 1)
    table = torch.tensor([[0.1, 0.2, 0.4]])
    o, lse = reference.attention(
        q,
        k,
        v,
        scale=0.5,
        query_offset=1,
        softcap=2.0,
        relative_keys=torch.tensor([[[3.0], [5.0], [7.0]]]),
        relative_query=2 * q,
        alibi_slopes=torch.tensor([0.3]),
        relative_bias=table,
        attn_bias=torch.tensor([[0.0, 0.7, 0.0]]),
        sinks=torch.tensor([0.9]),
        dropout=0.5,
        dropout_keep=torch.tensor([True, True, False]),
        return_lse=True,
    )
    scores = [
        2 * math.tanh(0.5 * (score + 2 * relative) / 2) - 0.3 * far + bias + own
        for score, relative, far, bias, own in zip(
            x, [7.0, 5.0, 3.0], [1, 0, 1], [0.4, 0.2, 0.1], [0.0, 0.7, 0.0], strict=True
        )
    ]
    denominator = sum(map(math.exp, scores)) + math.exp(0.9)
    expected = (math.exp(scores[0]) + 10 * math.exp(scores[1])) / denominator / 0.5
    assert o.item() == pytest.approx(expected, rel=1e-6)
    assert lse.item() == pytest.approx(math.log(denominator), rel=1e-6)


def test_a_row_that_sees_nothing_has_its_sink() -> None:
    q, k, v = make_qkv(1, 2, 1, 3, 4, 4, dtype=torch.float64)
    sinks = torch.tensor([0.5, -math.inf], requires_grad=True)
    hidden = torch.zeros(3, 4, dtype=torch.bool)
    o, lse = reference.attention(q, k, v, attn_mask=hidden, sinks=sinks, return_lse=True)
    assert (o == 0).all()
    assert lse[0, 0].tolist() == [0.5] * 3
    assert lse[0, 1].tolist() == [-math.inf] * 3
    (grad,) = torch.autograd.grad(lse[0, 0].sum(), sinks)
    assert grad.tolist() == [3.0, 0.0]


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="attention does not support colour"):
        reference.attention(*make_qkv(1, 1, 1, 2, D=4), colour=1)


def test_default_scale() -> None:
    q, k, v = make_qkv(1, 1, 1, 3, D=16, dtype=torch.float64)
    assert torch.equal(reference.attention(q, k, v), reference.attention(q, k, v, scale=0.25))


def test_query_heads_share_key_heads_in_order() -> None:
    q, k, v = make_qkv(1, 6, 2, 4, D=8, dtype=torch.float64)
    o = reference.attention(q, k, v)
    for h in range(6):
        shared = slice(h // 3, h // 3 + 1)
        alone = reference.attention(q[:, h : h + 1], k[:, shared], v[:, shared])
        torch.testing.assert_close(o[:, h : h + 1], alone, rtol=1e-12, atol=1e-12)


def test_blind_rows_and_hidden_nan() -> None:
    q, k, v = make_qkv(1, 1, 1, 3, 5, 4, dtype=torch.float64)
    k = k.detach().clone()
    k[:, :, 3:] = math.nan
    k.requires_grad_()
    o, lse = reference.attention(
        q, k, v, key_lengths=torch.tensor([3]), window=(0, 0), query_offset=2, return_lse=True
    )
    assert torch.equal(o[0, 0, 0], v[0, 0, 2])
    assert (o[0, 0, 1:] == 0).all()
    assert lse[0, 0, 1:].tolist() == [-math.inf, -math.inf]
    grads = torch.autograd.grad(o.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
