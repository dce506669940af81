"""flash-attn's modules by their names: versions 2, 3 and 4, and what importlib.metadata says."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from calls_of_flash_attn import check, offsets

from fastattn.compat import flash_attn
from fastattn.compat.flash_attn import (
    bert_padding,
    package_alias,
    passes,
    rotary,
    version_2,
    version_3,
    version_4,
)
from fastattn.rotary import rotary_tables
from fastattn.testing.inputs import draws

pytestmark = pytest.mark.usefixtures("models_on_torch")


@pytest.fixture
def installed(monkeypatch):
    """Installed over a package that was imported before, with a module of its own."""
    real = types.ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    monkeypatch.setitem(sys.modules, "flash_attn.models", types.ModuleType("flash_attn.models"))
    flash_attn.install()
    yield real
    flash_attn.uninstall()


def test_modules_are_found(installed):
    package = importlib.import_module("flash_attn")
    assert package is not installed and package.flash_attn_func is flash_attn.flash_attn_func
    assert package.__version__ == "2.8.3" and importlib.util.find_spec("flash_attn") is not None
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    assert interface.flash_attn_varlen_func is flash_attn.flash_attn_varlen_func
    for name in ("forward", "backward", "varlen_forward", "varlen_backward"):
        names = {getattr(interface, f"{prefix}flash_attn_{name}") for prefix in ("_", "_wrapped_")}
        assert names == {getattr(passes, f"_flash_attn_{name}")}
    padding = importlib.import_module("flash_attn.bert_padding")
    assert padding.pad_input is bert_padding.pad_input and package.bert_padding is padding
    for name in ("flash_attn.layers.rotary", "flash_attn.ops.triton.rotary"):
        assert importlib.import_module(name).apply_rotary is rotary.apply_rotary
    assert package.layers.rotary.RotaryEmbedding is rotary.RotaryEmbedding
    third = importlib.import_module("flash_attn_interface")
    assert third.flash_attn_with_kvcache is version_3.flash_attn_with_kvcache
    for name in ("flash_attn.cute", "flash_attn.cute.interface"):
        assert importlib.import_module(name).flash_attn_func is version_4.flash_attn_func
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.models"):
        importlib.import_module("flash_attn.models")
    flash_attn.install()
    assert sys.modules["flash_attn"] is package


def test_metadata_and_uninstall(installed, monkeypatch, tmp_path):
    """The real package's metadata is hidden, and back at the end."""
    (tmp_path / "flash_attn-1.0.dist-info").mkdir()
    (tmp_path / "flash_attn-1.0.dist-info/METADATA").write_text("Name: flash_attn\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("flash_attn", "flash-attn", "Flash.Attn"):
        assert importlib.metadata.version(name) == flash_attn.__version__
    assert "flash_attn" in importlib.metadata.packages_distributions()["flash_attn"]
    assert importlib.metadata.version("flash-attn-3") == "3.0.0"
    assert importlib.metadata.version("torch")
    before = len(sys.meta_path)
    for _ in range(2):
        flash_attn.uninstall()
        assert len(sys.meta_path) == before - 2
        assert sys.modules["flash_attn"] is installed
        left = {n for n in sys.modules if n.startswith("flash_attn")}
        assert left == {"flash_attn", "flash_attn.models"}
        assert importlib.metadata.version("flash_attn") == "1.0"


def test_install_where_there_was_nothing():
    package_alias.install("no_such_package", {"": (version_2,), "a.b": (bert_padding,)}, "1.2")
    try:
        import no_such_package.a.b  # type: ignore[import-not-found]

        assert no_such_package.flash_attn_func is flash_attn.flash_attn_func
        assert no_such_package.a.b.pad_input is bert_padding.pad_input
        assert importlib.metadata.version("no-such-package") == "1.2"
    finally:
        package_alias.uninstall("no_such_package")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("no_such_package")
    assert not [name for name in sys.modules if name.startswith("no_such_package")]


def test_version_3(draw, device):
    q, k, v = draw(2, 5, 4, 8), draw(2, 7, 2, 8), draw(2, 7, 2, 8)
    options = {"scale": 0.4, "causal": True, "window": (2, None)}
    none = (None,) * 4
    actual = version_3.flash_attn_func(q, k, v, 0.4, True, *none, (2, -1), return_attn_probs=True)
    assert len(actual) == 2
    check(actual, q, k, v, **options)
    together = torch.stack((q[:, :, :2], k[:, :5], v[:, :5]), 2)
    packed = version_3.flash_attn_qkvpacked_func(together, 0.4, True, window_size=(2, -1))
    check(packed, q[:, :, :2], k[:, :5], v[:, :5], **options)
    packed = version_3.flash_attn_qkvpacked_func(
        torch.cat((q[:, :5], k[:, :5], v[:, :5]), 2), 0.4, True, window_size=(2, -1), num_heads_q=4
    )
    check(packed, q, k[:, :5], v[:, :5], **options)
    cu_q, cu_k = offsets((5, 5), device), offsets((7, 7), device)
    flat = (x.flatten(0, 1) for x in (q, k, v))
    given = {"softmax_scale": 0.4, "causal": True, "window_size": (2, -1)}
    o = version_3.flash_attn_varlen_func(*flat, cu_q, cu_k, 5, 7, **given)
    check(o.view(2, 5, 4, 8), q, k, v, **options)


def test_combine(draw, device):
    """Parts of the keys, of which the third has none for any query, make the whole."""
    q, k, v = draw(2, 5, 4, 8), draw(2, 9, 2, 8), draw(2, 9, 2, 8)
    whole = version_3.flash_attn_func(q, k, v, return_attn_probs=True)
    outs, lses = [], []
    for keys in (slice(0, 3), slice(3, 9), slice(0, 0)):
        o, lse = version_3.flash_attn_func(q, k[:, keys], v[:, keys], return_attn_probs=True)
        outs.append(o)
        lses.append(lse.transpose(1, 2))
    outs[2] = torch.full_like(outs[2], torch.nan)
    parts = (torch.stack(outs), torch.stack(lses))
    into = torch.empty_like(q)
    o, lse = version_3.flash_attn_combine(*parts, into)
    assert o is into
    torch.testing.assert_close(o, whole[0])
    torch.testing.assert_close(lse, whole[1].transpose(1, 2))
    packed = [x.flatten(1, 2) for x in parts]
    actual = version_3.flash_attn_combine(*packed, out_dtype=torch.bfloat16)[0]
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.view(q.shape).float(), o, rtol=1e-2, atol=1e-2)
    o, lse = version_3.flash_attn_combine(parts[0][2:], parts[1][2:])
    assert not o.any() and bool(lse.isneginf().all())


