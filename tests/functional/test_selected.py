"""Attention over selected key blocks: results, gradients, work, and messages."""

from functools import partial
from typing import Any

import pytest
import torch
from fuzz.judges import check_by_kernels
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from triton.runtime import interpreter as triton_interpreter

import fastattn
from fastattn import block_indices, explain_selected, selected_attention
from fastattn.kernels.launch import tiles
from fastattn.testing import make_qkv
from fastattn.testing.inputs import draws


@pytest.mark.parametrize("seed", range(70))
def test_generated_calls(seed: int, one_thread: None, device: str) -> None:
    """Any heads, widths and blocks; some lists have no entries, some blocks are in none."""
    check_by_kernels("selected_attention", seed, device)


def test_gradients_repeat_to_the_bit_and_are_differentiated_again(device: str) -> None:
    leaves = *make_qkv(1, 4, 2, 6, 20, 16, device=device), draws(0, device)(4, grad=True)
    indices = torch.tensor([[2, 0], [1, 1], [0, 2]], device=device).repeat(2, 1).expand(1, 2, 6, 2)

    def gradients(backend: str, *, again: bool) -> tuple[Tensor, ...]:
        how = {"block": (1, 8), "sinks": leaves[3], "backend": backend}
        o = selected_attention(*leaves[:3], indices, **how)
        first = torch.autograd.grad(o.sin().sum(), leaves, create_graph=again)
        if not again:
            return first
        return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

    once, twice = (gradients("triton", again=False) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(once, twice, strict=True))
    actual, expected = (gradients(x, again=True) for x in ("triton", "torch"))
    torch.testing.assert_close(actual, expected)


MAP = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]]).bool()[None, None]
LISTED = [[0, 2, -1], [-1, -1, -1], [0, 1, 2], [1, -1, -1]]
COUNTS, NUMBERS = MAP.sum(-1), (~MAP).int().argsort(stable=True)  # what is not seen comes behind


@pytest.mark.filterwarnings("ignore:Sparse BSR tensor support is in beta")
def test_lists_from_other_forms_of_block_masks() -> None:
    dense = MAP[0, 0].repeat_interleave(2, 0).repeat_interleave(4, 1).float()
    bsr = dense.to_sparse_bsr((2, 4))
    forms: dict[str, Any] = {
        "map": MAP, "bsr": bsr, "rows": (bsr.crow_indices().int(), bsr.col_indices()),
        "counts": (COUNTS, NUMBERS),
        # Block 1 is full wherever it is seen.
        "full": (COUNTS - MAP[..., 1].long(), torch.tensor([0, 2, 1]).expand(1, 1, 4, 3),
                 MAP[..., 1].long(), torch.ones(1, 1, 4, 1, dtype=torch.int64)),
        "torch": create_block_mask(
            lambda b, h, i, j: dense[i, j] > 0, 1, 1, 8, 12, device="cpu", BLOCK_SIZE=(2, 4)
        ),
    }  # fmt: skip
    lists = {name: block_indices(form)[..., :3] for name, form in forms.items()}
    assert {name: x[0, 0].tolist() for name, x in lists.items()} == dict.fromkeys(forms, LISTED)
    assert all(x.dtype == torch.int32 for x in lists.values())
    assert block_indices(MAP, most=3).tolist() == [[LISTED]]


PRODUCTS = {"forward": 2, "backward_dq": 3, "backward_dkv": 4}


@pytest.mark.skipif(not tiles._INTERPRETING, reason="products are counted in the interpreter")
@pytest.mark.parametrize(("heads", "tiles_met"), [(16, 2 + 2 + 4), (1, 5)])
def test_work_follows_the_lists(
    heads: int, tiles_met: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles met by each kernel: those of the blocks that are named, each once for each list of 16
    rows, and once for all lists of one row.
    """
    T_k, rows = 320, 4
    q, k, v = make_qkv(1, heads, 1, rows, T_k, 16, device=device)
    indices = torch.tensor([[0, 7, 7, -1], [3, 0, -1, -1], [-1, -1, -1, -1], [0, 19, 4, 7]])
    call = partial(selected_attention, q, k, v, indices[None, None].to(device), block=(1, 16))
    call(backend="triton")  # the first call repairs the interpreter
    products = dict.fromkeys(PRODUCTS, 0)
    builder, executor = triton_interpreter.interpreter_builder, triton_interpreter.GridExecutor
    multiply, execute, running = builder.create_dot, executor.__call__, []

    def counting(*args: Any) -> Any:
        products[running[-1]] += 1
        return multiply(*args)

    def named(self: Any, *args: Any, **kwargs: Any) -> None:
        running.append(self.fn.__name__.removeprefix("selected_").removesuffix("_kernel"))
        execute(self, *args, **kwargs)

    monkeypatch.setattr(builder, "create_dot", counting)
    monkeypatch.setattr(executor, "__call__", named)
    tile = tiles.TileConfig(16, 16)
    with tiles.forced(forward=tile, backward_dq=tile, backward_dkv=tile):
        torch.autograd.grad(call(backend="triton").sum(), (q, k, v))
    visits = {name: products[name] / count for name, count in PRODUCTS.items()}
    assert visits == dict.fromkeys(PRODUCTS, tiles_met)


def test_explain_names_the_kernels(device: str) -> None:
    q, k, v = make_qkv(1, 2, 1, 3, 20, 16, device=device)
    indices = torch.zeros(1, 1, 3, 1, dtype=torch.int32, device=device)
    assert explain_selected(q, k, v, indices, backend="triton").backend == "triton"
    wide = (x.double() for x in (q, k, v))
    assert "float64" in explain_selected(*wide, indices).reasons["triton"]


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_compiled_calls_are_one_graph(backend: str, device: str) -> None:
    q, k, v = make_qkv(1, 2, 1, 3, 20, 16, device=device)
    lists = torch.zeros(1, 1, 3, 1, dtype=torch.int32, device=device)
    compiled = torch.compile(selected_attention, backend="aot_eager", fullgraph=True)
    how = {"backend": backend, "key_padding_mask": torch.arange(20, device=device)[None] > 1}
    o, expected = (f(q, k, v, lists, **how) for f in (compiled, selected_attention))
    assert torch.equal(o, expected)
    actual, grads = (torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (o, expected))
    assert all(torch.equal(x, y) for x, y in zip(actual, grads, strict=True))
    assert fastattn.selected_attention is selected_attention
