"""Relative schemes and sinusoids: against their formulas written over every pair of tokens."""

import copy

import pytest
import torch
from torch import Tensor

from fastattn import GQAttention, KVCache, PagedKVCache
from fastattn.generation.paged import layers_of
from fastattn.models.positions import (
    DistanceVectors,
    LearnedPositions,
    RelativeContent,
    RelativeScalar,
    RelativeTransformerXL,
    SinusoidalPositions,
    sinusoids,
)
from fastattn.testing import assert_within_budget, worst_naive

pytestmark = pytest.mark.usefixtures("one_thread")

C, H_q, H_k, D, R = 32, 4, 2, 8, 3
SCHEMES = {
    "scalar": lambda **values: RelativeScalar(H_q, R, **values),
    "content": lambda **values: RelativeContent(D, R, **values),
    "content-of-kv-heads-waves": lambda **values: RelativeContent(
        D, R, num_heads=H_k, table="sinusoidal", **values
    ),
    "transformer-xl": lambda **values: RelativeTransformerXL(H_q, D, R, **values),
    "transformer-xl-trained": lambda **values: RelativeTransformerXL(
        H_q, D, R, table="trained", **values
    ),
}


def make_layer(
    scheme: str, *, values: bool = False, backend: str = "torch", device="cpu", **options
) -> GQAttention:
    """A layer of width C whose every parameter matters."""
    relative = SCHEMES[scheme](value_dim=D if values else None)
    layer = GQAttention(C, H_q, H_k, relative=relative, backend=backend, **options)
    for parameter in layer.relative.parameters():
        torch.nn.init.normal_(parameter)
    return layer.to(device)


