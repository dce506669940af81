"""The attention function for transformers, called as a layer calls it."""

from typing import Any

import pytest
import torch
import transformers as tr
from nightly import gate_cases
from transformers_models import GQA, SIZES, build, heads, layer, tokens

from fastattn import decode_attention
from fastattn.compat.transformers import hf_attention

pytestmark = pytest.mark.usefixtures("models_on_torch")


def test_a_missing_mask_is_read_where_positions_do_not_count():
    q, k, v = heads(2, 6)
    o, weights = hf_attention.attention_forward(layer(False), q, k, v, None)
    assert o.shape == (1, 2, 2, 8) and weights is None
    one, _ = hf_attention.attention_forward(layer(), q[:, :, :1], k, v, None)
    torch.testing.assert_close(one, o[:, :1])
    for kept in (hf_attention.attention_mask(1, 1, n, n - 1) for n in (4, 9)):
        # Caches that are compressed layer by layer share one mask.
        one, _ = hf_attention.attention_forward(layer(), q[:, :, :1], k, v, kept)
        torch.testing.assert_close(one, o[:, :1])
    across = type("TextCrossAttention", (torch.nn.Module,), {})()  # as in mllama
    seen, _ = hf_attention.attention_forward(across, q, k, v, None)
    torch.testing.assert_close(seen, o)


KEYS = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
CAUSAL, NUMBERS = torch.ones(2, 1, 4, 6).bool().tril(2), torch.randn(2, 2, 4, 6)
BAND = KEYS.bool()[:, None, None] & CAUSAL.triu()
# Mask and options of a call, and those of the same in other words.
TWINS: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any]]] = {
    "keys": (KEYS, {"sliding_window": 3}, BAND, {}),
    "bias and numbers": (NUMBERS[:, :1], {"position_bias": NUMBERS}, NUMBERS + NUMBERS[:, :1], {}),
    "scaling": (CAUSAL, {"scaling": torch.tensor(0.5)}, CAUSAL, {"scaling": 0.5}),
}


@pytest.mark.parametrize("name", TWINS)
def test_masks_and_options_in_other_words(name):
    q, k, v = heads(4, 6, B=2)
    mask, options, other_mask, others = TWINS[name]
    # The queries of one row may be shared.
    shared = q[: 1 + (name != "scaling")]
    o, weights = hf_attention.attention_forward(layer(), shared, k, v, mask, **options)
    assert weights is None
    same = shared.expand(2, -1, -1, -1)
    wanted, _ = hf_attention.attention_forward(layer(), same, k, v, other_mask, **others)
    torch.testing.assert_close(o, wanted)


GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "vocab_size": 61}
# Weights are requested of them, and they do not name their layers.
SILENT = {
    "gpt2": lambda: tr.GPT2Config(**GPT2),
    "opt": lambda: tr.OPTConfig(**SIZES, ffn_dim=40, word_embed_proj_dim=32),
    "stablelm": lambda: tr.StableLmConfig(**GQA),
    "llama": lambda: tr.LlamaConfig(**GQA),
}


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *((name, False) for name in SILENT),
        *((name, True) for name in gate_cases(["gpt2"], [*SILENT][1:])),
    ],
)
def test_a_model_that_is_asked_for_weights_gives_them(name: str, compiled: bool, device: str):
    model = build(tr.AutoModelForCausalLM, SILENT[name](), device)
    ids = tokens(2, 5, device)
    wanted = model(ids, output_attentions=True).attentions
    model.set_attn_implementation("fastattn")
    run = torch.compile(model, backend="eager") if compiled else model
    actual = run(ids, output_attentions=True).attentions
    assert len(actual) == len(wanted) == model.config.num_hidden_layers
    for ours, theirs in zip(actual, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert model(ids).attentions is None


LEFT_PADDED = torch.arange(9) >= torch.tensor([[3], [0]])
CHOSEN = {"indices": torch.tensor([[[2, 5, 8]], [[0, 3, 4]]])}
# Masks and options of a step.
STEPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "none": (None, {}),
    "padding": (hf_attention.attention_mask(2, 1, 9, 8, attention_mask=LEFT_PADDED), {}),
    "mask": (LEFT_PADDED[:, None, None], {"softcap": 2.0}),
    "bias": (None, {"position_bias": torch.randn(1, 2, 1, 9), "s_aux": torch.ones(2)}),
    "window": (None, {"sliding_window": 4}),
    "static": (hf_attention.attention_mask(2, 1, 9, torch.tensor(5)), {}),
    "chosen": (None, CHOSEN),
    "chosen of padded": (LEFT_PADDED, CHOSEN),
    "autocast": (None, {}),  # which leaves turned queries and keys in fp32
}


