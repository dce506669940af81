"""CausalGQAttention against the same layer written naively in the dtype asked for."""

import copy

import pytest
import torch
from naive_layers import (
    LAYER_CASES,
    TRITON_LAYER_CASES,
    WIDTH,
    assert_checkpointing_changes_nothing,
    assert_layer_equals_naive,
    exact_and_naive,
    make_layer,
)
from torch import nn

import fastattn.modules
from fastattn import CausalGQAttention
from fastattn.rotary import rotary_tables
from fastattn.testing import assert_within_budget


@pytest.mark.parametrize("kwargs", LAYER_CASES.values(), ids=LAYER_CASES)
def test_output_and_gradients_equal_the_naive_layer(kwargs, device):
    assert_layer_equals_naive(
        make_layer(device, **kwargs), torch.randn(2, 13, WIDTH, device=device)
    )


@pytest.mark.parametrize("kwargs", TRITON_LAYER_CASES.values(), ids=TRITON_LAYER_CASES)
def test_triton_output_and_gradients_equal_the_naive_layer(kwargs, device):
    layer = make_layer(device, backend="triton", **kwargs)
    lengths = torch.tensor([19, 7], device=device)
    assert_layer_equals_naive(layer, torch.randn(2, 19, WIDTH, device=device), key_lengths=lengths)


@pytest.mark.parametrize("kwargs", LAYER_CASES.values(), ids=LAYER_CASES)
def test_padding_equals_the_naive_layer(kwargs, device):
    x = torch.randn(3, 9, WIDTH, device=device)
    mask = torch.rand(3, 9, device=device) < 0.6
    mask[0] = False
    assert_layer_equals_naive(make_layer(device, **kwargs), x, key_padding_mask=mask)
    lengths = torch.tensor([9, 0, 4], device=device)
    assert_layer_equals_naive(make_layer(device, **kwargs), x, key_lengths=lengths)


def test_nan_in_padding_reaches_no_real_token(device):
    layer = make_layer(device, num_heads=4, num_kv_heads=2, rotary="half")
    x = torch.randn(2, 8, WIDTH, device=device)
    real = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1], [1, 1, 1, 0, 0, 0, 0, 0]], device=device).bool()
    poisoned = x.masked_fill(~real[..., None], torch.nan)
    y = layer(poisoned, key_padding_mask=real)
    assert torch.equal(y[real], layer(x, key_padding_mask=real)[real])
    lengths = torch.tensor([8, 3], device=device)
    x[0], poisoned[0] = 1.0, 1.0
    y = layer(poisoned, key_lengths=lengths)
    assert y[0].isfinite().all()
    assert torch.equal(y[1, :3], layer(x, key_lengths=lengths)[1, :3])


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("per_row", [False, True])
@torch.no_grad()
def test_positions_and_tables_move_the_rotation(style, per_row, device):
    layer = make_layer(device, num_heads=2, rotary=style)
    x = torch.randn(2, 6, WIDTH, device=device)
    positions = torch.tensor([0, 2, 3, 9, 10, 50], device=device)
    positions = torch.stack((positions, positions.flip(0))) if per_row else positions
    y = layer(x, positions=positions)
    assert_within_budget("output", y, *exact_and_naive(layer, x, positions=positions))
    assert (y - layer(x)).abs().max() > 1e-3
    tables = rotary_tables(positions, layer.rotary_dim)
    assert torch.equal(layer(x, rotary_tables=tables), y)
    freqs_cis = torch.complex(*tables)
    assert torch.equal(layer(x, rotary_tables=freqs_cis), y)
    cache = layer.new_cache(batch_size=2, max_length=6)
    steps = [
        layer(x[:, t : t + 1], rotary_tables=freqs_cis[..., t : t + 1, :], cache=cache)
        for t in range(6)
    ]
    assert_within_budget(
        "steps", torch.cat(steps, 1), *exact_and_naive(layer, x, positions=positions)
    )


def test_attention_gets_views_and_shared_heads(monkeypatch, device):
    calls = []

    def recording(q, k, v, **kwargs):
        calls.append((q, k, v, kwargs))
        return attention(q, k, v, **kwargs)

    attention = fastattn.modules.self_attention.attention
    monkeypatch.setattr(fastattn.modules.self_attention, "attention", recording)
    layer = make_layer(device, num_heads=4, num_kv_heads=2)
    x = torch.randn(2, 5, WIDTH, device=device)
    layer(x)
    q, k, v, _ = calls.pop()
    assert [heads.shape[1] for heads in (q, k, v)] == [4, 2, 2]
    for heads in (q, k, v):  # as they were projected
        assert heads.untyped_storage().nbytes() == heads.nbytes
        assert heads.transpose(1, 2).is_contiguous()

    # Steps of so many tokens that decode_attention is not asked.
    x = torch.randn(2, 40, WIDTH, device=device)
    cache = layer.new_cache(2, 120)
    with torch.no_grad():
        layer(x, cache=cache)
        layer(x[:, :35], cache=cache)
        _, k, v, kwargs = calls[-1]
        assert kwargs["key_lengths"] is None and kwargs["query_offset"] is None
        assert k.shape[2] == v.shape[2] == 75
        assert (k.data_ptr(), v.data_ptr()) == (cache.k.data_ptr(), cache.v.data_ptr())
        layer(x, cache=cache, key_lengths=torch.tensor([1, 40], device=device))
    _, k, _, kwargs = calls[-1]
    assert kwargs["key_lengths"].tolist() == [76, 115]
    assert kwargs["query_offset"].tolist() == [75, 75]
    assert k.shape[2] == 115


