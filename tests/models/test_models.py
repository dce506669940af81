"""Encoder, tagger, masked model and encoder-decoder: steps against the whole, losses, bad input."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from small_gpt import called, randomised

from fastattn.models.encoder import Encoder, EncoderConfig, MaskedLM, Tagger
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.models.positions import sinusoids
from fastattn.models.seq2seq import Seq2Seq, Seq2SeqConfig
from fastattn.testing import assert_within_budget, worst_naive

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

SIZES = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 16}
V, S, T = 11, 9, 10
LENGTHS = torch.tensor([9, 4])
RELATIVE = {"relative_distance": 3}
# Every scheme of positions, and every other option once.
VARIANTS = {
    "learned-post-relu": {"block": "post", "activation": "relu", "bias": True},
    "sinusoidal-parallel": {"positions": "sinusoidal", "block": "parallel"},
    "rotary-rms-swiglu": {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu"},
    "alibi-geglu-merge": {
        "positions": "alibi", "activation": "geglu", "sparse": "merge", "window": 2, "stride": 3,
    },
    "scalar-alternate": {
        "positions": "scalar", **RELATIVE, "sparse": "alternate", "window": 3, "stride": 2,
        "keep_first": 1,
    },
    "scalar-values": {"positions": "scalar", **RELATIVE, "relative_values": True},
    "content-softcap": {"positions": "content", **RELATIVE, "softcap": 2.0, "sinks": True},
    "content-values-waves": {
        "positions": "content", **RELATIVE, "relative_values": True, "relative_table": "sinusoidal",
    },
    "transformer-xl": {"positions": "transformer_xl", **RELATIVE, "qk_norm": True},
    "transformer-xl-values": {"positions": "transformer_xl", **RELATIVE, "relative_values": True},
    "none-untied": {"positions": "none", "tie_weights": False, "embedding_norm": True},
    "dot": {"positions": "none", "scoring": "dot"},
    "multiplicative-rotary": {"positions": "rotary", "scoring": "multiplicative"},
    "additive": {"scoring": "additive"},
}  # fmt: skip
every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


def make_seq2seq(**options) -> Seq2Seq:
    return randomised(Seq2Seq(Seq2SeqConfig(V, V + 2, S, T, **{**SIZES, **options})))


def make_encoder(kind=MaskedLM, *more, **options):
    return randomised(kind(EncoderConfig(V, S, **{**SIZES, **options}), *more))


@every_variant
@torch.no_grad()
def test_decoder_by_steps_equals_all_positions_at_once(options):
    """The steps by layers without weights, as quantised ones."""
    model = randomised(GPT(GPTConfig(V, T, **{**SIZES, **options})))
    tokens = torch.randint(V, (2, T))
    exact = copy.deepcopy(model).double()(tokens)[0]
    whole = worst_naive(exact, lambda: model(tokens)[0])
    cache = called(model).new_cache(2)
    steps = [model(part, cache=cache)[0] for part in tokens.split([3, 1, 1, 2, 3], dim=1)]
    assert_within_budget("logits", torch.cat(steps, dim=1), exact, whole)


@every_variant
@torch.no_grad()
def test_teacher_forcing_equals_decoding_by_steps(options):
    model = make_seq2seq(**options)
    source, inputs = torch.randint(V, (2, S)), torch.randint(V + 2, (2, T))
    exact, _ = copy.deepcopy(model).double()(source, inputs, source_lengths=LENGTHS)
    whole = worst_naive(exact, lambda: model(source, inputs, source_lengths=LENGTHS)[0])
    memory, cache = called(model).encode(source, LENGTHS), model.new_cache(2)
    steps = [model.decode(token, memory, cache) for token in inputs.split(1, dim=1)]
    assert_within_budget("logits", torch.cat(steps, dim=1), exact, whole)


@every_variant
@torch.no_grad()
def test_rows_of_an_encoder_do_not_depend_on_padding(options):
    model = make_encoder(**options)
    tokens = torch.randint(V, (2, S))
    padded, _ = model(tokens, key_lengths=LENGTHS)
    for row, n in enumerate(LENGTHS.tolist()):
        alone = tokens[row : row + 1, :n]
        exact, _ = copy.deepcopy(model).double()(alone)
        naive = worst_naive(exact, lambda alone=alone: model(alone)[0])
        assert_within_budget(f"row {row}", padded[row, :n], exact[0], naive[0])


@torch.no_grad()
def test_padding_of_sources_and_targets_reaches_nothing():
    model = make_seq2seq()
    source, inputs = torch.randint(V, (2, S)), torch.randint(V + 2, (2, T))
    lengths = {"source_lengths": LENGTHS, "target_lengths": torch.tensor([10, 6])}
    changed = source.clone(), inputs.clone()
    changed[0][1, 4:] = (source[1, 4:] + 1) % V
    changed[1][1, 6:] = (inputs[1, 6:] + 1) % V
    first, second = (model(*pair, **lengths)[0] for pair in ((source, inputs), changed))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1, :6], second[1, :6])


@torch.no_grad()
def test_sinusoids_are_added_to_embeddings_as_large_as_they_are():
    sizes = {**SIZES, "tie_weights": False}
    model = randomised(GPT(GPTConfig(V, T, **sizes, positions="sinusoidal")))
    twin = GPT(GPTConfig(V, T, **sizes))
    table = sinusoids(torch.arange(T), 16)
    twin.load_state_dict({**model.state_dict(), "position_embedding.weight": table})
    twin.token_embedding.weight *= 16**0.5
    tokens = torch.randint(V, (2, T))
    torch.testing.assert_close(model(tokens)[0], twin(tokens)[0])


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "content"])
@torch.no_grad()
def test_ragged_targets_in_a_cache_equal_each_alone(positions):
    model = make_seq2seq(positions=positions, **RELATIVE if positions == "content" else {})
    source, inputs = torch.randint(V, (2, S)), torch.randint(V + 2, (2, 6))
    memory, cache = model.encode(source), model.new_cache(2)
    starts = torch.tensor([5, 3])
    model.decode(inputs[:, :5], memory, cache, key_lengths=starts)
    last = model.decode(inputs.gather(1, starts[:, None]), memory, cache, last_only=True)
    assert last.shape == (2, 1, V + 2)
    for row, n in enumerate(starts.tolist()):
        alone = source[row : row + 1], inputs[row : row + 1, : n + 1]
        exact, _ = copy.deepcopy(model).double()(*alone)
        whole = worst_naive(exact, lambda alone=alone: model(*alone)[0])
        assert_within_budget(f"row {row}", last[row, 0], exact[0, -1], whole[0, -1])


def test_heads_score_tags_and_tokens():
    hidden_of = {"tagger": make_encoder(Tagger, 5), "masked": make_encoder()}
    tokens = torch.randint(V, (2, S))
    for name, model in hidden_of.items():
        hidden = model.encoder(tokens)
        if name == "tagger":
            expected = hidden @ model.head.weight.T + model.head.bias
        else:
            expected = hidden @ model.encoder.token_embedding.weight.T + model.head_bias
        torch.testing.assert_close(model(tokens)[0], expected)
        assert expected.shape == (2, S, 5 if name == "tagger" else V)
    untied = make_encoder(tie_weights=False)
    expected = untied.encoder(tokens) @ untied.head.weight.T + untied.head_bias
    torch.testing.assert_close(untied(tokens)[0], expected)
    for change in (untied.head.register_forward_hook, partial(setattr, untied.head, "forward")):
        change(lambda *_: torch.zeros(2, S, V))
        torch.testing.assert_close(untied(tokens)[0], untied.head_bias.expand(2, S, V))
        untied.head._forward_hooks.clear()


@pytest.mark.parametrize("kind", ["gpt", "tagger", "masked", "seq2seq"])
def test_loss_leaves_out_minus_100_and_is_smoothed_in_training_alone(kind):
    smooth = {**SIZES, "label_smoothing": 0.3}
    tokens = torch.randint(5, (2, S))
    model = randomised(
        {
            "gpt": lambda: GPT(GPTConfig(V, S, **smooth)),
            "tagger": lambda: Tagger(EncoderConfig(V, S, **smooth), 5),
            "masked": lambda: MaskedLM(EncoderConfig(V, S, **smooth)),
            "seq2seq": lambda: Seq2Seq(Seq2SeqConfig(V, V, S, S, **smooth)),
        }[kind]()
    )
    call = (tokens, tokens) if kind == "seq2seq" else (tokens,)
    targets = torch.randint(5, (2, S))
    targets[:, 3:] = -100
    alone, nothing = model(*call)  # of two rows: a pair nevertheless
    logits, loss = model(*call, targets)
    assert nothing is None and torch.equal(alone, logits)
    chosen = logits[:, :3].flatten(0, 1), targets[:, :3].flatten()
    torch.testing.assert_close(loss, F.cross_entropy(*chosen))
    _, smoothed = model.train()(*call, targets)
    torch.testing.assert_close(smoothed, F.cross_entropy(*chosen, label_smoothing=0.3))
    assert abs(smoothed - loss) > 1e-3


def test_shared_embeddings_are_one_parameter():
    sizes = {**SIZES, "positions": "none"}
    shared = Seq2Seq(Seq2SeqConfig(V, V, S, T, **sizes, share_embeddings=True))
    apart = Seq2Seq(Seq2SeqConfig(V, V, S, T, **sizes))
    untied = Seq2Seq(Seq2SeqConfig(V, V, S, T, **sizes, tie_weights=False))
    assert shared.encoder.token_embedding is shared.decoder.token_embedding
    assert apart.num_parameters() - shared.num_parameters() == V * 16
    assert untied.num_parameters() - apart.num_parameters() == V * 16
    assert len(Seq2Seq(Seq2SeqConfig(V, V, **sizes, num_decoder_layers=1)).decoder.blocks) == 1


def test_initial_weights_of_layers_that_write_are_smaller():
    sizes = {"embed_dim": 128, "num_layers": 8, "bias": True}
    sizes |= {"positions": "content", "relative_distance": 160}
    for model, parts in (
        (GPT(GPTConfig(V, **sizes)), 2),
        (Encoder(EncoderConfig(V, **sizes)), 2),
        (Seq2Seq(Seq2SeqConfig(V, V, **sizes)).decoder, 3),
    ):
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                assert torch.equal(parameter, torch.full_like(parameter, name.endswith("weight")))
            elif parameter.numel() > 10000:
                writes = name.endswith(("out_proj.weight", "down_proj.weight"))
                expected = 0.02 / (parts * 8) ** 0.5 if writes else 0.02
                assert abs(parameter.std() / expected - 1) < 0.1, name


@pytest.mark.parametrize("name", ["rotary-rms-swiglu", "transformer-xl-values", "additive"])
def test_autocast_costs_precision_alone(name):
    model = make_seq2seq(**VARIANTS[name])
    source, inputs, targets = torch.randint(V, (3, 2, 6))
    logits, _ = model(source, inputs, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, loss = model(source, inputs, targets)
        memory, cache = model.encode(source), model.new_cache(2)
        assert model.new_cache(2, dtype=torch.half)[0].k.dtype == torch.half
        with torch.no_grad():
            steps = [model.decode(token, memory, cache) for token in inputs.split(1, dim=1)]
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    for x in (got, torch.cat(steps, dim=1)):
        assert (x - logits).norm() < 0.05 * logits.norm()


def test_compiles_to_one_graph():
    options = {"positions": "transformer_xl", **RELATIVE, "relative_values": True}
    model = make_seq2seq(**options, num_layers=1, block="parallel", norm="rmsnorm")
    source, inputs, targets = torch.randint(V, (3, 2, 6))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(source, inputs, targets), model(source, inputs, targets))
