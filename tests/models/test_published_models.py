"""Tiny random models of transformers, their weights copied into ours: the same numbers come out."""

import copy

import pytest
import torch
import transformers as tr
from small_gpt import randomised
from torch import Tensor, nn

from fastattn.models.encoder import Encoder, EncoderConfig
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.testing import assert_within_budget, worst_naive

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

V, C, H, L, HIDDEN = 37, 16, 4, 2, 24
SHARED = {"num_layers": L, "num_heads": H, "embed_dim": C, "hidden_dim": HIDDEN}
THEIRS = {
    "vocab_size": V, "hidden_size": C, "num_hidden_layers": L, "num_attention_heads": H,
    "intermediate_size": HIDDEN, "max_position_embeddings": 12, "attn_implementation": "eager",
}  # fmt: skip


def put(ours: nn.Module, theirs: nn.Module) -> None:
    """Copy a module's weight, and bias if it has one."""
    ours.load_state_dict({name: theirs.state_dict()[name] for name in ours.state_dict()})


def put_parts(block: nn.Module, layer: nn.Module, **names: str) -> None:
    """Copy the parts of a layer into fastattn's, named by their last name here."""
    parts_by_name = {name.rpartition(".")[2]: part for name, part in block.named_modules()}
    for ours, theirs in names.items():
        put(parts_by_name[ours], layer.get_submodule(theirs))


def assert_same(ours: nn.Module, theirs: nn.Module, call, their_call, real=slice(None)) -> None:
    """ours and theirs within the budget, theirs in fp64 being the reference; at real places."""
    with torch.no_grad():
        exact = their_call(copy.deepcopy(theirs).double())
        naive = worst_naive(exact, lambda: their_call(theirs))
        assert_within_budget("output", call(ours)[real], exact[real], naive[real])


def test_bert():
    theirs = randomised(tr.BertModel(tr.BertConfig(**THEIRS), add_pooling_layer=False))
    preset = EncoderConfig.preset("bert-base", vocab_size=V, context_length=12, **SHARED)
    ours = randomised(Encoder(preset))
    put(ours.token_embedding, theirs.embeddings.word_embeddings)
    put(ours.position_embedding, theirs.embeddings.position_embeddings)
    # Every token is of the first segment.
    ours.position_embedding.weight.data += theirs.embeddings.token_type_embeddings.weight.data[0]
    put(ours.embedding_norm, theirs.embeddings.LayerNorm)
    qkv = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
    names = {name: f"attention.self.{part}" for name, part in qkv.items()}
    names |= {"out_proj": "attention.output.dense", "attention_norm": "attention.output.LayerNorm"}
    names |= {"up_proj": "intermediate.dense", "down_proj": "output.dense"}
    for block, layer in zip(ours.blocks, theirs.encoder.layer, strict=True):
        put_parts(block, layer, **names, mlp_norm="output.LayerNorm")
    tokens, lengths = torch.randint(V, (2, 9)), torch.tensor([9, 5])
    real = torch.arange(9) < lengths[:, None]

    def their_call(model: nn.Module) -> Tensor:
        return model(tokens, attention_mask=real.long()).last_hidden_state

    assert_same(ours, theirs, lambda model: model(tokens, key_lengths=lengths), their_call, real)


def test_llama():
    config = tr.LlamaConfig(**THEIRS, num_key_value_heads=2, rms_norm_eps=0.1)
    theirs = randomised(tr.LlamaForCausalLM(config))
    sizes = {**SHARED, "num_kv_heads": 2, "norm_eps": 0.1}
    ours = randomised(GPT(GPTConfig.preset("tinyllama", vocab_size=V, context_length=12, **sizes)))
    put(ours.token_embedding, theirs.model.embed_tokens)
    put(ours.head, theirs.lm_head)
    put(ours.norm, theirs.model.norm)
    projections = {f"{name}_proj": f"self_attn.{name}_proj" for name in "qkv"}
    mlp = {f"{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    for block, layer in zip(ours.blocks, theirs.model.layers, strict=True):
        put_parts(block, layer, **projections, **mlp, **norms, out_proj="self_attn.o_proj")
    tokens = torch.randint(V, (2, 12))
    assert_same(ours, theirs, lambda model: model(tokens)[0], lambda model: model(tokens).logits)


def test_t5_bias_is_a_layer_of_ours():
    """T5's self-attention: buckets of distances both ways, scores that are not scaled."""
    from transformers.models.t5.modeling_t5 import T5Attention

    from fastattn import GQAttention

    config = tr.T5Config(
        d_model=C,
        num_heads=H,
        d_kv=C // H,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        dropout_rate=0.0,
        attn_implementation="eager",
    )
    theirs = randomised(T5Attention(config, has_relative_attention_bias=True, layer_idx=0))
    ours = GQAttention(C, H, causal=False, relative_bias=8, relative_max_distance=20, scale=1.0)
    put_parts(ours, theirs, q_proj="q", k_proj="k", v_proj="v", out_proj="o")
    ours.relative_bias.data = theirs.relative_attention_bias.weight.data.clone()
    x = torch.randn(2, 40, C)
    assert_same(ours, theirs, lambda of: of(x), lambda of: of(x.to(of.q.weight.dtype))[0])