# "half" is compiled below, with the kernels.
@pytest.mark.parametrize("rotary", [None, "interleaved"])
def test_compiles_without_a_graph_break(rotary):
    layer = make_layer(num_heads=4, num_kv_heads=2, rotary=rotary, window=4)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    lengths = torch.tensor([7, 3])
    for T in (7, 9):
        x = torch.randn(2, T, WIDTH, requires_grad=True)
        results = []
        for forward in (compiled, layer):
            y = forward(x, key_lengths=lengths)
            results.append([y, *torch.autograd.grad(y.sum(), [x, *layer.parameters()])])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected)


def test_triton_compiles_without_a_graph_break(device):
    layer = make_layer(device, backend="triton", num_heads=2, num_kv_heads=1, rotary="half")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 9, WIDTH, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(compiled(x).sum(), x)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(compiled(x), layer(x))
    torch.testing.assert_close(grad, expected)


def test_checkpoint_recomputes_the_same_gradients(device):
    layer = make_layer(device, num_heads=4, num_kv_heads=2, rotary="half", dropout=0.3)
    x = torch.randn(2, 7, WIDTH, device=device, requires_grad=True)
    assert_checkpointing_changes_nothing(layer, x)


def test_autocast_computes_and_caches_in_its_dtype(device):
    layer = make_layer(device, num_heads=4, num_kv_heads=2, rotary="half")
    rounded = copy.deepcopy(layer).bfloat16()
    x = torch.randn(2, 9, WIDTH, device=device).bfloat16()
    ref, naive = exact_and_naive(rounded, x)
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
        y = layer(x.float())
        cache = layer.new_cache(2, 9)
        steps = [layer(part, cache=cache) for part in x.float().split([5, 4], dim=1)]
        wide = layer.new_cache(2, 9, dtype=torch.float32)
        with pytest.raises(ValueError, match="k must have the cache's dtype"):
            layer(x.float(), cache=wide)
    assert y.dtype == cache.k.dtype == torch.bfloat16
    assert_within_budget("output", y, ref, naive)
    assert_within_budget("output", torch.cat(steps, dim=1), ref, naive)


@torch.no_grad()
def test_dtype_moves_with_the_module(device):
    layer = make_layer(device, num_heads=4, rotary="interleaved", qkv_bias=True).to(torch.bfloat16)
    x = torch.randn(2, 9, WIDTH, device=device).bfloat16()
    y = layer(x)
    assert y.dtype == layer.new_cache(1, 4).k.dtype == torch.bfloat16
    assert_within_budget("output", y, *exact_and_naive(layer, x))


def test_parameters_start_as_those_of_linear_layers():
    layer = make_layer(num_heads=4, num_kv_heads=2, qkv_bias=True, out_bias=True)
    torch.manual_seed(0)
    rows = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "out_proj": WIDTH}
    twins = {name: nn.Linear(WIDTH, count) for name, count in rows.items()}
    expected = {
        f"{name}.{part}": value
        for name, twin in twins.items()
        for part, value in twin.state_dict().items()
    }
    assert layer.state_dict().keys() == expected.keys()
    for name, value in layer.state_dict().items():
        assert torch.equal(value, expected[name])


def test_meta_layer_computes_shapes():
    layer = CausalGQAttention(WIDTH, 4, rotary="half", backend="torch", device="meta")
    assert layer(torch.randn(2, 5, WIDTH, device="meta")).shape == (2, 5, WIDTH)
    assert layer.new_cache(1, 3).k.device.type == "meta"


def test_meta_layer_is_materialised_by_a_state_dict_and_copies_are_independent():
    layer = make_layer(num_heads=4, rotary="half")
    x = torch.randn(2, 5, WIDTH)
    empty = CausalGQAttention(WIDTH, 4, rotary="half", backend="torch", device="meta")
    empty.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(empty(x), layer(x))
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.out_proj.weight.zero_()
    assert torch.equal(empty(x), layer(x))
    assert not twin(x).any()


def test_dropout_acts_on_the_output_in_training_alone():
    layer = make_layer(num_heads=4, dropout=0.5)
    x = torch.randn(2, 50, WIDTH)
    plain = layer.eval()(x)
    assert torch.equal(plain, make_layer(num_heads=4)(x))
    dropped = layer.train()(x)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * plain[kept])
    assert 0.4 < kept.float().mean() < 0.6


