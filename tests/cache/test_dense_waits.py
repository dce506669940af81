"""No method of a KVCache reads a value back from the device while there is room."""

import pytest
import torch

from fastattn import KVCache

B, H, D, DV, MAX = 3, 2, 2, 3, 8


def use(cache: KVCache, rows: torch.Tensor) -> None:
    k, v = (torch.ones(B, H, 2, width, device=cache.k.device) for width in (D, DV))
    cache.append(k, v)
    cache.append(k, v, new_lengths=rows)
    cache.append(k, v)
    cache.truncate(rows)
    cache.truncate(3)
    cache.reorder(rows)
    cache.reset()


def test_no_value_is_read_back_while_there_is_room():
    """Meta tensors have no values: any read of one raises."""
    cache = KVCache(B, H, MAX, D, value_dim=DV, device="meta")
    rows = torch.zeros(B, dtype=torch.int64, device="meta")
    use(cache, rows)
    k, v = (torch.ones(B, H, 4, width, device="meta") for width in (D, DV))
    cache.append(k, v, new_lengths=rows)
    cache.append(k, v)
    with pytest.raises(RuntimeError, match="meta"):
        cache.append(k, v)


@pytest.mark.gpu
def test_no_method_waits_for_the_gpu_while_there_is_room():
    cache = KVCache(B, H, MAX, D, value_dim=DV, device="cuda")
    rows = torch.tensor([2, 1, 0], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        use(cache, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
