"""Shipped masks and scores against plain torch."""

import itertools
import sys
from functools import partial

import pytest
import torch
import triton

import fastattn
from fastattn import BlockMask, attention, mods
from fastattn.testing.compare import assert_all_near


@triton.jit
def same(x, b, h, i, j):
    return x


def plain(q, k, v, seen=None, bias=None):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if bias is None else scores + bias
    return (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).softmax(-1) @ v


def assert_same(ours, plainly, *leaves: torch.Tensor, backward: bool = True) -> None:
    """Check that ours(*leaves) is plainly(*leaves), and its gradients, within the error budget."""

    def results(run, dtype: torch.dtype) -> list[torch.Tensor]:
        given = [x.detach().to(dtype).requires_grad_(backward) for x in leaves]
        o = run(*given)
        return [o, *(torch.autograd.grad(o.square().sum(), given) if backward else ())]

    exact = results(plainly, torch.float64)
    names = ("o", *(f"d{i}" for i in range(len(leaves))))[: len(exact)]
    actual = results(ours, torch.float32)
    assert_all_near(names, actual, exact, lambda: results(plainly, torch.float32))


def qkv(T: int, H: int = 2, D: int = 8, T_k: int | None = None):
    generator = torch.Generator().manual_seed(0)
    lengths = (T, T_k or T, T_k or T)
    return [torch.randn(1, H, n, D, generator=generator).requires_grad_() for n in lengths]


def table(T: int, sees, T_k: int | None = None) -> torch.Tensor:
    return torch.tensor([[bool(sees(i, j)) for j in range(T_k or T)] for i in range(T)])


