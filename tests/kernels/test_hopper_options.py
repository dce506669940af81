"""Options and head dims of attention in the Hopper kernels, emulated, by the oracle."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from emulated_hopper import attention_on_hopper, check_on_hopper, grid_of, passes
from fuzz import mods
from nightly import gate_cases
from torch import Tensor

from fastattn import BlockMask, reference
from fastattn.kernels.hopper.host import aligned_bias
from fastattn.mods import shared_prefix
from fastattn.options import Options
from fastattn.testing import assert_matches_reference, make_qkv

pytestmark = pytest.mark.usefixtures("emulated")


def holes(T_k: int, *rows: tuple[int, int, int]) -> Tensor:
    """Rows of a padding mask: keys from the first to the second, without each third number's."""
    keys = torch.arange(T_k)
    return torch.stack(
        [(keys >= first) & (keys < end) & (keys % every != 1) for first, end, every in rows]
    )


def documents(*lengths: int) -> Tensor:
    """Ids of one row of documents behind one another; a negative length is of none."""
    ids = [torch.full((abs(n),), i if n > 0 else -1) for i, n in enumerate(lengths)]
    return torch.cat(ids).int()[None]


# Of 290 keys: holes everywhere; whole blocks hidden before the first; none that is shown.
HOLES = holes(290, (0, 290, 7), (140, 290, 1000), (0, 0, 2))
IDS = documents(70, -30, 90, 110)
# One of each kind: what is far stays in sight, and what is near does not.
SLOPES = torch.tensor([0.5, 0.002, -0.01, 0.1])
# For two heads: a block that shows all, rows that see nothing, and what nothing regular says.
BITS = torch.rand(1, 2, 150, 150, generator=torch.Generator().manual_seed(0)) < 0.5
BITS[:, :, :, :128] |= torch.arange(150)[:, None] < 64
BITS[:, :, 70:80] = False
# -inf hides, a whole row and single keys. It does not start at a multiple of 16 bytes.
BIAS = torch.randn(2, 4, 70, 209, generator=torch.Generator().manual_seed(0)).bfloat16()
BIAS[:, :, 5] = BIAS[:, :, :, 7] = float("-inf")
BIAS = torch.nn.functional.pad(BIAS, (0, 7))[..., 1:201]
# Of distances to 60, and beyond them those of 60.
TABLE = torch.randn(4, 121, generator=torch.Generator().manual_seed(1))
# A seed of all bits, of which the higher half counts too.
DROPOUT: dict[str, Any] = dict(dropout=0.3, dropout_seed=torch.tensor([2**62 + 12345, 2**33 + 7]))
# Of the fuzzer's functions, and the answer of each of 384 tokens.
_ANSWERS = torch.rand(16, generator=torch.Generator().manual_seed(0))
TABLES = _ANSWERS, torch.tensor([0, 40, 3, 70] * 4, dtype=torch.int32)
BRANCHES = torch.tensor([-1, 0, 1, -1, 1, 0]).repeat_interleave(64).int()
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])


@triton.jit
def nearer(x, b, h, q_pos, k_pos):
    """Infinite at the next key, which a causal mask hides."""
    return x / (q_pos + 1 - k_pos)