def for_heads(vectors: Tensor) -> Tensor:
    """[H, ...] to [H_q, ...]."""
    return vectors.repeat_interleave(H_q // len(vectors), dim=0)


def naive(layer: GQAttention, x: Tensor, key_lengths: Tensor | None = None) -> Tensor:
    """The formulas of `fastattn.models.positions`, with a vector for each pair of tokens."""
    B, T, _ = x.shape
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    q, k, v = ((x @ proj.weight.T).view(B, T, -1, D).transpose(1, 2) for proj in projections)
    k, v = (heads.repeat_interleave(H_q // H_k, dim=1) for heads in (k, v))
    i, j = torch.arange(T, device=x.device)[:, None], torch.arange(T, device=x.device)
    index = (i - j).clamp(-R, R) + R
    scheme = layer.relative
    scores = q @ k.mT  # (a)
    if isinstance(scheme, RelativeTransformerXL):
        pairs = for_heads(scheme.keys())[:, index]  # [H_q, T, T, D]
        scores = scores + torch.einsum("bhid,hijd->bhij", q, pairs)  # (b)
        scores = scores + torch.einsum("hd,bhjd->bhj", scheme.u, k)[:, :, None]  # (c)
        scores = scores + torch.einsum("hd,hijd->hij", scheme.v, pairs)  # (d)
    elif isinstance(scheme, RelativeContent):
        pairs = for_heads(scheme.keys())[:, index]
        scores = torch.einsum("bhid,bhijd->bhij", q, k[:, :, None] + pairs)
    scores = scores * D**-0.5
    if isinstance(scheme, RelativeScalar):
        scores = scores + scheme.bias[:, index]
    seen = (j <= i) if layer.causal else torch.ones(T, T, dtype=torch.bool, device=x.device)
    seen = seen.expand(B, 1, T, T)
    if key_lengths is not None:
        seen = seen & (j < key_lengths[:, None, None, None])
    weights = scores.masked_fill(~seen, -1e300 if x.dtype == torch.float64 else -1e30).softmax(-1)
    weights = weights.masked_fill(~seen, 0)
    summands = v[:, :, None]
    if scheme.values is not None:
        summands = summands + scheme.values()[:, index]
    out = torch.einsum("bhij,bhijd->bihd", weights, summands.expand(B, H_q, T, T, D))
    return out.flatten(2) @ layer.out_proj.weight.T


def results(forward, layer: GQAttention, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of x and of every parameter."""
    x = x.detach().requires_grad_()
    y = forward(layer, x)
    upstream = torch.arange(y.numel(), device=y.device).view_as(y).to(y.dtype).cos()
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], upstream)]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both-ways"])
@pytest.mark.parametrize("values", [False, True], ids=["", "values"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_layer_and_gradients_equal_the_formula(scheme, values, causal):
    layer = make_layer(scheme, values=values, causal=causal)
    x, lengths = torch.randn(2, 10, C), torch.tensor([10, 6])

    def ours(layer, x):
        return layer(x, key_lengths=lengths)

    def formula(layer, x):
        return naive(layer, x, lengths)

    got = results(ours, layer, x)
    exact = results(formula, copy.deepcopy(layer).double(), x.double())
    plain = worst_naive(exact, lambda: results(formula, layer, x))
    names = ["output", "x", *(name for name, _ in layer.named_parameters())]
    for name, *triple in zip(names, got, exact, plain, strict=True):
        assert_within_budget(name, *triple)


@pytest.mark.parametrize("scheme", ["scalar", "transformer-xl"])
def test_kernels_equal_the_formula(scheme, device):
    layer = make_layer(scheme, values=True, causal=False, backend="triton", device=device)
    x = torch.randn(1, 7, C, device=device)
    with torch.no_grad():
        exact = naive(copy.deepcopy(layer).double(), x.double())
        plain = worst_naive(exact, lambda: naive(layer, x))
        assert_within_budget("output", layer(x), exact, plain)


@pytest.mark.parametrize("values", [False, True], ids=["", "values"])
@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_cached_steps_equal_the_formula(scheme, values):
    layer = make_layer(scheme, values=values)
    x = torch.randn(2, 9, C)
    exact = naive(copy.deepcopy(layer).double(), x.double())
    plain = worst_naive(exact, lambda: naive(layer, x))
    cache = layer.new_cache(2, 12)
    steps = [layer(part, cache=cache) for part in x.split([4, 1, 1, 3], dim=1)]
    assert_within_budget("steps", torch.cat(steps, dim=1), exact, plain)
    # Row 1 is padded by two, and goes on behind its own third token.
    cache = layer.new_cache(2, 12)
    first = layer(x[:, :5], cache=cache, key_lengths=torch.tensor([5, 3]))
    second = layer(torch.stack((x[0, 5:7], x[1, 3:5])), cache=cache)
    assert_within_budget("row 0", torch.cat((first[0], second[0])), exact[0, :7], plain[0, :7])
    assert_within_budget("row 1", torch.cat((first[1, :3], second[1])), exact[1, :5], plain[1, :5])


@torch.no_grad()
def test_pages_serve_relative_keys():
    layer = make_layer("transformer-xl", values=True)
    pages = PagedKVCache(10, 3, H_k, D)
    rows = [pages.allocate(), pages.allocate()]
    x = torch.randn(2, 7, C)
    steps = []
    for part in x.split([3, 1, 2, 1], dim=1):
        (cache,) = layers_of(pages, rows)
        steps.append(layer(part, cache=cache))
    exact = naive(copy.deepcopy(layer).double(), x.double())
    plain = worst_naive(exact, lambda: naive(layer, x))
    assert_within_budget("steps", torch.cat(steps, dim=1), exact, plain)


@torch.no_grad()
def test_codes_are_not_read_in_order():
    layer = make_layer("content")
    codes = KVCache(1, H_k, 9, D, quantize="int8")
    with pytest.raises(ValueError, match=r"without .* relative terms on keys or"):
        layer(torch.randn(1, 2, C), cache=codes)
    assert codes.length_bound == 0
    # A bias is what the decode kernels take.
    assert make_layer("scalar")(torch.randn(1, 2, C), cache=codes).isfinite().all()


def test_padding_on_the_left_has_no_part_in_the_values():
    layer = make_layer("content", values=True, causal=False)
    x = torch.randn(1, 9, C)
    mask = torch.arange(9)[None] >= 4
    exact = naive(copy.deepcopy(layer).double(), x[:, 4:].double())
    poisoned = x.clone()
    poisoned[:, :4] = torch.nan
    got = layer(poisoned, key_padding_mask=mask)[:, 4:]
    plain = worst_naive(exact, lambda: naive(layer, x[:, 4:]))
    assert_within_budget("output", got, exact, plain)


def test_a_row_that_sees_nothing_gets_no_values():
    layer = make_layer("scalar", values=True, causal=False)
    x = torch.randn(2, 5, C, requires_grad=True)
    y = layer(x, key_lengths=torch.tensor([5, 0]))
    assert not y[1].any()
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_values_under_autocast_keep_their_weights():
    """Weights that do not come to 1 would show as a part of the vectors, which are one here."""
    layer = make_layer("transformer-xl", values=True, causal=False)
    with torch.no_grad():
        layer.relative.values.proj.weight.zero_()
    layer.relative.values.forward = lambda: torch.full((1, 2 * R + 1, D), 1000.0)
    layer.v_proj.weight.data.zero_()
    layer.out_proj.weight.data = torch.eye(C)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(torch.randn(2, 40, C))
    torch.testing.assert_close(y.float(), torch.full_like(y, 1000.0).float(), rtol=2**-8, atol=0)


def test_a_far_distance_is_the_last_one():
    scheme = RelativeScalar(H_q, 2)
    with torch.no_grad():
        scheme.bias[:, 4] = -100.0  # two and more behind
    layer = GQAttention(C, H_q, relative=scheme, backend="torch")
    x = torch.randn(1, 8, C)
    near = GQAttention(C, H_q, window=2, backend="torch")
    near.load_state_dict(layer.state_dict(), strict=False)
    torch.testing.assert_close(layer(x), near(x))


def test_sinusoids_are_those_of_the_paper():
    p = sinusoids(torch.tensor([0, 1, 70000]), 6)
    for row, t in enumerate((0, 1, 70000)):
        for c in range(3):
            angle = torch.tensor(t / 10000 ** (2 * c / 6), dtype=torch.float64)
            torch.testing.assert_close(p[row, 2 * c].double(), angle.sin(), rtol=0, atol=1e-6)
            torch.testing.assert_close(p[row, 2 * c + 1].double(), angle.cos(), rtol=0, atol=1e-6)


def test_sinusoids_of_positions_multiply_to_a_number_of_their_distance():
    p = sinusoids(torch.arange(5000), 32).double()
    w = 10000.0 ** (-2 * torch.arange(16, dtype=torch.float64) / 32)
    for k in (0, 1, 7, 1000):
        products = (p[: 5000 - k] * p[k:]).sum(-1)
        expected = (w * k).cos().sum()
        assert (products - expected).abs().max() < 1e-5


def test_fixed_positions_go_on_past_any_length():
    positions = SinusoidalPositions(8)
    far = positions.at(4096, 3, torch.device("cpu"))
    assert torch.equal(far, sinusoids(torch.tensor([4096, 4097, 4098]), 8))
    rows = positions.at(torch.tensor([2, 5]), 3, torch.device("cpu"))
    assert torch.equal(rows[1], positions.at(5, 3, torch.device("cpu")))
    assert rows.shape == (2, 3, 8)


def test_learned_positions_of_rows_that_begin_anywhere():
    positions = LearnedPositions(6, 4)
    rows = positions.at(torch.tensor([0, 4]), 3, torch.device("cpu"))
    assert torch.equal(rows[0], positions.weight[:3])
    assert torch.equal(rows[1], positions.weight[[4, 5, 5]])
    assert torch.equal(positions.at(2, 3, torch.device("cpu")), positions.weight[2:5])


def test_vectors_of_distances_are_projected_sinusoids():
    vectors = DistanceVectors(2, 5, 3, "sinusoidal")
    waves = sinusoids(torch.arange(-3, 4), 10)
    expected = [waves @ vectors.proj.weight[rows].T for rows in (range(5), range(5, 10))]
    torch.testing.assert_close(vectors(), torch.stack(expected))
    odd = DistanceVectors(1, 5, 3, "sinusoidal")
    assert odd.proj.weight.shape == (5, 6)
    assert odd().shape == (1, 7, 5)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: sinusoids(torch.arange(3), 5), ValueError, "width must be even, .* got 5"),
        (lambda: sinusoids(torch.arange(3), 0), ValueError, "width must be at least 2, got 0"),
        (lambda: RelativeScalar(2, 0), ValueError, "max_distance must be at least 1, got 0"),
        (lambda: DistanceVectors(2, 4, 0), ValueError, "max_distance must be at least 1, got 0"),
        (lambda: RelativeContent(4, 2, table="fixed"), ValueError, "table must be 'trained' or"),
        (lambda: GQAttention(C, 4, relative=3), TypeError, "relative must be a module .* got int"),
        (
            lambda: GQAttention(C, 4, relative=RelativeScalar(4, 2), relative_bias=4),
            ValueError,
            "give relative or relative_bias, not both, got 4 buckets",
        ),
    ],
)
def test_wrong_arguments_are_named(make, error, match):
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize(
    "option",
    [
        {"window": 4},
        {"stride": 2},
        {"alibi": True},
        {"softcap": 2.0},
        {"sinks": True},
        {"attention_dropout": 0.1},
    ],
    ids=lambda option: next(iter(option)),
)
def test_what_terms_on_the_values_exclude_is_named(option):
    (name,) = option
    with pytest.raises(ValueError, match=f"{name} cannot go with relative terms on the values"):
        make_layer("scalar", values=True, **option)
    make_layer("scalar", **option)


def test_groups_of_tokens_exclude_terms_on_the_values():
    layer, x = make_layer("scalar", values=True), torch.randn(1, 4, C)
    with pytest.raises(ValueError, match="prefix_lengths cannot go with relative terms"):
        layer(x, prefix_lengths=2)
    with pytest.raises(ValueError, match="documents cannot go with relative terms"):
        layer(x, documents=torch.zeros(1, 4, dtype=torch.int32))


def test_sinusoidal_tables_compile_and_export_in_one_graph():
    layer, x = make_layer("content-of-kv-heads-waves"), torch.randn(2, 6, C)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), layer(x))
