"""Each class of xformers' biases against its mask, written out.

With FASTATTN_XFORMERS, the folder of an unpacked xformers 0.0.35, its own classes and their
`materialize`; else classes of the same names and fields, and masks of their documented meaning.
"""

import os
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from fastattn import attention, attention_varlen
from fastattn.compat import xformers as integration

FOLDER = os.environ.get("FASTATTN_XFORMERS")
QUERIES, KEYS = [3, 2, 5], [4, 6, 5]
DENSE = {
    "LowerTriangularMask": {},
    "LowerTriangularFromBottomRightMask": {},
    "LowerTriangularFromBottomRightLocalAttentionMask": {"_window_size": 2},
    "LocalAttentionFromBottomRightMask": {"window_left": 1, "window_right": 2},
}
TOP_LEFT = [
    "LowerTriangularMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalCausalLocalAttentionMask",
]
SIDES = {"window_left": 1, "window_right": 1}


def _bias(name, fields):
    if FOLDER:
        from xformers.ops.fmha import attn_bias as module

        return getattr(module, name)(**fields)
    return type(name, (), fields)()


@pytest.fixture(autouse=True)
def _own_classes(monkeypatch):
    if FOLDER:
        monkeypatch.syspath_prepend(FOLDER)


def _info(starts, lengths=None):
    fields = {"seqstart_py": starts, "seqstart": torch.tensor(starts, dtype=torch.int32),
              "max_seqlen": 6, "min_seqlen": 1}  # fmt: skip
    if lengths is not None:
        fields |= {"seqlen_py": lengths, "seqlen": torch.tensor(lengths, dtype=torch.int32)}
    if not FOLDER:
        return SimpleNamespace(**fields)
    from xformers.ops.fmha import attn_bias as module

    if lengths is None:
        return module._SeqLenInfo(**fields)
    kind = module._PaddedSeqLenInfo if starts == [0, 8, 16, 24] else module._GappySeqInfo
    return kind(**fields, **({"padding": 8} if kind is module._PaddedSeqLenInfo else {}))


def _starts(lengths):
    return [0, *accumulate(lengths)]


def _blocks(name):
    """Fields of a bias, and the rows of keys of each block."""
    paged, gappy = "Paged" in name, "Gappy" in name
    lengths = [2, 6, 1] if name in TOP_LEFT else KEYS
    fields = {"q_seqinfo": _info(_starts(QUERIES))}
    if "CausalLocal" in name:
        fields["_window_size"] = 5 if name in TOP_LEFT else 2
    elif "Local" in name:
        fields |= SIDES
    if "Keys" not in name:
        starts = _starts(lengths)
        fields["k_seqinfo"] = _info(starts)
    elif not gappy:
        starts = [0, 8, 16, 24]
        fields["k_seqinfo"] = _info(starts, lengths)
    elif not paged:
        starts = [1, 6, 15, 24]
        fields["k_seqinfo"] = _info(starts, lengths)
    else:
        starts = [1, 0, 3, -1]
        ends = [start + n for start, n in zip(starts, lengths, strict=False)]
        fields["k_seqinfo"] = _info(starts, ends)
    rows = [torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=False)]
    if paged:
        table = torch.tensor([[3, 1], [5, 0], [2, 4]], dtype=torch.int32)
        fields |= {"block_tables": table, "page_size": 4}
        first = [0, 0, 0] if gappy else [0, 8, 16]
        rows = [row - at for row, at in zip(rows, first, strict=True)]
        rows = [table[i, row // 4].long() * 4 + row % 4 for i, row in enumerate(rows)]
    return fields, rows, 24 if paged else starts[-1]


def _seen(T, N, name, fields):
    """One block's mask by the name of its class: bool [T, N]."""
    distance = torch.arange(T)[:, None] + (0 if name in TOP_LEFT else N - T) - torch.arange(N)
    seen = torch.ones(T, N, dtype=torch.bool)
    if "Causal" in name or "Triangular" in name:
        seen &= distance >= 0
    if "_window_size" in fields:
        seen &= distance < fields["_window_size"]
    if "window_left" in fields:
        seen &= (distance <= fields["window_left"]) & (distance >= -fields["window_right"])
    return seen


def _inputs(B, M, N):
    torch.manual_seed(0)
    shapes = ((B, 2, M, 16), (B, 2, N, 16), (B, 2, N, 8))
    return [torch.randn(shape, requires_grad=True).transpose(1, 2) for shape in shapes]


def _check(q, k, v, bias, mask, *learned):
    o = integration.memory_efficient_attention(q, k, v, bias, scale=0.3)
    assert o.is_contiguous(), "callers view it in other sizes"
    wanted = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), mask, scale=0.3
    ).transpose(1, 2)
    torch.testing.assert_close(o, wanted)
    grads, of = torch.randn_like(o), (q, k, v, *learned)
    torch.testing.assert_close(
        torch.autograd.grad(o, of, grads), torch.autograd.grad(wanted, of, grads)
    )
    if FOLDER and not learned:
        own = bias.materialize((q.shape[1], k.shape[1]))
        assert torch.equal(own[..., : k.shape[1]] == 0, mask)