@triton.jit
def nearer_grad(dx, x, b, h, q_pos, k_pos):
    return dx / (q_pos + 1 - k_pos)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "padding": ("two one", dict(B=3, H_q=1, T_k=290, key_padding_mask=HOLES)),
    "padding-none-shown": ("two", dict(
        H_q=1, T_q=70, T_k=128, causal=False, key_padding_mask=torch.zeros(1, 128) > 0,
    )),
    "padding-far-behind": ("two", dict(
        T_q=70, T_k=128, window=(9, 0), query_offset=9000, key_padding_mask=HOLES[:1, :128],
    )),
    "padding-window": ("two", dict(
        B=3, H_q=1, T_k=290, D=128, causal=False, window=(100, 20), key_padding_mask=HOLES,
    )),
    "padding-lengths": ("two", dict(
        B=2, T_q=70, T_k=290, causal=False, softcap=3.0,
        key_padding_mask=HOLES[:2], key_lengths=[250, 200],
    )),
    "documents": ("two one", dict(H_q=1, T_q=300, documents=(IDS, IDS))),
    "documents-padding": ("two", dict(
        H_q=1, T_q=300, documents=(IDS, IDS), key_padding_mask=holes(300, (9, 300, 5)),
    )),
    "alibi": ("two one", dict(H_q=4, H_k=2, T_q=140, alibi_slopes=SLOPES)),
    "alibi-window": ("two", dict(
        B=2, T_q=70, T_k=290, D=128, causal=False, window=(100, 90), query_offset=40,
        alibi_slopes=SLOPES.view(2, 2),
    )),
    "bias": ("two one", dict(B=2, H_q=4, H_k=2, T_q=70, T_k=200, attn_mask=BIAS)),
    "bias-for-all": ("two", dict(
        B=2, T_q=70, T_k=200, D=128, causal=False, window=(90, 60),
        attn_mask=BIAS[:1, 1:2],
    )),
    "attn_mask": ("two one", dict(H_q=2, T_q=150, causal=False, attn_mask=BITS[:, :1])),
    "attn_mask-of-heads": ("two", dict(
        H_q=2, H_k=2, T_q=150, D=128, attn_mask=BITS, key_padding_mask=holes(150, (3, 150, 9)),
    )),
    "relative": ("two one", dict(H_q=4, H_k=2, T_q=140, relative_bias=TABLE)),
    "relative-window": ("two", dict(
        B=2, T_q=70, T_k=290, D=128, causal=False, window=(100, 90), query_offset=40,
        relative_bias=TABLE[:2], key_padding_mask=HOLES[:2],
    )),
    "alibi-softcap-sinks": ("/ two", dict(
        T_q=140, softcap=3.0, sinks=torch.tensor([0.5, -1.0]), alibi_slopes=SLOPES[:2],
    )),
    "alibi-positions": ("/ two", dict(
        H_q=1, T_q=128, T_k=128, alibi_slopes=SLOPES[1:2],
        positions=(torch.arange(256, 384)[None].int(), torch.arange(128)[None].int()),
    )),
    "dropout": ("two", dict(H_q=4, H_k=2, T_q=140, B=2, **DROPOUT)),
    "dropout-d128": ("two", dict(
        B=2, T_q=70, T_k=290, D=128, causal=False, window=(100, 90), key_lengths=[280, 290],
        softcap=3.0, heads=(2, 8), **DROPOUT,
    )),
    "dropout-positions": ("two", dict(
        H_q=1, T_q=128, T_k=128, **DROPOUT,
        positions=(torch.arange(256, 384)[None].int(), torch.arange(128, 256)[None].int()),
    )),
    "dropout-d256": ("/ three", dict(D=256, T_q=140, sinks=torch.tensor([0.5, -1.0]), **DROPOUT)),
    "mask_mod": ("two one", dict(
        B=2, H_q=2, H_k=2, T_q=150, causal=False, mask_mod=mods.ahead_or_near, heads=(1, 4),
    )),
    "mask_mod-of-groups": ("two", dict(
        B=2, H_q=4, H_k=2, T_q=70, T_k=290, D=128, causal=False,
        mask_mod=BlockMask(mods.striped, per_head=False),
        key_padding_mask=HOLES[:2], softcap=3.0,
    )),
    "mask_mod-d256": ("/ three", dict(
        H_k=2, D=256, T_q=140, mask_mod=mods.within_table, mod_tensors=TABLES, key_lengths=[130],
    )),
    "mask_mod-positions": ("two", dict(
        T_q=128, T_k=256, mask_mod=BlockMask(shared_prefix, per_head=False),
        mod_tensors=(BRANCHES,), positions=(torch.arange(256, 384)[None].int(), torch.cat([
            torch.arange(128, 256), torch.arange(256, 384),
        ])[None].int()),
    )),
    "score_mod": ("two", dict(
        B=2, H_q=4, H_k=2, T_q=150, score_mod=mods.bent, score_mod_grad=mods.bent_grad,
        heads=(2, 8), key_lengths=[140, 90],
    )),
    "score_mod-d128": ("two", dict(
        H_q=4, H_k=2, T_q=70, T_k=290, D=128, causal=False, softcap=3.0, sinks=SINKS,
        score_mod=mods.by_table, score_mod_grad=mods.by_table_grad, mod_tensors=TABLES,
    )),
    "score_mod-guarded": ("two", dict(
        H_k=2, T_q=140, score_mod=nearer, score_mod_grad=nearer_grad, **DROPOUT,
    )),
    # Heads between the widths of tiles, and those of v narrower than those of q.
    "96": ("two", dict(D=96, D_v=96, T_q=140)),
    "192/128": ("three", dict(D=192, D_v=128, T_q=140)),
    "192": ("/ three", dict(D=192, D_v=192, T_q=70, T_k=150, causal=False)),
    "40": ("two", dict(B=2, D=40, D_v=40, T_q=70, T_k=200, key_lengths=[150, 130])),
    "128/64": ("two / one", dict(D=128, D_v=64, T_q=140)),
    "192/128-parts": ("/ three", dict(
        H_q=8, D=192, D_v=128, T_q=200, causal=False, programs=16,
    )),
    "256/72": ("/ three", dict(D=256, D_v=72, T_q=140, window=(50, 0))),
}  # fmt: skip


