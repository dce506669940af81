"""flash-attn's functions against the naive reference, in flash-attn's layout."""

import importlib
import importlib.util
import sys
import types

import pytest
import torch

from fastattn import document_ids, reference
from fastattn.compat import bert_padding, foreign_module
from fastattn.compat import flash_attn as door
from fastattn.rotary import apply_rotary, rotary_tables
from fastattn.testing.budget import assert_within_budget


@pytest.fixture(autouse=True)
def served(monkeypatch, device):
    """Most tests are of arguments, not of kernels; on a GPU they run on the kernels."""
    if device == "cpu":
        monkeypatch.setenv("FASTATTN_BACKEND", "torch")


@pytest.fixture
def draw(device):
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device).requires_grad_(grad)

    return drawn


def oracle(q, k, v, dtype, **options):
    """The reference in flash-attn's layout: o [B, T_q, H, D_v] and lse."""
    wide = {n: x.to(dtype) if n in ("sinks",) else x for n, x in options.items()}
    q, k, v = (x.detach().to(dtype).transpose(1, 2) for x in (q, k, v))
    o, lse = reference.attention(q, k, v, return_lse=True, **wide)
    return o.transpose(1, 2), lse


def check(found, q, k, v, **options):
    """Hold o, or (o, lse, ...), to the error budget."""
    exact = oracle(q, k, v, torch.float64, **options)
    naive = oracle(q, k, v, q.dtype, **options)
    o, lse = found[:2] if isinstance(found, tuple) else (found, None)
    assert o.is_contiguous()
    assert_within_budget("o", o, exact[0], naive[0])
    if lse is not None:
        assert_within_budget("lse", lse, exact[1], naive[1])


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
CASES = {
    "defaults": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "scale": ({"softmax_scale": 0.3}, {"scale": 0.3}),
    "window": ({"window_size": (2, 1)}, {"window": (2, 1)}),
    "window-one-side": ({"window_size": (2, -1)}, {"window": (2, None)}),
    "window-4": ({"window_size": (None, 0)}, {"window": (None, 0)}),
    "causal-window": (
        {"causal": True, "window_size": (3, 0)}, {"causal": True, "window": (3, 0)},
    ),
    "softcap": ({"softcap": 1.5, "causal": True}, {"softcap": 1.5, "causal": True}),
    "alibi": ({"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES}),
    "sink": ({"learnable_sink": SLOPES}, {"sinks": SLOPES}),
    "no-effect": (
        {"num_splits": 3, "pack_gqa": True, "qv": None, "attention_chunk": 0},
        {},
    ),
}  # fmt: skip


def on(device: str, options: dict) -> dict:
    return {n: x.to(device) if torch.is_tensor(x) else x for n, x in options.items()}


@pytest.mark.parametrize("name", CASES)
def test_dense(name, draw, device):
    theirs, ours = (on(device, options) for options in CASES[name])
    q, k, v = draw(2, 5, 4, 8), draw(2, 7, 2, 8), draw(2, 7, 2, 8)
    check(door.flash_attn_func(q, k, v, return_attn_probs=True, **theirs), q, k, v, **ours)


def test_what_is_returned(draw):
    q = draw(1, 4, 2, 8)
    o = door.flash_attn_func(q, q, q)
    assert o.shape == (1, 4, 2, 8)
    three = door.flash_attn_func(q, q, q, return_attn_probs=True)
    torch.testing.assert_close(three[0], o)
    assert three[1].shape == (1, 2, 4) and three[2] is None
    two = door.flash_attn_func(q, q, q, return_lse=True)
    assert len(two) == 2 and torch.equal(two[1], three[1])


def test_arguments_by_position_as_in_version_2(draw):
    q = draw(1, 6, 2, 8)
    found = door.flash_attn_func(q, q, q, 0.0, 0.4, True, (2, -1), 3.0)
    wanted = {"scale": 0.4, "causal": True, "window": (2, None), "softcap": 3.0}
    check(found, q, q, q, **wanted)


def test_deterministic_is_accepted(draw):
    q = draw(1, 4, 2, 8)
    assert torch.equal(
        door.flash_attn_func(q, q, q, deterministic=True), door.flash_attn_func(q, q, q)
    )


def test_compiled_without_graph_breaks(draw):
    q = draw(1, 4, 2, 8)
    compiled = torch.compile(door.flash_attn_func, backend="eager", fullgraph=True)
    wanted = door.flash_attn_func(q, q, q, causal=True, window_size=(2, 0))
    torch.testing.assert_close(compiled(q, q, q, causal=True, window_size=(2, 0)), wanted)


def test_gradients_and_packed_forms(draw):
    qkv = draw(2, 6, 3, 4, 8, grad=True)
    q, k, v = qkv.unbind(2)
    o = door.flash_attn_qkvpacked_func(qkv, causal=True)
    check(o, q, k, v, causal=True)
    kv = torch.stack((k, v), dim=2)
    assert torch.equal(door.flash_attn_kvpacked_func(q, kv, causal=True), o)
    (grad,) = torch.autograd.grad(o.square().sum(), qkv)

    def by_oracle(dtype):
        leaf = qkv.detach().to(dtype).requires_grad_()
        heads = (x.transpose(1, 2) for x in leaf.unbind(2))
        out = reference.attention(*heads, causal=True)
        return torch.autograd.grad(out.square().sum(), leaf)[0]

    assert_within_budget("dqkv", grad, by_oracle(torch.float64), by_oracle(torch.float32))


def test_dropout_is_drawn_from_torchs_generator(draw):
    q = draw(1, 8, 2, 8)
    torch.manual_seed(1)
    first = door.flash_attn_func(q, q, q, dropout_p=0.5)
    again = door.flash_attn_func(q, q, q, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(door.flash_attn_func(q, q, q, dropout_p=0.5), first)
    assert not torch.equal(first, again)


LENGTHS_Q, LENGTHS_K = (3, 0, 5), (4, 2, 7)


def offsets(lengths, device) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("name", ["defaults", "causal", "window", "softcap", "alibi"])
def test_varlen(name, draw, device):
    theirs, ours = (on(device, options) for options in CASES[name])
    q, k, v = draw(8, 4, 8), draw(13, 2, 8), draw(13, 2, 8)
    cu_q, cu_k = offsets(LENGTHS_Q, device), offsets(LENGTHS_K, device)
    o, lse, probs = door.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 5, 7, return_attn_probs=True, **theirs
    )
    assert probs is None and lse.shape == (4, 8)
    for n in (0, 2):
        rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        part = (o[None, rows].contiguous(), lse[None, :, rows])
        check(part, q[None, rows], k[None, keys], v[None, keys], **ours)


def test_varlen_packed_forms(draw, device):
    qkv = draw(8, 3, 2, 8)
    cu = offsets((3, 5), device)
    o = door.flash_attn_varlen_qkvpacked_func(qkv, cu, 5, causal=True)
    ids = document_ids(cu, 8)
    check(o[None], *(x[None] for x in qkv.unbind(1)), causal=True, documents=ids)
    q, kv = qkv[:, 0], qkv[:, 1:]
    assert torch.equal(door.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 5, 5, causal=True), o)


def test_varlen_with_used_keys(draw, device):
    q, k, v = draw(4, 2, 8), draw(10, 2, 8), draw(10, 2, 8)
    cu_q, cu_k = offsets((2, 2), device), offsets((5, 5), device)
    used = torch.tensor([3, 5], dtype=torch.int32, device=device)
    o = door.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 2, 5, seqused_k=used)
    keys = torch.tensor([3, 5], device=device)
    check(o.view(2, 2, 2, 8), q.view(2, 2, 2, 8), k.view(2, 5, 2, 8), v.view(2, 5, 2, 8),
          key_lengths=keys)  # fmt: skip


