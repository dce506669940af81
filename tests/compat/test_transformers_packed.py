"""Sequences packed into one row of a model of transformers: none may see another."""

from contextlib import nullcontext
from inspect import signature

import pytest
import torch
import torch.nn.functional as F
import transformers as tr
from nightly import gate_cases
from oracles import assert_by_oracle
from transformers import masking_utils as masking
from transformers_models import (
    build,
    decoder,
    decoder_config,
    heads,
    layer,
    softmax_in_fp64,
    tokens,
)

from fastattn.compat.transformers import hf_attention

pytestmark = pytest.mark.usefixtures("models_on_torch", "one_thread")
CACHE = "cache" if "cache" in signature(tr.LlamaModel.forward).parameters else "past_key_values"


LENGTHS = (7, 5)
OFFSETS = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0).int()
FAMILIES = ["mistral-window", "gemma2-softcap", "gpt-oss-sinks", "llama4-chunks"]
BY_POSITIONS = ("plain", "cache", "ones", "numbers", "left", "right", "static", "compiled")
CASES = [("llama-gqa", "offsets, ones"), *((name, "offsets") for name in FAMILIES)]
CASES += [(name, way) for name in ("llama-gqa", FAMILIES[3]) for way in BY_POSITIONS]
CASES += [("mistral-window", "plain"), ("gpt-oss-sinks", "compiled")]
LATER = [("llama-gqa", "offsets"), *((name, "offsets, ones") for name in FAMILIES)]


def packed(device: str) -> tuple[dict, dict]:
    """Inputs in which positions start anew, and the offsets besides."""
    starts = OFFSETS.to(device)
    positions = torch.cat([torch.arange(n, device=device) for n in LENGTHS])[None]
    inputs = {"position_ids": positions, "use_cache": False}
    return inputs, {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}


@pytest.mark.parametrize(("name", "way"), gate_cases(CASES, LATER))
@torch.no_grad()
def test_packed_sequences_are_as_if_alone(name, way, device, attention_calls):
    """Offsets as FlashAttention takes them, or positions; beside masks, padding and caches."""
    model = decoder(name, device)
    ids = tokens(1, sum(LENGTHS), device)
    inputs, offsets = packed(device)
    sides = {"left": (3, 0), "right": (0, 3)}.get(way, (0, 0))
    x, positions = (F.pad(row, sides) for row in (ids, inputs["position_ids"]))
    given = {"use_cache": way == "cache", **(offsets if "offsets" in way else {})}
    if way.endswith(("ones", "left", "right")):
        given["attention_mask"] = x.ne(0).long()
    elif way == "numbers":
        given["attention_mask"] = torch.tensor([[1] * 7 + [2] * 5], device=device)
    elif way == "static":
        given[CACHE] = tr.StaticCache(config=model.config, max_cache_len=20)

    def alone(dtype: torch.dtype) -> list[torch.Tensor]:
        model.to(dtype).set_attn_implementation("eager")
        with softmax_in_fp64() if dtype == torch.float64 else nullcontext():
            parts = [model(x, use_cache=False).logits for x in ids.split(LENGTHS, dim=1)]
        return [torch.cat(parts, dim=1)]

    model.set_attn_implementation("fastattn")
    call = torch.compile(model, backend="eager") if way == "compiled" else model
    logits = call(x, position_ids=positions, **given).logits[:, sides[0] :][:, : sum(LENGTHS)]
    assert way in BY_POSITIONS[-2:] or not any("attn_mask" in call for call in attention_calls)
    assert_by_oracle([logits], alone, names="logits")


@torch.no_grad()
def test_masks_and_positions_that_no_rule_covers_are_refused(device):
    model, ids, cache = decoder("llama-gqa", device), tokens(1, 7, device), tr.DynamicCache()
    model.set_attn_implementation("fastattn")
    square = torch.ones(1, 1, 7, 7, device=device)
    for wrong in (square.long(), square.repeat(1, 1, 1, 2).bool(), square[0], -ids, ids / 2):
        with pytest.raises((TypeError, ValueError), match=r"attention_mask .*must .* got"):
            model(ids, attention_mask=wrong)
    mixed = tr.Qwen3NextConfig(attn_implementation="fastattn")
    wide = torch.tensor([[1] * 4 + [2] * 4])  # with a column for a token that is to come
    torch.testing.assert_close(*(model(ids, attention_mask=x)[0] for x in (wide, wide[:, :7])))
    for kind in (model, decoder("gpt-oss-sinks", device)):  # its masks are made without positions
        kind.set_attn_implementation("fastattn")
        with pytest.raises(ValueError, match="8 columns for 7 tokens, and position_ids start anew"):
            kind(ids, attention_mask=torch.ones(1, 8), position_ids=torch.arange(7)[None] % 4)
    embedded, numbers = torch.zeros(1, 7, 8), torch.full((1, 7), 60)
    with pytest.raises(ValueError, match="up to 60, and layers of linear_attention do not keep"):
        masking.create_causal_mask(mixed, embedded, numbers, **{CACHE: None})
    with pytest.raises(ValueError, match="up to 60, and embeddings are multiplied by them"):
        masking.create_bidirectional_mask(
            tr.EsmConfig(attn_implementation="fastattn"), embedded, numbers
        )
    model(ids, **{CACHE: cache})
    with pytest.raises(ValueError, match="position_ids start anew in a call with cached tokens"):
        model(ids[:, :3], position_ids=torch.tensor([[7, 0, 1]], device=device), **{CACHE: cache})