# Where no kernel in 8 bits serves a GPU, that is said once.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("packed", [False, True])
def test_e4m3(packed, draw, device):
    """Scales of powers of 2: what is read back is exact."""
    sizes = ((2, 5, 4, 16), (2, 5, 2, 16), (2, 5, 2, 16))
    codes = [draw(*size).to(torch.float8_e4m3fn) for size in sizes]
    scales = 2.0 ** torch.randint(-2, 3, (3, 2, 2), device=device)
    scales[0] /= 8  # of queries, by K/V heads
    wide = [scales[0].repeat_interleave(2, 1), scales[1], scales[2]]
    plain = [
        x.bfloat16() * s.bfloat16()[:, None, :, None] for x, s in zip(codes, wide, strict=True)
    ]
    options = {"causal": True, "window_size": (3, -1), "softcap": 2.0, "return_attn_probs": True}
    call, lengths = version_3.flash_attn_func, ()
    if packed:
        call, lengths = version_3.flash_attn_varlen_func, [offsets((5, 5), device)] * 2 + [5, 5]
        codes, plain = ([x.flatten(0, 1) for x in xs] for xs in (codes, plain))
        options["seqused_k"] = torch.tensor([4, 5], dtype=torch.int32, device=device)
    names = ("q_descale", "k_descale", "v_descale")
    actual = call(*codes, *lengths, **dict(zip(names, scales, strict=True)), **options)
    assert actual[0].dtype == torch.bfloat16
    assert all(map(torch.equal, actual, call(*plain, *lengths, **options)))
    ones = call(*codes, *lengths, **options)[0]
    assert torch.equal(ones, call(*(x.bfloat16() for x in codes), *lengths, **options)[0])
    with pytest.raises(RuntimeError, match=r"q_descale must have shape \[2, 2\], got \[2, 4\]"):
        call(*codes, *lengths, q_descale=wide[0])