@pytest.mark.parametrize("way", STEPS)
def test_one_new_token_is_decoded(way, monkeypatch):
    """Decode by the kernels that split the keys; the result is as without them."""
    q, k, v = heads(1, 9, B=2)
    mask, options = STEPS[way]
    decoded = []
    monkeypatch.setattr(
        hf_attention,
        "decode_attention",
        lambda *a, **o: decoded.append(o) or decode_attention(*a, **o),
    )
    cast = torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast")
    with cast:
        v = v.bfloat16() if way == "autocast" else v
        wanted, _ = hf_attention.attention_forward(layer(), q, k, v, mask, **options)
    assert not decoded
    with cast, torch.no_grad():
        actual, _ = hf_attention.attention_forward(layer(), q, k, v, mask, **options)
    assert len(decoded) == 1 and actual.shape == (2, 1, 2, 8) and actual.is_contiguous()
    torch.testing.assert_close(actual, wanted)


def test_one_new_token_over_other_memory_or_by_torch_is_not_decoded(attention_calls, monkeypatch):
    q, k, v = heads(1, 9)
    wide = k.transpose(1, 2).contiguous().transpose(1, 2)
    with torch.no_grad():
        hf_attention.attention_forward(layer(), q, wide, v, None)
        hf_attention.attention_forward(layer(), q, k, v, None, dropout=0.5)
        monkeypatch.setattr(hf_attention, "interpreting", lambda: False)
        hf_attention.attention_forward(layer(), q.cpu(), k.cpu(), v.cpu(), None)
    assert len(attention_calls) == 3


def among(lists, T_k, size=1):
    """bool [T_q, T_k]: the keys that lists of blocks name; -1 is no block."""
    pairs = torch.zeros(len(lists), T_k, dtype=torch.bool)
    for query, numbers in enumerate(lists):
        for number in (n for n in numbers if n >= 0):
            pairs[query, number * size : (number + 1) * size] = True
    return pairs


@pytest.mark.parametrize("mask", [None, "bool", "numbers"])
def test_keys_that_an_indexer_chose(mask):
    q, k, v = heads(4, 6)
    lists = [[0, 1], [3, -1], [-1, -1], [5, 1]]
    chosen = torch.tensor([lists], dtype=torch.int32)
    seen = torch.ones(1, 1, 4, 6).bool().tril(2)
    lowest = torch.zeros(1, 1, 4, 6).masked_fill(~seen, torch.finfo(q.dtype).min)
    given = {None: hf_attention.attention_mask(1, 4, 6, 2), "bool": seen, "numbers": lowest}[mask]
    o, _ = hf_attention.attention_forward(layer(), q, k, v, given, indices=chosen)
    wanted, _ = hf_attention.attention_forward(layer(), q, k, v, seen & among(lists, 6))
    torch.testing.assert_close(o, wanted)
    with pytest.raises(RuntimeError, match="out of bounds"):
        hf_attention.attention_forward(layer(), q, k, v, given, indices=chosen + 1)


@pytest.mark.parametrize("way", ["blocks", "blocks, mask", "tokens", "tokens, sinks"])
def test_lists_of_few_keys(way, monkeypatch):
    """Without a tensor of all pairs where the mask is a rule; with -1 in every place."""
    q, k, v = heads(5, 11)
    size, by_lists, module = 4 if "blocks" in way else 1, [], layer()
    module.config = type("Config", (), {"index_block_size": size})()
    lists = [[1, -1], [-1, -1], [-1, 0], [2, 2], [0, 1]]
    chosen = torch.tensor([[lists]], dtype=torch.int32)
    given = {"block_indices": chosen} if size > 1 else {"indices": chosen[0]}
    beside = {"sinks": torch.randn(1, 2, 5, 1)} if "sinks" in way else {}
    seen = torch.ones(1, 1, 5, 11).bool().tril(6)
    mask = seen if "mask" in way else hf_attention.attention_mask(1, 5, 11, 6)
    selected = hf_attention.selected_attention
    monkeypatch.setattr(
        hf_attention, "selected_attention", lambda *a, **o: by_lists.append(1) or selected(*a, **o)
    )
    o, _ = hf_attention.attention_forward(module, q, k, v, mask, **given, **beside)
    assert len(by_lists) == ("mask" not in way)
    both = seen & among(lists, 11, size)
    wanted, _ = hf_attention.attention_forward(layer(), q, k, v, both, **beside)
    torch.testing.assert_close(o, wanted)


def test_a_sink_for_each_query():
    q, k, v = heads(4, 4)
    sinks = torch.randn(1, 2, 4, 1, requires_grad=True)
    scores = (q @ k.mT * 8**-0.5).masked_fill(~torch.ones(4, 4).tril().bool(), -torch.inf)
    weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    wanted = (weights @ v).transpose(1, 2)
    o, actual = hf_attention.attention_forward(
        layer(), q, k, v, None, sinks=sinks, output_attentions=True
    )
    torch.testing.assert_close(o, wanted)
    torch.testing.assert_close(actual, weights)
    grad, wanted_grad = (torch.autograd.grad(x.square().sum(), sinks)[0] for x in (o, wanted))
    torch.testing.assert_close(grad, wanted_grad)
    with torch.no_grad():
        last = {"sinks": sinks[:, :, 3:]}
        one, _ = hf_attention.attention_forward(layer(), q[:, :, 3:], k, v, None, **last)
    torch.testing.assert_close(one, wanted[:, 3:])