def test_unpad_and_pad_as_models_do(draw, device):
    """Padding taken out, attention on packed tokens, and put back: the padded result."""
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]], device=device)
    x = draw(2, 5, 4, 8, grad=True)
    tokens, indices, cu, longest, used = bert_padding.unpad_input(x, mask)
    assert tokens.shape == (7, 4, 8) and indices.tolist() == [0, 1, 2, 6, 7, 8, 9]
    assert cu.tolist() == [0, 3, 7] and cu.dtype == torch.int32 and longest == 4
    assert used.tolist() == [3, 4]
    o = door.flash_attn_varlen_func(tokens, tokens, tokens, cu, cu, longest, longest, causal=True)
    whole = bert_padding.pad_input(o, indices, 2, 5)
    assert not whole[mask == 0].any()
    options = {"causal": True, "key_padding_mask": mask.bool()}
    wanted, naive = (
        oracle(x, x, x, dtype, **options)[0] for dtype in (torch.float64, torch.float32)
    )
    keep = mask.bool()
    assert_within_budget("o", whole[keep], wanted[keep], naive[keep])
    (grad,) = torch.autograd.grad(whole.sum(), x)
    assert not grad[mask == 0].any() and grad[mask == 1].any()


def test_unpad_keeps_places_of_the_unused_mask(draw, device):
    mask = torch.tensor([[1, 1, 0, 0]], device=device)
    unused = torch.tensor([[0, 0, 1, 0]], device=device)
    tokens, indices, cu, longest, used = bert_padding.unpad_input(draw(1, 4, 3), mask, unused)
    assert indices.tolist() == [0, 1, 2] and cu.tolist() == [0, 3]
    assert (longest, used.tolist(), tokens.shape) == (3, [2], (3, 3))


