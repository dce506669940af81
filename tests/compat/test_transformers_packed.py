"""Sequences packed into one row of a model of transformers: none may see another."""

import copy
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
    compare,
    decoder,
    decoder_config,
    heads,
    layer,
    softmax_in_fp64,
    tokens,
)

from fastattn.compat.transformers import attend

pytestmark = pytest.mark.usefixtures("models_on_torch", "one_thread")
CACHE = "cache" if "cache" in signature(tr.LlamaModel.forward).parameters else "past_key_values"


@pytest.mark.parametrize("name", ["mistral-window", "llama4-chunks"])
def test_packed_sequences_by_positions(name, device, attention_calls):
    model = decoder(name, device)
    positions = torch.tensor([[*range(7), *range(2), *range(6)]], device=device)
    inputs = {"input_ids": tokens(1, 15, device), "position_ids": positions, "use_cache": False}
    compare(model, inputs)
    assert all("documents" in options and "attn_mask" not in options for options in attention_calls)


LENGTHS = (7, 5)
OFFSETS = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0).int()
FAMILIES = ["mistral-window", "gemma2-softcap", "gpt-oss-sinks", "llama4-chunks"]
CASES = [("llama-gqa", "ones"), *((name, "no mask") for name in FAMILIES)]
CASES += [("llama-gqa", "no mask"), *((name, "ones") for name in FAMILIES)]


def packed(device: str) -> tuple[dict, dict]:
    """Inputs in which positions start anew, and the offsets besides."""
    starts = OFFSETS.to(device)
    positions = torch.cat([torch.arange(n, device=device) for n in LENGTHS])[None]
    inputs = {"position_ids": positions, "use_cache": False}
    return inputs, {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}


@pytest.mark.parametrize(("name", "mask"), gate_cases(CASES[:5], CASES[5:]))
def test_packed_sequences_by_offsets(name, mask, device):
    """Offsets as FlashAttention takes them. A mask that hides nothing changes no result."""
    model = decoder(name, device)
    ids = tokens(1, sum(LENGTHS), device)
    inputs, offsets = packed(device)
    model.set_attn_implementation("fastattn")
    given = {} if mask == "no mask" else {"attention_mask": torch.ones_like(ids)}
    assert_alone(model, ids, model(ids, **inputs, **offsets, **given).logits)


def assert_alone(model, ids: torch.Tensor, logits: torch.Tensor) -> None:
    """Check a row's logits against those of each sequence alone."""

    def alone(dtype: torch.dtype) -> list[torch.Tensor]:
        copied = copy.deepcopy(model).to(dtype)
        copied.set_attn_implementation("eager")
        with torch.no_grad(), softmax_in_fp64() if dtype == torch.float64 else nullcontext():
            parts = [copied(x, use_cache=False).logits for x in ids.split(LENGTHS, dim=1)]
        return [torch.cat(parts, dim=1)]

    assert_by_oracle([logits], alone, names="logits")


@pytest.mark.parametrize("way", ["cache", "ones", "numbers", "static", "padding", "compiled"])
@pytest.mark.parametrize("name", ["llama-gqa", "llama4-chunks"])
@torch.no_grad()
def test_packed_sequences_beside_masks_and_caches(name, way, device):
    model = decoder(name, device)
    model.set_attn_implementation("fastattn")
    ids, positions = tokens(1, 12, device), packed(device)[0]["position_ids"]
    given = {
        "ones": {"attention_mask": torch.ones_like(ids)},
        "numbers": {"attention_mask": torch.tensor([[1] * 7 + [2] * 5], device=device)},
        "static": {CACHE: tr.StaticCache(config=model.config, max_cache_len=20)},
    }.get(way, {})
    if way == "padding":  # each side, in one batch, padded as `generate` numbers it
        both = (torch.cat([F.pad(x, (3, 0)), F.pad(x, (0, 3))]) for x in (ids, positions))
        rows, places = both
        logits = model(rows, attention_mask=rows.ne(0).long(), position_ids=places).logits
        assert_alone(model, ids, logits[:1, 3:])
        logits = logits[1:, :12]
    else:
        call = torch.compile(model, backend="eager") if way == "compiled" else model
        logits = call(ids, position_ids=positions, **given).logits
    assert_alone(model, ids, logits)


