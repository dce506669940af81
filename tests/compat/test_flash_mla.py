"""FlashMLA's call, and flash-attn 3's qv: against sums written out in float64."""

from functools import partial
from typing import Any

import pytest
import torch
from oracles import assert_by_oracle, with_gradients
from torch import Tensor

from fastattn.compat.flash_attn import version_3
from fastattn.compat.flash_mla import (
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)
from fastattn.testing.inputs import draw

B, T, H, R, C, S = 2, 2, 3, 8, 16, 4
LENGTHS = [7, 4]


def expected(
    q: Tensor, rows: list[Tensor], width: int, scale: float, dtype: torch.dtype, sink: Any = None
) -> Any:
    """o [B, T, H, width] and lse [B, H, T] without the sink, causal; rows: keys [n, D]."""
    outputs, lses = [], []
    for x, keys in zip(q.to(dtype), (row.to(dtype) for row in rows), strict=True):
        n = len(keys)
        s = scale * torch.einsum("thd,nd->htn", x, keys)
        s = s.masked_fill(torch.arange(n) > torch.arange(T)[:, None] + n - T, -torch.inf)
        total = s.exp().sum(-1)
        lses.append(total.log())
        share = total if sink is None else total + sink.to(dtype).exp()[:, None]
        outputs.append(torch.einsum("htn,nd->thd", s.exp() / share[..., None], keys[:, :width]))
    return torch.stack(outputs), torch.stack(lses)


