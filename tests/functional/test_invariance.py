"""Bits of a token, whatever is computed beside it: in training and in chunks of a prompt."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fastattn import KVCache, attention, attention_varlen, decode_attention
from fastattn.kernels.launch import tiles
from fastattn.kernels.launch.arguments import block_dim, tile_for
from fastattn.kernels.launch.tiles import TileConfig, forced
from fastattn.options import Options
from fastattn.testing import make_qkv
from fastattn.testing.inputs import draw, to_device

T, TILE = 85, TileConfig(16, 16)
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "capped": {"softcap": 2.0, "sinks": draw(4)},
}


def packed(x: Tensor, *rows: slice) -> Tensor:
    """Parts of the first batch row behind one another, [total, H, D]."""
    return torch.cat([x[0, :, part].transpose(0, 1) for part in rows])


@pytest.mark.parametrize(("name", "dtype"), [("causal", torch.bfloat16), ("capped", torch.float32)])
def test_a_token_has_its_bits_in_every_call(name: str, dtype: torch.dtype, device: str) -> None:
    """In a batch, packed behind others, in chunks of any size, and decoded from one part."""
    q, k, v = make_qkv(2, 4, 2, T, T, 16, dtype=dtype, device=device, requires_grad=False)
    options = to_device(OPTIONS[name], device)
    how: dict[str, Any] = {"backend": "triton", "return_lse": True, "causal": True, **options}

    def of_chunk(first: int, last: int) -> tuple[Tensor, Tensor]:
        offsets = (torch.tensor([0, n], device=device) for n in (last - first, last))
        inputs = (packed(q, slice(first, last)), packed(k, slice(last)), packed(v, slice(last)))
        return attention_varlen(*inputs, *offsets, **how)

    with forced(forward=TILE, decode=TILE, decode_chunk=TILE):
        trained = [x[0] for x in attention(q, k, v, **how)]
        trained = [trained[0].transpose(0, 1), trained[1]]
        alone = attention(q[:1], k[:1], v[:1], **how)
        results = {"alone": (alone[0][0].transpose(0, 1), alone[1][0])}
        whole = (slice(0, 21), slice(0, T))
        offsets = torch.tensor([0, 21, 21 + T], device=device)
        o, lse = attention_varlen(*(packed(x, *whole) for x in (q, k, v)), offsets, **how)
        results["packed"] = (o[21:], lse[:, 21:])
        for size in (7, 32):
            o, lse = zip(*(of_chunk(i, min(i + size, T)) for i in range(0, T, size)), strict=True)
            results[f"chunks of {size}"] = (torch.cat(o), torch.cat(lse, 1))
        cache = KVCache(1, 2, T, 16, dtype=dtype, device=device)
        cache.append(k[:1], v[:1])
        step, of_step = decode_attention(q[:1, :, -1:], cache, batch_invariant=True, **how)
    for call, (o, lse) in results.items():
        assert torch.equal(o, trained[0]), call
        assert torch.equal(lse, trained[1]), call
    assert torch.equal(step[0].transpose(0, 1), trained[0][-1:])
    assert torch.equal(of_step[0], trained[1][:, -1:])


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942"])
def test_packed_calls_take_the_tiles_of_dense_ones(arch: str) -> None:
    """Blocks of keys of another size would give other bits."""
    offsets = torch.empty(3, dtype=torch.int32, device="meta")
    dense = Options(causal=True)
    of_packed = dense._replace(query_offset=None, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    with mock.patch.object(tiles, "current_arch", lambda: arch):
        for D in (64, 128, 256):
            q = torch.empty(1, 4, 100, D, dtype=torch.bfloat16, device="meta")
            sizes = (q, block_dim(D), block_dim(D))
            tiled = [tile_for("forward", x, *sizes, streams_bias=True) for x in (dense, of_packed)]
            assert tiled[0].BLOCK_N == tiled[1].BLOCK_N
            assert tiled[0].sum_parts == tiled[1].sum_parts