@pytest.mark.parametrize("name", DENSE)
def test_biases_of_whole_rows(name):
    fields = DENSE[name]
    _check(*_inputs(2, 5, 7), _bias(name, fields), _seen(5, 7, name, fields))


@pytest.mark.parametrize("name", integration._BLOCKS)
def test_biases_of_blocks(name):
    fields, rows, total = _blocks(name)
    mask = torch.zeros(sum(QUERIES), total, dtype=torch.bool)
    for start, n, row in zip(_starts(QUERIES), QUERIES, rows, strict=False):
        mask[start : start + n, row] = _seen(n, len(row), name, fields)
    _check(*_inputs(1, sum(QUERIES), total), _bias(name, fields), mask)


def test_added_tensors_and_groups():
    q, k, v = _inputs(2, 5, 7)
    added = torch.randn(2, 2, 5, 7, requires_grad=True)
    _check(q, k, v, added, added, added)
    o = integration.memory_efficient_attention(q, k, v, added)
    grouped = [*(x.unsqueeze(2) for x in (q, k, v)), added.unsqueeze(1)]
    of_groups = integration.memory_efficient_attention(*grouped)[:, :, 0]
    torch.testing.assert_close(of_groups, o)
    grads = (torch.autograd.grad(x.square().sum(), added)[0] for x in (of_groups, o))
    torch.testing.assert_close(*grads)
    bias = _bias(
        "LowerTriangularMaskWithTensorBias", {"bias": added} if FOLDER else {"_bias": added}
    )
    _check(q, k, v, bias, added + torch.ones(5, 7).tril().log(), added)
    with pytest.raises(ValueError, match=r"query must be \[1, 10"):
        kind = type("BlockDiagonalMask", (), _blocks("BlockDiagonalMask")[0])
        integration.memory_efficient_attention(q, k, v, kind())
    fields, _, total = _blocks("BlockDiagonalMask")
    q, k, v = _inputs(1, sum(QUERIES), total + 1)
    with pytest.raises(ValueError, match=rf"key must have {total} rows .* got {total + 1}"):
        integration.memory_efficient_attention(q, k, v, _bias("BlockDiagonalMask", fields))


@pytest.mark.parametrize("name", [None, "BlockDiagonalCausalFromBottomRightMask"])
def test_dropped_weights_are_those_of_the_seed(name):
    q, k, v = _inputs(1, sum(QUERIES), sum(KEYS))
    bias = None if name is None else _bias(name, _blocks(name)[0])
    torch.manual_seed(3)
    o = integration.memory_efficient_attention(q, k, v, bias, 0.5)
    torch.manual_seed(3)
    if name is None:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        wanted = attention(*heads, dropout=0.5).transpose(1, 2)
    else:
        offsets = (torch.tensor(_starts(n), dtype=torch.int32) for n in (QUERIES, KEYS))
        packed = (x[0] for x in (q, k, v))
        wanted = attention_varlen(*packed, *offsets, causal=True, dropout=0.5)[None]
    assert torch.equal(o, wanted)