def test_masks_that_no_rule_covers_are_refused(device):
    model, ids = decoder("llama-gqa", device), tokens(1, 12, device)
    model.set_attn_implementation("fastattn")
    square, cache = torch.ones(1, 1, 12, 12, device=device).tril(), tr.DynamicCache()
    with pytest.raises(TypeError, match=r"bool .* or float .*, got torch\.int64"):
        model(ids, attention_mask=square.long())
    for mask, said in ((-ids, "numbers of sequences"), (ids / 2, "0 and 1"), (square[0], "2 or 4")):
        with pytest.raises(ValueError, match=f"attention_mask .*must .*{said}"):
            model(ids, attention_mask=mask)
    model(ids[:, :4], **{CACHE: cache})
    with pytest.raises(ValueError, match="position_ids start anew in a call with cached tokens"):
        model(ids[:, 4:7], **{CACHE: cache}, position_ids=torch.tensor([[4, 0, 1]], device=device))


def test_what_does_not_go_with_offsets_is_refused():
    q, k, v = heads(12, 12)
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[0, -1] = 0
    with pytest.raises(ValueError, match=r"attention_mask hides tokens, and cu_seq_lens_q has"):
        attend.attention_forward(layer(), q, k, v, mask, cu_seq_lens_q=OFFSETS)
    with pytest.raises(ValueError, match="as many queries as keys, got 2 and 12"):
        mask = torch.ones(1, 1, 2, 12).bool()
        attend.attention_forward(layer(), q[:, :, :2], k, v, mask, cu_seq_lens_q=OFFSETS)


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
        return attend.attention_forward(module, q, k, v, mask, cu_seq_lens_q=OFFSETS)

    with pytest.raises(NotImplementedError, match="cu_seq_lens_q with the entries of a mask"):
        call(*heads(12, 12))


SEPARATE = torch.block_diag(*(torch.ones(n, n) for n in LENGTHS)).bool()


@pytest.mark.parametrize("with_keys", [False, True])
@pytest.mark.parametrize("way", ["mask", "numbers", "bias", "weights", "sinks", "chunks"])
def test_offsets_hold_beside_what_else_is_given(way, with_keys):
    q, k, v = heads(12, 12)
    seen = torch.ones(12, 12).tril().bool()
    numbers = torch.zeros(12, 12).masked_fill(~seen, torch.finfo(q.dtype).min)
    chunked = attend.attention_mask(1, 12, 12, mask_function=chunks(3))
    mask = {"mask": seen[None, None], "numbers": numbers[None, None], "chunks": chunked}.get(way)
    options = {
        "bias": {"position_bias": torch.randn(1, 2, 12, 12)},
        "weights": {"output_attentions": True},
        "sinks": {"sinks": torch.randn(1, 2, 12, 1)},
    }.get(way, {})
    offsets = {"cu_seq_lens_q": OFFSETS, **({"cu_seq_lens_k": OFFSETS} if with_keys else {})}
    o, weights = attend.attention_forward(layer(), q, k, v, mask, **offsets, **options)
    if way == "chunks":
        parts = (torch.block_diag(*(torch.ones(3, 3),) * 4)[:n, :n] for n in LENGTHS)
        seen = seen & torch.block_diag(*parts).bool()
    both = (seen & SEPARATE)[None, None]
    wanted, wanted_weights = attend.attention_forward(layer(), q, k, v, both, **options)
    torch.testing.assert_close(o, wanted)
    if way == "weights":
        torch.testing.assert_close(weights, wanted_weights)


def test_offsets_take_the_place_of_sequences_found_in_positions():
    q, k, v = heads(12, 12)
    actual = masking.packed_sequence_mask_function(torch.tensor([[0] * 4 + [1] * 8]))
    both = masking.and_masks(masking.causal_mask_function, actual)
    mask = attend.attention_mask(1, 12, 12, mask_function=both)
    assert mask.rule().documents is not None
    seen = SEPARATE.tril()[None, None]
    wanted, _ = attend.attention_forward(layer(), q, k, v, seen)
    for bias in (None, torch.zeros(1, 2, 12, 12)):  # by offsets, and by a number for each token
        given = {"cu_seq_lens_q": OFFSETS, "position_bias": bias}
        o, _ = attend.attention_forward(layer(), q, k, v, mask, **given)
        torch.testing.assert_close(o, wanted)


def chunks(size: int):
    return masking.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long))
