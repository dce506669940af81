"""Masks for transformers: the rule that they keep, and their entries."""

import copy
from itertools import product

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import masking_utils as masking
from transformers_models import decoder, heads, layer, tokens

from fastattn.compat.transformers import hf_attention, lazy_mask, masks, packing

pytestmark = pytest.mark.usefixtures("models_on_torch")
remap = getattr(masking, packing.REMAP, masks._remap)


def test_masks_agree_with_those_of_transformers():
    """The rule's mask, entry by entry, for every maker, offset and padding."""
    packed = torch.tensor([[0, 0, 0, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    sliding = masking.sliding_window_causal_mask_function(3)
    functions = [
        masking.causal_mask_function,
        masking.bidirectional_mask_function,
        sliding,
        masking.sliding_window_bidirectional_mask_function(2),
    ]
    sizes_of_calls = ((6, 6, 0, 0), (2, 7, 5, 0), (3, 8, 0, 0), (2, 5, 9, 6))
    cases = [(function, *sizes, None) for function in functions for sizes in sizes_of_calls]
    cases += [(*case[:5], torch.tensor([[0, 0, 1, 1, 1, 1, 1]]).bool()) for case in cases]
    # In transformers 5.23 sequences come first, in 5.24 last.
    both = [
        masking.packed_sequence_mask_function(packed),
        remap(sliding, positions),
    ]
    for joined in (both, both[::-1]):
        cases.append((masking.and_masks(*joined), 6, 6, 0, 0, None))
    narrower = masking.and_masks(sliding, masking.sliding_window_overlay(2))
    cases.append((narrower, 6, 6, 0, 0, None))
    for function, T_q, T_k, q_offset, k_offset, padding in cases:
        sizes = (1, T_q, T_k, q_offset, k_offset)
        counter = q_offset if T_q == T_k else torch.tensor(q_offset)
        given = (*sizes[:3], counter, k_offset, function, padding, None, False)
        mask = hf_attention.attention_mask(*given, device="cpu")
        counter += T_q  # a static cache counts before a layer may ask for entries
        assert isinstance(mask, lazy_mask.LazyMask)
        q, k, v = heads(T_q, T_k)
        # A layer's `is_causal` may say otherwise, and a missing mask cannot.
        both = (layer(), layer(causal=False))
        outputs = [hf_attention.attention_forward(module, q, k, v, mask)[0] for module in both]
        assert mask._made is None, "the rule was not used"
        plain, _ = hf_attention.attention_forward(layer(), q, k, v, mask.entries())
        for o in outputs:
            torch.testing.assert_close(o, plain)
        wanted = masking.sdpa_mask(*sizes, function, padding, allow_is_causal_skip=False)
        assert torch.equal(mask.entries(), wanted)


def test_a_traced_call_lets_no_mask_fall_that_hides(monkeypatch):
    """None only where the mask is all of `is_causal`, whatever else may be skipped."""
    monkeypatch.setattr("transformers.utils.import_utils.is_tracing", lambda *x: True)
    causal, whole = masking.causal_mask_function, masking.bidirectional_mask_function
    sliding = masking.sliding_window_causal_mask_function(2)
    for function, skips_causal, skips_whole, keys in product(
        (causal, whole, sliding), (False, True), (False, True), (None, torch.ones(1, 4).bool())
    ):
        skips = {causal: skips_causal, whole: skips_whole}.get(function, False) and keys is None
        may = {"allow_is_causal_skip": skips_causal, "allow_is_bidirectional_skip": skips_whole}
        called = {"mask_function": function, "attention_mask": keys}
        mask = hf_attention.attention_mask(1, 4, 4, **called, **may)
        assert (mask is None) == skips, (function, may)
        expected = masking.sdpa_mask(1, 4, 4, **called, allow_is_causal_skip=False)
        assert mask is None or torch.equal(mask, expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_masks_under_vmap_are_not_read(device):
    """Gradients of each sample; one has padding, and one two sequences."""
    model = decoder("mistral-window", device)
    model.set_attn_implementation("fastattn")
    weights, ids = dict(model.named_parameters()), tokens(2, 9, device)
    seen = torch.tensor([[0] * 3 + [1] * 6, [1] * 4 + [2] * 5], device=device)

    def loss(weights, ids, mask):
        inputs = {"attention_mask": mask[None], "use_cache": False}
        out = torch.func.functional_call(model, weights, (ids[None],), inputs)
        return (out.logits[0] * (mask != 0)[:, None]).square().sum()

    of_sample = torch.func.grad(loss)
    each = torch.func.vmap(of_sample, (None, 0, 0))(weights, ids, seen)
    for n in range(2):
        alone = of_sample(weights, ids[n], seen[n])
        torch.testing.assert_close({name: x[n] for name, x in each.items()}, alone)


def test_other_mask_functions_are_translated_or_computed(monkeypatch):
    """Kernels get the function, torch its entries."""
    ids, padding = torch.tensor([[0, 1, 1, 0, 1], [2, 2, 0, 0, 2]]), torch.ones(2, 5).bool()
    padding[1, :2] = False

    def same(b, h, q, k):
        return torch.where(q < ids.shape[1], ids[b, q], -1) == ids[b, k]

    def every_other(b, h, q, k):
        return torch.isin(q - k, torch.tensor([0, 2]))

    for function, q_offset, kv_offset, backend in (
        (same, 0, 0, "triton"),
        (masking.or_masks(masking.causal_mask_function, same), 0, 0, "torch"),
        (masking.and_masks(masking.causal_mask_function, same), 2, 1, "triton"),
    ):
        T_q, T_k = 5 - q_offset, 5 - kv_offset
        mask = hf_attention.attention_mask(
            2, T_q, T_k, q_offset, kv_offset, function, attention_mask=padding
        )
        q, k, v = heads(T_q, T_k, B=2)
        monkeypatch.setenv("FASTATTN_BACKEND", backend)
        o, _ = hf_attention.attention_forward(layer(), q, k, v, mask)
        assert (mask._made is None) is (backend == "triton")
        moved = mask.rule().to(torch.device("meta")).mask_mod
        assert {x.device.type for x in moved.tensors} == {"meta"}
        plain, _ = hf_attention.attention_forward(layer(), q, k, v, mask.entries())
        torch.testing.assert_close(o, plain)
    monkeypatch.setenv("FASTATTN_BACKEND", "triton")
    q, k, v = heads(5, 5)
    for beside in (
        {"position_ids": torch.tensor([[0, 1, 0, 1, 2]])},
        {"cu_seq_lens_q": torch.tensor([0, 2, 5], dtype=torch.int32)},
        {"indices": torch.tensor([0, 2, 3]).expand(1, 5, 3)},
    ):
        mask = hf_attention.attention_mask(1, 5, 5, mask_function=same)
        o, _ = hf_attention.attention_forward(layer(), q, k, v, mask, **beside)
        plain, _ = hf_attention.attention_forward(layer(), q, k, v, mask.entries(), **beside)
        torch.testing.assert_close(o, plain)
    mask = hf_attention.attention_mask(1, 4, 4, mask_function=every_other)
    assert type(mask) is torch.Tensor
    assert mask[0, 0, 3].tolist() == [False, True, False, True]
    remapped = remap(masking.causal_mask_function, torch.tensor([[0, 1, 0, 1]]))
    assert masks.rule_of(masking.and_masks(remapped)) is None


def test_chunks_are_documents_where_queries_are_the_keys():
    keys = torch.arange(8) >= torch.tensor([[2], [0]])
    for padding, T in ((None, 8), (keys, 8), (keys[:, :3], 3)):
        left = torch.zeros(2).long() if padding is None else (~padding).sum(dim=1)
        function = masking.chunked_causal_mask_function(3, left)
        mask = hf_attention.attention_mask(2, T, T, mask_function=function, attention_mask=padding)
        assert (mask.rule().documents is None) is (T == 3)
        q, k, v = heads(T, T, B=2)
        o, _ = hf_attention.attention_forward(layer(), q, k, v, mask)
        assert mask._made is None, "the rule was not used"
        plain, _ = hf_attention.attention_forward(layer(), q, k, v, mask.entries())
        seen = mask.entries().any(dim=-1)[:, 0]
        torch.testing.assert_close(o[seen], plain[seen])
    # Behind a cache the chunks are read from the entries.
    assert type(hf_attention.attention_mask(2, 2, 8, 6, mask_function=function)) is torch.Tensor


def test_a_mask_that_is_moved_keeps_its_rule_and_one_that_is_changed_is_obeyed():
    mask = hf_attention.attention_mask(1, 4, 4, attention_mask=torch.ones(1, 4).bool())
    for moved in (mask.to("cpu"), mask.to(torch.bool), mask.to(device="cpu", non_blocking=True)):
        assert isinstance(moved, lazy_mask.LazyMask) and moved.rule() is mask.rule()
    elsewhere = mask.to("meta")
    assert elsewhere.device.type == "meta" and elsewhere.rule().padding.device.type == "meta"
    assert mask._made is None
    assert mask.to(torch.float32).tolist() == torch.ones(4, 4).tril()[None, None].tolist()
    mask.logical_and_(torch.eye(4).bool())
    q, k, v = heads(4, 4)
    for changed in (mask, mask.to("cpu")):
        o, _ = hf_attention.attention_forward(layer(), q, k, v, changed)
        torch.testing.assert_close(o, v.transpose(1, 2))


@torch.inference_mode()
def test_lazy_mask_is_a_tensor_to_others():
    made = []

    def entries():
        made.append(1)
        return torch.eye(3).bool()[None, None].expand(2, 1, 3, 3)

    rule = lazy_mask.Rule(causal=True)
    mask = lazy_mask.LazyMask(rule, entries, (2, 1, 3, 3), "cpu")
    assert isinstance(mask, torch.Tensor) and mask.shape == (2, 1, 3, 3) and mask.ndim == 4
    assert mask.dtype == torch.bool and mask.device.type == "cpu" and len(mask) == 2
    assert mask.contiguous().rule() == rule and mask.clone().rule() == rule
    assert not made
    assert torch.equal(mask[:, :, 1:], torch.eye(3).bool()[1:].expand(2, 1, 2, 3))
    assert torch.cat([mask, mask]).shape == (4, 1, 3, 3) and (~mask).sum() == 12
    assert made == [1] and mask.rule() == rule
    mask[0, 0, 0, 2] = True
    assert mask.rule() is None and bool(mask.entries()[0, 0, 0, 2])
    assert not mask[1, 0, 0, 2]
    copied = copy.deepcopy(mask)
    assert bool(copied[0, 0, 0, 2])


def test_what_wrappers_ask_of_arguments_makes_no_entries():
    """Wrappers that shard, cast and recompute layers inspect all arguments of a layer."""
    from torch.distributed.utils import _apply_to_tensors
    from torch.utils.checkpoint import checkpoint

    mask = hf_attention.attention_mask(1, 4, 4)
    q, k, v = (x.requires_grad_() for x in heads(4, 4))

    def call(q, k, v, mask):
        assert isinstance(mask, lazy_mask.LazyMask)
        masks_seen.append(mask)
        return hf_attention.attention_forward(layer(), q, k, v, mask)[0]

    masks_seen = []
    _apply_to_tensors(lambda x: x.half() if torch.is_floating_point(x) else x, {"mask": mask})
    for reentrant in (False, True):
        checkpoint(call, q, k, v, mask, use_reentrant=reentrant).sum().backward()
    assert len(masks_seen) == 4 and all(x._made is None for x in (mask, *masks_seen))
    assert not mask.is_complex() and mask.get_device() == -1 and mask.is_cpu
    assert mask._made is None


SEQUENCES = torch.tensor([[0] * 9 + [1] * 15, [2] * 20 + [3] * 4])


def in_sequences(b, h, i, j):
    return (SEQUENCES[b, i] == SEQUENCES[b, j]) & (j <= i)


@pytest.mark.parametrize("name", ["llama-gqa", "gpt-oss-sinks"])
def test_a_block_mask_is_the_mask_of_its_pairs(name):
    model = decoder(name, "cpu")
    model.set_attn_implementation("fastattn")
    i = torch.arange(24)
    pairs = in_sequences(torch.arange(2)[:, None, None, None], 0, i[:, None], i)
    results = []
    for mask in (pairs, create_block_mask(in_sequences, 2, None, 24, 24, device="cpu")):
        logits = model(tokens(2, 24, "cpu"), attention_mask=mask).logits
        results.append((logits, *torch.autograd.grad(logits.sin().sum(), model.parameters())))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
