"""Every row of refusals.txt is refused by name, and the call that it changes is served."""

import re
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from refusals import rows_of, served
from torch import Tensor

import fastattn
from fastattn import rotary, rotary_scaling
from fastattn.functional.call_options import dense_options
from fastattn.functional.fp8 import PackedValues
from fastattn.functional.fp8.codes import E4M3
from fastattn.kernels.hopper.host import why_not_hopper, why_not_hopper_fp8
from fastattn.options import Options
from fastattn.parallel import ContextPlan
from fastattn.rotary import apply_rotary, rotary_tables
from fastattn.testing import make_qkv
from fastattn.testing.inputs import draw, draws

ROWS = rows_of(__file__)
Z, DEVICE = torch.zeros, "cuda" if torch.cuda.is_available() else "cpu"
INTS, ROW = Z(2).int(), torch.arange(4, dtype=torch.int32)[None]


def filled(B: int, *, T: int = 5, slots: int = 8, **options: Any) -> fastattn.KVCache:
    cache = fastattn.KVCache(B, 2, slots, 16, **options)
    cache.append(Z(B, 2, T, 16), Z(B, 2, T, 16), backend="torch")
    return cache


FROM_LEFT = filled(2)
FROM_LEFT.set_starts(INTS)
B, H_q, H_k, T_q, T_k, D = 2, 4, 2, 3, 5, 8
ones, yes = torch.ones, torch.ones(1, 1, dtype=torch.bool)


def ints(*shape: int) -> Tensor:
    return Z(*shape, dtype=torch.int64)


@triton.jit
def keep_all(b, h, i, j):
    return i == i


@triton.jit
def keep_two(b, h, i, j, one, other):
    return i == i


@triton.jit
def arranged(b, h, i, j):
    return i == tl.arange(0, 1)


@triton.jit
def by_part(b, h, i, j):
    return keep_all(b, h, i, j) & arranged(b, h, i, j)


@triton.jit
def by_method(b, h, i, j):
    return i.to(tl.float32).max() > j


@triton.jit
def by_subscript(b, h, i, j):
    return i[None] > j


@triton.jit
def same(x, b, h, i, j):
    return x


@triton.jit
def summed(x, b, h, i, j):
    return tl.cumsum(x, 1)


@triton.jit
def summed_grad(dx, x, b, h, i, j):
    return tl.cumsum(dx, 1)


@triton.jit
def branching(x, b, h, i, j):
    if h > 1:
        x = 2 * x
    return x


KEYS, LEARNS = ones(1, 3, D), ones(H_q, requires_grad=True)
Q2 = ones(B, H_q, T_q, 6)
POSITIONS = tuple(torch.arange(T, dtype=torch.int32)[None] for T in (T_q, T_k))
TABLES = {"mask_mod": keep_all, "mod_tensors": (ones(2),)}
X, (COS, SIN) = draw(2, 3, 5, 8), rotary_tables(5, 8)


def explained(call: Any, explain: Any, given: dict[str, Any]) -> Any:
    """The call, if it is served; else its explanation says why not, as the call does."""
    try:
        return call(**given)
    except (TypeError, ValueError, RuntimeError) as error:
        with pytest.raises(type(error), match=f"^{re.escape(str(error))}$"):
            explain(**given)
        raise


def dense(**change: Any) -> Any:
    given = dict(zip("qkv", make_qkv(B, H_q, H_k, T_q, T_k, D), strict=True))
    return explained(fastattn.attention, fastattn.explain, given | change)


def packed(**change: Any) -> Any:
    q, k, v = (x[0].transpose(0, 1).detach() for x in make_qkv(1, H_q, H_k, T_q, T_k, D))
    starts = {"cu_seqlens_q": torch.tensor([0, 1, 3]), "cu_seqlens_k": torch.tensor([0, 2, 5])}
    return fastattn.attention_varlen(**{"q": q, "k": k, "v": v, **starts, **change})


def tables(positions: Any = 3, **change: Any) -> Any:
    return rotary_tables(positions, **{"rotary_dim": 8, **change})


def rotate(x: Any = X, cos: Any = COS, sin: Any = SIN, **change: Any) -> Any:
    return apply_rotary(x, cos, sin, **change)


Q, CACHE, ONE_ROW = Z(2, 4, 1, 16), filled(2), filled(1)
RING, ONE_RING = (filled(B, T=9, slots=6, window=4, keep_first=1) for B in (2, 1))
PADDED = fastattn.KVCache(1, 2, 8, 16)
PADDED.set_starts(torch.tensor([2]))


def decode(**change: Any) -> Any:
    given = {"q": Q, "cache": CACHE, "backend": "torch"} | change
    return explained(fastattn.decode_attention, fastattn.explain_decode, given)


def ring(**change: Any) -> Any:
    return decode(**{"q": Q[:1], "cache": ONE_RING, "window": 3, "keep_first": 1, **change})


