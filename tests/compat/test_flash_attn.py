"""flash-attn's functions against the naive reference, in flash-attn's layout."""

from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from calls_of_flash_attn import case, check, check_parts, offsets, oracle
from oracles import assert_by_oracle, with_gradients

from fastattn import dispatch, document_ids, reference
from fastattn.compat import flash_attn
from fastattn.compat.flash_attn import bert_padding, passes

pytestmark = pytest.mark.usefixtures("models_on_torch")


def test_what_is_returned_also_when_compiled(draw):
    q = draw(1, 4, 2, 8)
    o = flash_attn.flash_attn_func(q, q, q)
    three = flash_attn.flash_attn_func(q, q, q, return_attn_probs=True, deterministic=True)
    torch.testing.assert_close(three[0], o)
    assert three[1].shape == (1, 2, 4) and three[2] is None
    two = flash_attn.flash_attn_func(q, q, q, return_lse=True)
    assert len(two) == 2 and torch.equal(two[1], three[1])
    with mock.patch.object(dispatch, "warn_once") as warned:  # of layouts that are right here
        heads = draw(1, 2, 4, 8).transpose(1, 2)
        flash_attn.flash_attn_func(heads, heads[:, :2], heads[:, :2], causal=True)
    warned.assert_not_called()
    compiled = torch.compile(flash_attn.flash_attn_func, backend="eager", fullgraph=True)
    wanted = flash_attn.flash_attn_func(q, q, q, causal=True, window_size=(2, 0))
    torch.testing.assert_close(compiled(q, q, q, causal=True, window_size=(2, 0)), wanted)


@pytest.mark.parametrize(
    "size", [(2, -1), (np.int64(2), np.int32(-1)), torch.tensor([2, -1]), [2, None]], ids=str
)
def test_arguments_by_position_in_numbers_of_any_kind(size, draw):
    q = draw(1, 6, 2, 8)
    given = (np.float64(0.0), np.float32(0.5), np.bool_(True), size, np.float32(3.0))
    actual = flash_attn.flash_attn_func(q, q, q, *given)
    check(actual, q, q, q, scale=0.5, causal=True, window=(2, None), softcap=3.0)


def test_gradients_and_packed_forms(draw):
    qkv = draw(2, 6, 3, 4, 8)

    def ours(qkv):
        o = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True)
        q, kv = qkv[:, :, 0], qkv[:, :, 1:]
        assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, kv, causal=True), o)
        return o

    def by_reference(qkv):
        heads = (x.transpose(1, 2) for x in qkv.unbind(2))
        return reference.attention(*heads, causal=True).transpose(1, 2)

    actual = with_gradients(ours, [qkv], torch.float32)
    assert actual[0].is_contiguous()
    assert_by_oracle(actual, partial(with_gradients, by_reference, [qkv]), names="o dqkv")


def test_varlen_packed_forms(draw, device):
    qkv = draw(8, 3, 2, 8)
    cu = offsets((3, 5), device)
    o = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 5, causal=True)
    ids = document_ids(cu, 8)
    check(o[None], *(x[None] for x in qkv.unbind(1)), causal=True, documents=ids)
    q, kv = qkv[:, 0], qkv[:, 1:]
    assert torch.equal(
        flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 5, 5, causal=True), o
    )


@pytest.mark.parametrize("name", ["defaults", "causal", "causal-window", "alibi"])
def test_varlen_with_used_keys_and_positions(name, draw, device):
    """Positions count from the last key that is used; 9 are more than there are."""
    theirs, ours = case(name, device)
    q, k, v = draw(5, 4, 8, grad=True), draw(12, 2, 8, grad=True), draw(12, 2, 8, grad=True)
    cu_q, cu_k = offsets((2, 3), device), offsets((7, 5), device)
    used = torch.tensor([4, 9], dtype=torch.int32, device=device)
    o, lse = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 3, 7, seqused_k=used, return_lse=True, **theirs
    )
    parts = [(slice(0, 2), slice(0, 4)), (slice(2, 5), slice(7, 12))]
    check_parts((o, lse), q, k, v, parts, **ours)
    for grad in torch.autograd.grad(o.square().sum(), (k, v)):
        assert not grad[4:7].any() and grad[:4].any() and grad[7:].any()


