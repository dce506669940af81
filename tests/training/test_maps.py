"""The weights of layers and models: equal to what attention does, and as a picture."""

from unittest.mock import patch

import pytest
import torch

from fastattn import CausalGQAttention, MultiheadLatentAttention
from fastattn.cli.main import main
from fastattn.models.encoder import EncoderConfig, MaskedLM, Tagger
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.models.positions import RelativeContent, RelativeTransformerXL
from fastattn.models.seq2seq import Seq2Seq, Seq2SeqConfig
from fastattn.modules.cross_attention import CrossGQAttention
from fastattn.modules.self_attention import GQAttention
from fastattn.modules.weights import (
    cross_attention_weights,
    latent_attention_weights,
    self_attention_weights,
)
from fastattn.training.checkpoint import Checkpoint, Trained, save_checkpoint
from fastattn.training.data.text import DataError
from fastattn.training.maps import attention_maps
from fastattn.training.tasks.kinds import KINDS
from fastattn.training.tokenizers import train_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

TOKENIZER = train_tokenizer("word", "the fox jumps over a lazy dog $ { x")
V = TOKENIZER.vocab_size
SHAPE = {"num_layers": 2, "num_heads": 2, "embed_dim": 16}


def make_model(kind: str, **options) -> Trained:
    torch.manual_seed(0)
    if kind == "seq2seq":
        sizes = {"source_length": 6, "target_length": 4}
        shape = {**SHAPE, **options}
        config = Seq2SeqConfig(source_vocab_size=V, target_vocab_size=V, **sizes, **shape)
        model = Seq2Seq(config)
    elif kind == "gpt":
        config = GPTConfig(vocab_size=V, context_length=6, **SHAPE, **options)
        model = GPT(config)
    else:
        config = EncoderConfig(vocab_size=V, context_length=6, **SHAPE, **options)
        model = MaskedLM(config) if kind == "masked" else Tagger(config, 3)
    # Untrained weights are small, and all scores with them.
    for parameter in model.parameters():
        parameter.data.mul_(8)
    data = {"tags": ["A", "B", "C"], "python": False}
    return Trained(KINDS[kind], model.eval(), config, TOKENIZER, data)


def assert_rows_sum_to_one(weights: torch.Tensor) -> None:
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def values_by_weights(layer, x, weights, v):
    """out_proj(weights @ v), with key/value heads shared."""
    groups = layer.num_heads // layer.num_kv_heads
    return layer.project_output(weights.to(v.dtype) @ v.repeat_interleave(groups, dim=1), x)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False, "rotary": "half", "qk_norm": True, "stride": 2, "softcap": 3.0},
        {"window": 3, "keep_first": 1, "alibi": True, "relative_bias": 4, "sinks": True},
        {"scoring": "multiplicative", "rotary": "interleaved"},
        {"scoring": "additive", "causal": False},
        {"relative": RelativeContent(8, 3)},
        {"relative": RelativeTransformerXL(2, 8, 3)},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_a_self_attention_multiplies_values_by_these_weights(options):
    torch.manual_seed(1)
    layer = GQAttention(16, 2, 1, **options).double().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x, lengths = torch.randn(2, 6, 16).double(), torch.tensor([6, 4])
    weights = self_attention_weights(layer, x, key_lengths=lengths)
    assert weights.shape == (2, 2, 6, 6)
    v = layer.split_heads(layer.v_proj(x))
    expected = layer(x, key_lengths=lengths)
    actual = values_by_weights(layer, x, weights, v)
    torch.testing.assert_close(actual[0], expected[0])
    torch.testing.assert_close(actual[1, :4], expected[1, :4])
    if "sinks" in options:
        assert weights.sum(-1).max() < 1 + 1e-9
        assert weights.sum(-1).min() < 0.9
    else:
        torch.testing.assert_close(weights[0].sum(-1), torch.ones(2, 6).double())
    assert (weights[1, :, :, 4:] == 0).all()


@pytest.mark.parametrize(
    "options", [{"qk_norm": True}, {"scoring": "multiplicative"}, {"scoring": "additive"}]
)
def test_a_cross_attention_multiplies_values_by_these_weights(options):
    torch.manual_seed(1)
    layer = CrossGQAttention(16, 2, 1, memory_dim=8, **options).double().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x, memory = torch.randn(2, 3, 16).double(), torch.randn(2, 5, 8).double()
    padding = {"memory_lengths": torch.tensor([5, 2]), "memory_padding_mask": torch.ones(2, 5) > 0}
    padding["memory_padding_mask"][0, 1] = False
    weights = cross_attention_weights(layer, x, memory, **padding)
    lengths, mask = padding.values()
    projected = layer.project_memory(memory, lengths, padding_mask=mask)
    assert torch.equal(cross_attention_weights(layer, x, projected), weights)
    actual = values_by_weights(layer, x, weights, projected.v)
    torch.testing.assert_close(actual, layer(x, projected))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 3).double())
    assert (weights[1, :, :, 2:] == 0).all()


@pytest.mark.parametrize("options", [{"rope_dim": 0}, {"window": 3, "sinks": True, "softcap": 2.0}])
def test_a_latent_attention_multiplies_values_by_these_weights(options):
    options = {"kv_latent_dim": 8, "nope_dim": 8, "rope_dim": 4, **options}
    layer = MultiheadLatentAttention(16, 2, **options).double().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x, kept = torch.randn(2, 6, 16).double(), {}
    weights = latent_attention_weights(layer, x)
    layer.kv_b_proj.register_forward_hook(lambda _, __, kv: kept.update(kv=kv))
    expected = layer(x)
    v = kept["kv"].unflatten(2, (2, 16)).transpose(1, 2)[..., 8:]
    actual = layer.o_proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(actual, expected)