def pages(device: str) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Pages [P, S, 1, C + R], NaN where no token is; their table, lengths, and keys of each row."""
    pool = draw(5, S, 1, C + R).to(device)
    table = torch.tensor([[3, 1], [4, 0]], dtype=torch.int32, device=device)
    rows = [pool[table[b].long()].flatten(0, 2)[:n] for b, n in enumerate(LENGTHS)]
    pool = torch.where(torch.isin(pool, torch.cat(rows)), pool, torch.nan)
    return pool, table, torch.tensor(LENGTHS, dtype=torch.int32, device=device), rows


@pytest.mark.parametrize("with_sink", [False, True])
def test_flash_mla(with_sink: bool, device: str) -> None:
    pool, table, lengths, rows = pages(device)
    q = draw(B, T, H, C + R, seed=1).to(device)
    sink = draw(H).to(device) if with_sink else None
    plan, splits = get_mla_metadata(lengths, H * T, 1)
    actual = flash_mla_with_kvcache(
        q, pool, table, lengths, C, plan, splits, softmax_scale=0.2, causal=True, attn_sink=sink
    )
    assert_by_oracle(actual, lambda dtype: expected(q, rows, C, 0.2, dtype, sink))


def records(pool: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Records uint8 of latents [..., width + R], and the numbers that they stand for."""
    groups, rope = pool[..., :width].unflatten(-1, (-1, 128)), pool[..., width:].bfloat16()
    scale = groups.abs().amax(-1) / 300  # any scale will do
    codes = (groups / scale[..., None]).to(torch.float8_e4m3fn)
    parts = (codes.flatten(-2), scale, rope)
    numbers = torch.cat(((codes.float() * scale[..., None]).flatten(-2), rope.float()), -1)
    return torch.cat([x.contiguous().view(torch.uint8) for x in parts], -1), numbers


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("chosen", [False, True])
def test_flash_mla_of_records(
    chosen: bool, backend: str, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Rows of 656 bytes in pages: all that a table lists, or those that each token names."""
    monkeypatch.setenv("FASTATTN_BACKEND", backend)
    packed, numbers = (x[:, :S] for x in records(draw(5, S + 1, 1, 512 + 64), 512))
    assert packed.shape[-1] == 656 and not packed.is_contiguous()  # a slot is between the pages
    q = draw(B, T, H, 512 + 64, seed=1).bfloat16()
    given: tuple[Any, ...] = (None, None, 0.05, False, True)
    if chosen:
        picked = torch.tensor([[[7, -1, 3, 19], [0, 1, 2, 99]], [[-1, -1, 5, 12], [4, 4, -1, 8]]])
        counts = torch.tensor([4, 3])
        given += (picked.to(device), None, None, None, counts.to(device))
        tables = [None, None]
        rows = [
            [numbers.flatten(0, 2)[x[:n][(x[:n] >= 0) & (x[:n] < 20)]] for x in of_batch]
            for of_batch, n in zip(picked, counts, strict=True)
        ]
    else:
        table = torch.tensor([[3, 1], [4, 0]])
        tables = [table.to(device), torch.tensor(LENGTHS, device=device)]
        rows = [[numbers[table[b]].flatten(0, 2)[:n]] * T for b, n in enumerate(LENGTHS)]
    actual = flash_mla_with_kvcache(q.to(device), packed.to(device), *tables, 512, *given)

    def sums(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys = [k.to(dtype) for of_row in rows for k in of_row]
        scores = [0.05 * x @ k.T for x, k in zip(q.to(dtype).flatten(0, 1), keys, strict=True)]
        o = torch.stack([s.softmax(-1) @ k[:, :512] for s, k in zip(scores, keys, strict=True)])
        lse = torch.stack([s.exp().sum(-1).log() for s in scores])
        return o.view(B, T, H, 512), lse.view(B, T, H).transpose(1, 2)

    assert_by_oracle((x.cpu() for x in actual), sums, torch.bfloat16)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_chosen_latents_of_a_prompt(
    backend: str, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Latents out of order and twice, past the end, behind a token's count, and of no token."""
    monkeypatch.setenv("FASTATTN_BACKEND", backend)
    q, kv, sink = draw(4, H, C + R), draw(9, 1, C + R, seed=1), draw(H, seed=2)
    indices = torch.tensor([[8, 0, 3, 3], [-1, 2, 9, 1], [5, 6, 7, 2], [-1, -1, 9, -1]]).int()
    counts = torch.tensor([4, 3, 2, 4]).int()
    named = [[8, 0, 3, 3], [2], [5, 6], []]
    kv[4], sink[0] = torch.nan, -torch.inf
    moved = [x.to(device) for x in (q, kv, indices[:, None])]
    o, largest, lse = flash_mla_sparse_fwd(
        *moved, 0.2, C, sink.to(device), topk_length=counts.to(device)
    )
    whole = torch.tensor([[0]], device=device), torch.tensor([9], device=device)
    of_row, _ = flash_mla_with_kvcache(moved[0][None], moved[1][None], *whole, C)
    assert largest is None
    assert all(x.is_contiguous() for x in (o, lse, of_row)), "servers view them in other sizes"

    def sums(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        scores = [0.2 * x @ kv[n, 0].to(dtype).T for x, n in zip(q.to(dtype), named, strict=True)]
        totals = torch.stack([s.exp().sum(-1) for s in scores])
        share = totals + sink.to(dtype).exp()
        weighed = [s.exp() @ kv[n, 0, :C].to(dtype) for s, n in zip(scores, named, strict=True)]
        return (torch.stack(weighed) / share[..., None]).nan_to_num(0), totals.log()

    assert_by_oracle((o.cpu(), lse.cpu()), sums)
    with pytest.raises(
        ValueError, match=r"kv must have shape .* = \[T_k, 1, 24\], got \[9, 2, 24\]"
    ):
        flash_mla_sparse_fwd(q, kv.expand(9, 2, C + R), indices[:, None], 0.2, C)
    with pytest.raises(ValueError, match=r"indices must have shape .* = \[4, 1, n\]"):
        flash_mla_sparse_fwd(q, kv, indices[:3, None], 0.2, C)


@pytest.mark.parametrize("packed", [False, True])
def test_qv_adds_products_with_the_values(packed: bool, device: str) -> None:
    """s = q k + qv v over (R + C)^-0.5, with gradients; of v from both products."""
    shapes = ((1, 6, H, R), (1, 6, 1, R), (1, 6, 1, C), (1, 6, H, C))
    tensors = [draw(*shape, seed=n).to(device) for n, shape in enumerate(shapes)]

    def ours(q: Tensor, k: Tensor, v: Tensor, qv: Tensor) -> Any:
        if not packed:
            return version_3.flash_attn_func(q, k, v, causal=True, qv=qv)
        starts = torch.tensor([0, 6], dtype=torch.int32, device=device)
        rows = (q[0], k[0], v[0], starts, starts, 6, 6)
        return version_3.flash_attn_varlen_func(*rows, causal=True, qv=qv[0])[None]

    def oracle(q: Tensor, k: Tensor, v: Tensor, qv: Tensor) -> Tensor:
        s = torch.einsum("bthd,bnd->bhtn", q, k[:, :, 0])
        s = (s + torch.einsum("bthd,bnd->bhtn", qv, v[:, :, 0])) * (R + C) ** -0.5
        s = s.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
        return torch.einsum("bhtn,bnd->bthd", s.softmax(-1), v[:, :, 0])

    actual = with_gradients(ours, tensors, torch.float32)
    oracles = partial(with_gradients, oracle, tensors)
    assert_by_oracle(actual, oracles, names="o dq dk dv dqv")


@pytest.mark.parametrize("beside", [True, False])
def test_qv_over_a_cache(beside: bool, device: str) -> None:
    """Latents and rotary keys in one buffer, as servers keep them, or in two; new ones appended."""
    pool, table, lengths, rows = pages(device)
    v_cache, k_cache = pool[..., :C], pool[..., C:]
    if not beside:
        v_cache, k_cache = v_cache.contiguous(), k_cache.contiguous()
    q, qv = draw(B, T, H, R, seed=1).to(device), draw(B, T, H, C, seed=2).to(device)
    k, v = (x[:, :, None] for x in torch.stack([x[-T:] for x in rows]).split((C, R), -1)[::-1])
    before = lengths - T
    actual = version_3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, qv, cache_seqlens=before, page_table=table, causal=True
    )
    both, scale = torch.cat((qv, q), -1), (R + C) ** -0.5
    assert_by_oracle([actual], lambda dtype: expected(both, rows, C, scale, dtype)[:1])