def test_unpad_and_pad_as_models_do(draw, device):
    """Padding taken out, attention on packed tokens, and put back: the padded result."""
    mask = torch.tensor([[1, 2, 1, 0, 0], [0, 1, 1, 3, 1]], device=device)
    keep, x = mask.bool(), draw(2, 5, 4, 8, grad=True)
    tokens, indices, cu, longest, used = bert_padding.unpad_input(x, mask)
    assert tokens.shape == (7, 4, 8) and indices.tolist() == [0, 1, 2, 6, 7, 8, 9]
    assert cu.tolist() == [0, 3, 7] and cu.dtype == torch.int32 and longest == 4
    assert used.tolist() == [3, 4]
    o = flash_attn.flash_attn_varlen_func(*[tokens] * 3, cu, cu, longest, longest, causal=True)
    whole = bert_padding.pad_input(o, indices, 2, 5)
    assert not whole[~keep].any()

    def padded(dtype):
        return [oracle(x, x, x, dtype, causal=True, key_padding_mask=keep)[0][keep]]

    assert_by_oracle([whole[keep]], padded)
    (grad,) = torch.autograd.grad(whole.sum(), x)
    assert not grad[~keep].any() and grad[keep].any()
    unused = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 0, 0, 0]], device=device)
    tokens, indices, cu, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert indices.tolist() == [0, 1, 2, 3, 6, 7, 8, 9] and cu.tolist() == [0, 4, 8]
    assert (longest, used.tolist(), tokens.shape) == (4, [3, 4], (8, 4, 8))
    lengths = torch.tensor([[2, 1, 0, 0, 0], [4, 0, 0, 0, 0]], device=device)
    joined, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [0, 1, 2, 5, 6, 7, 8] and cu.tolist() == [0, 2, 3, 7]
    assert cu.dtype == torch.int32 and longest == 4
    assert torch.equal(joined, torch.cat((x[0, :3], x[1, :4])))


def test_lengths_of_a_cache_as_a_number_and_by_default(draw):
    q, k_cache, v_cache = draw(3, 1, 4, 8), draw(3, 12, 2, 8), draw(3, 12, 2, 8)
    check(flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache), q, k_cache, v_cache)
    numbers = {"cache_seqlens": np.int64(6), "softmax_scale": np.float32(0.3)}
    numbers |= {"causal": np.bool_(True), "window_size": torch.tensor([3, -1])}
    actual = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **numbers)
    check(actual, q, k_cache[:, :6], v_cache[:, :6], scale=0.3, window=(3, None))


def test_varlen_over_pages(draw, device):
    """Pages [P, 4, 2, D] in any order; the first row has more queries than its pages have slots."""
    q, k_pages, v_pages = draw(15, 4, 8), draw(10, 4, 2, 8), draw(10, 4, 2, 8)
    table = torch.tensor([[7, 1, 4], [0, 9, 2]], dtype=torch.int32, device=device)
    cu_q, cu_k = offsets((14, 1), device), offsets((6, 11), device)
    given = {"causal": True, "block_table": table, "return_attn_probs": True}
    o, lse, _ = flash_attn.flash_attn_varlen_func(q, k_pages, v_pages, cu_q, cu_k, 14, 11, **given)
    keys, values = (x[table.long()].flatten(1, 2) for x in (k_pages, v_pages))
    parts = [(slice(0, 14), slice(0, 6)), (slice(14, 15), slice(12, 23))]
    check_parts((o, lse), q, keys.flatten(0, 1), values.flatten(0, 1), parts, causal=True)
    used = cu_k.diff()
    given = {"seqused_k": used, "max_seqlen_q": 14, "causal": True, "page_table": table}
    again = flash_attn.flash_attn_varlen_func(q, k_pages, v_pages, cu_q, return_lse=True, **given)
    assert torch.equal(again[0], o) and torch.equal(again[1], lse)
    call = (q, k_pages, v_pages, cu_q, cu_k, 14, 11, 0.0, 8**-0.5, True)
    again = passes._flash_attn_varlen_forward(*call, block_table=table)
    assert torch.equal(again[0], o) and torch.equal(again[1], lse)