def test_repr_names_what_was_chosen():
    layer = CausalGQAttention(
        WIDTH, 4, 2, window=8, rotary="half", rotary_dim=4, dropout=0.1, scale=2
    )
    assert layer.extra_repr() == (
        "embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, rotary='half', "
        "rotary_base=10000, rotary_dim=4, window=8, dropout=0.1, scale=2"
    )
    layer = CausalGQAttention(WIDTH, 4, backend="torch")
    assert layer.extra_repr() == (
        "embed_dim=32, num_heads=4, num_kv_heads=4, head_dim=8, backend='torch'"
    )


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"embed_dim": 0}, r"embed_dim must be >= 1, got 0"),
        ({"num_heads": 0}, r"num_heads must be >= 1, got 0"),
        ({"num_kv_heads": 0}, r"num_kv_heads must be >= 1, got 0"),
        ({"head_dim": -2}, r"head_dim must be >= 1, got -2"),
        ({"num_kv_heads": 3}, r"num_kv_heads must divide num_heads = 4, got 3"),
        ({"num_heads": 5}, r"num_heads must divide embed_dim = 32 unless head_dim is given, got 5"),
        ({"window": 0}, r"window .* at least 1, got 0"),
        ({"rotary": "neox"}, r"rotary style must be 'half' or 'interleaved', got 'neox'"),
        ({"rotary": "half", "rotary_dim": 3}, r"rotary_dim must be even and positive, got 3"),
        ({"rotary": "half", "rotary_dim": 10}, r"rotary_dim must be at most head_dim = 8, got 10"),
        ({"rotary": "half", "head_dim": 7}, r"rotary_dim must be even and positive, got 7"),
        ({"rotary": "half", "rotary_base": 0.0}, r"rotary_base must be > 0, got 0.0"),
        ({"rotary_dim": 4}, r"rotary_dim needs rotary='half' or 'interleaved', got 4"),
        ({"dropout": 1.5}, r"dropout must be a probability, got 1.5"),
        ({"scale": 0.0}, r"scale must be positive and finite, got 0.0"),
        ({"backend": "cudnn"}, r"backend must be one of .*, got 'cudnn'"),
    ],
)
def test_constructor_errors(kwargs, match):
    with pytest.raises(ValueError, match=match):
        CausalGQAttention(**{"embed_dim": WIDTH, "num_heads": 4, **kwargs})


def test_forward_errors():
    layer = make_layer(num_heads=4, rotary="half")
    x = torch.randn(2, 5, WIDTH)
    tables = rotary_tables(5, 8)
    with pytest.raises(ValueError, match=r"x must have shape \[B, T, 32\], got \(2, 5, 31\)"):
        layer(x[..., :31])
    with pytest.raises(ValueError, match=r"x must have shape \[B, T, 32\], got \(5, 32\)"):
        layer(x[0])
    for given, got in ((x.tolist(), "list"), (x.int(), r"torch\.int32")):
        with pytest.raises(TypeError, match=f"x must be a float tensor, got {got}"):
            layer(given)
    with torch.no_grad(), pytest.raises(TypeError, match=r"cache must be a KVCache, .* got list"):
        layer(x, cache=[])
    with pytest.raises(ValueError, match=r"positions or rotary_tables, not both"):
        layer(x, positions=torch.arange(5), rotary_tables=tables)
    with pytest.raises(ValueError, match=r"positions must have shape \[5\] or \[2, 5\] .* \(4,\)"):
        layer(x, positions=torch.arange(4))
    with pytest.raises(TypeError, match=r"positions must be a torch\.Tensor, got list"):
        layer(x, positions=[0, 1, 2, 3, 4])
    with pytest.raises(TypeError, match=r"positions must have an integer dtype"):
        layer(x, positions=torch.arange(5.0))
    with pytest.raises(ValueError, match=r"rotary_tables must have 4 columns .* = 8, got 2"):
        layer(x, rotary_tables=rotary_tables(5, 4))
    with pytest.raises(ValueError, match=r"rotary_tables must have 4 columns .* = 8, got 0"):
        layer(x, rotary_tables=(torch.tensor(1.0), torch.tensor(1.0)))
    for given in ((torch.complex(*tables), torch.complex(*tables)), (tables[0].int(), tables[1])):
        with pytest.raises(
            TypeError, match=r"cos must have a floating dtype, got torch\.(co|int32)"
        ):
            layer(x, rotary_tables=given)
    for given, got in ((tables[0], r"torch\.float32"), (list(tables), "list")):
        with pytest.raises(TypeError, match=rf"rotary_tables must be \(cos, sin\), .* got {got}"):
            layer(x, rotary_tables=given)
    with pytest.raises(ValueError, match=r"cos and sin must have shape \[5, R // 2\]"):
        layer(x, rotary_tables=rotary_tables(6, 8))
    with pytest.raises(TypeError, match=r"key_padding_mask must be a bool tensor"):
        layer(x, key_padding_mask=torch.ones(2, 5))
    plain = make_layer(num_heads=4)
    for kwargs in ({"positions": torch.arange(5)}, {"rotary_tables": tables}):
        (name,) = kwargs
        with pytest.raises(ValueError, match=f"{name} needs a layer with rotary="):
            plain(x, **kwargs)