def cascade(prefix: Any = ONE_ROW, cache: Any = CACHE, *, q: Tensor = Q, **options: Any) -> Any:
    return fastattn.cascade_attention(q, prefix, cache, **options)


def view(**change: Any) -> Any:
    pages = Z(2, 1, 4, 16)
    return fastattn.view_of_tensors(
        **{"k": pages, "v": pages, "lengths": torch.tensor([2, 3]), **change}
    )


CODES, SCALE = dict.fromkeys("kv", Z(2, 1, 4, 16).to(torch.int8)), Z(2, 1, 4)
PAGES, TABLE, P = Z(6, 2, 4, 16), torch.tensor([[0, 1, 2], [3, 4, 9]]), Z(4, 4, 16)
TREE, FLAT = torch.ones(4, 3, dtype=torch.bool), torch.ones(10, dtype=torch.bool)


def cache_with(**change: Any) -> tuple[Any, ...]:
    cache = {"k": PAGES, "v": PAGES, "table": TABLE, "lengths": torch.tensor([9, 7])}
    return tuple({**cache, **change}.values())


def paged(**change: Any) -> Any:
    given = {"q": P, "cache": cache_with(), "cu_seqlens_q": torch.tensor([0, 3, 4])}
    call, explain = fastattn.attention_paged, fastattn.explain_paged
    return explained(call, explain, {**given, "backend": "torch", **change})


# Rows that share their first page, which the older tokens of one of them fill.
SHARED: Any = {"cache": cache_with(table=torch.tensor([[0, 1, 2], [0, 4, 5]]))}
SHARED["cu_seqlens_q"] = torch.tensor([0, 3, 4])
TWICE = fastattn.view_of_tensors(
    PAGES, PAGES, INTS + 9, block_table=SHARED["cache"][2], batch_index=INTS
)


def shared(**change: Any) -> Any:
    groups = {"rows": torch.tensor([0, 2]), "lengths": torch.tensor([4])}
    return fastattn.shared_pages(**{**SHARED, **groups, **change})


def over_shared(**change: Any) -> Any:
    return paged(**{"q": P, **SHARED, "shared": shared(), "softcap": 1.0, "window": None, **change})


def paged_scale(scale: Any = None) -> Any:
    codes, scale = PAGES.to(torch.int8), torch.ones(()) if scale is None else scale
    return fastattn.view_of_tensors(codes, codes, INTS, k_scale=scale, v_scale=torch.ones(()))


def merge(**change: Any) -> Any:
    return fastattn.merge(**{"o1": Z(2, 3), "lse1": Z(2), "o2": Z(2, 3), "lse2": Z(2), **change})


def values(rows: int, keys: int, length: Any = 3) -> PackedValues:
    return PackedValues(Z(rows, 2, 64, keys).to(E4M3), length)


def fp8(**change: Any) -> Any:
    code = Z(1, 2, 3, 64).to(E4M3)
    call = {"q": code.repeat(1, 2, 1, 1), "k": code, "v": code}
    return explained(fastattn.attention_fp8, fastattn.explain_fp8, call | change)


def packed_fp8(**change: Any) -> Any:
    code = Z(3, 2, 64).to(E4M3)
    call = {"q": code, "k": code, "v": code, "cu_seqlens_q": torch.tensor([0, 1, 3])}
    return fastattn.attention_varlen_fp8(**(call | change))


def additive(**change: Any) -> Any:
    """H_q 2, H_k 1, 18 queries of width 4 and 21 keys of width 6, 3 hidden."""
    draw = draws()
    given = {"q": draw(2, 2, 18, 4), "k": draw(2, 1, 21, 6), "v": draw(2, 1, 21, 3)}
    given |= {"u": draw(3), "w_query": draw(3, 4), "w_key": draw(3, 6)}
    return fastattn.additive_attention(**(given | change))


QKV = make_qkv(1, 2, 1, 3, 4, 8)


def statistics(**change: Any) -> Any:
    q, k, _ = make_qkv(2, 2, 1, 21, 25, 12)
    return fastattn.attention_statistics(q, k, **change)


def weights(**change: Any) -> Any:
    return fastattn.attention_weights(*QKV[:2], **change)


def append(
    slots: Any = (13, -1, 0, 14, 2, -1, 7),
    *,
    dtype: torch.dtype = torch.float32,
    cache: Any = None,
    positions: Any = None,
    rotary: bool = False,
    device: str = "cpu",
    **q: Tensor,
) -> None:
    """Seven tokens to pages of three slots, of which none is written where the call is refused."""
    pages = [torch.full((5, 2, 3, 16), 7.0) for _ in "kv"]
    how: dict[str, Any] = {"rotary": rotary_tables(4, 8)} if rotary else {}
    how |= {} if positions is None else {"positions": torch.tensor(positions)}
    try:
        k = ones(7, 2, 16, dtype=dtype)
        fastattn.append_paged(
            cache or tuple(pages), k, k, torch.tensor(slots, device=device), **how, **q
        )
    except (TypeError, ValueError):
        assert all((x == 7).all() for x in pages), "something was written"
        raise


