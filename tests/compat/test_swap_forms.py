"""Spellings that `fastattn.swap` serves with the same results, and code that is no attention."""

import copy
import os
import sys

import pytest
import torch
from attention_blocks import FORMS, C, Formed, SelfMade
from attention_forms import Drawn
from swapped_blocks import assert_equal, results, tokens, total

pytestmark = pytest.mark.usefixtures("one_thread", "served", "no_graphs_before")

FIRST = int(os.environ.get("FASTATTN_FUZZ_SEED", "0"))


@pytest.mark.parametrize(
    ("kind", "why"),
    {
        "keys": "scores are multiplied by a tensor, another for each key",
        "lowered": "scores have other uses than their softmax",
        "softcap": "scores are changed by tanh",
        "foreign": "scores are changed by attention_blocks.tanh",
        "fill": "scores are filled with -10000.0, and not with -inf",
        "other-dim": "along another dim than that of the softmax",
        "no-grad": "gradients or autocast are switched between the products",
        "negative": "scores are multiplied by -0.3",
        "vector": "scores are changed by a product with a vector",
        "values": "attention weights are changed by a product with a vector",
        "turned": "scores are both permuted and viewed",
        "shared": "values are broadcast to weights that are viewed",
        "gate": "attention weights are changed by multiplication",
        "blind": "attention weights are changed by nan_to_num",
        "other-mask": "weights are set to 0 by another mask than that of the scores",
        "in-place": "add_ is between the products",
        "asserts": "torch.compile cannot capture its forward at",
        "whole": "rounded to something else than 16, 32 or 64 bits",
        "sorted": "the result of sort is no tensor",
        "kept": "attention weights are kept or returned by its forward",
        "in-place-late": "add_ is between the products",
        "returned": "attention weights have other uses than their product with values",
    }.items(),
)
def test_what_is_no_attention_runs_as_it_is(swap, kind, why):
    model = SelfMade(kind)
    plain = copy.deepcopy(model)
    done = swap(model, eager=True)
    assert all(map(torch.equal, results(model, tokens()), results(plain, tokens())))
    assert done.replaced == {}
    assert why in str(done)
    assert (done.calls[""].served, done.calls[""].passed) == (0, 1)


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_formula(swap, form):
    model = Formed(FORMS[form])
    plain = copy.deepcopy(model)
    done = swap(model, eager=True)
    assert_equal(model, plain, tokens())
    assert total(done) == 1, str(done)
    model(tokens())  # captured without gradients, too
    with torch.profiler.profile(acc_events=True) as profile:
        model(tokens())
    # What is served is not computed besides.
    assert sum(event.name == "aten::_softmax" for event in profile.events()) == 1


class HeadsInTheBatch(torch.nn.Module):
    """Attention [T, B, 16] that asks its scores for their sizes, as torchaudio's Emformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        T, B = x.size(0), x.size(1)
        parts = (y.contiguous() for y in self.qkv(x).chunk(3, dim=2))
        q, k, v = (y.view(-1, B * 4, 4).transpose(0, 1) for y in parts)
        scores = torch.bmm(q, k.transpose(1, 2))
        if hidden is not None:
            scores = scores.view(scores.size(0) // 4, 4, T, -1)
            scores = scores.masked_fill(hidden[:, None, None], -1e8).view(B * 4, T, -1)
        return torch.bmm(scores.softmax(-1), v).transpose(0, 1).reshape(T, B, 16)


class InGroups(torch.nn.Module):
    """Attention [T, B, 16] in groups of tokens that checks its scores' sizes, as in LongLoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = int(len(x) * 0.5)
        q, k, v = self.qkv(x).reshape(-1, size, x.shape[1], 48).transpose(1, 2).chunk(3, -1)
        scores = q @ k.mT
        if scores.size() != (len(x) // size, x.shape[1], size, size):
            raise ValueError(scores.size())
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)


class Padded(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = HeadsInTheBatch()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.arange(len(x)).expand(x.shape[1], -1) > len(x) - 2
        return self.inner(x, None if len(hidden) == 1 else hidden)


@pytest.mark.parametrize(("kind", "lengths"), [(Padded, (6, 5, 9)), (InGroups, (6, 8, 12))])
def test_scores_that_are_asked_for_their_sizes(swap, kind, lengths):
    model = kind()
    plain = copy.deepcopy(model)
    done = swap(model, eager=True)
    for T in lengths:
        assert_equal(model, plain, torch.randn(T, 1 + (T != 5), 16))
    calls = done.calls["inner" if kind is Padded else ""]
    assert (calls.served, calls.passed) == (3, 0), str(done)


class Softmax(torch.nn.Module):
    """Mask and softmax in a part of its own, as Megatron has it."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(ahead, -1e9).softmax(-1)


class Around(torch.nn.Module):
    """Products around the softmax of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.softmax = torch.nn.Linear(C, 3 * C), Softmax()


class Operators(Around):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.softmax(q @ k.mT) @ v


class Matmul(Around):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.matmul(self.softmax(torch.matmul(q, k.mT)), v)


@pytest.mark.parametrize("kind", [Operators, Matmul])
def test_a_softmax_in_a_part_is_captured_with_the_products_around_it(swap, kind):
    model = torch.nn.Sequential(kind(), SelfMade("foreign"))
    plain = copy.deepcopy(model)
    done = swap(model, eager=True)
    assert_equal(model, plain, tokens())
    assert list(done.replaced) == ["0"] and list(done.left) == ["1"], str(done)
    assert done.calls["0"].passed == 0


@pytest.mark.parametrize("turn", range(4))
def test_drawn_forms(swap, turn):
    for seed in range(FIRST + 20 * turn, FIRST + 20 * (turn + 1)):
        torch._dynamo.reset()
        torch.manual_seed(seed)
        model = Drawn(seed)
        sys.stdout.write(f"seed {seed}: {model.text}\n")
        plain = copy.deepcopy(model)
        if not all(x.isfinite().all() for x in results(plain, tokens())):
            model.blind = plain.blind = False  # torch's formula gives NaN
        done = swap(model, eager=True)
        assert_equal(model, plain, tokens())
        assert total(done) == 1, str(done)
        done.undo()


def test_a_result_that_gradients_read_may_be_changed_in_place(swap, monkeypatch):
    monkeypatch.undo()  # by the operators, which keep results for gradients

    def moved(q, k, v, s, m):
        out = s.masked_fill(m, -1e9).softmax(-1) @ v
        out[:, 1:] = out[:, 1:].roll(1, 2)  # as LongLoRA moves the tokens of heads
        return out

    model = Formed(moved)
    plain = copy.deepcopy(model)
    swap(model, eager=True)
    assert_equal(model, plain, tokens())
