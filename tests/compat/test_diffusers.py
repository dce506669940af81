"""The backend of diffusers' dispatcher, against torch's own attention; see test_integrations.py.

With FASTATTN_DIFFUSERS, the folder of an unpacked diffusers 0.42.1, on its own module; else on one
with the names and signatures that the backend needs.
"""

import inspect
import os
import sys
import types
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from fastattn.compat import diffusers as integration

FOLDER = os.environ.get("FASTATTN_DIFFUSERS")
PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "diffusers.md"
PLACE = "diffusers.models.attention_dispatch"


def _stub():
    module = types.ModuleType(PLACE)

    class AttentionBackendName(str, Enum):
        NATIVE = "native"

    class Registry:
        _backends, _supported_arg_names, _supports_context_parallel = {}, {}, set()

        @classmethod
        def register(cls, backend, constraints=None, supports_context_parallel=False):
            def decorator(function):
                cls._backends[backend] = function
                cls._supported_arg_names[backend] = set(inspect.signature(function).parameters)
                if supports_context_parallel:
                    cls._supports_context_parallel.add(backend.value)
                return function

            return decorator

    def dispatch_attention_fn(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False,
                              scale=None, enable_gqa=False, attention_kwargs=None, *,
                              backend=None, parallel_config=None):  # fmt: skip
        member = AttentionBackendName(backend)
        given = {"query": query, "key": key, "value": value, "attn_mask": attn_mask,
                 "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale,
                 "enable_gqa": enable_gqa, **(attention_kwargs or {}),
                 "_parallel_config": parallel_config}  # fmt: skip
        taken = Registry._supported_arg_names[member]
        return Registry._backends[member](**{k: v for k, v in given.items() if k in taken})

    module.AttentionBackendName, module._AttentionBackendRegistry = AttentionBackendName, Registry
    module._check_device = module._check_shape = lambda **given: None
    module.dispatch_attention_fn = dispatch_attention_fn
    return module


@pytest.fixture
def dispatcher(monkeypatch):
    if FOLDER:
        monkeypatch.syspath_prepend(FOLDER)
        from diffusers.models import attention_dispatch as module
    else:
        module = _stub()
        for name in ("diffusers", "diffusers.models"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, PLACE, module)
    integration.register()
    integration.register()
    return module


def _inputs(heads=2):
    torch.manual_seed(0)
    q = torch.randn(2, 5, 4, 16, requires_grad=True)
    k, v = (torch.randn(2, 7, heads, 16, requires_grad=True) for _ in range(2))
    return q, k, v


def _torchs(q, k, v, mask, **options):
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None]
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads, mask, **options).transpose(1, 2)


def test_causal_and_lse(dispatcher):
    q, k, v = _inputs(4)
    how = {"is_causal": True, "backend": "fastattn", "attention_kwargs": {"return_lse": True}}
    o, lse = dispatcher.dispatch_attention_fn(q, k, v, **how)
    torch.testing.assert_close(o, _torchs(q, k, v, None, is_causal=True))
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k) / 4
    later = torch.arange(7) > torch.arange(5)[:, None]
    scores = scores.masked_fill(later[:, None], -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    names, registry = dispatcher.AttentionBackendName, dispatcher._AttentionBackendRegistry
    assert [name.value for name in names].count("fastattn") == 1
    assert names("fastattn") in registry._backends
    assert "fastattn" in registry._supports_context_parallel


def test_the_program_of_the_page(dispatcher):
    program = PAGE.read_text().split("```python\n")[1].split("```")[0]
    results = {}
    exec(program, results)
    q = results["q"]
    torch.testing.assert_close(results["o"], _torchs(q, q, q, None))


def _context():
    ctx = SimpleNamespace()
    ctx.save_for_backward = lambda *arguments: setattr(ctx, "saved_tensors", arguments)
    return ctx


def test_parts_of_a_ring():
    """Two parts of the keys, put together and driven backward as diffusers' ring does."""
    q, k, v = _inputs(4)
    ctx = _context()
    parts = list(zip(k.split([3, 4], 1), v.split([3, 4], 1), strict=True))
    actual = [
        integration.forward_op(ctx, q, *part, None, 0.0, False, None, False, True, _save_ctx=i == 0)
        for i, part in enumerate(parts)
    ]
    (o, lse), (other, other_lse) = ((o, lse.unsqueeze(-1)) for o, lse in actual)
    o = o - torch.sigmoid(other_lse - lse) * (o - other)
    lse = lse - F.logsigmoid(lse - other_lse)
    wanted = _torchs(q, k, v, None)
    torch.testing.assert_close(o, wanted)
    do = torch.randn_like(o)
    grads = [
        integration.backward_op(ctx, do, query=q, key=key, value=value, out=o, lse=lse.squeeze(-1))
        for key, value in parts
    ]
    dq, dk, dv = zip(*grads, strict=True)
    wanted = torch.autograd.grad(wanted, (q, k, v), do)
    torch.testing.assert_close((sum(dq), torch.cat(dk, 1), torch.cat(dv, 1)), wanted)


def test_a_single_part_is_saved_whole():
    """Without overrides, as by Ulysses: with the mask, and fewer heads of keys."""
    q, k, v = _inputs()
    ctx, mask = _context(), torch.arange(7) < torch.tensor([[7], [4]])
    o = integration.forward_op(ctx, q, k, v, mask, 0.0, False, 0.3, True)
    wanted = _torchs(q, k, v, mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(o, wanted)
    do = torch.randn_like(o)
    grads = torch.autograd.grad(wanted, (q, k, v), do)
    torch.testing.assert_close(integration.backward_op(ctx, do), grads)
