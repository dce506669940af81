"""Models of transformers with attn_implementation="fastattn" against the same models with "eager".

The models are tiny and random. "eager" in fp64 is the reference and "eager" in fp32 the naive
twin of the error budget.
"""

import builtins
import copy
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers as tr

from fastattn import decode_attention
from fastattn.compat import lazy_mask
from fastattn.compat import transformers as door
from fastattn.testing.budget import assert_within_budget

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.1,
}  # fmt: skip
GQA = {**SIZES, "num_key_value_heads": 2}
MIXED = ["sliding_attention", "full_attention"]


def yarn(length: int) -> dict:
    return {
        "rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4,
        "original_max_position_embeddings": length // 2,
    }  # fmt: skip


DECODERS = {
    "llama-gqa": lambda: tr.LlamaConfig(**GQA),
    "mistral-window": lambda: tr.MistralConfig(**GQA, sliding_window=5),
    "gemma2-softcap": lambda: tr.Gemma2Config(
        **GQA, head_dim=8, sliding_window=5, attn_logit_softcapping=2.0, layer_types=MIXED
    ),
    "gpt-oss-sinks": lambda: tr.GptOssConfig(
        **GQA, head_dim=8, sliding_window=5, num_local_experts=2, num_experts_per_tok=1,
        layer_types=MIXED, rope_parameters=yarn(64),
    ),
    "qwen3-norm": lambda: tr.Qwen3Config(**GQA, head_dim=8),
    "deepseek-values": lambda: tr.DeepseekV3Config(
        **SIZES, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=12, first_k_dense_replace=2,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def registered():
    door.register()


@pytest.fixture(autouse=True)
def served(monkeypatch, one_thread, device):
    """Whole models are too slow for the interpreter; on a GPU they run on the kernels."""
    if device == "cpu":
        monkeypatch.setenv("FASTATTN_BACKEND", "torch")


@pytest.fixture
def calls(monkeypatch):
    """The options of every call of `attention`."""
    made = []
    attention = door.attention

    def record(q, k, v, **options):
        made.append(options)
        return attention(q, k, v, **options)

    monkeypatch.setattr(door, "attention", record)
    return made


def build(auto: type, config, device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager").to(device)
    if isinstance(config, tr.GptOssConfig):
        # Its faster experts have no fp64.
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    return model.eval()


@contextmanager
def softmax_in_fp64() -> Iterator[None]:
    """ "eager" rounds its scores to fp32, whatever the model's dtype is."""
    softmax = torch.nn.functional.softmax

    def wide(x: torch.Tensor, dim: int, **ignored) -> torch.Tensor:
        return softmax(x, dim=dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", wide)
        yield


def compare(model, inputs: dict, select=lambda out: out.logits, *, grads: bool = True) -> None:
    """Hold outputs and the gradients of all parameters to the error budget."""

    def run(copied, implementation: str, dtype: torch.dtype):
        copied.set_attn_implementation(implementation)
        assert copied.config._attn_implementation == implementation
        copied.to(dtype)
        floats = {n for n, x in inputs.items() if torch.is_tensor(x) and x.is_floating_point()}
        cast = {n: x.to(dtype) if n in floats else x for n, x in inputs.items()}
        copied.zero_grad()
        out = select(copied(**cast))
        if not grads:
            return {"output": out.detach()}
        generator = torch.Generator().manual_seed(1)
        do = torch.randn(out.shape, generator=generator).bfloat16().to(out)
        (out * do).sum().backward()
        found = {n: p.grad for n, p in copied.named_parameters() if p.grad is not None}
        return {"output": out.detach(), **found}

    with softmax_in_fp64():
        ref = run(copy.deepcopy(model), "eager", torch.float64)
    naive = run(copy.deepcopy(model), "eager", torch.float32)
    ours = run(copy.deepcopy(model), "fastattn", torch.float32)
    assert ours.keys() == ref.keys()
    for name, x in ours.items():
        assert_within_budget(name, x, ref[name], naive[name])


def tokens(B: int, T: int, device: str) -> torch.Tensor:
    return torch.randint(3, 61, (B, T), generator=torch.Generator().manual_seed(5)).to(device)


def padded(mask_of_rows: list[tuple[int, int]], T: int, device: str) -> torch.Tensor:
    """int64 [B, T] with ones from start to end."""
    j = torch.arange(T, device=device)
    return torch.stack([(j >= start) & (j < end) for start, end in mask_of_rows]).long()


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_with_padding(name, device):
    model = build(tr.AutoModelForCausalLM, DECODERS[name](), device)
    mask = padded([(4, 12), (0, 12), (0, 9)], 12, device)
    inputs = {"input_ids": tokens(3, 12, device), "attention_mask": mask}
    compare(model, inputs, lambda out: out.logits[mask.bool()])


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window"])
def test_decoder_without_mask(name, device):
    model = build(tr.AutoModelForCausalLM, DECODERS[name](), device)
    compare(model, {"input_ids": tokens(2, 12, device)}, grads=False)


def test_kernels_serve_a_model(device, monkeypatch):
    monkeypatch.setenv("FASTATTN_BACKEND", "triton")
    config = tr.LlamaConfig(**{**GQA, "num_hidden_layers": 1})
    model = build(tr.AutoModelForCausalLM, config, device)
    mask = padded([(2, 7)], 7, device)
    inputs = {"input_ids": tokens(1, 7, device), "attention_mask": mask}
    compare(model, inputs, lambda out: out.logits[mask.bool()])


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "gpt-oss-sinks"])
def test_chunked_prefill(name, device):
    """A prompt in pieces, T_q < T_k, into a cache that grows."""
    model = build(tr.AutoModelForCausalLM, DECODERS[name](), device)
    ids = tokens(2, 13, device)

    def run(implementation, dtype):
        model.set_attn_implementation(implementation)
        model.to(dtype)
        out, cache = [], tr.DynamicCache(config=model.config)
        with torch.no_grad():
            for piece in ids.split([4, 6, 1, 2], dim=1):
                out.append(model(piece, past_key_values=cache).logits)
        return torch.cat(out, dim=1)

    with softmax_in_fp64():
        ref = run("eager", torch.float64)
    naive = run("eager", torch.float32)
    assert_within_budget("logits", run("fastattn", torch.float32), ref, naive)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2-softcap"])
def test_generated_tokens_are_equal(name, cache, device):
    model = build(tr.AutoModelForCausalLM, DECODERS[name](), device)
    inputs = {
        "input_ids": tokens(2, 9, device),
        "attention_mask": padded([(4, 9), (0, 9)], 9, device),
        "cache_implementation": None if cache == "dynamic" else cache,
        "max_new_tokens": 7, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    ways = {"greedy": {}, "sampled": {"do_sample": True}, "beam": {"num_beams": 3}}
    found = {}
    for implementation in ("eager", "fastattn"):
        model.set_attn_implementation(implementation)
        for way, options in ways.items():
            torch.manual_seed(3)
            options = {"do_sample": False, **options}
            found[implementation, way] = model.generate(**inputs, **options).tolist()
    for way in ways:
        assert found["fastattn", way] == found["eager", way], way
    assert len({str(found["eager", way]) for way in ways}) > 1


def test_packed_sequences_by_positions(device, calls):
    model = build(tr.AutoModelForCausalLM, DECODERS["mistral-window"](), device)
    positions = torch.tensor([[*range(7), *range(2), *range(6)]], device=device)
    inputs = {"input_ids": tokens(1, 15, device), "position_ids": positions, "use_cache": False}
    compare(model, inputs)
    assert all("documents" in options and "attn_mask" not in options for options in calls)


def test_packed_sequences_by_offsets(device):
    """Offsets alone, as FlashAttention is given them, separate sequences too."""
    model = build(tr.AutoModelForCausalLM, DECODERS["llama-gqa"](), device)
    ids = tokens(1, 12, device)
    offsets = torch.tensor([0, 7, 12], dtype=torch.int32, device=device)
    positions = torch.tensor([[*range(7), *range(5)]], device=device)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = model(ids, position_ids=positions, use_cache=False).logits
        with softmax_in_fp64():
            exact = model.double()(ids, position_ids=positions, use_cache=False).logits
        model.float().set_attn_implementation("fastattn")
        given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
        found = model(ids, position_ids=positions, use_cache=False, **given).logits
    assert_within_budget("logits", found, exact, wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_and_training(reentrant, device):
    model = build(tr.AutoModelForCausalLM, DECODERS["llama-gqa"](), device).train()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    mask = padded([(0, 8), (0, 5)], 8, device)
    inputs = {
        "input_ids": tokens(2, 8, device),
        "attention_mask": mask,
        "labels": tokens(2, 8, device),
    }
    compare(model, inputs, lambda out: out.loss)


def test_dropout_of_weights_is_used_in_training_alone(device, calls):
    config = tr.LlamaConfig(**GQA, attention_dropout=0.5)
    model = build(tr.AutoModelForCausalLM, config, device)
    model.set_attn_implementation("fastattn")
    ids = tokens(1, 6, device)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, model(ids).logits, rtol=0, atol=0)
        assert not torch.equal(model.train()(ids).logits, model(ids).logits)
    assert {options["dropout"] for options in calls} == {0.0, 0.5}


def test_bias_for_each_head_by_a_mask_of_numbers(device):
    """ALiBi as a mask of floats [1, H, T, T], the way in which models without support add it."""
    model = build(tr.AutoModelForCausalLM, DECODERS["llama-gqa"](), device)
    i, slopes = torch.arange(10, device=device), torch.tensor([0.5, 0.25, 0.125, 0.0625])
    bias = -slopes.to(device)[:, None, None] * (i[:, None] - i).abs()
    bias = bias.masked_fill(i > i[:, None], torch.finfo(torch.float32).min)[None]
    compare(model, {"input_ids": tokens(2, 10, device), "attention_mask": bias})


def test_encoder_with_padding(device):
    model = build(tr.AutoModel, tr.BertConfig(**SIZES), device)
    mask = padded([(0, 6), (0, 11)], 11, device)
    inputs = {"input_ids": tokens(2, 11, device), "attention_mask": mask}
    compare(model, inputs, lambda out: out.last_hidden_state[mask.bool()])


def test_encoder_with_window_and_padding(device, calls):
    config = tr.ModernBertConfig(
        **{n: x for n, x in SIZES.items() if n != "initializer_range"}, initializer_range=0.1,
        local_attention=6, layer_types=MIXED, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    model = build(tr.AutoModel, config, device)
    mask = padded([(0, 9), (0, 14)], 14, device)
    inputs = {"input_ids": tokens(2, 14, device), "attention_mask": mask}
    compare(model, inputs, lambda out: out.last_hidden_state[mask.bool()])
    assert {options.get("window") for options in calls} == {None, (3, 3)}


@pytest.fixture
def t5(device):
    config = tr.T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, dropout_rate=0.0,
        pad_token_id=0, eos_token_id=2, decoder_start_token_id=0, relative_attention_num_buckets=8,
        relative_attention_max_distance=10,
    )  # fmt: skip
    return build(tr.AutoModelForSeq2SeqLM, config, device)


def test_encoder_decoder_with_relative_bias(t5, device):
    mask = padded([(0, 6), (0, 11)], 11, device)
    decoder_ids = tokens(2, 7, device)
    inputs = {
        "input_ids": tokens(2, 11, device),
        "attention_mask": mask,
        "decoder_input_ids": decoder_ids,
    }
    compare(t5, inputs)


def test_encoder_decoder_generates_equal_tokens(t5, device):
    inputs = {
        "input_ids": tokens(2, 8, device),
        "attention_mask": padded([(0, 5), (0, 8)], 8, device),
        "max_new_tokens": 6, "eos_token_id": None, "do_sample": False,
    }  # fmt: skip
    wanted = t5.generate(**inputs).tolist()
    t5.set_attn_implementation("fastattn")
    assert t5.generate(**inputs).tolist() == wanted


def test_vision_model(device):
    config = tr.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
        image_size=16, patch_size=4, initializer_range=0.1,
    )  # fmt: skip
    model = build(tr.AutoModel, config, device)
    image = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    compare(model, {"pixel_values": image.float().to(device)}, lambda out: out.last_hidden_state)


def layer(causal: bool = True) -> torch.nn.Module:
    module = torch.nn.Module()
    module.is_causal = causal
    return module


def heads(T_q: int, T_k: int, B: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(B, 2, T, 8, generator=generator) for T in (T_q, T_k, T_k))


def test_masks_agree_with_those_of_transformers():
    """The rule's mask, entry by entry, for every maker, offset and padding."""
    from transformers import masking_utils as masking

    packed = torch.tensor([[0, 0, 0, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    sliding = masking.sliding_window_causal_mask_function(3)
    functions = [
        masking.causal_mask_function, masking.bidirectional_mask_function, sliding,
        masking.sliding_window_bidirectional_mask_function(2),
    ]  # fmt: skip
    sizes_of_calls = ((6, 6, 0, 0), (2, 7, 5, 0), (3, 8, 0, 0), (2, 5, 9, 6))
    cases = [(function, *sizes, None) for function in functions for sizes in sizes_of_calls]
    cases += [(*case[:5], torch.tensor([[0, 0, 1, 1, 1, 1, 1]]).bool()) for case in cases]
    joined = masking.packed_sequence_compatibility_function(sliding, positions, packed)
    cases.append((joined, 6, 6, 0, 0, None))
    for function, T_q, T_k, q_offset, k_offset, padding in cases:
        sizes = (1, T_q, T_k, q_offset, k_offset)
        mask = door.attention_mask(*sizes, function, padding, None, False, device="cpu")
        assert isinstance(mask, lazy_mask.LazyMask)
        q, k, v = heads(T_q, T_k)
        o, _ = door.attention_forward(layer(), q, k, v, mask)
        assert mask._made is None, "the rule was not used"
        plain, _ = door.attention_forward(layer(), q, k, v, mask.entries())
        torch.testing.assert_close(o, plain)
        wanted = masking.sdpa_mask(*sizes, function, padding, allow_is_causal_skip=False)
        assert torch.equal(mask.entries(), wanted)


def test_unknown_mask_functions_are_computed():
    from transformers import masking_utils as masking

    def every_other(b, h, q, k):
        return (q - k) % 2 == 0

    for function in (every_other, masking.and_masks(masking.causal_mask_function, every_other)):
        mask = door.attention_mask(1, 4, 4, mask_function=function)
        assert type(mask) is torch.Tensor
        assert mask[0, 0, 3].tolist()[1] is True and mask[0, 0, 3].tolist()[2] is False
    remapped = masking.remap_positions_for_packed_sequence(
        masking.causal_mask_function, torch.tensor([[0, 1, 0, 1]])
    )
    assert door.rule_of(masking.and_masks(remapped)) is None


def test_none_is_returned_only_where_it_is_unambiguous():
    def returned(T_q, T_k, q_offset, **options):
        return door.attention_mask(1, T_q, T_k, q_offset, **options)

    assert returned(6, 6, 0) is None
    # A chunk behind a cache, a static cache with room, one step into each of them.
    for T_q, T_k, q_offset in ((2, 6, 4), (6, 7, 0), (1, 6, 5), (1, 7, 3)):
        assert returned(T_q, T_k, q_offset) is not None
    assert returned(6, 6, 0, attention_mask=torch.ones(1, 6).bool()) is not None
    assert returned(6, 6, 0, allow_is_causal_skip=False) is not None


def test_a_missing_mask_is_refused_where_positions_are_unknown():
    q, k, v = heads(2, 6)
    with pytest.raises(ValueError, match="None for 2 queries and 6 keys of a causal layer"):
        door.attention_forward(layer(), q, k, v, None)
    o, weights = door.attention_forward(layer(False), q, k, v, None)
    assert o.shape == (1, 2, 2, 8) and weights is None
    one, _ = door.attention_forward(layer(), q[:, :, :1], k, v, None)
    torch.testing.assert_close(one, o[:, :1])


def test_two_dimensional_mask_is_of_keys():
    q, k, v = heads(3, 5, B=2)
    keys = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    o, _ = door.attention_forward(layer(), q, k, v, keys)
    i, j = torch.arange(3)[:, None] + 2, torch.arange(5)
    whole = (keys.bool()[:, None, None] & (j <= i)).expand(2, 1, 3, 5)
    wanted, _ = door.attention_forward(layer(), q, k, v, whole)
    torch.testing.assert_close(o, wanted)


def test_window_holds_without_a_mask():
    q, k, v = heads(7, 7)
    o, _ = door.attention_forward(layer(), q, k, v, None, sliding_window=3)
    distance = torch.arange(7)[:, None] - torch.arange(7)
    seen = ((distance >= 0) & (distance < 3))[None, None]
    wanted, _ = door.attention_forward(layer(), q, k, v, seen)
    torch.testing.assert_close(o, wanted)


def test_weights_on_request():
    q, k, v = heads(4, 4)
    o, weights = door.attention_forward(layer(), q, k, v, None, output_attentions=True)
    torch.testing.assert_close((weights @ v).transpose(1, 2), o)
    assert torch.equal(weights.triu(1), torch.zeros_like(weights))


def test_scaling_may_be_a_tensor_and_queries_may_be_shared():
    q, k, v = heads(4, 4, B=2)
    o, _ = door.attention_forward(layer(), q[:1], k, v, None, scaling=torch.tensor(0.5))
    wanted, _ = door.attention_forward(
        layer(), q[:1].expand(2, -1, -1, -1), k, v, None, scaling=0.5
    )
    torch.testing.assert_close(o, wanted)


def test_bias_and_mask_of_numbers_add_up():
    q, k, v = heads(4, 4)
    bias, more = torch.randn(1, 2, 4, 4), torch.randn(1, 1, 4, 4)
    o, _ = door.attention_forward(layer(), q, k, v, more, position_bias=bias)
    wanted, _ = door.attention_forward(layer(), q, k, v, bias + more)
    torch.testing.assert_close(o, wanted)


@pytest.mark.parametrize("way", ["none", "padding", "mask", "bias", "window", "static"])
def test_one_new_token_is_decoded(way, monkeypatch):
    """By the kernels for that, which split the keys, with the result of the others."""
    q, k, v = heads(1, 9, B=2)
    keys = torch.arange(9) >= torch.tensor([[3], [0]])
    given = {
        "none": (None, {}),
        "padding": (door.attention_mask(2, 1, 9, 8, attention_mask=keys), {}),
        "mask": (keys[:, None, None], {"softcap": 2.0}),
        "bias": (None, {"position_bias": torch.randn(1, 2, 1, 9), "s_aux": torch.ones(2)}),
        "window": (None, {"sliding_window": 4}),
        "static": (door.attention_mask(2, 1, 9, torch.tensor(5)), {}),
    }
    mask, options = given[way]
    decoded = []
    monkeypatch.setattr(
        door, "decode_attention", lambda *a, **o: decoded.append(o) or decode_attention(*a, **o)
    )
    wanted, _ = door.attention_forward(layer(), q, k, v, mask, **options)
    assert not decoded
    with torch.no_grad():
        found, _ = door.attention_forward(layer(), q, k, v, mask, **options)
    assert len(decoded) == 1 and found.shape == (2, 1, 2, 8) and found.is_contiguous()
    torch.testing.assert_close(found, wanted)


def test_one_new_token_over_other_memory_is_not_decoded(calls):
    q, k, v = heads(1, 9)
    wide = k.transpose(1, 2).contiguous().transpose(1, 2)
    with torch.no_grad():
        door.attention_forward(layer(), q, wide, v, None)
        door.attention_forward(layer(), q, k, v, None, dropout=0.5)
    assert len(calls) == 2


def test_what_is_refused():
    q, k, v = heads(4, 4)
    with pytest.raises(NotImplementedError, match="paged cache"):
        door.attention_forward(layer(), q, k, v, None, cache=object())
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="position_bias or output_attentions"):
        door.attention_forward(
            layer(), q, k, v, None, cu_seq_lens_q=offsets, position_bias=torch.zeros(1, 2, 4, 4)
        )
    with pytest.raises(ValueError, match="batch of 1, got 2"):
        door.attention_forward(layer(), *heads(4, 4, B=2), None, cu_seq_lens_q=offsets)


def test_lazy_mask_is_a_tensor_to_others():
    made = []

    def entries():
        made.append(1)
        return torch.eye(3).bool()[None, None].expand(2, 1, 3, 3)

    rule = lazy_mask.Rule(causal=True)
    mask = lazy_mask.LazyMask(rule, entries, (2, 1, 3, 3), "cpu")
    assert isinstance(mask, torch.Tensor) and mask.shape == (2, 1, 3, 3) and mask.ndim == 4
    assert mask.dtype == torch.bool and mask.device.type == "cpu" and len(mask) == 2
    assert mask.contiguous().rule() == rule and mask.clone().rule() == rule
    assert not made
    assert torch.equal(mask[:, :, 1:], torch.eye(3).bool()[1:].expand(2, 1, 2, 3))
    assert torch.cat([mask, mask]).shape == (4, 1, 3, 3) and (~mask).sum() == 12
    assert made == [1] and mask.rule() == rule
    mask[0, 0, 0, 2] = True
    assert mask.rule() is None and bool(mask.entries()[0, 0, 0, 2])
    assert not mask[1, 0, 0, 2]
    copied = copy.deepcopy(mask)
    assert bool(copied[0, 0, 0, 2])


def test_a_changed_mask_is_obeyed():
    q, k, v = heads(4, 4)
    mask = door.attention_mask(1, 4, 4, allow_is_causal_skip=False)
    mask.logical_and_(torch.eye(4).bool())
    o, _ = door.attention_forward(layer(), q, k, v, mask)
    torch.testing.assert_close(o, v.transpose(1, 2))


def test_missing_transformers_names_the_extra(monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest, **named):
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
        return real(name, *rest, **named)

    for name in [n for n in sys.modules if n.partition(".")[0] == "transformers"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r'pip install "fastattn\[hf\]"'):
        door.register()


def test_other_versions_warn_once():
    door._check_version.cache_clear()
    with pytest.warns(UserWarning, match=r"4\.57\.1 is outside .* 5\.23 to 5\.23"):
        door._check_version("4.57.1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        door._check_version("4.57.1")
        door._check_version("5.23.4.dev0")


def test_compiled_model(device):
    """Traced, masks are ordinary tensors, and a missing one is causal."""
    config = tr.LlamaConfig(**{**GQA, "num_hidden_layers": 1})
    model = build(tr.AutoModelForCausalLM, config, device)
    model.set_attn_implementation("fastattn")
    ids, mask = tokens(2, 8, device), padded([(3, 8), (0, 8)], 8, device)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for inputs in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
            wanted = model(**inputs, use_cache=False).logits
            found = compiled(**inputs, use_cache=False).logits
            keep = inputs.get("attention_mask", torch.ones_like(ids)).bool()
            torch.testing.assert_close(found[keep], wanted[keep])
    assert math.isfinite(float(found[keep].sum()))
