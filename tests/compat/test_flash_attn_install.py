"""flash-attn's modules by their names: versions 2, 3 and 4, and what importlib.metadata says."""

import importlib
import importlib.metadata
import importlib.util
import sys
import types

import pytest
import torch

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
from fastattn.testing.flash_attn import check, offsets

pytestmark = pytest.mark.usefixtures("on_torch_without_a_gpu")


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
        found = {getattr(interface, f"{prefix}flash_attn_{name}") for prefix in ("_", "_wrapped_")}
        assert found == {getattr(passes, f"_flash_attn_{name}")}
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


def test_metadata_tells_the_version(installed):
    for name in ("flash_attn", "flash-attn", "Flash.Attn"):
        assert importlib.metadata.version(name) == flash_attn.__version__
    assert "flash_attn" in importlib.metadata.packages_distributions()["flash_attn"]
    assert importlib.metadata.version("torch")


def test_uninstall_undoes_it(installed):
    before = len(sys.meta_path)
    flash_attn.uninstall()
    assert len(sys.meta_path) == before - 1
    assert sys.modules["flash_attn"] is installed
    assert "flash_attn.models" in sys.modules
    left = [n for n in sys.modules if n.startswith("flash_attn") and n != "flash_attn"]
    assert left == ["flash_attn.models"]
    flash_attn.uninstall()
    assert sys.modules["flash_attn"] is installed


def test_install_where_there_was_nothing():
    modules = {"": (version_2,), "a.b": (bert_padding,)}
    package_alias.install("no_such_package", modules, "1.2")
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
    found = version_3.flash_attn_func(
        q, k, v, 0.4, True, None, None, None, None, (2, -1), return_attn_probs=True
    )
    assert len(found) == 2
    check(found, q, k, v, **options)
    packed = version_3.flash_attn_qkvpacked_func(
        torch.cat((q[:, :5], k[:, :5], v[:, :5]), 2), 0.4, True, window_size=(2, -1), num_heads_q=4
    )
    check(packed, q, k[:, :5], v[:, :5], **options)
    cu_q, cu_k = offsets((5, 5), device), offsets((7, 7), device)
    flat = (x.flatten(0, 1) for x in (q, k, v))
    o = version_3.flash_attn_varlen_func(
        *flat, cu_q, cu_k, 5, 7, softmax_scale=0.4, causal=True, window_size=(2, -1)
    )
    check(o.view(2, 5, 4, 8), q, k, v, **options)
    with pytest.raises(RuntimeError, match="num_heads_q=4 and 2 H_k heads in dim 2"):
        version_3.flash_attn_qkvpacked_func(draw(1, 2, 7, 8), num_heads_q=4)
    with pytest.raises(NotImplementedError, match="q_descale is not served"):
        version_3.flash_attn_func(q, k, v, q_descale=torch.ones(2, 2))


def test_version_3_with_a_cache(draw, device):
    q, k, v = draw(2, 1, 4, 8), draw(2, 1, 2, 8), draw(2, 1, 2, 8)
    caches, lengths = (draw(2, 9, 2, 8), draw(2, 9, 2, 8)), offsets((3,), device) + 2
    own = tuple(x.clone() for x in caches)
    tables = rotary_tables(9, 8, device=device)
    found = version_3.flash_attn_with_kvcache(
        q, *caches, k, v, None, *tables, lengths, causal=True, return_softmax_lse=True
    )
    wanted = flash_attn.flash_attn_with_kvcache(
        q, *own, k, v, *tables, lengths, causal=True, return_softmax_lse=True
    )
    assert len(found) == 4 and found[2:] == (None, None)
    assert all(map(torch.equal, found[:2], wanted)) and all(map(torch.equal, caches, own))
    for name in ("qv", "cu_seqlens_q", "cu_seqlens_k_new", "rotary_seqlens"):
        with pytest.raises(NotImplementedError, match=f"{name} is not served"):
            version_3.flash_attn_with_kvcache(q, *caches, **{name: lengths})


def test_version_4(draw, device):
    q, k, v, sinks = draw(2, 5, 4, 8), draw(2, 7, 2, 8), draw(2, 7, 2, 8), draw(4)
    options = {"scale": 0.4, "causal": True, "window": (2, None), "sinks": sinks}
    positional = (None, None, 0.4, True, (2, None), sinks)
    found = version_4.flash_attn_func(q, k, v, *positional, return_lse=True)
    check(found, q, k, v, **options)
    o, lse = version_4.flash_attn_func(q, k, v, *positional)
    assert torch.equal(o, found[0]) and lse is None
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    given = {"softmax_scale": 0.4, "causal": True, "window_size": (2, None)}
    o, lse = version_4.flash_attn_varlen_func(
        *flat,
        None,
        offsets((5, 5), device),
        offsets((7, 7), device),
        learnable_sink=sinks,
        return_lse=True,
        **given,
    )
    assert lse.shape == (4, 10)
    check(o.view(2, 5, 4, 8), q, k, v, **options)
    with pytest.raises(NotImplementedError, match="cu_seqlens_q=None"):
        version_4.flash_attn_varlen_func(*flat)
    with pytest.raises(NotImplementedError, match="mask_mod is not served"):
        version_4.flash_attn_func(q, k, v, mask_mod=print)