# As the tests of flash-attn's repository import them.
UPSTREAM = """
from flash_attn import (
    flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache,
)
from flash_attn.bert_padding import pad_input, rearrange, repeat, unpad_input
from flash_attn.flash_attn_interface import _get_block_size_n, USE_TRITON_ROCM
from flash_attn.flash_attn_triton_amd.utils import is_rdna
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn_interface import flash_attn_combine, get_scheduler_metadata
assert not USE_TRITON_ROCM and not is_rdna() and get_scheduler_metadata(1, num_splits=2) is None
"""


def test_what_their_tests_import(installed):
    results: dict = {}
    exec(UPSTREAM, results)
    with pytest.raises(NotImplementedError, match=r"fastattn\.attention_weights computes them"):
        results["_get_block_size_n"]("cuda", 64, True, False)


def test_modules_that_are_not_here_say_what_is(installed):
    for name, instead in {
        "losses.cross_entropy": r"torch\.nn\.functional\.cross_entropy",
        "modules.mha": "fastattn.MultiheadAttention",
        "models.gpt": "fastattn.models",
        "ops.rms_norm": "torch.nn.RMSNorm",
        "ops.triton.layer_norm": "torch.nn.LayerNorm and torch.nn.RMSNorm",
        "ops.triton.cross_entropy": "functions of torch",
        "utils.generation": "uninstall",
        "utils.distributed": "torch.distributed.nn.functional",
    }.items():
        with pytest.raises(ModuleNotFoundError, match=f"flash_attn.* use .*{instead}"):
            importlib.import_module(f"flash_attn.{name}")


# Functions of versions 3 and 4, and their positional arguments.
ORDERS = """
3.flash_attn_func q k v softmax_scale causal qv q_descale k_descale v_descale window_size
    attention_chunk softcap num_splits pack_gqa deterministic sm_margin return_attn_probs
3.flash_attn_qkvpacked_func qkv softmax_scale causal q_descale k_descale v_descale window_size
    attention_chunk softcap deterministic num_heads_q sm_margin return_attn_probs
3.flash_attn_varlen_func q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q
    seqused_k softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk
    softcap num_splits pack_gqa deterministic sm_margin return_attn_probs
3.flash_attn_with_kvcache q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens
    cache_batch_idx cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q
    rotary_seqlens q_descale k_descale v_descale softmax_scale causal window_size attention_chunk
    softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse
4.flash_attn_func q k v qv gather_kv_indices softmax_scale causal window_size learnable_sink
    softcap num_splits pack_gqa deterministic score_mod score_mod_bwd mask_mod aux_tensors
    aux_scalars block_sparse_tensors block_sparse_tensors_bwd return_lse
4.flash_attn_varlen_func q k v qv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k
    min_seqlen_k seqused_q seqused_k gather_kv_indices page_table softmax_scale causal window_size
    learnable_sink softcap num_splits pack_gqa deterministic score_mod score_mod_bwd mask_mod
    block_sparse_tensors aux_tensors aux_scalars return_lse scheduler_metadata seqlen_k_per_split
    disable_scheduler_metadata
"""


def test_orders_are_those_of_the_packages():
    for line in ORDERS.replace("\n    ", " ").strip().splitlines():
        (version, name), *names = line.split(" ")[0].split("."), *line.split(" ")[1:]
        module = {"3": version_3, "4": version_4}[version]
        parameters = inspect.signature(getattr(module, name)).parameters
        assert list(parameters) == names
        assert all(x.kind is x.POSITIONAL_OR_KEYWORD for x in parameters.values())


