"""Blocks that the kernels compute, counted by their matrix products: hidden ones are skipped."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from triton.runtime import interpreter as triton_interpreter

import fastattn
from fastattn import reference
from fastattn.kernels.launch import tiles
from fastattn.testing import make_qkv

pytestmark = pytest.mark.skipif(
    not tiles._INTERPRETING, reason="products are counted in the interpreter"
)

BLOCK = 8
# Products of a block: q k, p v; q k, do v, ds k; k q, p do, v do, ds q; q k, do v.
PRODUCTS = {"forward": 2, "backward_dq": 3, "backward_dkv": 4, "backward_bias": 2}


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    tile = tiles.TileConfig(BLOCK, BLOCK)
    with tiles.forced(forward=tile, backward_dq=tile, backward_dkv=tile):
        yield


@pytest.fixture
def count_blocks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, float]]:
    """Runs attention and its backward, and returns the blocks that each kernel computed."""

    def run(inputs: tuple[torch.Tensor, ...], **options: Any) -> dict[str, float]:
        # The first call repairs the interpreter, whose products are counted from then on.
        fastattn.attention(*(x[:, :, :1] for x in inputs), backend="triton")
        products = dict.fromkeys(PRODUCTS, 0)
        builder = triton_interpreter.interpreter_builder
        multiply, execute = builder.create_dot, triton_interpreter.GridExecutor.__call__
        running = []

        def counting(*args: Any) -> Any:
            products[running[-1]] += 1
            return multiply(*args)

        def named(self: Any, *args: Any, **kwargs: Any) -> None:
            name = self.fn.__name__.removeprefix("attention_").removesuffix("_kernel")
            running.append(name)
            execute(self, *args, **kwargs)
            running.pop()

        monkeypatch.setattr(builder, "create_dot", counting)
        monkeypatch.setattr(triton_interpreter.GridExecutor, "__call__", named)
        o = fastattn.attention(*inputs, backend="triton", **options)
        bias = options.get("attn_bias")
        torch.autograd.grad(o.sum(), inputs if bias is None else (*inputs, bias))
        monkeypatch.undo()
        return {name: count / PRODUCTS[name] for name, count in products.items()}

    return run


def blocks_with_pairs(H: int, T_q: int, T_k: int, **masks: Any) -> int:
    """Blocks of all batch rows and heads that hold a pair which is seen."""
    keep = reference.visible_mask(T_q, T_k, **masks)
    rows, columns = -(-T_q // BLOCK), -(-T_k // BLOCK)
    whole = torch.zeros(len(keep), rows * BLOCK, columns * BLOCK, dtype=torch.bool)
    whole[:, :T_q, :T_k] = keep[:, 0]
    return H * int(
        whole.unflatten(2, (columns, BLOCK)).unflatten(1, (rows, BLOCK)).any(4).any(2).sum()
    )


B, H, T = 3, 1, 29


def padding(kind: str) -> dict[str, torch.Tensor]:
    key = torch.arange(T)
    if kind == "lengths":
        return {"key_lengths": torch.tensor([29, 9, 0])}
    if kind == "right":
        return {"key_padding_mask": key < torch.tensor([[29], [13], [0]])}
    if kind == "left":
        return {"key_padding_mask": key >= torch.tensor([[0], [18], [29]])}
    return {"key_padding_mask": (key < 7) | (key > torch.tensor([[20], [24], [4]]))}


def with_holes_filled(there: torch.Tensor) -> torch.Tensor:
    """Keys between the first and the last of a row: forward and dQ load one block after another."""
    return (there.cumsum(1) > 0) & (there.flip(1).cumsum(1).flip(1) > 0)


def with_small_holes_filled(there: torch.Tensor) -> torch.Tensor:
    """Fill holes, but only in blocks with a key that is there: dK/dV visits these blocks."""
    between = with_holes_filled(there)
    block = torch.nn.functional.pad(there, (0, -there.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    shared = block.any(2).repeat_interleave(BLOCK, 1)
    return between & shared[:, : there.shape[1]]


@pytest.mark.parametrize("band", [{}, {"causal": True}, {"window": (6, 3)}], ids=str)
@pytest.mark.parametrize("kind", ["lengths", "right", "left", "holes"])
def test_padding_is_not_computed(kind: str, band: dict[str, Any], count_blocks: Any) -> None:
    """Nor, for dK and dV, are blocks of keys that a hole in the padding mask empties."""
    inputs = make_qkv(B, H, 1, T, D=16)
    masks = {**band, **padding(kind)}
    counted = count_blocks(inputs, **masks)
    of_keys = masks
    if kind == "holes":
        there = masks["key_padding_mask"].expand(B, T)
        masks = {**masks, "key_padding_mask": with_holes_filled(there)}
        of_keys = {**masks, "key_padding_mask": with_small_holes_filled(there)}
    expected = blocks_with_pairs(H, T, T, **masks)
    del counted["backward_bias"]
    met_by_keys = blocks_with_pairs(H, T, T, **of_keys)
    assert counted.pop("backward_dkv") == met_by_keys
    assert counted == dict.fromkeys(counted, expected)
    everything = blocks_with_pairs(H, T, T, key_lengths=torch.full((B,), T), **band)
    assert met_by_keys < everything


MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "prefix": {"causal": True, "prefix_lengths": torch.tensor([13, 3])},
    "first": {"window": 4, "keep_first": 3},
    "stride": {"stride": 25, "window": 3, "causal": True},
    "offset": {"causal": True, "query_offset": -12},
}


@pytest.mark.parametrize("mask", MASKS)
def test_hidden_blocks_are_not_computed(mask: str, count_blocks: Any) -> None:
    inputs = make_qkv(2, H, 1, T, D=16)
    like_rows = {"key_lengths": torch.tensor([T, T])}
    bias = torch.zeros(2, H, T, T, requires_grad=True)
    counted = count_blocks(inputs, attn_bias=bias, **MASKS[mask])
    expected = blocks_with_pairs(H, T, T, **like_rows, **MASKS[mask])
    assert counted["forward"] == counted["backward_dq"] == expected
    assert counted["backward_dkv"] == expected
    # The gradient of the bias goes by ranges, which know no strides.
    assert counted["backward_bias"] == expected or mask == "stride"


@triton.jit
def islands(b, h, q_pos, k_pos):
    return q_pos // 11 == k_pos // 11


def test_a_mask_function_skips_what_it_empties(count_blocks: Any) -> None:
    inputs = make_qkv(1, H, 1, T, D=16)
    counted = count_blocks(inputs, mask_mod=islands)
    same = torch.arange(T)[:, None] // 11 == torch.arange(T) // 11
    used = torch.nn.functional.pad(same, (0, 3, 0, 3)).unflatten(1, (4, BLOCK))
    expected = H * int(used.unflatten(0, (4, BLOCK)).any(3).any(1).sum())
    assert counted["forward"] == counted["backward_dq"] == counted["backward_dkv"] == expected
    ids = (torch.arange(T) // 11)[None]
    assert count_blocks(inputs, documents=ids) == counted
    assert count_blocks(inputs, attn_mask=same) == counted
