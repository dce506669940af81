"""Work of one step of a server: products and memory of a chunk beside rows that decode a token."""

import numpy as np
import pytest
import torch
import triton
from triton.runtime import interpreter

from fastattn import attention_paged, shared_pages, view_of_tensors
from fastattn.kernels.launch import tiles
from fastattn.kernels.launch.interpreter import patch_interpreter
from fastattn.kernels.launch.tiles import TileConfig

H_Q, H_K, D, SIZE = 16, 1, 16, 16
NEW = (192, *[1] * 15, 0)
HELD = (960, *range(650, 1100, 30), 777)

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="kernels run compiled: there is no interpreter"
)


def test_a_mixed_step_is_within_5_percent_of_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of pairs that see each other, and every byte of queries, cache and results once."""
    patch_interpreter()
    products, touched = [], {}
    builder = type(interpreter.interpreter_builder)
    dot, load, store = (
        getattr(builder, f"create_{name}") for name in ("dot", "masked_load", "masked_store")
    )

    def counted_dot(self, a, b, *others):
        products.append(2 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1])
        return dot(self, a, b, *others)

    def touch(pointers, mask) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        places = pointers.data[mask.data] if mask is not None else pointers.data
        touched.setdefault(size, []).append(np.unique(places))

    def counted_load(self, pointers, mask, *others):
        touch(pointers, mask)
        return load(self, pointers, mask, *others)

    def counted_store(self, pointers, value, mask, *others):
        touch(pointers, mask)
        return store(self, pointers, value, mask, *others)

    columns = -(-max(HELD) // SIZE)
    k, v = torch.randn(2, len(HELD) * columns, H_K, SIZE, D)
    table = torch.randperm(len(HELD) * columns).view(len(HELD), columns).int()
    view = view_of_tensors(k, v, torch.tensor(HELD).int(), block_table=table)
    offsets = torch.tensor((0, *NEW)).cumsum(0)
    q = torch.randn(sum(NEW), H_Q, D)
    with (
        monkeypatch.context() as patch,
        tiles.forced(decode=TileConfig(16, 64), decode_chunk=TileConfig(64, 64)),
    ):
        patch.setattr(builder, "create_dot", counted_dot)
        patch.setattr(builder, "create_masked_load", counted_load)
        patch.setattr(builder, "create_masked_store", counted_store)
        actual = attention_paged(q, view, offsets, backend="triton")
    torch.testing.assert_close(actual, attention_paged(q, view, offsets, backend="torch"))
    pairs = sum(n * held - n * (n - 1) // 2 for n, held in zip(NEW, HELD, strict=True))
    least = 2 * H_Q * pairs * 2 * D
    assert least <= sum(products) <= 1.05 * least, sum(products) / least
    used = sum(held for n, held in zip(NEW, HELD, strict=True) if n)
    least = 4 * (2 * q.numel() + q.shape[0] * H_Q + 2 * used * H_K * D)
    moved = sum(size * np.unique(np.concatenate(x)).size for size, x in touched.items())
    assert least <= moved <= 1.05 * least, moved / least


def test_a_shared_page_is_read_once_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that programs load from the pool: 16 rows that share 64 tokens and have 32 of their
    own, whose 64 queries fill one tile of a chunk.
    """
    patch_interpreter()
    loaded: list[int] = []
    builder = type(interpreter.interpreter_builder)
    load = builder.create_masked_load
    k, v = torch.randn(2, 4 + 16 * 2, H_K, SIZE, D)

    def counted(self, pointers, mask, *others):
        places = pointers.data if mask is None else pointers.data[mask.data]
        for x in (k, v):
            first = x.data_ptr()
            loaded.append(int(((places >= first) & (places < first + x.nbytes)).sum()))
        return load(self, pointers, mask, *others)

    table = torch.cat((torch.arange(4).expand(16, 4), 4 + torch.arange(32).view(16, 2)), 1).int()
    view = view_of_tensors(k, v, torch.full((16,), 96).int(), block_table=table)
    offsets, q = torch.arange(17), torch.randn(16, 4, D)
    shared = shared_pages(view, offsets, torch.tensor([0, 16]), torch.tensor([64]))
    monkeypatch.setattr(builder, "create_masked_load", counted)
    with tiles.forced(decode=TileConfig(16, 16), decode_chunk=TileConfig(64, 16)):
        attention_paged(q, view, offsets, max_seqlen_q=1, shared=shared, backend="triton")
        once = sum(loaded)
        attention_paged(q, view, offsets, max_seqlen_q=1, backend="triton")
    of_token = 2 * H_K * D
    assert once == (64 + 16 * 32) * of_token
    assert sum(loaded) - once == 16 * 96 * of_token
