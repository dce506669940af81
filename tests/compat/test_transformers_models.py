"""Families of transformers that a registered attention function does not reach, or only in part."""

import pytest
import torch
import transformers as tr
from transformers_models import GQA, MIXED, SIZES, VISION, build, compare, padded, tokens

import fastattn
from fastattn.compat.transformers import hf_attention
from fastattn.compat.transformers import models as families

pytestmark = pytest.mark.usefixtures("models_on_torch", "one_thread")

SMALL = {"hidden_size": 32, "vocab_size": 61}
TWO_HALVES = {
    "vocab_size": 61, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
# Each computes attention in code of its own, or has none.
UNSERVED = {
    "bloom": lambda: tr.BloomConfig(**SMALL, n_layer=1, n_head=4),
    "longformer": lambda: tr.LongformerConfig(
        **{**SIZES, "num_hidden_layers": 1}, attention_window=4
    ),
    "mpt": lambda: tr.MptConfig(d_model=32, n_layers=1, n_heads=4, vocab_size=61),
    "falcon": lambda: tr.FalconConfig(**SMALL, num_hidden_layers=1, num_attention_heads=4),
    "fnet": lambda: tr.FNetConfig(**SMALL, num_hidden_layers=1, intermediate_size=40),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_swap_leaves_what_no_registered_function_reaches(swap, name, device):
    model = build(tr.AutoModel, UNSERVED[name](), device)
    before = model.config._attn_implementation
    done = swap(model)
    assert model.config._attn_implementation == before
    assert list(done.unseen) == (["h.0.self_attention"] if name == "falcon" else [])
    reasons = set(done.left.values())
    if name == "fnet":
        assert done.left == {"": "no module of it uses transformers' AttentionInterface"}
    else:
        assert bool(reasons) is (name != "falcon")
        assert all("computes attention by itself" in reason for reason in reasons)
    # A name of a module that is there, below the model.
    assert all(model.get_submodule(path) is not None for path in done.left)


@pytest.mark.parametrize("name", ["bloom", "longformer", "mpt"])
def test_models_that_would_misread_a_mask_are_refused(name, device):
    """Their own code adds to its scores what is registered as a mask."""
    hf_attention.register()
    config = UNSERVED[name]()
    model = tr.AutoModel.from_config(config, attn_implementation="fastattn").to(device)
    with pytest.raises(ValueError, match=f"cannot serve models of {type(config).__name__}: "):
        model(tokens(1, 8, device))


def test_swap_of_a_model_that_is_served_in_part(swap, device):
    config = tr.BigBirdPegasusConfig(**TWO_HALVES, attention_type="original_full")
    model = build(tr.AutoModel, config, device)
    done = swap(torch.nn.ModuleDict({"inner": model}))
    parts = (f"decoder.layers.{i}.{x}_attn" for i in range(2) for x in ("self", "encoder"))
    ways = {f"inner.{part}": 'attn_implementation="fastattn"' for part in parts}
    assert done.unseen == ways and not done.replaced
    assert set(done.left) == {f"inner.encoder.layers.{i}.self_attn" for i in range(2)}
    mask = padded([(0, 6), (0, 9)], 9, device)
    inputs = {"input_ids": tokens(2, 9, device), "attention_mask": mask}
    inputs["decoder_input_ids"] = tokens(2, 5, device)
    model(**inputs)
    assert done.replaced == ways and {calls.served for calls in done.calls.values()} == {0, 1}
    done.undo()
    compare(model, inputs, lambda out: out.last_hidden_state, grads=False)


def test_swap_counts_calls_of_the_registered_function(swap, device):
    """Kosmos 2.5 looks it up as an attribute, which none has. Parts and adapters come first."""
    sizes = {"hidden_size": 32, "patch_embed_hidden_size": 12, "num_attention_heads": 4}
    config = tr.Kosmos2_5VisionConfig(**sizes, head_dim=8, num_hidden_layers=2)
    model = tr.models.kosmos2_5.modeling_kosmos2_5.Kosmos2_5VisionModel._from_config(config)
    done = swap(model.to(device))
    model(torch.ones(1, 4, 14, device=device))
    why = "no call used fastattn: its forward ran without a call to the function registered with"
    assert {x[: len(why)] for x in done.left.values()} == {why} and not done.replaced
    llama = build(tr.AutoModel, tr.LlamaConfig(**GQA), device)
    kind = type(llama.layers[0].self_attn)
    done = swap(llama, adapters={kind: lambda *_, hidden_states, **__: (hidden_states, None)})
    llama(tokens(1, 8, device))
    assert set(done.replaced.values()) == {"its adapter computes its calls"}
    config = tr.Data2VecVisionConfig(**VISION)
    done = swap(tr.AutoModel.from_config(config, attn_implementation="sdpa"))
    assert list(done.unseen) == ["encoder.layer.0.attention.attention"] and not done.left


def test_undo_gives_each_part_its_implementation_back(swap, device):
    text = tr.LlamaConfig(**{**GQA, "num_hidden_layers": 1})
    config = tr.LlavaConfig(vision_config=tr.CLIPVisionConfig(**VISION), text_config=text)
    model = build(tr.AutoModel, config, device)
    model.set_attn_implementation({"": "eager", "vision_config": "sdpa", "text_config": "eager"})

    def each() -> list[str]:
        parts = (model.config, model.config.vision_config, model.config.text_config)
        return [part._attn_implementation for part in parts]

    assert each() == ["eager", "sdpa", "eager"]
    done, again = swap(model), swap(model)
    assert each() == ["fastattn"] * 3
    done.undo()
    again.undo()  # which changed nothing
    assert each() == ["eager", "sdpa", "eager"]


def test_swap_takes_torchs_modules_inside_a_model(swap, device):
    model = build(tr.AutoModel, tr.SiglipVisionConfig(**VISION), device)
    done = swap(model)
    assert done.left == {}
    assert list(done.unseen) == ["encoder.layers.0.self_attn", "head.attention"]
    assert type(model.get_submodule("head.attention")) is fastattn.MultiheadAttention
    done.undo()
    assert type(model.get_submodule("head.attention")) is torch.nn.MultiheadAttention


def test_images_that_see_all_of_themselves_in_a_window(device):
    """Gemma 3 asks for its masks' sizes by keywords."""
    text = tr.Gemma3TextConfig(**GQA, head_dim=8, sliding_window=5, layer_types=MIXED)
    config = tr.Gemma3Config(text_config=text, vision_config=tr.SiglipVisionConfig(**VISION))
    model = build(tr.AutoModelForImageTextToText, config, device)
    mask, images = (padded(x, 12, device) for x in ([(0, 12), (3, 12)], [(4, 8), (3, 11)]))
    inputs = {"input_ids": tokens(2, 12, device), "attention_mask": mask, "token_type_ids": images}
    compare(model, inputs, lambda out: out.logits[mask.bool()])


def test_lengths_that_halve_between_layers(device):
    """Informer's encoder makes one mask for layers of 10 and of 5 steps."""
    sizes = {"input_size": 1, "prediction_length": 3, "context_length": 10, "lags_sequence": [1]}
    parts = {**TWO_HALVES, "decoder_layers": 1, "attention_type": "full"}
    config = tr.InformerConfig(**sizes, **parts, num_time_features=1)
    model = build(tr.AutoModel, config, device)
    inputs = {name: torch.rand(2, n, 1) for name, n in (("past_time", 11), ("future_time", 3))}
    inputs = {f"{name}_features": x.to(device) for name, x in inputs.items()}
    past = torch.rand(2, 11, device=device)
    inputs |= {"past_values": past, "past_observed_mask": torch.ones_like(past)}
    inputs["future_values"] = past[:, :3]
    compare(model, inputs, lambda out: out.last_hidden_state)


def test_qwen3_next_and_its_gated_layer_as_ours(device):
    """The model through the integration, and the weights of its layer in `CausalGQAttention`."""
    config = tr.Qwen3NextConfig(
        **{**GQA, "num_hidden_layers": 1}, head_dim=8, partial_rotary_factor=0.5,
        layer_types=["full_attention"], mlp_only_layers=[0], attention_bias=True,
    )  # fmt: skip
    model = build(tr.AutoModelForCausalLM, config, device)
    theirs = model.model.layers[0].self_attn
    for part in (theirs.q_norm.weight, theirs.k_norm.weight, theirs.q_proj.bias):
        torch.nn.init.normal_(part)
    mask = padded([(0, 9), (3, 9)], 9, device)
    inputs = {"input_ids": tokens(2, 9, device), "attention_mask": mask}
    compare(model, inputs, lambda out: out.logits[mask.bool()])
    names = ("head_dim", "qkv_bias", "out_bias", "rotary", "rotary_dim", "qk_norm", "output_gate")
    chosen = dict(zip(names, (8, True, True, "half", 4, True, "element"), strict=True))
    ours = fastattn.CausalGQAttention(32, 4, 2, **chosen, device=device)
    weights = theirs.state_dict()
    weights |= {n: 1 + x for n, x in weights.items() if "norm" in n}  # they add 1 in the layer
    ours.load_state_dict({n.replace("o_proj", "out_proj"): x for n, x in weights.items()})
    x = torch.randn(2, 9, 32, device=device)
    tables = model.model.rotary_emb(x, torch.arange(9, device=device)[None])
    model.set_attn_implementation("sdpa")
    wanted, _ = theirs(x, position_embeddings=tables, attention_mask=None)
    torch.testing.assert_close(ours(x), wanted)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_config_that_turns_layers_and_not_the_mask(compiled, device):
    text = {**GQA, "num_hidden_layers": 1}
    config = tr.GemmaConfig(**text, head_dim=8, use_bidirectional_attention=True)
    model = build(tr.AutoModel, config, device)
    ids = tokens(1, 8, device)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).last_hidden_state
        model.set_attn_implementation("fastattn")
        run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        actual = run(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(actual, wanted)


def test_modules_whose_config_was_not_changed_are_left(device):
    hf_attention.register()
    model = build(tr.AutoModel, tr.LlamaConfig(**GQA), device)
    why = "its config keeps attn_implementation='eager' on a model that is built"
    left = {f"layers.{i}.self_attn": why for i in range(2)}
    assert families.unserved(model, "fastattn") == (0, left)
    assert families.is_attention(type("JanusVQVAEAttnBlock", (), {}))


def test_configs_without_models_are_known_by_base_and_family():
    class Mine(tr.LlamaConfig):
        pass

    part = tr.models.t5gemma.configuration_t5gemma.T5GemmaModuleConfig
    assert families.takes_rules(Mine) and families.takes_rules(part)
    assert families.takes_rules(getattr(tr, "ExaoneConfig", Mine))  # of Llama's models, in 5.23
    assert not families.takes_rules(tr.PreTrainedConfig)
