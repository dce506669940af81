"""The check before timing: the heads it samples, and the faults it finds."""

from dataclasses import replace

import pytest
import torch

from fastattn import reference
from fastattn.bench.cases import correctness, peers
from fastattn.bench.cases.case import Case
from fastattn.bench.cases.inputs import OPTIONS, make_inputs

CASE = Case("backward", "backward", 3, 4, 2, 24, 24, 8, True, dtype="float32", device="cpu")
FEW_ROWS = 8 * 2 * 24 * 5


def results(case, inputs):
    leaves = (inputs.q, inputs.k, inputs.v)
    options = {"causal": case.causal, "window": case.window, **inputs.arguments()}
    o = reference.attention(*leaves, **options)
    if case.direction == "forward":
        return o.detach(), None
    return o.detach(), torch.autograd.grad(o, leaves, inputs.do)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_head_is_that_of_the_whole(monkeypatch, option):
    """Options come in parts, by heads and by rows of queries, as the oracle takes them."""
    case = replace(CASE, option=option, lengths=(24, 7, 12))
    inputs = make_inputs(case)
    o, grads = results(case, inputs)
    monkeypatch.setitem(correctness.CHUNK_BYTES, "cpu", FEW_ROWS)
    expected = correctness.expect(case, inputs, correctness.all_heads(case))
    assert len(expected) == 3 * 2
    correctness.check(case, o, grads, expected)
    wrong = o.clone()
    wrong[1, 1, 3, 2] += 0.01
    correctness.check(case, wrong, grads, correctness.expect(case, inputs))
    with pytest.raises(AssertionError, match="exceeds the budget"):
        correctness.check(case, wrong, grads, expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, (5, 3), (5, None)])
def test_flex_attention_is_given_the_mask_of_the_case(causal, window):
    case = replace(CASE, causal=causal, window=window, lengths=(24, 7, 12), T_q=20)
    inputs = make_inputs(case)
    places = (torch.arange(n).view(-1, *[1] * i) for n, i in ((3, 3), (4, 2), (20, 1), (24, 0)))
    actual = peers._flex_mask(case, inputs)(*places)
    how = {"causal": causal, "window": window, "key_lengths": inputs.key_lengths}
    expected = reference.visible_mask(20, 24, **how)
    assert torch.equal(*torch.broadcast_tensors(actual, expected))


def test_chunks_fit_the_memory_that_is_free(monkeypatch):
    case = replace(CASE, device="cuda", T_q=16384, T_k=16384)
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    row, rows = 2 * 16384 * 8, {}
    for gib in (140, 8):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gib=gib: (gib * 2**30, 2**40))
        rows[gib] = correctness.rows_at_once(case, torch.float64)
    # Ten matrices of scores at a time, and as much again for everything else.
    assert rows[140] == 2**30 // row and 15 * rows[8] * row < 8 * 2**30 <= 21 * rows[8] * row


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("head", [0, -1])
def test_an_error_in_a_sampled_head_is_found_and_nan_anywhere(index, head):
    inputs = make_inputs(CASE)
    o, grads = results(CASE, inputs)
    expected = correctness.expect(CASE, inputs)
    assert set(expected) == {(0, 0), (2, 1)}
    tensors, name = [o, *grads], ("o", "dq", "dk", "dv")[index]
    correctness.check(CASE, o, grads, expected)
    for place, value, why in (
        ((head, head, 3), 0.01, f"{name}: error .* exceeds the budget"),
        ((1, 0, 5), float("nan"), f"{name} has NaN or inf"),  # a row that is not sampled
    ):
        tensors[index][place] += value
        with pytest.raises(AssertionError, match=why):
            correctness.check(CASE, tensors[0], tuple(tensors[1:]), expected)


def test_inputs_repeat_and_lie_as_the_case_says():
    first, second = make_inputs(CASE), make_inputs(CASE)
    assert torch.equal(first.q, second.q)
    assert first.q.shape == (3, 4, 24, 8) and first.q.requires_grad
    assert first.q.stride(1) < first.q.stride(2)
    plain = make_inputs(replace(CASE, layout="bhtd", direction="forward"))
    assert plain.k.is_contiguous() and not plain.k.requires_grad
    left = make_inputs(replace(CASE, lengths=(24, 7, 12), padding_side="left"))
    assert left.key_lengths is None
    assert left.key_padding_mask.sum(1).tolist() == [24, 7, 12]
    assert not left.key_padding_mask[1, 0] and left.key_padding_mask[1, -1]
