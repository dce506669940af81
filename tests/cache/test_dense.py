"""KVCache: lengths on the host and in tensors, rows, padding; no value is read back."""

import copy

import pytest
import torch

from fastattn import KVCache

B, H, D, DV, MAX = 3, 2, 2, 3, 8


def make_cache(**kwargs) -> KVCache:
    """A small cache whose unwritten slots hold NaN."""
    cache = KVCache(B, H, MAX, D, value_dim=DV, **kwargs)
    for stored in (cache.k, cache.v, cache.k_scale, cache.v_scale):
        if stored is not None and stored.is_floating_point():
            stored.fill_(torch.nan)
    return cache


def tokens(T: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """T new tokens a row, no two alike, in the strides of a transposed projection."""
    k = torch.arange(B * T * H * D, dtype=torch.float32) + 1000 * start
    v = -torch.arange(B * T * H * DV, dtype=torch.float32) - 1000 * start - 1
    return k.view(B, T, H, D).transpose(1, 2), v.view(B, T, H, DV).transpose(1, 2)


def test_lengths_are_changed_in_place():
    cache = make_cache()
    lengths, k = cache.lengths, cache.k
    cache.append(*tokens(3), new_lengths=torch.tensor([3, 1, 2], dtype=torch.int32))
    assert cache.uniform_length is None and cache.lengths.dtype == torch.int32
    cache.reorder(torch.tensor([2, 1, 0]))
    cache.truncate(torch.tensor([1, 9, 9]))
    assert lengths.tolist() == [1, 1, 3]
    assert cache.lengths is lengths
    assert cache.k is k
    cache.reset()
    assert cache.uniform_length == cache.length_bound == 0


def test_bound_that_counts_padding_is_tightened_before_an_append_is_refused():
    cache = make_cache()
    cache.append(*tokens(6), new_lengths=torch.tensor([2, 1, 2]))
    assert cache.length_bound == 6
    cache.append(*tokens(6, start=1))
    held = cache.k[0].clone()
    with pytest.raises(ValueError, match="needs 9 slots"):
        cache.append(*tokens(1, start=2))
    assert cache.lengths.tolist() == [8, 7, 8] and torch.equal(cache.k[0], held)
    assert cache.length_bound == MAX and cache.uniform_length is None


def test_cache_made_in_inference_mode_serves_outside_of_it():
    with torch.inference_mode():
        cache = make_cache()
        cache.append(*tokens(2))
    cache.append(*tokens(2, start=1))
    assert cache.uniform_length == 4


def test_dtype_device_copy_bytes_and_repr():
    cache = KVCache(B, H, MAX, D, dtype=torch.bfloat16)
    assert cache.k.shape == cache.v.shape == (B, H, MAX, D)
    assert cache.nbytes == 2 * B * H * MAX * D * 2 + B * 4
    twin = copy.deepcopy(cache)
    twin.append(*(torch.ones(B, H, 1, D, dtype=torch.bfloat16) for _ in range(2)))
    assert (cache.uniform_length, twin.uniform_length) == (0, 1)
    assert cache.lengths.tolist() == [0] * B
    assert repr(twin) == (
        "KVCache(batch_size=3, num_kv_heads=2, max_length=8, head_dim=2, value_dim=2, device=cpu, "
        "dtype=torch.bfloat16, uniform_length=1, length_bound=1)"
    )


def test_left_padding_is_hidden_moves_with_rows_and_is_forgotten():
    cache = make_cache()
    cache.append(*tokens(4))
    cache.set_starts(torch.tensor([0, 3, 9]))
    assert cache.starts.dtype == torch.int32
    k, _, positions = cache.view().gather()
    assert positions.tolist() == [[0, 1, 2, 3], [-1, -1, -1, 3], [-1] * 4]
    assert (k[1, :, :3] == 0).all()
    cache.reorder(torch.tensor([1, 1, 0]))
    assert cache.starts.tolist() == [3, 3, 0]
    assert cache.view(torch.tensor([2])).slot_positions().tolist() == [[0, 1, 2, 3]]
    cache.reset()
    assert cache.starts is None
    cache.set_starts(torch.zeros(B).int())
    cache.set_starts(None)
    assert cache.starts is None


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