S, D = 12, 8


@pytest.fixture
def caches(draw):
    return draw(3, S, 2, D), draw(3, S, 2, D)


def lengths_of(numbers, device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


@pytest.mark.parametrize("name", [*CASES][:-1])
def test_cache_read(name, caches, draw, device):
    theirs, ours = (on(device, options) for options in CASES[name])
    q, lengths = draw(3, 2, 4, D), lengths_of([5, 12, 7], device)
    k_cache, v_cache = caches
    found = door.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, return_softmax_lse=True, **theirs
    )
    check(found, q, k_cache, v_cache, key_lengths=lengths, query_offset=lengths - 2, **ours)
    assert lengths.tolist() == [5, 12, 7]


def test_cache_lengths_as_a_number_and_by_default(caches, draw):
    q, (k_cache, v_cache) = draw(3, 1, 4, D), caches
    o = door.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=6)
    check(o, q, k_cache[:, :6], v_cache[:, :6])
    check(door.flash_attn_with_kvcache(q, k_cache, v_cache), q, k_cache, v_cache)


def turned(x, positions, tables, interleaved):
    cos, sin = (t[positions.long()] for t in tables)
    style = "interleaved" if interleaved else "half"
    return apply_rotary(x.transpose(1, 2), cos, sin, style=style).transpose(1, 2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_cache_append_with_rotary(interleaved, causal, caches, draw, device):
    k_cache, v_cache = caches
    q, k, v = draw(3, 2, 4, D), draw(3, 2, 2, D), draw(3, 2, 2, D)
    lengths = lengths_of([5, 10, 0], device)
    tables = rotary_tables(S, 6, device=device)
    wanted_k, wanted_v = k_cache.clone(), v_cache.clone()
    steps = torch.arange(2, device=device)
    places = lengths[:, None] + steps
    rotated_k = turned(k, places, tables, interleaved)
    rotated_q = turned(q, places if causal else places - steps, tables, interleaved)
    for b in range(3):
        wanted_k[b, places[b].long()], wanted_v[b, places[b].long()] = rotated_k[b], v[b]
    o = door.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, *tables, lengths, causal=causal, rotary_interleaved=interleaved
    )
    torch.testing.assert_close(k_cache, wanted_k)
    assert torch.equal(v_cache, wanted_v) and lengths.tolist() == [5, 10, 0]
    options = {"key_lengths": lengths + 2, "query_offset": lengths, "causal": causal}
    check(o, rotated_q, wanted_k, wanted_v, **options)


def test_cache_rows_by_index(caches, draw, device):
    k_cache, v_cache = caches
    q, k, v = draw(2, 1, 4, D), draw(2, 1, 2, D), draw(2, 1, 2, D)
    rows, lengths = lengths_of([2, 0], device), lengths_of([3, 8], device)
    before = k_cache[1].clone()
    o = door.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, cache_batch_idx=rows, causal=True
    )
    assert torch.equal(k_cache[2, 3], k[0, 0]) and torch.equal(v_cache[0, 8], v[1, 0])
    assert torch.equal(k_cache[1], before)
    keys, values = k_cache[[2, 0]], v_cache[[2, 0]]
    check(o, q, keys, values, key_lengths=lengths + 1)


def test_cache_rows_that_start_late(caches, draw, device):
    """Positions, and with them rotations, count from where a row starts."""
    k_cache, v_cache = caches
    q, k, v = draw(3, 1, 4, D), draw(3, 1, 2, D), draw(3, 1, 2, D)
    lengths, first = lengths_of([5, 11, 4], device), lengths_of([2, 0, 3], device)
    tables = rotary_tables(S, D, device=device)
    positions = (lengths - first)[:, None]
    k_cache[0, :2] = v_cache[0, :2] = float("nan")
    o = door.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, *tables, lengths, cache_leftpad=first, causal=True
    )
    rotated = turned(k, positions, tables, True)
    for b, n in enumerate([5, 11, 4]):
        torch.testing.assert_close(k_cache[b, n], rotated[b, 0])
    rotated_q = turned(q, positions, tables, True)
    for b, (start, n) in enumerate([(2, 6), (0, 12), (3, 5)]):
        check(o[b : b + 1], rotated_q[b : b + 1], k_cache[b : b + 1, start:n],
              v_cache[b : b + 1, start:n])  # fmt: skip