@pytest.mark.parametrize("positions", [[3] * 12, [0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5]])
def test_positions_that_begin_no_sequence(positions):
    """Equal ones, and those that `generate` counts on behind padding."""
    mask = torch.ones(1, 12).index_fill(1, torch.tensor([5, 6]), 0)
    given = layer(), *heads(12, 12), mask
    o, _ = hf_attention.attention_forward(*given, position_ids=torch.tensor([positions]))
    torch.testing.assert_close(o, hf_attention.attention_forward(*given)[0])


def test_positions_behind_a_cache_in_a_compiled_call():
    """`generate` makes the masks of a static cache before a compiled model."""
    q, k, v = heads(3, 12)
    given = layer(), q, k, v, hf_attention.attention_mask(1, 3, 12, torch.tensor(4))
    call = torch.compile(hf_attention.attention_forward, backend="eager")
    o, _ = call(*given, position_ids=torch.arange(4, 7)[None])
    torch.testing.assert_close(o, hf_attention.attention_forward(*given)[0])


def test_compiled_model_with_offsets(device):
    """Nothing is read while it is traced: mask and offsets hold together."""
    torch._dynamo.reset()
    config = decoder_config("mistral-window", num_hidden_layers=1)
    model = build(tr.AutoModelForCausalLM, config, device)
    model.set_attn_implementation("fastattn")
    ids = tokens(1, 12, device)
    inputs, offsets = packed(device)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        wanted = model(ids, **inputs, **offsets).logits
        actual = compiled(ids, attention_mask=torch.ones_like(ids), **inputs, **offsets).logits
        torch.testing.assert_close(actual, wanted)
        with pytest.raises(ValueError, match=r"attention_mask hides tokens, and cu_seq_lens_q has"):
            model(ids, attention_mask=(ids != ids[0, -1]).long(), **inputs, **offsets)


def test_chunks_with_offsets_are_not_compiled():
    """A traced mask counts its chunks from the start of the row."""
    module = layer()
    module.config = tr.Llama4TextConfig(attention_chunk_size=4)
    mask = torch.ones(1, 1, 12, 12).tril().bool()

    @torch.compile(backend="eager")
    def call(q, k, v):
        return hf_attention.attention_forward(module, q, k, v, mask, cu_seq_lens_q=OFFSETS)

    with pytest.raises(NotImplementedError, match="cu_seq_lens_q with the entries of a mask"):
        call(*heads(12, 12))


SEPARATE = torch.block_diag(*(torch.ones(n, n) for n in LENGTHS)).bool()


@pytest.mark.parametrize("with_keys", [False, True])
@pytest.mark.parametrize("way", ["mask", "numbers", "bias", "weights", "sinks", "chunks"])
def test_offsets_hold_beside_what_else_is_given(way, with_keys):
    q, k, v = heads(12, 12)
    seen = torch.ones(12, 12).tril().bool()
    numbers = torch.zeros(12, 12).masked_fill(~seen, torch.finfo(q.dtype).min)
    chunked = hf_attention.attention_mask(1, 12, 12, mask_function=chunks(3))
    mask = {"mask": seen[None, None], "numbers": numbers[None, None], "chunks": chunked}.get(way)
    options = {
        "bias": {"position_bias": torch.randn(1, 2, 12, 12)},
        "weights": {"output_attentions": True},
        "sinks": {"sinks": torch.randn(1, 2, 12, 1)},
    }.get(way, {})
    offsets = {"cu_seq_lens_q": OFFSETS, **({"cu_seq_lens_k": OFFSETS} if with_keys else {})}
    o, weights = hf_attention.attention_forward(layer(), q, k, v, mask, **offsets, **options)
    if way == "chunks":
        parts = (torch.block_diag(*(torch.ones(3, 3),) * 4)[:n, :n] for n in LENGTHS)
        seen = seen & torch.block_diag(*parts).bool()
    both = (seen & SEPARATE)[None, None]
    wanted, wanted_weights = hf_attention.attention_forward(layer(), q, k, v, both, **options)
    torch.testing.assert_close(o, wanted)
    if way == "weights":
        torch.testing.assert_close(weights, wanted_weights)


def test_offsets_take_the_place_of_sequences_found_in_positions():
    q, k, v = heads(12, 12)
    actual = masking.packed_sequence_mask_function(torch.tensor([[0] * 4 + [1] * 8]))
    both = masking.and_masks(masking.causal_mask_function, actual)
    mask = hf_attention.attention_mask(1, 12, 12, mask_function=both)
    assert mask.rule().documents is not None
    seen = SEPARATE.tril()[None, None]
    wanted, _ = hf_attention.attention_forward(layer(), q, k, v, seen)
    for bias in (None, torch.zeros(1, 2, 12, 12)):  # by offsets, and by a number for each token
        given = {"cu_seq_lens_q": OFFSETS, "position_bias": bias}
        o, _ = hf_attention.attention_forward(layer(), q, k, v, mask, **given)
        torch.testing.assert_close(o, wanted)


def chunks(size: int):
    return masking.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long))
