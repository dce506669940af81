"""`fastattn.patch_sdpa`: torch's function is replaced while a patch is in force, and back after."""

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import fastattn
from fastattn.compat import patch

torch_attention = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    yield
    fastattn.unpatch_sdpa()
    assert F.scaled_dot_product_attention is torch_attention


@pytest.fixture
def doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the kernels: what is served by a patch is seen in the result."""

    def doubled(*args: Tensor, **kwargs: object) -> Tensor:
        return 2 * torch_attention(*args, **kwargs)

    monkeypatch.setattr(patch, "scaled_dot_product_attention", doubled)


def factor() -> float:
    """1 for torch's function and 2 for `doubled`, whatever is in torch's module."""
    x = torch.ones(1, 1, 1, 1)
    return float(F.scaled_dot_product_attention(x, x, x))


def test_switch(doubling):
    fastattn.patch_sdpa()
    assert factor() == 2
    fastattn.patch_sdpa()
    fastattn.unpatch_sdpa()
    assert factor() == 1
    fastattn.unpatch_sdpa()
    assert F.scaled_dot_product_attention is torch_attention


def test_context_manager_nests_and_ends_on_errors(doubling):
    with pytest.raises(KeyError), fastattn.patch_sdpa():
        with fastattn.patch_sdpa() as inner, inner:
            assert factor() == 2
        assert factor() == 2
        raise KeyError
    assert factor() == 1


def test_a_patch_can_be_entered_again(doubling):
    again = fastattn.patch_sdpa()
    with again, again:
        pass
    assert factor() == 1
    with again:
        assert factor() == 2
    assert factor() == 1


def test_switch_ends_open_blocks(doubling):
    with fastattn.patch_sdpa():
        fastattn.unpatch_sdpa()
        assert factor() == 1
    assert factor() == 1


def test_one_patch_undone_leaves_the_other(doubling):
    first, second = fastattn.patch_sdpa(), fastattn.patch_sdpa()
    first.undo()
    first.undo()
    assert factor() == 2
    second.undo()
    assert factor() == 1


def test_overlapping_threads_hold_one_patch(doubling):
    inside, leave = threading.Event(), threading.Event()
    seen = []

    def other() -> None:
        with fastattn.patch_sdpa():
            inside.set()
            leave.wait()
            seen.append(factor())

    with fastattn.patch_sdpa():
        thread = threading.Thread(target=other)
        thread.start()
        inside.wait()
    # This thread's patch has ended; the other's is in force, for all threads.
    assert factor() == 2
    leave.set()
    thread.join()
    assert seen == [2]
    assert factor() == 1


def test_many_threads_leave_torchs_function(doubling):
    def patch_often() -> None:
        for _ in range(200):
            with fastattn.patch_sdpa():
                assert factor() == 2

    threads = [threading.Thread(target=patch_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert F.scaled_dot_product_attention is torch_attention


def test_a_patch_over_ours_stays_and_gets_torchs(doubling, monkeypatch):
    fastattn.patch_sdpa()
    ours = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *x: 3 * ours(*x))
    assert factor() == 6
    fastattn.unpatch_sdpa()
    assert factor() == 3
    with fastattn.patch_sdpa():
        assert factor() == 2
    assert factor() == 3
    monkeypatch.undo()


def test_torchs_module_goes_through_the_patch(doubling):
    layer = torch.nn.MultiheadAttention(8, 2, bias=False)
    x = torch.randn(3, 1, 8)
    plain, _ = layer(x, x, x, need_weights=False)
    with fastattn.patch_sdpa():
        patched, _ = layer(x, x, x, need_weights=False)
    torch.testing.assert_close(patched, 2 * plain, rtol=0, atol=0)


def test_compiled_code_follows_the_patch(doubling):
    torch._dynamo.reset()
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    x = torch.ones(1, 1, 1, 1)
    for _ in range(2):
        assert attend(x) == 1
        with fastattn.patch_sdpa():
            assert attend(x) == 2
    # Both graphs are kept: going back and forth compiles nothing more.
    assert counter.frame_count == 2


def test_a_region_may_not_patch_while_it_is_compiled():
    torch._dynamo.reset()

    @torch.compile(backend="eager", fullgraph=True)
    def attend(x: Tensor) -> Tensor:
        with fastattn.patch_sdpa():
            return F.scaled_dot_product_attention(x, x, x)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        attend(torch.ones(1, 1, 1, 1))


def test_the_library_itself_keeps_torchs_function(doubling):
    q = k = v = torch.randn(1, 1, 3, 4)
    plain = fastattn.attention(q, k, v, backend="torch")
    with fastattn.patch_sdpa():
        assert torch.equal(fastattn.attention(q, k, v, backend="torch"), plain)