@pytest.fixture
def paged(draw, device):
    """Pages [P, 4, 2, D], a table of shuffled pages, and the same rows in order."""
    k_pages, v_pages = draw(10, 4, 2, D), draw(10, 4, 2, D)
    table = torch.tensor([[7, 1, 4], [0, 9, 2]], dtype=torch.int32, device=device)
    return k_pages, v_pages, table


def in_order(pages, table):
    return pages[table.long()].flatten(1, 2)


@pytest.mark.parametrize("spelling", ["block_table", "page_table"])
def test_paged_cache(spelling, paged, draw, device):
    k_pages, v_pages, table = paged
    q, k, v = draw(2, 3, 4, D), draw(2, 3, 2, D), draw(2, 3, 2, D)
    lengths = lengths_of([3, 9], device)
    o, lse = door.flash_attn_with_kvcache(
        q, k_pages, v_pages, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True,
        **{spelling: table},
    )  # fmt: skip
    keys, values = in_order(k_pages, table), in_order(v_pages, table)
    assert torch.equal(keys[0, 3:6], k[0]) and torch.equal(values[1, 9:12], v[1])
    options = {"key_lengths": lengths + 3, "query_offset": lengths, "causal": True}
    check((o, lse), q, keys, values, **options)


def test_varlen_over_pages(paged, draw, device):
    k_pages, v_pages, table = paged
    q = draw(5, 4, D)
    cu_q, cu_k = offsets((4, 1), device), offsets((6, 11), device)
    o, lse, _ = door.flash_attn_varlen_func(
        q, k_pages, v_pages, cu_q, cu_k, 4, 11, causal=True, block_table=table,
        return_attn_probs=True,
    )  # fmt: skip
    keys, values = in_order(k_pages, table), in_order(v_pages, table)
    for n, (rows, length) in enumerate([(slice(0, 4), 6), (slice(4, 5), 11)]):
        part = (o[None, rows].contiguous(), lse[None, :, rows])
        check(
            part, q[None, rows], keys[n : n + 1, :length], values[n : n + 1, :length], causal=True
        )
    used = cu_k.diff()
    given = {"seqused_k": used, "max_seqlen_q": 4, "causal": True, "page_table": table}
    again = door.flash_attn_varlen_func(q, k_pages, v_pages, cu_q, return_lse=True, **given)
    assert torch.equal(again[0], o) and torch.equal(again[1], lse)


def test_kernels_read_and_write_the_cache(caches, draw, device, monkeypatch):
    monkeypatch.setenv("FASTATTN_BACKEND", "triton")
    k_cache, v_cache = (x[:2].clone() for x in caches)
    q, k, v = draw(2, 1, 4, D), draw(2, 1, 2, D), draw(2, 1, 2, D)
    lengths, tables = lengths_of([4, 9], device), rotary_tables(S, D, device=device)
    o = door.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, *tables, lengths, causal=True)
    torch.testing.assert_close(k_cache[0, 4:5], turned(k, lengths[:, None], tables, True)[0])
    assert torch.equal(v_cache[1, 9], v[1, 0])
    rotated_q = turned(q, lengths[:, None], tables, True)
    check(o, rotated_q, k_cache, v_cache, key_lengths=lengths + 1)


