"""Continuous batching of transformers: `generate_batch` gives what `generate` gives alone."""

import functools
from unittest import mock

import pytest
import torch
import transformers as tr
from transformers import masking_utils as masking
from transformers.generation import continuous_batching
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching import continuous_api
from transformers_models import GQA, decoder_config, heads, layer

from fastattn.compat import transformers as integration
from fastattn.compat.transformers import continuous

pytestmark = pytest.mark.usefixtures("models_on_torch", "one_thread")
initialization = getattr(continuous_batching, "initialization", None)

# Two requests share steps, and the second prompt is longer than a step of 8 tokens.
PROMPTS = [[3, 7, 4], [5, 9, 2, 8, 1, 6, 11, 13, 12, 10, 15]]
GREEDY = tr.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=63, pad_token_id=0)


@pytest.fixture
def known():
    """Skips where transformers is older than what is served of continuous batching."""
    if not hasattr(initialization, "lazy_import_flash_attention"):
        with pytest.raises(ImportError, match=r"batching of transformers 5\.19 to"):
            integration.enable_continuous_batching()
        pytest.skip("transformers before 5.19")


@pytest.fixture
def enabled(known, monkeypatch):
    """Continuous batching with "fastattn", undone after the test."""
    for module in (continuous_api, initialization, paged_cache):
        name = "is_flash_attention_requested"
        monkeypatch.setattr(module, name, getattr(module, name))
    name = "lazy_import_flash_attention"
    monkeypatch.setattr(initialization, name, getattr(initialization, name))
    integration.register()
    integration.enable_continuous_batching()


def model(name: str):
    """Tiny models whose weights are large: the greedy tokens depend on what was attended."""
    size = {"hidden_size": 64, "intermediate_size": 48, "vocab_size": 64, "initializer_range": 0.4}
    if name == "granite-scale":
        config = tr.GraniteConfig(**GQA | size, attention_multiplier=2.0)
    else:
        window = {"sliding_window": 4} if name == "mistral-window" else {}
        config = decoder_config(name, **size, **window)
    torch.manual_seed(0)
    return tr.AutoModelForCausalLM.from_config(config, attn_implementation="fastattn").eval()


def batched(built, **options) -> list[list[int]]:
    """The new tokens of all prompts, by steps of up to 8 tokens."""
    config = tr.ContinuousBatchingConfig(
        num_blocks=8, max_batch_tokens=8, page_size=16, use_cuda_graph=False, **options
    )
    made = built.generate_batch(
        PROMPTS, generation_config=GREEDY, continuous_batching_config=config, progress_bar=False
    )
    actual = sorted(made.values(), key=lambda x: int(x.request_id.rpartition("_")[2]))
    assert [x.error for x in actual] == [None] * len(PROMPTS)
    return [x.generated_tokens for x in actual]


def alone(built) -> list[list[int]]:
    built.set_attn_implementation("eager")
    made = [built.generate(torch.tensor([p]), generation_config=GREEDY)[0] for p in PROMPTS]
    return [tokens[len(p) :].tolist() for p, tokens in zip(PROMPTS, made, strict=True)]


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window"])
def test_batched_tokens_are_those_of_requests_alone(name, enabled, monkeypatch):
    """Pretend that flash_attn can be imported: the model keeps its implementation all the same."""
    monkeypatch.setattr(continuous_api, "is_flash_attn_2_available", lambda **_: True)
    built = model(name)
    kept, calls = set(), []

    @functools.wraps(continuous.attend_paged)
    def counted(module, *args):
        kept.add(module.config._attn_implementation)
        calls.append(args[0].shape[2])
        return continuous.attend_paged(module, *args)

    monkeypatch.setattr(integration.hf_attention, "attend_paged", counted)
    actual = batched(built)
    assert kept == {"fastattn"}
    assert max(calls) == 8
    assert actual == alone(built)


def test_decoding_over_block_tables(enabled, monkeypatch):
    """transformers takes that path on CUDA alone: here as if the check had passed."""
    path = "ensure_decode_fast_path_is_available"
    monkeypatch.setattr(initialization, path, lambda *_, **__: None)
    append = mock.Mock(side_effect=continuous.append_paged)
    monkeypatch.setattr(continuous, "append_paged", append)
    built = model("granite-scale")
    actual = batched(built, max_blocks_per_request=2)
    assert 2 in {call.args[1].shape[0] for call in append.call_args_list}  # both requests decode
    assert actual == alone(built)


def test_slots_of_tokens_without_a_row_and_of_padded_tables():
    starts = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    lengths = torch.tensor([5, 0, 4], dtype=torch.int32)
    table = torch.tensor([[6, 2], [-1, -1], [3, -1]], dtype=torch.int32)
    slots = continuous._slots(starts, lengths, table, 4, 5)
    assert slots.tolist() == [27, 8, 15, -1, -1]


def test_refused_without_the_call(known, monkeypatch):
    integration.register()
    with pytest.raises(ValueError, match="fastattn is not supported for continuous batching"):
        batched(model("llama-gqa"), auto_switch_to_flash=False)
    monkeypatch.delattr(paged_cache, "is_flash_attention_requested")
    with pytest.raises(ImportError, match=r"continuous_batching\.cache has no is_flash_attention"):
        integration.enable_continuous_batching()


def test_refused_beside_a_cache():
    q, k, v = heads(4, 4)
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    given = {"cache": object(), "cu_seq_lens_q": offsets, "cu_seq_lens_k": {}}
    for wrong in ({"is_causal": False}, {"output_attentions": True}, {"dropout": 0.1}):
        with pytest.raises(NotImplementedError, match=next(iter(wrong))):
            integration.attention_forward(layer(), q, k, v, None, **given, **wrong)
    with pytest.raises(NotImplementedError, match="scores of the caller's own"):
        integration.attention_forward(layer(), q, k, v, None, **given, indices=torch.zeros(1, 4, 1))
    with pytest.raises(ValueError, match="cache needs cu_seq_lens_q and cu_seq_lens_k"):
        integration.attention_forward(layer(), q, k, v, None, **given | {"cu_seq_lens_q": None})
    chunks = masking.chunked_causal_mask_function(3, torch.zeros(1).long())
    chunked, ruled = layer(), integration.attention_mask(1, 4, 4, mask_function=chunks)
    chunked.config = tr.Llama4TextConfig(attention_chunk_size=3)
    for module, mask in ((chunked, None), (layer(), ruled)):
        with pytest.raises(NotImplementedError, match="attention in chunks over pages"):
            integration.attention_forward(module, q, k, v, mask, **given)
    bias = torch.zeros(1, 1, 4, 4)
    with pytest.raises(NotImplementedError, match=r"attention_mask of torch\.float32"):
        integration.attention_forward(layer(), q, k, v, bias, **given)