def neighbours(sides: tuple[int, ...], kernel: int) -> torch.Tensor:
    """Seen keys, by the kernel nearest places along each side, for tokens in order."""
    places = list(itertools.product(*map(range, sides)))

    def near(x: int, y: int, n: int) -> bool:
        first = min(max(x - kernel // 2, 0), n - kernel)
        return first <= y < first + kernel

    return table(len(places), lambda i, j: all(map(near, places[i], places[j], sides)))


def tiles(height: int, width: int, tile: int, kernel: int) -> torch.Tensor:
    of = [(i // width // tile) * (width // tile) + i % width // tile for i in range(height * width)]
    seen = neighbours((height // tile, width // tile), kernel)
    return seen[of][:, of]


def diffusion(length: int, block: int) -> torch.Tensor:
    """The three parts of BD3-LM's mask."""
    i = torch.arange(length) // block
    own, before = i[:, None] == i, i[:, None] > i
    return torch.cat((torch.cat((own, before), 1), torch.cat((own & False, own | before), 1)))


BRANCH = torch.tensor([-1, -1, 0, 0, 0, 1, 1, 2], dtype=torch.int32)
# 0 - 1 - 2, 1 - 3, 0 - 4 - 5
PARENTS = [None, 0, 1, 1, 0, 4]
TIN = torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32)
TOUT = torch.tensor([6, 4, 3, 4, 6, 6], dtype=torch.int32)
WIDTH = 3
WIDTHS = torch.tensor([1, 3], dtype=torch.int32)


def ancestors(i: int) -> set[int]:
    nodes, at = set(), i
    while at is not None:
        nodes.add(at)
        at = PARENTS[at]
    return nodes


MASKS = {
    "natten_1d": (mods.natten_1d(9, 4), (), neighbours((9,), 4)),
    "natten_2d": (mods.natten_2d(4, 5, 3), (), neighbours((4, 5), 3)),
    "natten_3d": (mods.natten_3d(3, 4, 2, 2), (), neighbours((3, 4, 2), 2)),
    "tiles": (mods.sliding_tiles_2d(4, 6, tile=2, kernel=2), (), tiles(4, 6, 2, 2)),
    "dilated": (
        *(mods.dilated(3, 2), ()),
        table(12, lambda i, j: 0 <= i - j < 6 and (i - j) % 2 == 0),
    ),
    "by head": (
        *(mods.window_by_head, (WIDTHS,)),
        torch.stack([table(6, lambda i, j, w=w: 0 <= i - j < w) for w in (1, 3)]),
    ),
    "shared prefix": (
        *(mods.shared_prefix, (BRANCH,)),
        table(8, lambda i, j: j <= i and BRANCH[j] in (-1, BRANCH[i])),
    ),
    "tree": (mods.tree, (TIN, TOUT), table(6, lambda i, j: j in ancestors(i))),
    "block diffusion": (mods.block_diffusion(6, 2), (), diffusion(6, 2)),
    "and": (
        *(mods.and_masks(mods.causal, mods.natten_1d(8, 5)), ()),
        neighbours((8,), 5).tril(),
    ),
    "lambdas": (
        mods.and_masks(
            lambda b, h, q, k: k <= q,
            lambda b, h, q, k: q - k < torch.clamp(h, min=WIDTH),
        ),
        *((), table(8, lambda i, j: 0 <= i - j < WIDTH)),
    ),
    "or, each with its tensors": (
        *(mods.or_masks(mods.window_by_head, BlockMask(mods.shared_prefix)), (WIDTHS, BRANCH)),
        torch.stack(
            [
                table(8, lambda i, j, w=w: j <= i and (i - j < w or BRANCH[j] in (-1, BRANCH[i])))
                for w in (1, 3)
            ]
        ),
    ),
}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_what_plain_torch_has(name: str, backend: str, device: str) -> None:
    mask, tensors, seen = MASKS[name]
    given = {"mask_mod": mask, "mod_tensors": tuple(x.to(device) for x in tensors)}
    assert_same(
        partial(attention, **given, backend=backend),
        partial(plain, seen=seen.to(device)),
        *(x.to(device) for x in qkv(seen.shape[-1])),
        backward=backend == "triton",
    )


def test_functions_alone_and_tables_that_learn_serve_without_gradients() -> None:
    q, k, v = (x.detach() for x in qkv(4))
    tables = {"mask_mod": mods.window_by_head, "mod_tensors": (torch.ones(2, requires_grad=True),)}
    with torch.no_grad():
        o = attention(q, k, v, score_mod=same, backend="torch")
        torch.testing.assert_close(o, attention(q, k, v, backend="torch"))
        assert attention(q, k, v, **tables, backend="torch").shape == o.shape


def test_the_same_parts_give_the_same_function() -> None:
    assert mods.natten_2d(4, 5, 3) is MASKS["natten_2d"][0]
    assert mods.natten_2d(4, 5, 2) is not MASKS["natten_2d"][0]
    with pytest.raises(ValueError, match="kernel of natten_2d must be an int from 1 to 4, got 5"):
        mods.natten_2d(4, 5, 5)
    with pytest.raises(ValueError, match="sliding_tiles_2d must be an int from 1 to 2, got 3"):
        mods.sliding_tiles_2d(4, 6, tile=2, kernel=3)
    with pytest.raises(ValueError, match="tile must divide height 4 and width 5, got 2"):
        mods.sliding_tiles_2d(4, 5, tile=2, kernel=2)
    with pytest.raises(ValueError, match="or_masks takes one mask or more, got none"):
        mods.or_masks()
    with pytest.raises(ValueError, match=r"neighbours must take \(b, h, q_pos, k_pos\)"):
        mods.or_masks(mods.causal, neighbours)


def test_rules_of_one_source_are_two_rules() -> None:
    one, other = (mods.or_masks(triton.jit(mods.causal.fn)) for _ in range(2))
    assert one is not other


def test_a_lambda_keeps_the_numbers_of_its_scope() -> None:
    def behind(n: int):
        return mods.or_masks(lambda b, h, q, k: q - k == n)

    masks = [behind(n) for n in range(3)]
    assert [mods.visited_blocks(mask, 4, 4, block=1) * 16 for mask in masks] == [4, 3, 2]
    assert masks[2] is mods.or_masks(lambda b, h, q, k: q - k == 2)
    if sys.version_info >= (3, 11):
        two = mods.or_masks(lambda b, h, q, k: q == k + 1, lambda b, h, q, k: q == k + 3)
        assert mods.visited_blocks(two, 4, 4, block=1) * 16 == 4


def test_flamingo_sees_the_last_image() -> None:
    q, k, v = (x.detach() for x in qkv(5, T_k=6))
    images, length = (torch.tensor(x, dtype=torch.int32) for x in ([-1, 0, 0, 1, 1], [3]))
    options = {"mask_mod": mods.flamingo, "mod_tensors": (images, length), "query_offset": 0}
    seen = table(5, lambda i, j: images[i] == j // 3, 6)
    ours = partial(attention, **options, backend="torch")
    assert_same(ours, lambda *x: plain(*x, seen).nan_to_num(), q, k, v, backward=False)
    assert ours(q, k, v)[:, :, 0].abs().max() == 0


def test_swins_masks_are_those_of_each_image() -> None:
    masks = torch.zeros(3, 4, 4)
    masks[1, :2, 2:] = masks[1, 2:, :2] = masks[2, 0, 1] = -100
    q, k, v = (x.detach().expand(6, -1, -1, -1) + torch.arange(6.0)[:, None, None, None] / 6
               for x in qkv(4))  # fmt: skip
    ours = partial(attention, attn_mask=mods.swin_windows(masks, 2))
    assert_same(ours, partial(plain, bias=masks.repeat(2, 1, 1)[:, None]), q, k, v)
    with pytest.raises(ValueError, match=r"mask must have shape \[nW, N, N\], got \[3, 4\]"):
        mods.swin_windows(masks[:, 0], 2)


def test_alibi_with_learned_slopes() -> None:
    far = (torch.arange(6)[:, None] - torch.arange(6)).float()

    def ours(q, k, v, slopes, ahead):
        return attention(q, k, v, relative_bias=mods.alibi_bias(slopes, 5, ahead))

    def plainly(q, k, v, slopes, ahead):
        behind = -slopes[:, None, None] * far.clamp(min=0)
        return plain(q, k, v, bias=behind - ahead[:, None, None] * (-far).clamp(min=0))

    q, k, v = qkv(6)
    assert_same(ours, plainly, q, k, v, torch.tensor([0.5, 1.0]), torch.tensor([0.25, 2.0]))
    same = fastattn.alibi_slopes(2)
    o = attention(q, k, v, relative_bias=mods.alibi_bias(same, 5))
    torch.testing.assert_close(o, attention(q, k, v, alibi_slopes=same))


def test_forget_gates_weigh_keys_by_their_product() -> None:
    def ours(q, k, v, raw):
        bias = mods.forgetting_bias(torch.nn.functional.logsigmoid(raw))
        return attention(q, k, v, causal=True, attn_bias=bias)

    def plainly(q, k, v, raw):
        gates = raw.sigmoid()
        between = [[gates[..., j + 1 : i + 1].prod(-1) for j in range(6)] for i in range(6)]
        product = torch.stack([torch.stack(row, -1) for row in between], -2)
        return plain(q, k, v, torch.ones(6, 6).tril() > 0, product.log())

    assert_same(ours, plainly, *qkv(6), torch.linspace(-1, 2, 12).reshape(1, 2, 6))


def test_decomposed_positions_are_a_bias_by_row_and_column() -> None:
    H, W, D = 3, 4, 8
    y, x = torch.arange(H * W) // W, torch.arange(H * W) % W

    def ours(q, k, v, rows, columns):
        q, k, scale = mods.decomposed_positions(q, k, rows, columns)
        return attention(q, k, v, scale=scale)

    def plainly(q, k, v, rows, columns):
        to_rows, to_columns = rows[y[:, None] - y + H - 1], columns[x[:, None] - x + W - 1]
        return plain(q, k, v, bias=torch.einsum("bhid,ijd->bhij", q, to_rows + to_columns))

    rows, columns = (torch.randn(2 * n - 1, D) for n in (H, W))
    assert_same(ours, plainly, *qkv(H * W), rows, columns)
    with pytest.raises(ValueError, match=r"q and k must have 3 \* 4 tokens, got 6 and 6"):
        mods.decomposed_positions(*qkv(6)[:2], rows, columns)


@pytest.mark.parametrize(
    ("mask", "T", "visited"),
    [
        (mods.dilated(8, 8), 1024, 31),
        (mods.natten_2d(32, 32, 7), 1024, 76),
        (mods.block_diffusion(512, 64), 1024, 72),
        (mods.causal, 1024, 136),
    ],
)
def test_blocks_that_are_visited(mask, T: int, visited: int) -> None:
    """The counts that the docstrings give."""
    assert mods.visited_blocks(mask, T, T) * 256 == visited
    assert mods.visited_blocks(BlockMask(mods.shared_prefix), 3, 8, BRANCH, block=4) == 1