CONTRADICTIONS = {
    "k-alone": ({"v": None}, "k and v must be given together"),
    "no-lengths": ({"cache_seqlens": None}, "cache_seqlens must be given with k and v"),
    "one-table": ({"rotary_cos": torch.ones(12, 4)}, "rotary_cos and rotary_sin must be given tog"),
    "tables-without-k": (
        {"k": None, "v": None, "rotary_cos": torch.ones(12, 4), "rotary_sin": torch.ones(12, 4)},
        "k and v must be given",
    ),
    "index-and-pages": (
        {"cache_batch_idx": torch.zeros(3).int(), "block_table": torch.zeros(3, 1).int()},
        "cache_batch_idx must be None with a block_table",
    ),
    "start-and-pages": (
        {"cache_leftpad": torch.zeros(3).int(), "block_table": torch.zeros(3, 1).int()},
        "cache_leftpad must be None with a block_table",
    ),
    "two-names": (
        {"page_table": torch.zeros(3, 1).int(), "block_table": torch.zeros(3, 1).int()},
        "two names of one argument",
    ),
    "too-long": ({"cache_seqlens": 12}, "12 and 1 new tokens exceed 12 places"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_runtime_errors(name, draw):
    changed, message = CONTRADICTIONS[name]
    cache, new = torch.zeros(3, S, 2, D), torch.zeros(3, 1, 2, D)
    given = {"k": new, "v": new, "cache_seqlens": 3, **changed}
    with pytest.raises(RuntimeError, match=message):
        door.flash_attn_with_kvcache(torch.zeros(3, 1, 4, D), cache, cache, **given)


def test_other_errors(draw, device):
    q = draw(1, 4, 2, 8)
    with pytest.raises(RuntimeError, match="q must have 4 dimensions"):
        door.flash_attn_func(q[0], q, q)
    with pytest.raises(RuntimeError, match="size 3 in dim 2"):
        door.flash_attn_qkvpacked_func(torch.zeros(1, 4, 2, 2, 8))
    with pytest.raises(RuntimeError, match="k must have the dtype of q"):
        door.flash_attn_func(q, q.half(), q)
    with pytest.raises(RuntimeError, match="divides q's 2"):
        door.flash_attn_func(q, draw(1, 4, 3, 8), draw(1, 4, 3, 8))
    with pytest.raises(RuntimeError, match="k_cache must be contiguous"):
        door.flash_attn_with_kvcache(q, q.transpose(1, 2), q)
    with pytest.raises(TypeError, match="q must be a torch"):
        door.flash_attn_func([1.0], q, q)
    with pytest.raises(TypeError, match="unexpected keyword argument 'windows'"):
        door.flash_attn_func(q, q, q, windows=3)
    cu = offsets((4,), device)
    with pytest.raises(RuntimeError, match="cu_seqlens_k must be given"):
        door.flash_attn_varlen_func(q[0], q[0], q[0], cu)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match="block_table needs max_seqlen_q"):
        door.flash_attn_varlen_func(q[0], q, q, cu, cu, block_table=table)
    with pytest.raises(RuntimeError, match=r"dropout_p must be 0\.0 with a block_table"):
        door.flash_attn_varlen_func(q[0], q, q, cu, cu, 4, 4, 0.5, block_table=table)


@pytest.mark.parametrize(
    ("name", "value"),
    [("qv", torch.zeros(1)), ("attention_chunk", 4), ("q_descale", torch.ones(1)),
     ("score_mod", print), ("mask_mod", print), ("block_sparse_tensors", ())],
)  # fmt: skip
def test_what_is_not_served_is_refused(name, value, draw):
    q = draw(1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match=f"{name} is not served"):
        door.flash_attn_func(q, q, q, **{name: value})


def test_install_and_uninstall(monkeypatch):
    real = types.ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    monkeypatch.setitem(sys.modules, "flash_attn.ops", types.ModuleType("flash_attn.ops"))
    door.install()
    try:
        package = importlib.import_module("flash_attn")
        assert package is not real
        assert package.flash_attn_func is door.flash_attn_func and package.__version__ == "2.8.3"
        interface = importlib.import_module("flash_attn.flash_attn_interface")
        assert interface.flash_attn_varlen_func is door.flash_attn_varlen_func
        padding = importlib.import_module("flash_attn.bert_padding")
        assert padding.pad_input is bert_padding.pad_input
        assert package.bert_padding is padding
        assert importlib.util.find_spec("flash_attn") is not None
        with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.ops"):
            importlib.import_module("flash_attn.ops")
        door.install()
        assert sys.modules["flash_attn"] is package
    finally:
        door.uninstall()
    assert sys.modules["flash_attn"] is real and "flash_attn.bert_padding" not in sys.modules
    assert "flash_attn.ops" in sys.modules
    door.uninstall()
    assert sys.modules["flash_attn"] is real


def test_install_where_there_was_nothing():
    foreign_module.install("no_such_package", {"": door})
    try:
        import no_such_package  # type: ignore[import-not-found]

        assert no_such_package.flash_attn_func is door.flash_attn_func
    finally:
        foreign_module.uninstall("no_such_package")
    assert "no_such_package" not in sys.modules
