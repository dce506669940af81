"""Generation as nanoGPT has it: by tensors, and by the last context of tokens in every step."""

import math

import pytest
import torch
from small_gpt import make_gpt

from fastattn.models.gpt import GPT
from fastattn.models.sampling import Sampling

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

CONTEXT, GREEDY = 12, Sampling(greedy=True)


@torch.no_grad()
def nanogpt_generate(model: GPT, idx, max_new_tokens, temperature=1.0, top_k=None):
    """nanoGPT's `GPT.generate` (model.py), for this model."""
    for _ in range(max_new_tokens):
        logits = model(idx[:, -CONTEXT:])[0][:, -1] / temperature
        if top_k is not None:
            v, _ = torch.topk(logits, min(top_k, logits.size(-1)))
            logits[logits < v[:, [-1]]] = -math.inf
        idx = torch.cat((idx, torch.multinomial(logits.softmax(dim=-1), num_samples=1)), dim=1)
    return idx


@pytest.mark.parametrize("positions", ["learned", "alibi"])
@pytest.mark.parametrize("length", [1, 12, 30])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 5}])
def test_generate_draws_what_nanogpt_draws(settings, length, positions):
    model = make_gpt(context=CONTEXT, positions=positions, std=0.3).double()
    idx = torch.randint(20, (3, length))
    given = idx.clone()
    torch.manual_seed(1)
    expected = nanogpt_generate(model, idx, 20, **settings)
    torch.manual_seed(1)
    got = model.generate(idx, 20, **settings)
    assert torch.equal(got, expected)
    assert torch.equal(idx, given)
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(model.generate(idx, 20, **settings, generator=generator), expected)
    assert not torch.equal(model.generate(idx, 20, **settings), expected)
    assert torch.equal(model.generate(idx, 0), idx)


def test_generate_cuts_improbable_tokens_off():
    model, idx = make_gpt(context=CONTEXT, std=0.3), torch.tensor([[1, 2, 3]])
    greedy = model.generate(idx, 9, top_k=1)
    for cut in ({"epsilon_cutoff": 0.999}, {"top_p": 1e-3}):
        assert torch.equal(model.generate(idx, 9, **cut), greedy)


def test_generate_reads_every_token_once_within_the_context(monkeypatch):
    model, read = make_gpt(context=CONTEXT), []
    forward = model.forward

    def counted(tokens, **options):
        read.append(tokens.shape[1])
        return forward(tokens, **options)

    monkeypatch.setattr(model, "forward", counted)
    model.generate(torch.tensor([[1, 2, 3]]), 12)
    assert read == [3] + [1] * 9 + [12, 12]
