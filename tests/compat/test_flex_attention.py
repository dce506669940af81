"""torch's FlexAttention by its own signature: what is served is what torch computes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

from fastattn import reference
from fastattn.compat.flex_attention import flex_attention

# torch's eager function.
pytestmark = pytest.mark.filterwarnings(
    "ignore:return_lse is deprecated", "ignore:flex_attention called with"
)
B, H, H_K, T, D = 2, 4, 2, 24, 8
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 15, [0] * 20 + [2] * 4])
SLOPES = torch.linspace(0.1, 0.8, H)
SCORES: dict[str, Callable[..., Any]] = {
    "softcap": lambda s, b, h, i, j: 3.0 * torch.tanh(s / 1.5) + SLOPES[h],
    "hidden": lambda s, b, h, i, j: torch.where(i >= j, s * 0.5, -math.inf) * 2.0,
    "two": lambda s, b, h, i, j: torch.where(
        i > j, s + SLOPES[h], torch.where(j < i + 6, s.to(torch.float32), -math.inf)
    ),
}


def document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (DOCUMENTS[b, i] == DOCUMENTS[b, j]) & ((j <= i) | (h > 1)) & (i != 5)


def block_mask(mask_mod: Any = document) -> torchs.BlockMask:
    return torchs.create_block_mask(mask_mod, B, H, T, T, device="cpu", BLOCK_SIZE=8)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, heads, T, D, generator=made) for heads in (H, H_K, H_K))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


@pytest.mark.parametrize("name", SCORES)
def test_as_torch_computes(name: str) -> None:
    q, k, v = (x.detach() for x in inputs())
    how = {"score_mod": SCORES[name], "block_mask": block_mask(), "scale": 0.3, "enable_gqa": True}
    expected = torchs.flex_attention(q, k, v, **how, return_lse=True)
    torch.testing.assert_close(flex_attention(q, k, v, **how, return_lse=True), expected)


def test_keys_of_one_row_and_masks_of_other_sizes() -> None:
    q, k, v = (x.detach() for x in inputs())
    how = {"block_mask": block_mask(), "enable_gqa": True}
    expected = flex_attention(q, *(x[:1].expand(B, -1, -1, -1) for x in (k, v)), **how)
    assert torch.equal(flex_attention(q, k[:1], v[:1], **how), expected)
    for rows, heads in ((3, H), (B, 2)):
        other = torchs.create_block_mask(lambda b, h, i, j: i >= j, rows, heads, T, T, device="cpu")
        message = f"of 1 or 2 rows and 1 or 4 heads, got {rows} and {heads}"
        with pytest.raises(ValueError, match=message):
            flex_attention(q, k, v, **{**how, "block_mask": other})


def test_lists_of_blocks_hold() -> None:
    """Partial blocks apply the function as well, full blocks do not; others are not read."""
    q, k, v = inputs()
    counts, lists = torch.tensor([[[1, 1, 1]]]), torch.tensor([[[[0, -1], [2, 3], [1, -1]]]])
    full_counts, full_lists = torch.tensor([[[0, 1, 1]]]), torch.tensor([[[[5], [1], [0]]]])
    blocks = (x.int() for x in (counts, lists, full_counts, full_lists))
    mask = torchs.BlockMask.from_kv_blocks(*blocks, 8, None, (T, T), compute_q_blocks=False)
    for hidden in (3, 4):
        mask.mask_mod = lambda b, h, i, j, hidden=hidden: j != hidden  # also once it was used
        seen = torch.zeros(3, 8, 3, 8, dtype=torch.bool)
        for row, column in ((0, 0), (1, 2), (2, 1)):
            seen[row, :, column] = True
        seen = seen.view(T, T) & (torch.arange(T) != hidden)
        for row, column in ((1, 1), (2, 0)):
            seen[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = True
        actual = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        expected = reference.attention(q, k, v, attn_mask=seen)
        torch.testing.assert_close(actual, expected)


def test_what_is_returned() -> None:
    q, k, v = inputs()
    o, lse = flex_attention(q, k[:, :1], v[:, :1], None, None, None, True, True, {"BLOCK_M": 32})
    both = torchs.AuxRequest(lse=True, max_scores=True)
    actual, aux = flex_attention(q, k[:, :1], v[:, :1], enable_gqa=True, return_aux=both)
    torch.testing.assert_close((actual, aux.lse), (o, lse))
    torch.testing.assert_close(aux.max_scores, (q @ k[:, :1].mT * D**-0.5).amax(-1))
    _, aux = flex_attention(q, q, q, return_aux=torchs.AuxRequest(max_scores=True))
    assert aux.lse is None and aux.max_scores is not None


def test_compiled_calls_take_each_mask() -> None:
    """Also one that was used before, and numbers and lengths that vary at once; from position 0."""
    q, k, v = (x.detach() for x in inputs())
    call = torch.compile(flex_attention, fullgraph=True, backend="aot_eager")

    def mask_of(n: int, length: int, ids: Tensor) -> torchs.BlockMask:
        mask_mod = lambda b, h, i, j: (ids[i] == ids[j]) & (j // n < 3)  # noqa: E731
        return torchs.create_block_mask(mask_mod, None, None, length - 3, length, "cpu", 8)

    for n, length in ((2, T), (5, T), (3, T - 1), (4, T - 2), (2, T)):
        mask = mask_of(n, length, torch.arange(T) // n)
        now = [q[:, :, : length - 3], *(x[:, :, :length] for x in (k, v))]
        expected = torchs.flex_attention(*now, block_mask=mask, enable_gqa=True)
        for served in (flex_attention, call) if n == 2 else (call,):
            o = served(*now, block_mask=mask, enable_gqa=True)
            torch.testing.assert_close(o, expected)
