"""Generation as nanoGPT has it: by tensors, and by the last context of tokens in every step."""

import math

import pytest
import torch
from nightly import gate_cases
from small_gpt import make_gpt

from fastattn.generation.engine import Engine
from fastattn.generation.generate import generate_batch, generate_tokens
from fastattn.models.gpt import GPT
from fastattn.models.sampling import Sampling

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

CONTEXT, GREEDY = 12, Sampling(greedy=True)


@torch.no_grad()
def nanogpt_generate(model: GPT, idx, max_new_tokens, temperature=1.0, top_k=None):
    """nanoGPT's `GPT.generate` (model.py), for this model."""
    for _ in range(max_new_tokens):
        logits = model(idx[:, -CONTEXT:])[:, -1] / temperature
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
    assert torch.equal(model.generate(idx, 9, epsilon_cutoff=0.999), greedy)


def test_generate_reads_every_token_once_within_the_context(monkeypatch):
    model, read = make_gpt(context=CONTEXT), []
    forward = model.forward

    def counted(tokens, **options):
        read.append(tokens.shape[1])
        return forward(tokens, **options)

    monkeypatch.setattr(model, "forward", counted)
    model.generate(torch.tensor([[1, 2, 3]]), 12)
    assert read == [3] + [1] * 9 + [12, 12]


@torch.no_grad()
def greedy_by_crops(model: GPT, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens[-CONTEXT:]]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("positions", gate_cases(["rotary"], ["learned"]))
def test_a_cropped_text_sees_the_whole_context_in_every_step(positions):
    model = make_gpt(context=CONTEXT, positions=positions)
    prompts = [torch.randint(20, (length,)).tolist() for length in (1, 11, 12, 30)]
    expected = [greedy_by_crops(model, prompt, 25) for prompt in prompts]
    options = {"sampling": GREEDY, "past_context": "crop"}
    assert [list(generate_tokens(model, prompt, 25, **options)) for prompt in prompts] == expected
    assert generate_batch(model, prompts, 25, **options) == expected
    restarted = generate_batch(model, prompts, 25, sampling=GREEDY)
    assert all(a != b for a, b in zip(restarted, expected, strict=True))
    engine = Engine(model, num_pages=12, page_size=4, max_batch=3, past_context="crop")
    requests = [engine.submit(prompt, 25, sampling=GREEDY) for prompt in prompts]
    for _ in engine.run():
        pass
    assert [request.tokens for request in requests] == expected