def test_weights_are_of_the_call_s_own_positions():
    layer = CausalGQAttention(16, 2, rotary="half").eval()
    x = torch.randn(1, 4, 16)
    apart = torch.tensor([0, 5, 6, 20])
    weights = self_attention_weights(layer, x, positions=apart)
    assert not torch.allclose(weights, self_attention_weights(layer, x))
    shifted = self_attention_weights(layer, x, positions=apart + 7)
    torch.testing.assert_close(weights, shifted)


@pytest.mark.parametrize(
    ("kind", "owner", "options"),
    [
        ("gpt", "", {"positions": "rotary"}),
        ("gpt", "", {"positions": "rotary", "kv_latent_dim": 8}),
        ("masked", "encoder.", {}),
        ("tagger", "encoder.", {}),
    ],
)
def test_maps_see_the_past_alone_or_both_sides(kind, owner, options):
    maps = attention_maps(make_model(kind, **options), "the fox jumps")
    assert [one.name for one in maps] == [f"{owner}blocks.{i}.attention" for i in range(2)]
    for one in maps:
        assert one.weights.shape == (2, 3, 3)
        assert_rows_sum_to_one(one.weights)
        seen = torch.ones(3, 3).tril() if kind == "gpt" else torch.ones(3, 3)
        assert torch.equal((one.weights > 0).float(), seen.expand(2, 3, 3))
        assert list(one.queries) == list(one.keys) == ["the", "fox", "jumps"]
    assert not torch.allclose(maps[0].weights, maps[1].weights)


def test_maps_of_an_encoder_decoder_have_three_kinds():
    actual = make_model("seq2seq")
    maps = attention_maps(actual, "the lazy dog", target="a fox")
    names = [f"encoder.blocks.{i}.attention" for i in range(2)]
    names += [f"decoder.blocks.{i}.{part}" for i in range(2) for part in ("attention", "cross")]
    assert [one.name for one in maps] == names
    assert {tuple(one.weights.shape) for one in maps} == {(2, 3, 3)}
    source, written = ["the", "lazy", "dog"], ["[BEGIN]", "a", "fox"]
    sides = [(list(one.queries), list(one.keys)) for one in maps]
    assert sides[0] == (source, source)
    assert sides[2] == (written, written)
    assert sides[3] == (written, source)
    for one in maps:
        assert_rows_sum_to_one(one.weights)
    own = attention_maps(actual, "the lazy dog")
    assert own[2].queries[0] == "[BEGIN]"
    assert len(own[2].queries) <= actual.config.target_length


@pytest.mark.parametrize(
    ("kind", "text", "target", "message"),
    [
        ("gpt", " ", None, "--text has no token"),
        ("gpt", "the fox jumps over a lazy dog", None, "--text has 7 tokens, the model"),
        ("tagger", "the fox jumps over a lazy dog", None, "7 tokens, the model reads at most 6"),
        ("masked", "the", "the", "--target is for an encoder-decoder, not a masked-token model"),
        ("seq2seq", "the", "a fox jumps over", "--target: the target has 5 tokens with its begin"),
        ("seq2seq", "", None, "--text: the source has no token"),
    ],
)
def test_unusable_texts_are_named(kind, text, target, message):
    with pytest.raises(DataError, match=message):
        attention_maps(make_model(kind), text, target=target)


def test_the_command_draws_a_picture(tmp_path, capsys):
    from matplotlib.axes import Axes

    actual = make_model("seq2seq", num_layers=1)
    config = {"kind": "seq2seq", "model": actual.config.to_dict(), "data": {}}
    checkpoint = Checkpoint(1, actual.model.state_dict(), TOKENIZER, config)
    save_checkpoint(tmp_path / "run", checkpoint)
    out = tmp_path / "maps.png"
    # The font lacks the last sign.
    command = ["inspect", "--checkpoint", str(tmp_path / "run"), "--text", "the fox 漢"]
    command += ["--target", "a fox jumps"]
    with patch.object(Axes, "imshow", autospec=True, side_effect=Axes.imshow) as imshow:
        assert main([*command, "--out", str(out), "--device", "cpu"]) == 0
    drawn = [call.args[1].tolist() for call in imshow.call_args_list]
    maps = attention_maps(actual, "the fox 漢", target="a fox jumps")
    assert drawn == [head.tolist() for one in maps for head in one.weights]
    assert out.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"6 heads of 3 layers in {out}\n"
    absent = tmp_path / "absent" / "maps.png"
    assert main([*command, "--out", str(absent), "--device", "cpu"]) == 1
    assert f"cannot write {absent}: No such file or directory" in capsys.readouterr().err
    link = tmp_path / "link.png"
    link.symlink_to(out)
    for theirs in (link, tmp_path / "run" / "step-00000001" / "training.pt"):
        before = theirs.read_bytes()
        assert main([*command, "--out", str(theirs), "--device", "cpu"]) == 1
        assert f"{theirs}: it is there and is no PNG file" in capsys.readouterr().err
        assert theirs.read_bytes() == before
