"""Relative schemes and sinusoids: codes, autocast, compilation, and vectors by distance."""

import naive_layers
import pytest
import torch

from fastattn import GQAttention, KVCache
from fastattn.models.positions import (
    DistanceVectors,
    LearnedPositions,
    RelativeContent,
    RelativeScalar,
    RelativeTransformerXL,
    sinusoids,
)

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


@torch.no_grad()
def test_codes_are_not_read_in_order():
    layer = make_layer("content")
    codes = KVCache(1, H_k, 9, D, quantize="int8")
    with pytest.raises(ValueError, match=r"without .* relative terms on keys or"):
        layer(torch.randn(1, 2, C), cache=codes)
    wide = GQAttention(C, H_q, v_head_dim=12, relative=SCHEMES["content"](value_dim=D))
    with pytest.raises(ValueError, match="v_head_dim=12 channels, got 8"):
        wide(torch.randn(1, 2, C), cache=(cache := wide.new_cache(1, 9)))
    assert codes.length_bound == cache.length_bound == 0
    # A bias is what the decode kernels take.
    assert make_layer("scalar")(torch.randn(1, 2, C), cache=codes).isfinite().all()


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
    assert layer(torch.randn(0, 3, C)).shape == (0, 3, C)


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
