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


def blocks_with_pairs(keep: torch.Tensor) -> int:
    """Blocks of all rows of a mask [B, 1, T, T] that hold a pair which is seen."""
    surplus = -T % BLOCK
    whole = torch.nn.functional.pad(keep[:, 0], (0, surplus, 0, surplus))
    return int(whole.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK)).any(4).any(2).sum())


B, T = 3, 29
KEYS = torch.arange(T)
HOLES = (KEYS < 7) | (torch.tensor([[20], [24], [4]]) < KEYS)
PADDING: dict[str, dict[str, torch.Tensor]] = {
    "lengths": {"key_lengths": torch.tensor([29, 9, 0])},
    "right": {"key_padding_mask": torch.tensor([[29], [13], [0]]) > KEYS},
    "left": {"key_padding_mask": torch.tensor([[0], [18], [29]]) <= KEYS},
    "holes": {"key_padding_mask": HOLES},
}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "prefix": {"causal": True, "prefix_lengths": torch.tensor([13, 3, 0])},
    "first": {"window": 4, "keep_first": 3},
    "stride": {"stride": 25, "window": 3, "causal": True},
    "offset": {"causal": True, "query_offset": -12},
    **PADDING,
    **{f"{name}-causal": {**x, "causal": True} for name, x in PADDING.items()},
    **{f"{name}-window": {**x, "window": (6, 3)} for name, x in PADDING.items()},
}


@pytest.mark.parametrize("mask", MASKS)
def test_hidden_blocks_are_not_computed(mask: str, count_blocks: Any) -> None:
    """Forward and dQ load one block after another between the first key and the last of a row;
    dK and dV leave out blocks of keys that a hole in the padding empties.
    """
    given = MASKS[mask]
    biased = not {"key_lengths", "key_padding_mask"} & given.keys()
    bias = {"attn_bias": torch.zeros(B, 1, T, T, requires_grad=True)} if biased else {}
    counted = count_blocks(make_qkv(B, 1, 1, T, D=16), **bias, **given)
    by_queries = by_keys = given
    if mask.startswith("holes"):
        between = (HOLES.cumsum(1) > 0) & (HOLES.flip(1).cumsum(1).flip(1) > 0)
        met = torch.nn.functional.pad(HOLES, (0, -T % BLOCK)).unflatten(1, (-1, BLOCK)).any(2)
        by_queries = {**given, "key_padding_mask": between}
        by_keys = {**given, "key_padding_mask": between & met.repeat_interleave(BLOCK, 1)[:, :T]}
    expected, of_keys = (
        blocks_with_pairs(reference.visible_mask(T, T, **x).expand(B, 1, T, T))
        for x in (by_queries, by_keys)
    )
    assert counted["forward"] == counted["backward_dq"] == expected
    assert counted["backward_dkv"] == of_keys
    # The gradient of the bias goes by ranges, which know no strides.
    assert not biased or counted["backward_bias"] == expected or mask == "stride"


@triton.jit
def islands(b, h, q_pos, k_pos):
    return q_pos // 11 == k_pos // 11


def test_a_mask_function_skips_what_it_empties(count_blocks: Any) -> None:
    inputs = make_qkv(1, 1, 1, T, D=16)
    counted = count_blocks(inputs, mask_mod=islands)
    same = KEYS[:, None] // 11 == KEYS // 11
    expected = blocks_with_pairs(same[None, None])
    assert counted["forward"] == counted["backward_dq"] == counted["backward_dkv"] == expected
    assert count_blocks(inputs, documents=(KEYS // 11)[None]) == counted
    assert count_blocks(inputs, attn_mask=same) == counted
