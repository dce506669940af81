"""The attention function for transformers, called as a layer calls it."""

import pytest
import torch
import transformers as tr
from nightly import gate_cases
from transformers_models import GQA, SIZES, build, heads, layer, tokens

from fastattn import decode_attention
from fastattn.compat.transformers import attend

pytestmark = pytest.mark.usefixtures("models_on_torch")


def test_a_missing_mask_is_refused_where_positions_are_unknown():
    q, k, v = heads(2, 6)
    with pytest.raises(ValueError, match="None for 2 queries and 6 keys of a causal layer"):
        attend.attention_forward(layer(), q, k, v, None)
    o, weights = attend.attention_forward(layer(False), q, k, v, None)
    assert o.shape == (1, 2, 2, 8) and weights is None
    one, _ = attend.attention_forward(layer(), q[:, :, :1], k, v, None)
    torch.testing.assert_close(one, o[:, :1])


def test_two_dimensional_mask_is_of_keys():
    q, k, v = heads(3, 5, B=2)
    keys = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    o, _ = attend.attention_forward(layer(), q, k, v, keys)
    i, j = torch.arange(3)[:, None] + 2, torch.arange(5)
    whole = (keys.bool()[:, None, None] & (j <= i)).expand(2, 1, 3, 5)
    wanted, _ = attend.attention_forward(layer(), q, k, v, whole)
    torch.testing.assert_close(o, wanted)


def test_window_holds_without_a_mask():
    q, k, v = heads(7, 7)
    o, _ = attend.attention_forward(layer(), q, k, v, None, sliding_window=3)
    distance = torch.arange(7)[:, None] - torch.arange(7)
    seen = ((distance >= 0) & (distance < 3))[None, None]
    wanted, _ = attend.attention_forward(layer(), q, k, v, seen)
    torch.testing.assert_close(o, wanted)


def test_weights_on_request():
    q, k, v = heads(4, 4)
    o, weights = attend.attention_forward(layer(), q, k, v, None, output_attentions=True)
    torch.testing.assert_close((weights @ v).transpose(1, 2), o)
    assert torch.equal(weights.triu(1), torch.zeros_like(weights))


GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "vocab_size": 61}
# They are asked for weights and do not tell their layers.
SILENT = {
    "gpt2": lambda: tr.GPT2Config(**GPT2),
    "opt": lambda: tr.OPTConfig(**SIZES, ffn_dim=40, word_embed_proj_dim=32),
    "gpt-bigcode": lambda: tr.GPTBigCodeConfig(**GPT2),
    "stablelm": lambda: tr.StableLmConfig(**GQA),
    "nemotron": lambda: tr.NemotronConfig(**GQA),
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


def test_scaling_may_be_a_tensor_and_queries_may_be_shared():
    q, k, v = heads(4, 4, B=2)
    o, _ = attend.attention_forward(layer(), q[:1], k, v, None, scaling=torch.tensor(0.5))
    wanted, _ = attend.attention_forward(
        layer(), q[:1].expand(2, -1, -1, -1), k, v, None, scaling=0.5
    )
    torch.testing.assert_close(o, wanted)


def test_bias_and_mask_of_numbers_add_up():
    q, k, v = heads(4, 4)
    bias, more = torch.randn(1, 2, 4, 4), torch.randn(1, 1, 4, 4)
    o, _ = attend.attention_forward(layer(), q, k, v, more, position_bias=bias)
    wanted, _ = attend.attention_forward(layer(), q, k, v, bias + more)
    torch.testing.assert_close(o, wanted)


@pytest.mark.parametrize(
    "way", ["none", "padding", "mask", "bias", "window", "static", "chosen", "chosen of padded"]
)
def test_one_new_token_is_decoded(way, monkeypatch):
    """Decode by the kernels that split the keys; the result is as without them."""
    q, k, v = heads(1, 9, B=2)
    keys = torch.arange(9) >= torch.tensor([[3], [0]])
    chosen = {"indices": torch.tensor([[[2, 5, 8]], [[0, 3, 4]]])}
    given = {
        "none": (None, {}),
        "padding": (attend.attention_mask(2, 1, 9, 8, attention_mask=keys), {}),
        "mask": (keys[:, None, None], {"softcap": 2.0}),
        "bias": (None, {"position_bias": torch.randn(1, 2, 1, 9), "s_aux": torch.ones(2)}),
        "window": (None, {"sliding_window": 4}),
        "static": (attend.attention_mask(2, 1, 9, torch.tensor(5)), {}),
        "chosen": (None, chosen),
        "chosen of padded": (keys, chosen),
    }
    mask, options = given[way]
    decoded = []
    monkeypatch.setattr(
        attend, "decode_attention", lambda *a, **o: decoded.append(o) or decode_attention(*a, **o)
    )
    wanted, _ = attend.attention_forward(layer(), q, k, v, mask, **options)
    assert not decoded
    with torch.no_grad():
        actual, _ = attend.attention_forward(layer(), q, k, v, mask, **options)
    assert len(decoded) == 1 and actual.shape == (2, 1, 2, 8) and actual.is_contiguous()
    torch.testing.assert_close(actual, wanted)


def test_one_new_token_over_other_memory_is_not_decoded(attention_calls):
    q, k, v = heads(1, 9)
    wide = k.transpose(1, 2).contiguous().transpose(1, 2)
    with torch.no_grad():
        attend.attention_forward(layer(), q, wide, v, None)
        attend.attention_forward(layer(), q, k, v, None, dropout=0.5)
    assert len(attention_calls) == 2


def test_what_is_refused():
    q, k, v = heads(4, 4)
    chosen = torch.zeros(1, 1, 4, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="block_indices needs the size of a block"):
        attend.attention_forward(layer(), q, k, v, None, block_indices=chosen)
    with pytest.raises(ValueError, match="both choose keys"):
        attend.attention_forward(layer(), q, k, v, None, block_indices=chosen, indices=chosen[0])
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="batch of 1, got 2"):
        attend.attention_forward(layer(), *heads(4, 4, B=2), None, cu_seq_lens_q=offsets)


