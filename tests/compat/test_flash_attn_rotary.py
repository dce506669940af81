"""flash-attn's rotary functions against rotation by complex numbers."""

import pytest
import torch

from fastattn.compat.flash_attn import rotary
from fastattn.testing.budget import assert_within_budget

N, D, R = 24, 12, 8


@pytest.fixture
def tables(draw):
    angle = 3 * draw(N, R // 2)
    return angle.cos(), angle.sin()


def by_oracle(x, tables, positions, dtype, *, interleaved, conjugate=False):
    """x [B, T, H, D] at positions [B, T]: pairs of channels as complex numbers, in dtype."""
    cos, sin = (t.to(dtype)[positions.long()].unsqueeze(2) for t in tables)
    turn = torch.complex(cos, -sin if conjugate else sin)
    x = x.detach().to(dtype).clone()
    if interleaved:
        pairs = x[..., :R].unflatten(-1, (R // 2, 2)).contiguous()
        x[..., :R] = torch.view_as_real(torch.view_as_complex(pairs) * turn).flatten(-2)
    else:
        turned = torch.complex(x[..., : R // 2], x[..., R // 2 : R]) * turn
        x[..., :R] = torch.cat((turned.real, turned.imag), -1)
    return x


def check(name, actual, x, *oracle, **how):
    exact, naive = (by_oracle(x, *oracle, t, **how) for t in (torch.float64, torch.float32))
    assert_within_budget(name, actual, exact, naive.to(x.dtype))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("first", [0, 5, "rows"])
def test_dense(first, interleaved, tables, draw, device):
    x = draw(2, 6, 3, D, dtype=torch.float16)
    if first == "rows":
        first = torch.tensor([7, 0], device=device)
    steps = torch.arange(6, device=device)
    positions = (first[:, None] if torch.is_tensor(first) else first) + steps.expand(2, -1)
    actual = rotary.apply_rotary(x, *tables, first, interleaved=interleaved)
    check("x", actual, x, tables, positions, interleaved=interleaved)
    rows = (table[positions] for table in tables)
    assert torch.equal(rotary.apply_rotary_emb_torch(x, *rows, interleaved), actual)
    back = rotary.apply_rotary(x, *tables, first, interleaved=interleaved, conjugate=True)
    check("x turned back", back, x, tables, positions, interleaved=interleaved, conjugate=True)
    assert torch.equal(rotary.apply_rotary_emb(x, *tables, interleaved, False, first), actual)
    written = rotary.apply_rotary(x, *tables, first, interleaved=interleaved, inplace=True)
    assert written is x and torch.equal(x, actual)


@pytest.mark.parametrize("first", [0, "rows"])
def test_packed(first, tables, draw, device):
    x, cu = draw(9, 3, D), torch.tensor([0, 4, 4, 9], dtype=torch.int32, device=device)
    first = torch.tensor([2, 9, 5], device=device) if first == "rows" else first
    actual = rotary.apply_rotary_emb(x, *tables, seqlen_offsets=first, cu_seqlens=cu, max_seqlen=5)
    for n in (0, 2):
        rows = slice(cu[n], cu[n + 1])
        start = first[n] if torch.is_tensor(first) else first
        positions = start + torch.arange(cu[n + 1] - cu[n], device=device)[None]
        check("x", actual[rows][None], x[rows][None], tables, positions, interleaved=False)


def test_past_the_tables(tables, draw, device):
    x = draw(1, 3, 2, D)
    actual = rotary.apply_rotary(x, *tables, torch.tensor([N - 1], device=device))
    assert torch.equal(actual[:, 1:], x[:, 1:]) and not torch.equal(actual[:, 0], x[:, 0])


@pytest.mark.parametrize("inplace", [True, False])
def test_gradients(inplace, tables, draw, device):
    x, dy = draw(2, 5, 3, D).requires_grad_(), draw(2, 5, 3, D)
    given, kept = x.detach().clone(), dy.clone()
    first = torch.tensor([3, 1], device=device)
    positions = first[:, None] + torch.arange(5, device=device)
    y = rotary.apply_rotary_emb(x, *tables, False, inplace, first)
    check("y", y, given, tables, positions, interleaved=False)
    assert inplace == (x.data_ptr() == y.data_ptr())
    y.backward(dy)
    check("dx", x.grad, dy, tables, positions, interleaved=False, conjugate=True)
    assert torch.equal(dy, kept)


def parts(qkv, heads_q):
    return qkv.unbind(2) if heads_q is None else qkv.split((heads_q, 2, 2), dim=2)


@pytest.mark.parametrize(("shape", "heads_q"), [((2, 5, 3, 4, D), None), ((2, 5, 8, D), 4)])
@pytest.mark.parametrize("own_tables", [True, False])
def test_qkv_in_place(own_tables, shape, heads_q, tables, draw, device):
    qkv, dy = draw(*shape).requires_grad_(), draw(*shape)
    given = qkv.detach().clone()
    of_keys = tuple(2 * t for t in tables) if own_tables else tables
    given_keys = of_keys if own_tables else (None, None)
    actual = rotary.apply_rotary_emb_qkv_(qkv, *tables, *given_keys, own_tables, 2, heads_q)
    assert actual.data_ptr() == qkv.data_ptr()
    positions = 2 + torch.arange(5, device=device).expand(2, -1)
    actual.backward(dy)
    for results, whole, back in ((actual, given, False), (qkv.grad, dy, True)):
        how = {"interleaved": own_tables, "conjugate": back}
        (q, k, v), xs = parts(results, heads_q), parts(whole, heads_q)
        check("q", q, xs[0], tables, positions, **how)
        check("k", k, xs[1], of_keys, positions, **how)
        assert torch.equal(v, xs[2])


def test_module(draw, device):
    """Tables grow; q apart from kv gives what qkv gives; xPos scales queries and keys."""
    embedding = rotary.RotaryEmbedding(R, 500.0, device=device)
    qkv = draw(2, 5, 3, 4, D)
    q, kv = qkv[:, :, 0].clone(), qkv[:, :, 1:].clone()
    given = qkv.clone()
    whole = embedding(qkv, seqlen_offset=1)
    assert embedding._seq_len_cached == 6 and embedding._cos_cached.shape == (6, R // 2)
    apart = embedding(q, kv, seqlen_offset=torch.tensor([1, 1], device=device), max_seqlen=8)
    assert embedding._cos_cached.shape == (8, R // 2)
    assert torch.equal(torch.cat((apart[0][:, :, None], apart[1]), 2), whole)
    channels = torch.arange(0, R, 2, device=device)
    angle = torch.arange(8, device=device)[:, None] * 500.0 ** (-channels / R)
    positions = 1 + torch.arange(5, device=device).expand(2, -1)
    tables = (angle.cos(), angle.sin())
    check("q", whole[:, :, 0], given[:, :, 0], tables, positions, interleaved=False)
    assert not dict(embedding.state_dict())

    # Its buffers lose digits with a model's weights.
    scaled = rotary.RotaryEmbedding(R, 500.0, scale_base=4.0, device=device).bfloat16()
    zeta = (channels + 0.4 * R) / (1.4 * R)
    factor = zeta ** ((torch.arange(8, device=device)[:, None] - 4) / 4.0)
    _, kv = scaled(given[:, :, 0].clone(), given[:, :, 1:].clone(), max_seqlen=8)
    of_keys = [table / factor for table in tables]
    check("k", kv[:, :, 0], given[:, :, 1], of_keys, positions - 1, interleaved=False)
    for name, got, table in (
        ("cos", scaled._cos_cached, tables[0] * factor),
        ("sin of k", scaled._sin_k_cached, tables[1] / factor),
    ):
        assert_within_budget(name, got, table.double(), table)
