"""Load variants of a kernel folder as Hugging Face's kernels does, and check what they compute.

A process that cannot import fastattn calls `main`, with the variants on its command line.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def every_third(b: Any, h: Any, q_pos: Any, k_pos: Any) -> Any:
    """A mask that a user writes, found by its name."""
    return (k_pos <= q_pos) & ((q_pos - k_pos) % 3 != 1)


def loaded(variant: Path) -> ModuleType:
    """The package of a variant, under its id."""
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def compare(mine: Tensor, wanted: Tensor, inputs: list[Tensor]) -> None:
    """Results, and gradients of a sum with unequal weights; fp32 on both sides."""
    weights = torch.linspace(-1, 1, mine.numel()).view(mine.shape)
    torch.testing.assert_close(mine, wanted)
    pairs = (torch.autograd.grad((x * weights).sum(), inputs) for x in (mine, wanted))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other)


def formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Torch's; causal without a mask, queries at the end of the keys."""
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def attend(kernel: ModuleType) -> None:
    inputs = q, k, v = drawn((2, 4, 7, 16), (2, 2, 9, 16), (2, 2, 9, 16))
    compare(kernel.attention(q, k, v, causal=True), formula(q, k, v), inputs)
    i, j = torch.arange(2, 9)[:, None], torch.arange(9)
    seen = (j <= i) & ((i - j) % 3 != 1)
    mask = kernel.BlockMask(every_third, per_batch=False, per_head=False)
    compare(kernel.attention(q, k, v, mask_mod=mask), formula(q, k, v, seen), inputs)


def attend_packed(kernel: ModuleType) -> None:
    inputs = q, k, v = drawn((11, 4, 16), (11, 2, 16), (11, 2, 16))
    starts = torch.tensor([0, 4, 11], dtype=torch.int32)
    mine = kernel.attention_varlen(q, k, v, starts, starts, causal=True)
    rows = [[x[a:b].transpose(0, 1)[None] for x in inputs] for a, b in ((0, 4), (4, 11))]
    wanted = torch.cat([formula(*row)[0].transpose(0, 1) for row in rows])
    compare(mine, wanted, inputs)


def decode(kernel: ModuleType) -> None:
    q, k, v = (x.detach() for x in drawn((2, 4, 1, 16), (2, 2, 6, 16), (2, 2, 6, 16)))
    cache = kernel.KVCache(2, 2, 8, 16)
    cache.append(k, v)
    torch.testing.assert_close(kernel.decode_attention(q, cache), formula(q, k, v))


def attend_by_flash(kernel: ModuleType) -> None:
    inputs = q, k, v = drawn((2, 7, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
    wanted = formula(*(x.transpose(1, 2) for x in inputs)).transpose(1, 2)
    compare(kernel.flash_attn_func(q, k, v, causal=True), wanted, inputs)


def trace(kernel: ModuleType) -> None:
    """Its operators are named after it, and find users' functions by their names."""
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = (x.detach() for x in drawn((1, 4, 9, 16), (1, 2, 9, 16), (1, 2, 9, 16)))
    mask = kernel.BlockMask(every_third, per_batch=False, per_head=False)
    graph = make_fx(lambda *x: kernel.attention(*x, mask_mod=mask))(q, k, v)
    targets = {str(node.target) for node in graph.graph.nodes}
    assert f"{kernel.__name__}.attention_forward.default" in targets, targets
    torch.testing.assert_close(graph(q, k, v), kernel.attention(q, k, v, mask_mod=mask))


def main() -> None:
    modules = [loaded(Path(word)) for word in sys.argv[1:]]
    for kernel in modules:
        if INTERPRETED:
            attend(kernel)
            trace(kernel)
            continue
        for check in (attend, attend_packed, decode, attend_by_flash):
            check(kernel)
    defined = {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}
    assert {kernel.__name__ for kernel in modules} <= defined and "fastattn" not in defined