@pytest.mark.parametrize("mask", [None, "bool", "numbers"])
def test_keys_that_an_indexer_chose(mask):
    q, k, v = heads(4, 6)
    """-1 is no key: the second query has one, the third has none."""
    chosen = torch.tensor([[[0, 1], [3, -1], [-1, -1], [5, 1]]], dtype=torch.int32)
    seen = torch.arange(6) <= torch.arange(4)[:, None] + 2
    if mask is None:
        given = attend.attention_mask(1, 4, 6, 2)
    else:
        given = seen[None, None] if mask == "bool" else torch.zeros(1, 1, 4, 6)
        given = given if mask == "bool" else given.masked_fill(~seen, torch.finfo(q.dtype).min)
    o, _ = attend.attention_forward(layer(), q, k, v, given, indices=chosen)
    among = torch.zeros(4, 6, dtype=torch.bool)
    for query, keys in enumerate(([0, 1], [3], [], [5, 1])):
        among[query, keys] = True
    both = seen & among
    wanted, _ = attend.attention_forward(layer(), q, k, v, both[None, None])
    torch.testing.assert_close(o, wanted)
    with pytest.raises(RuntimeError, match="out of bounds"):
        attend.attention_forward(layer(), q, k, v, given, indices=chosen + 1)


@pytest.mark.parametrize("way", ["blocks", "blocks, mask", "tokens", "tokens, sinks"])
def test_lists_of_few_keys(way, monkeypatch):
    """Without a tensor of all pairs where the mask is a rule; with -1 in every place."""
    q, k, v = heads(5, 11)
    size, by_lists = 4 if "blocks" in way else 1, []
    module = layer()
    module.config = type("Config", (), {"index_block_size": size})()
    actual = [[1, -1], [-1, -1], [-1, 0], [2, 2], [0, 1]]
    chosen = torch.tensor([[actual]], dtype=torch.int32)
    given = {"block_indices": chosen} if size > 1 else {"indices": chosen[0]}
    if "sinks" in way:
        given["sinks"] = torch.randn(1, 2, 5, 1)
    seen = (torch.arange(11) <= torch.arange(5)[:, None] + 6)[None, None]
    mask = seen if "mask" in way else attend.attention_mask(1, 5, 11, 6)
    selected = attend.selected_attention
    monkeypatch.setattr(
        attend, "selected_attention", lambda *a, **o: by_lists.append(1) or selected(*a, **o)
    )
    o, _ = attend.attention_forward(module, q, k, v, mask, **given)
    assert len(by_lists) == ("mask" not in way)
    among = torch.zeros(5, 11, dtype=torch.bool)
    for query, numbers in enumerate(actual):
        for number in numbers:
            if number >= 0:
                among[query, number * size : (number + 1) * size] = True
    beside = {name: x for name, x in given.items() if name == "sinks"}
    wanted, _ = attend.attention_forward(layer(), q, k, v, seen & among, **beside)
    torch.testing.assert_close(o, wanted)


def test_a_sink_for_each_query():
    q, k, v = heads(4, 4)
    sinks = torch.randn(1, 2, 4, 1, requires_grad=True)
    scores = (q @ k.mT * 8**-0.5).masked_fill(~torch.ones(4, 4).tril().bool(), -torch.inf)
    weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    wanted = (weights @ v).transpose(1, 2)
    o, actual = attend.attention_forward(
        layer(), q, k, v, None, sinks=sinks, output_attentions=True
    )
    torch.testing.assert_close(o, wanted)
    torch.testing.assert_close(actual, weights)
    grad, wanted_grad = (torch.autograd.grad(x.square().sum(), sinks)[0] for x in (o, wanted))
    torch.testing.assert_close(grad, wanted_grad)
    with torch.no_grad():
        one, _ = attend.attention_forward(layer(), q[:, :, 3:], k, v, None, sinks=sinks[:, :, 3:])
    torch.testing.assert_close(one, wanted[:, 3:])