def test_version_3_with_a_cache(draw, device):
    q, k, v = draw(2, 1, 4, 8), draw(2, 1, 2, 8), draw(2, 1, 2, 8)
    caches, lengths = (draw(2, 9, 2, 8), draw(2, 9, 2, 8)), offsets((3,), device) + 2
    own = tuple(x.clone() for x in caches)
    tables = rotary_tables(9, 8, device=device)
    actual = version_3.flash_attn_with_kvcache(
        q, *caches, k, v, None, *tables, lengths, causal=True, return_softmax_lse=True
    )
    wanted = flash_attn.flash_attn_with_kvcache(
        q, *own, k, v, *tables, lengths, causal=True, return_softmax_lse=True
    )
    assert len(actual) == 4 and actual[2:] == (None, None)
    assert all(map(torch.equal, actual[:2], wanted)) and all(map(torch.equal, caches, own))


def test_version_4(draw, device):
    q, k, v, sinks = draw(2, 5, 4, 8), draw(2, 7, 2, 8), draw(2, 7, 2, 8), draw(4)
    options = {"scale": 0.4, "causal": True, "window": (2, None), "sinks": sinks}
    positional = (None, None, 0.4, True, (2, None), sinks)
    actual = version_4.flash_attn_func(q, k, v, *positional, return_lse=True)
    check(actual, q, k, v, **options)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    given = {"softmax_scale": 0.4, "causal": True, "window_size": (2, None)}
    cu = (offsets((5, 5), device), offsets((7, 7), device))
    given |= {"learnable_sink": sinks, "return_lse": True}
    o, lse = version_4.flash_attn_varlen_func(*flat, None, *cu, **given)
    assert lse.shape == (4, 10)
    alone = version_4.flash_attn_varlen_func(*flat, None, *cu, **given | {"return_lse": False})
    assert torch.equal(alone[0], o) and alone[1] is None
    check(o.view(2, 5, 4, 8), q, k, v, **options)
    wide = version_4.flash_attn_func(q, k, v, q, return_lse=True)
    same = flash_attn.flash_attn_func(q, k, v, qv=q, return_lse=True)
    assert torch.equal(wide[1], same[1].mT)  # heads last, where there is a qv


def test_nanochat_takes_two_assignments(monkeypatch, device):
    """The lines of the page on a stand-in, and nanochat's calls of flash-attn 3."""
    parent, module = types.ModuleType("nanochat"), types.ModuleType("nanochat.flash_attention")
    parent.flash_attention, module._fa3, module.USE_FA3 = module, None, False
    monkeypatch.setitem(sys.modules, "nanochat", parent)
    monkeypatch.setitem(sys.modules, "nanochat.flash_attention", module)
    page = Path(__file__).parents[2] / "docs" / "integrations" / "flash_attn.md"
    exec(re.search(r"^```py\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)[1])
    assert module.USE_FA3
    how = {"causal": True, "window_size": (3, 0)}
    q, k, v = (draws(seed=i, device=device)(2, 9, heads, 16) for i, heads in enumerate((4, 2, 2)))
    o = module._fa3.flash_attn_func(q, k, v, **how)
    seen = torch.ones(9, 9, dtype=torch.bool, device=device).tril().triu(-3)
    rows = (x.transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*rows, attn_mask=seen, enable_gqa=True)
    torch.testing.assert_close(o, expected.transpose(1, 2))
    caches = torch.zeros(2, 2, 12, 2, 16, device=device)
    for start, end in ((0, 5), (5, 8), (8, 9)):
        filled = torch.full((2,), start, dtype=torch.int32, device=device)
        new = {name: x[:, start:end] for name, x in (("k", k), ("v", v))}
        step = q[:, start:end], *caches
        part = module._fa3.flash_attn_with_kvcache(*step, cache_seqlens=filled, **new, **how)
        torch.testing.assert_close(part, o[:, start:end])