def turns(night: bool) -> list[tuple[str, str]]:
    ways = {name: (f"{ways}/").split("/")[night].split() for name, (ways, _) in CASES.items()}
    return [(name, way) for name in ways for way in ways[name]]


@pytest.mark.parametrize(("name", "way"), gate_cases(turns(False), turns(True)))
def test_matches_the_reference(name: str, way: str) -> None:
    """Keys that no query may see hold NaN."""
    check_on_hopper(attention_on_hopper, **CASES[name][1], deterministic=way != "one")
    assert passes() == {"one": 1, "two": 2, "three": 3}[way]


def test_packed_sequences_end_within_a_tile() -> None:
    """Rows that leave through registers end with their columns: other rows follow."""
    dense = make_qkv(1, 2, 1, 170, 170, 96, 72, dtype=torch.bfloat16)
    packed = (x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in dense)
    offsets = torch.tensor([0, 70, 70, 170], dtype=torch.int32)
    how = {"causal": True, "oracle": reference.attention_varlen}
    with grid_of(2):
        assert_matches_reference(attention_on_hopper, *packed, offsets, offsets, **how)


@triton.jit
def until(b, h, q_pos, k_pos, ends):
    return q_pos <= tl.load(ends + k_pos)


def test_packed_sequences_without_keys_call_no_function() -> None:
    """A tile of queries visits a block, of which a function could read."""
    q, k, v = (
        torch.randn(T, 2, 64, generator=torch.Generator().manual_seed(T)).bfloat16()
        for T in (170, 160, 160)
    )
    offsets = [
        torch.tensor(ends, dtype=torch.int32) for ends in ([0, 60, 100, 170], [0, 60, 60, 160])
    ]
    how = {"mask_mod": until, "mod_tensors": (torch.arange(100, dtype=torch.int32) % 70,)}
    inputs = (x.requires_grad_() for x in (q, k, v))
    with grid_of(2):
        assert_matches_reference(
            attention_on_hopper, *inputs, *offsets, **how, oracle=reference.attention_varlen
        )


def test_a_bias_starts_where_tma_does() -> None:
    assert BIAS.data_ptr() % 16
    given = BIAS[:1, :, :, :199].expand(2, -1, -1, -1)
    copied = aligned_bias(Options(attn_bias=given))
    assert copied.attn_bias is not None and torch.equal(copied.attn_bias, given[:1])
    assert copied.attn_bias.data_ptr() % 16 == copied.attn_bias.stride(2) % 8 == 0
    assert aligned_bias(copied) is copied