def plan(T: int = 256, ranks: int = 2, **change: Any) -> ContextPlan:
    return ContextPlan.make(T, ranks, **change)


def heads(heads: Any = (0, 4)) -> Any:
    return fastattn.attention(*make_qkv(1, 4, 2, 4, D=8), heads=heads, dropout=0.5)


def positions(positions: Any = (ROW, ROW), **change: Any) -> Any:
    return fastattn.attention(*make_qkv(2, 1, 1, 4, 4, 8), positions=positions, **change)


def warmup(**change: Any) -> Any:
    return fastattn.warmup(**{"head_dims": 16, "calls": "full", "device": DEVICE, **change})


HALF, LSE = Z(1, 2, 4, 8).half(), Z(1, 2, 4)


def forward(**change: Any) -> Any:
    return fastattn.attention_block_forward(HALF, HALF, HALF, **change)


def backward(**change: Any) -> Any:
    given = dict.fromkeys(("do", "q", "k", "v", "o"), HALF)
    return fastattn.attention_block_backward(**{**given, "lse": LSE, **change})


BF16 = torch.bfloat16
INDICES, INDEX = Z(1, 2, 3, 1).int(), ones(1, 2, 3, 4)


def selected(**change: Any) -> Any:
    given = dict(zip("qkv", make_qkv(1, 4, 2, 3, 20, 8), strict=True))
    given |= {"indices": INDICES, "block": (1, 16)} | change
    return explained(fastattn.selected_attention, fastattn.explain_selected, given)


LISTED = fastattn.PagedKVCache(8, 8, 2, 16)
LISTED.append([LISTED.allocate(), LISTED.allocate()], Z(2, 2, 5, 16), Z(2, 2, 5, 16))
TURNED = LISTED.view(LISTED.rows)
TURNED = TURNED._replace(k=TURNED.k.transpose(1, 2).contiguous().transpose(1, 2))
WIDE = Z(1, 1, 1, 8).double()


def listed(**change: Any) -> Any:
    call = {"q": Z(2, 4, 2, 16), "cache": LISTED, "indices": Z(2, 1, 2, 2).int(), "block_k": 8}
    return fastattn.decode_selected(**{**call, **change})


def loss(**change: Any) -> Any:
    call = {"q_index": INDEX, "k_index": INDEX[:, :1], "w": INDEX[..., 0], "q": INDEX, "k": INDEX}
    return fastattn.indexer_loss(**{**call, **change})


def select(**change: Any) -> Any:
    q, k, _ = make_qkv(1, 4, 2, 8, 8, 8)
    return fastattn.select_blocks(q, k, **{"n": 2, "block_k": 4, **change})


def pool(**change: Any) -> fastattn.PagedKVCache:
    sizes = {"num_pages": 2, "page_size": 4, "num_kv_heads": 1, "head_dim": 8}
    return fastattn.PagedKVCache(**{**sizes, **change})


def compact(first: int = 1, kept: tuple[int, ...] = (2,)) -> None:
    cache = pool()
    cache.append([cache.allocate()], Z(1, 1, 3, 8), Z(1, 1, 3, 8))
    cache.compact(0, first, kept)


def tokens(**change: Any) -> Any:
    """To a cache of three rows, of which each holds four tokens."""
    cache = fastattn.KVCache(3, 2, 8, 4, value_dim=3)
    cache.append(Z(3, 2, 4, 4), Z(3, 2, 4, 3), backend="torch")
    return cache.append(**{"k": Z(3, 2, 1, 4), "v": Z(3, 2, 1, 3), "backend": "torch", **change})


def turned(**change: Any) -> Any:
    return tokens(**{"q": Z(3, 2, 1, 4), "rotary": (ones(9, 1),) * 2, **change})


def hopper(sizes: Any = (), **options: Any) -> None:
    q, k, v = make_qkv(**{"B": 1, "D": 64, "dtype": BF16, **dict(sizes)})
    if why := why_not_hopper(q, k, v, dense_options(q, k, v, **options)):
        raise ValueError(why)


def hopper_fp8(D: int = 64, D_v: int = 64, T_k: int = 8, out_dtype: torch.dtype = BF16) -> None:
    q, k, v = (torch.empty(1, 1, *shape) for shape in ((4, D), (T_k, D), (T_k, D_v)))
    if why := why_not_hopper_fp8(q, k, v, Options(), out_dtype):
        raise ValueError(why)


NAMES = {"np": np} | vars(fastattn) | vars(rotary_scaling) | vars(rotary) | globals()
# The others are called by rows with all that they take.
CHANGED = [name for name in ROWS if getattr(globals().get(name), "__module__", "") == __name__]


@pytest.mark.parametrize("name", ROWS)
def test_refused(name: str) -> None:
    assert served(ROWS[name], NAMES) == []


@pytest.mark.parametrize("name", CHANGED)
def test_what_the_rows_change_is_served(name: str) -> None:
    globals()[name]()
