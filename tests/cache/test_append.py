"""The append kernel against plain torch, bit for bit, for every cache; and as an operator."""

import pytest
import torch
from torch import Tensor

from fastattn import KVCache, PagedKVCache
from fastattn.cache.append import append
from fastattn.ops.append import append_tokens
from fastattn.rotary import apply_rotary, rotary_tables

B, H_Q, H_K, MAX = 3, 4, 2, 20


def tokens_of(
    B, H_q, H_k, T, D, D_v, *, device, dtype=torch.float32, transposed=True
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q [B, H_q, T, D], k [B, H_k, T, D] and v [B, H_k, T, D_v].

    transposed: views of one fused projection [B, T, heads, D], as a layer makes them.
    """
    shared_width = D_v == D
    if not (transposed and shared_width):
        shapes = ((H_q, D), (H_k, D), (H_k, D_v))
        q, k, v = (torch.randn(B, H, T, width, device=device).to(dtype) for H, width in shapes)
        return q, k, v
    fused = torch.randn(B, T, H_q + 2 * H_k, D, device=device).to(dtype).transpose(1, 2)
    q, k, v = fused.split((H_q, H_k, H_k), dim=1)
    return q, k, v


def append_randomly(cache, steps, *, rotary, style="half", transposed=True, backend):
    """Append steps of (T, new_lengths) to the first rows of a cache, the same tokens every time.

    Returns:
        Everything that can be seen after it: rotated queries where they stand at tokens, keys,
        values and their positions of every layer, and lengths.
    """
    torch.manual_seed(1)
    H_k, D, D_v = cache.k.shape[-3], cache.k.shape[-1], cache.v.shape[-1]
    is_paged = isinstance(cache, PagedKVCache)
    rows = cache.rows[::-1] if is_paged else list(range(cache.lengths.shape[0]))
    layers = cache.num_layers if is_paged else 1
    device = cache.k.device
    seen = []
    for T, counts in steps:
        for layer in range(layers):
            q, k, v = tokens_of(
                len(rows),
                2 * H_k,
                H_k,
                T,
                D,
                D_v,
                device=device,
                dtype=cache.dtype,
                transposed=transposed,
            )
            options = {"rotary": rotary, "rotary_style": style, "backend": backend}
            if isinstance(cache, PagedKVCache):
                turned = cache.append(rows, k, v, counts, layer=layer, q=q, **options)
            else:
                new = None if counts is None else torch.tensor(counts, device=device)
                turned = cache.append(k, v, new, q=q, **options)
            seen += [turned[b, :, :n] for b, n in enumerate(counts or [T] * len(rows))]
    for layer in range(layers):
        seen += cache.view(rows, layer).gather() if is_paged else cache.view().gather()
    return [*seen, cache.lengths]


def contiguous(D, D_v, **options):
    return KVCache(B, H_K, MAX, D, value_dim=D_v, **options)


def ring(D, D_v, **options):
    return KVCache(B, H_K, 9, D, value_dim=D_v, window=5, keep_first=2, **options)


def paged(D, D_v, **options):
    cache = PagedKVCache(16, 3, H_K, D, value_dim=D_v, num_layers=2, max_rows=5, **options)
    spare = [cache.allocate() for _ in range(5)]
    cache.free(spare[0])
    cache.free(spare[3])
    return cache


def assert_same_bits(ours, expected):
    for x, y in zip(ours, expected, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y), f"{int((x != y).sum())} of {x.numel()} differ"


@pytest.mark.parametrize(
    ("quantize", "dtype"),
    [
        (None, torch.bfloat16),
        (None, torch.float16),
        ("int8", torch.bfloat16),
        ("int8", torch.float32),
        ("fp8", torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [contiguous, ring, paged])
def test_kernel_stores_the_bits_that_torch_stores(make, quantize, dtype, device):
    """Three ragged steps with rotation; heads of 24 and 40 channels, 16 of them rotated."""
    results = {
        backend: append_randomly(
            make(24, 40, quantize=quantize, dtype=dtype, device=device),
            steps=[(5, [5, 2, 0]), (1, None), (6, [6, 3, 6])],
            rotary=rotary_tables(MAX, 16, device=device),
            backend=backend,
        )
        for backend in ("triton", "torch")
    }
    assert_same_bits(results["triton"], results["torch"])


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(("D", "rotary_dim"), [(16, 16), (16, 6), (5, 4), (64, 2)])
def test_rotation_styles_and_partial_dims(style, D, rotary_dim, device):
    """Head dims of whole 16 bytes and others, in both layouts of memory."""
    for transposed in (True, False):
        results = {
            backend: append_randomly(
                contiguous(D, D, device=device),
                steps=[(4, None), (3, [1, 3, 0])],
                rotary=rotary_tables(MAX, rotary_dim, device=device),
                style=style,
                transposed=transposed,
                backend=backend,
            )
            for backend in ("triton", "torch")
        }
        assert_same_bits(results["triton"], results["torch"])


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_positions_are_those_of_each_row(backend, device):
    """Against the rotation of the whole sequence at once."""
    cache = contiguous(8, 8, device=device)
    cos, sin = rotary_tables(MAX, 8, device=device)
    q, k, v = tokens_of(B, H_Q, H_K, 14, 8, 8, device=device)
    lengths, taken = torch.tensor([7, 2, 5]), torch.zeros(B, dtype=torch.int64)
    whole_q, whole_k = (apply_rotary(x, cos[:14], sin[:14]) for x in (q, k))
    for new in (lengths, torch.tensor([1, 4, 4])):
        rows = [slice(int(t), int(t) + 7) for t in taken]
        part = [torch.stack([x[b, :, rows[b]] for b in range(B)]) for x in (q, k, v)]
        turned = cache.append(
            *part[1:], new_lengths=new.to(device), q=part[0], rotary=(cos, sin), backend=backend
        )
        for b in range(B):
            n = int(new[b])
            start = int(taken[b])
            expected = whole_q[b, :, start : start + n]
            torch.testing.assert_close(turned[b, :, :n], expected, rtol=0, atol=0)
        taken += new
    for b in range(B):
        n = int(taken[b])
        torch.testing.assert_close(cache.k[b, :, :n], whole_k[b, :, :n], rtol=0, atol=0)
        assert torch.equal(cache.v[b, :, :n], v[b, :, :n])


def test_kernel_writes_real_tokens_and_nothing_else(device):
    """NaN in padding is not read, and slots that get no token keep the NaN that they had."""
    cache = contiguous(16, 16, device=device)
    q, k, v = tokens_of(B, H_Q, H_K, 4, 16, 16, device=device)
    count = [4, 1, 0]
    for b, n in enumerate(count):
        q[b, :, n:] = k[b, :, n:] = v[b, :, n:] = torch.nan
    rotary = rotary_tables(MAX, 16, device=device)
    turned = cache.append(
        k, v, torch.tensor(count, device=device), q=q, rotary=rotary, backend="triton"
    )
    for b, n in enumerate(count):
        for stored in (cache.k, cache.v):
            assert stored[b, :, :n].isfinite().all()
            assert stored[b, :, n:].isnan().all()
        assert turned[b, :, :n].isfinite().all()
    assert cache.view().counters.tolist() == [0] * B


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_append_to_some_rows_by_batch_index(backend, device):
    cache = contiguous(16, 8, device=device)
    full = tokens_of(B, H_Q, H_K, 3, 16, 8, device=device)[1:]
    cache.append(*full, backend=backend)
    _, k, v = tokens_of(2, H_Q, H_K, 2, 16, 8, device=device)
    index = torch.tensor([2, 0], device=device)
    cache.append(k, v, torch.tensor([1, 2], device=device), batch_index=index, backend=backend)
    assert cache.lengths.tolist() == [5, 3, 4]
    assert torch.equal(cache.k[0, :, 3:5], k[1])
    assert torch.equal(cache.v[2, :, 3:4], v[0, :, :1])
    assert torch.equal(cache.k[1, :, :3], full[0][1])
    got_k, _, positions = cache.view(index).gather()
    assert positions.tolist() == [[0, 1, 2, 3, -1], [0, 1, 2, 3, 4]]
    assert torch.equal(got_k[1, :, 3:], k[1])


def test_pages_that_are_past_the_end_are_not_written(device):
    """A replayed graph may append beyond the pages that the host allocated."""
    cache = contiguous(16, 16, device=device)
    cache.append(*tokens_of(B, H_Q, H_K, MAX, 16, 16, device=device)[1:], backend="triton")
    before = cache.k.clone()
    _, k, v = tokens_of(B, H_Q, H_K, 2, 16, 16, device=device)
    append(cache.view(), k, v, backend="triton")
    assert torch.equal(cache.k, before)


@pytest.mark.parametrize("kind", ["plain", "codes"])
def test_operator_is_registered_right(kind, device):
    quantize = None if kind == "plain" else "int8"
    cache = contiguous(16, 16, quantize=quantize, device=device)
    for x in (cache.k, cache.v):
        x.zero_()
    view = cache.view()
    if quantize:
        view.k_scale.zero_()
        view.v_scale.zero_()
    q, k, v = tokens_of(B, H_Q, H_K, 2, 16, 16, device=device)
    index = torch.tensor([1, 0, 2], device=device)
    cos, sin = rotary_tables(MAX, 8, device=device)
    torch.library.opcheck(
        append_tokens.op,
        (
            q if kind == "plain" else None, k, v, None, view.k, view.v, view.k_scale, view.v_scale,
            view.lengths, view.counters, None, index, cos, sin, None, False, True,
        ),
    )  # fmt: skip


def test_compiles_as_one_graph_and_mutates_the_cache(device):
    def step(cache_view, q, k, v, rotary):
        turned = append(cache_view, k * 2, v, q=q, rotary=rotary, backend="triton")
        return turned + cache_view.lengths.sum()

    rotary = rotary_tables(MAX, 16, device=device)
    q, k, v = tokens_of(B, H_Q, H_K, 2, 16, 16, device=device)
    outcomes = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        cache = contiguous(16, 16, device=device)
        outputs = [function(cache.view(), q, k, v, rotary) for _ in range(2)]
        assert cache.lengths.tolist() == [4] * B
        outcomes.append([*outputs, cache.k[:, :, :4], cache.v[:, :, :4]])
    assert_same_bits(outcomes[1], outcomes[0])


def test_backend_that_cannot_serve_is_refused(device):
    cache = KVCache(1, 1, 4, 8, dtype=torch.float64, device=device)
    k = torch.zeros(1, 1, 1, 8, dtype=torch.float64, device=device)
    with pytest.raises(ValueError, match=r'"triton" cannot append to this cache: k is float64'):
        cache.append(k, k, backend="triton")
    message = r"backend must be one of auto, hopper, triton, torch, got 'cuda'"
    with pytest.raises(ValueError, match=message):
        cache.append(k, k, backend="cuda")
    assert cache.lengths.tolist() == [0]


def test_empty_steps_change_nothing(device):
    cache = contiguous(16, 16, device=device)
    q, k, v = tokens_of(B, H_Q, H_K, 0, 16, 16, device=device)
    rotary = rotary_tables(MAX, 16, device=device)
    turned = cache.append(k, v, q=q, rotary=rotary, backend="triton")
    assert turned.shape == q.shape
    assert cache.lengths.tolist() == [0] * B
