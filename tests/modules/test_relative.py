"""Relative schemes and sinusoids: against their formulas written over every pair of tokens."""

import naive_layers
import pytest
import torch
from engine import packed_layers
from naive_layers import assert_layer_equals_naive, exact_and_naive
from nightly import gate_cases

from fastattn import GQAttention, KVCache, PagedKVCache
from fastattn.models.positions import (
    DistanceVectors,
    LearnedPositions,
    RelativeContent,
    RelativeScalar,
    RelativeTransformerXL,
    sinusoids,
)
from fastattn.testing import assert_within_budget

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


def make_layer(scheme: str, *, values: bool = False, **options) -> GQAttention:
    """A layer of width C whose every parameter matters."""
    relative = SCHEMES[scheme](value_dim=D if values else None)
    sizes = {"num_heads": H_q, "num_kv_heads": H_k}
    return naive_layers.make_layer(kind=GQAttention, relative=relative, **sizes, **options)


@pytest.mark.parametrize(
    ("causal", "values"), gate_cases([(True, False), (False, True)], [(True, True), (False, False)])
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_layer_and_gradients_equal_the_formula(scheme, values, causal):
    layer = make_layer(scheme, values=values, causal=causal, scale=None if causal else 0.5)
    lengths = torch.tensor([10, 6])
    assert_layer_equals_naive(layer, torch.randn(2, 10, C), key_lengths=lengths)


@pytest.mark.parametrize("scheme", ["scalar", "transformer-xl"])
def test_kernels_equal_the_formula(scheme, device):
    layer = make_layer(scheme, values=True, causal=False, backend="triton", device=device)
    x = torch.randn(1, 7, C, device=device)
    with torch.no_grad():
        assert_within_budget("output", layer(x), *exact_and_naive(layer, x))


@pytest.mark.parametrize("values", [False, True], ids=["", "values"])
@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_cached_steps_equal_the_formula(scheme, values):
    layer = make_layer(scheme, values=values)
    x = torch.randn(2, 9, C)
    exact, plain = exact_and_naive(layer, x)
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
        T = part.shape[1]
        (cache,) = packed_layers(pages, rows, [T, T])
        packed = layer(part.reshape(2 * T, 1, C), cache=cache)
        steps.append(packed.view(2, T, -1))
    assert_within_budget("steps", torch.cat(steps, dim=1), *exact_and_naive(layer, x))


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
    poisoned = x.clone()
    poisoned[:, :4] = torch.nan
    got = layer(poisoned, key_padding_mask=mask)[:, 4:]
    assert_within_budget("output", got, *exact_and_naive(layer, x[:, 4:]))


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


def test_sinusoids_are_those_of_the_paper():
    p = sinusoids(torch.tensor([0, 1, 70000]), 6)
    for row, t in enumerate((0, 1, 70000)):
        for c in range(3):
            angle = torch.tensor(t / 10000 ** (2 * c / 6), dtype=torch.float64)
            torch.testing.assert_close(p[row, 2 * c].double(), angle.sin(), rtol=0, atol=1e-6)
            torch.testing.assert_close(p[row, 2 * c + 1].double(), angle.cos(), rtol=0, atol=1e-6)


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


def test_sinusoidal_tables_compile_and_export_in_one_graph():
    layer, x = make_layer("content-of-kv-heads-waves"), torch.randn(2, 6, C)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), layer(x))
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), layer(x))
