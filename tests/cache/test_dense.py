"""KVCache against a plain list of tokens a row, its messages, and what it promises about syncs."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattn import KVCache, PagedKVCache
from fastattn.quantization import dequantize_rows, quantize_rows

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


def snapshot(cache: KVCache) -> tuple:
    return cache.k.clone(), cache.v.clone(), cache.lengths.clone(), cache.uniform_length


def assert_unchanged(cache: KVCache, before: tuple) -> None:
    for got, expected in zip(snapshot(cache)[:3], before[:3], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert cache.uniform_length == before[3]


class ListCache:
    """The model: a list of (k, v) a row. Tokens that do not fit are refused for all rows."""

    def __init__(self) -> None:
        self.rows: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(B)]

    def append(self, k: torch.Tensor, v: torch.Tensor, counts: list[int]) -> bool:
        if any(len(row) + n > MAX for row, n in zip(self.rows, counts, strict=True)):
            return False
        for b, n in enumerate(counts):
            self.rows[b] = self.rows[b] + [(k[b, :, t], v[b, :, t]) for t in range(n)]
        return True

    def truncate(self, lengths: list[int]) -> None:
        self.rows = [row[: max(n, 0)] for row, n in zip(self.rows, lengths, strict=True)]

    def reorder(self, index: list[int]) -> None:
        self.rows = [self.rows[b] for b in index]

    def append_to(self, index: list[int], k, v, counts: list[int]) -> bool:
        """Append tokens to some of the rows."""
        full = [counts[index.index(b)] if b in index else 0 for b in range(B)]
        place = [index.index(b) if b in index else 0 for b in range(B)]
        return self.append(k[place], v[place], full)

    def assert_equals(self, cache: KVCache) -> None:
        lengths = [len(row) for row in self.rows]
        assert cache.lengths.tolist() == lengths
        assert max(lengths) <= cache.length_bound <= MAX
        assert cache.uniform_length is None or lengths == [cache.uniform_length] * B
        all_k, all_v, positions = cache.view().gather()
        for b, row in enumerate(self.rows):
            slots = positions.shape[1]
            assert positions[b].tolist() == [t if t < len(row) else -1 for t in range(slots)]
            for t, (k, v) in enumerate(row):
                assert torch.equal(all_k[b, :, t], stored(k, cache))
                assert torch.equal(all_v[b, :, t], stored(v, cache))


def stored(x: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """Rows x as the cache returns them."""
    if cache.quantize is None:
        return x
    return dequantize_rows(*quantize_rows(x, cache.quantize), cache.dtype)


row_values = st.lists(st.integers(-1, MAX), min_size=B, max_size=B)
row_orders = st.permutations(range(B)).flatmap(lambda p: st.integers(1, B).map(lambda n: p[:n]))
operations = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 4), st.none()),
    st.tuples(st.just("append"), st.integers(0, 4), row_values),
    st.tuples(st.just("append to"), st.integers(0, 4), row_values, row_orders),
    st.tuples(st.just("truncate"), st.integers(0, MAX)),
    st.tuples(st.just("truncate"), row_values),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, B - 1), min_size=B, max_size=B)),
    st.tuples(st.just("reset")),
)


@pytest.mark.parametrize("quantize", [None, "int8"])
@settings(max_examples=150, deadline=None)
@given(sequence=st.lists(operations, max_size=12))
def test_any_sequence_of_operations_equals_the_list_model(quantize, sequence):
    cache, model = make_cache(quantize=quantize), ListCache()
    for step, (name, *args) in enumerate(sequence):
        if name == "append":
            T, counts = args
            k, v = tokens(T, step)
            before = snapshot(cache)
            new_lengths = None if counts is None else torch.tensor(counts)
            counts = [T] * B if counts is None else [min(max(n, 0), T) for n in counts]
            if model.append(k, v, counts):
                cache.append(k, v, new_lengths)
            else:
                with pytest.raises(ValueError, match="there is room for"):
                    cache.append(k, v, new_lengths)
                assert_unchanged(cache, before)
        elif name == "append to":
            T, counts, index = args
            k, v = (x[: len(index)] for x in tokens(T, step))
            new_lengths, batch_index = torch.tensor(counts[: len(index)]), torch.tensor(index)
            before = snapshot(cache)
            clamped = [min(max(n, 0), T) for n in counts[: len(index)]]
            if model.append_to(index, k, v, clamped):
                cache.append(k, v, new_lengths, batch_index=batch_index)
            else:
                with pytest.raises(ValueError, match="there is room for"):
                    cache.append(k, v, new_lengths, batch_index=batch_index)
                assert_unchanged(cache, before)
        elif name == "truncate":
            (lengths,) = args
            cache.truncate(lengths if isinstance(lengths, int) else torch.tensor(lengths))
            model.truncate([lengths] * B if isinstance(lengths, int) else lengths)
        elif name == "reorder":
            cache.reorder(torch.tensor(args[0]))
            model.reorder(args[0])
        else:
            cache.reset()
            model.truncate([0] * B)
        model.assert_equals(cache)


def test_equal_appends_keep_the_length_known_on_the_host():
    cache = make_cache()
    assert cache.uniform_length == 0
    cache.append(*tokens(3))
    cache.append(*tokens(1, start=1))
    assert cache.uniform_length == cache.length_bound == 4
    cache.truncate(2)
    assert cache.uniform_length == cache.length_bound == 2
    cache.append(*tokens(3), new_lengths=torch.tensor([3, 1, 2], dtype=torch.int32))
    assert cache.uniform_length is None
    assert cache.lengths.dtype == torch.int32
    cache.reset()
    assert cache.uniform_length == cache.length_bound == 0


def test_lengths_are_changed_in_place():
    cache = make_cache()
    lengths, k = cache.lengths, cache.k
    cache.append(*tokens(3), new_lengths=torch.tensor([3, 1, 2]))
    cache.reorder(torch.tensor([2, 1, 0]))
    cache.truncate(torch.tensor([1, 9, 9]))
    assert lengths.tolist() == [1, 1, 3]
    assert cache.lengths is lengths
    assert cache.k is k


def test_bound_that_counts_padding_is_tightened_before_an_append_is_refused():
    cache = make_cache()
    cache.append(*tokens(6), new_lengths=torch.tensor([2, 1, 2]))
    assert cache.length_bound == 6
    cache.append(*tokens(5, start=1))
    assert cache.lengths.tolist() == [7, 6, 7]
    assert cache.length_bound == 7


def test_lengths_differ_after_an_append_to_some_rows():
    cache = make_cache()
    cache.append(*tokens(2))
    k, v = (x[:2] for x in tokens(2, start=1))
    with pytest.raises(ValueError, match=r"batch_index must hold no row twice, got \[1, 1\]"):
        cache.append(k, v, batch_index=torch.tensor([1, 1]))
    assert cache.uniform_length == 2
    cache.append(k, v, batch_index=torch.tensor([2, 0]))
    assert cache.uniform_length is None
    assert cache.lengths.tolist() == [4, 2, 4]
    new = tokens(1, start=5)
    cache.append(*new)
    for row, length in enumerate((4, 2, 4)):
        assert torch.equal(cache.k[row, :, length], new[0][row, :, 0])


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


@pytest.mark.parametrize(
    "name", ["batch_size", "num_kv_heads", "max_length", "head_dim", "value_dim"]
)
def test_sizes_must_be_positive(name):
    sizes = {"batch_size": 1, "num_kv_heads": 1, "max_length": 4, "head_dim": 2, name: 0}
    with pytest.raises(ValueError, match=f"^{name} must be >= 1, got 0"):
        KVCache(**sizes)


@pytest.mark.parametrize("dtype", ["float32", float, torch.int32])
def test_tokens_are_of_a_floating_dtype(dtype):
    match = f"dtype must be a floating dtype, got {dtype!r}"
    with pytest.raises(TypeError, match=match):
        KVCache(1, 1, 4, 2, dtype=dtype)
    with pytest.raises(TypeError, match=match):
        PagedKVCache(4, 4, 1, 2, dtype=dtype)


def test_overflow_names_the_need_and_the_room():
    cache = make_cache()
    cache.append(*tokens(6))
    before = snapshot(cache)
    with pytest.raises(
        ValueError,
        match=r"appending 3 tokens a row needs 9 slots, but max_length is 8 and the longest row "
        r"holds 6: there is room for 2",
    ):
        cache.append(*tokens(3, start=1))
    assert_unchanged(cache, before)
    with pytest.raises(ValueError, match=r"needs 9 slots"):
        cache.append(*tokens(3, start=1), new_lengths=torch.tensor([0, 3, 0]))
    assert_unchanged(cache, before)


Z = torch.zeros
INTS = torch.zeros(3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("error", "match", "change"),
    [
        (ValueError, r"k must .* \[3, 2, T, 2\] .* got \(2, 2, 1, 2\)", {"k": Z(2, 2, 1, 2)}),
        (ValueError, r"k must have shape .* \(3, 1, 1, 2\)", {"k": Z(3, 1, 1, 2)}),
        (ValueError, r"k must have shape .* \(3, 2, 2\)", {"k": Z(3, 2, 2)}),
        (ValueError, r"v must .* \[3, 2, T, 3\] .* got \(3, 2, 1, 2\)", {"v": Z(3, 2, 1, 2)}),
        (ValueError, r"same number of tokens, got 1 and 2", {"v": Z(3, 2, 2, 3)}),
        (ValueError, r"v must .*'s dtype .*32, got .*16; build the", {"v": Z(3, 2, 1, 3).half()}),
        (ValueError, r"k must be on the .* cpu, got meta", {"k": Z(3, 2, 1, 2, device="meta")}),
        (TypeError, r"new_lengths must be an int32 .* got torch.float32", {"new_lengths": Z(3)}),
        (ValueError, r"new_lengths must have shape \[3\], got \[2\]", {"new_lengths": INTS[:2]}),
        (ValueError, r"new_lengths must be on cpu, got meta", {"new_lengths": INTS.to("meta")}),
    ],
)
def test_append_errors(error, match, change):
    cache = make_cache()
    before = snapshot(cache)
    k, v = tokens(1)
    with pytest.raises(error, match=match):
        cache.append(**{"k": k, "v": v, **change})
    assert_unchanged(cache, before)


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
    with pytest.raises(ValueError, match=r"starts must have shape \[3\], got \[2\]"):
        cache.set_starts(torch.tensor([1, 1]))
    with pytest.raises(TypeError, match=r"starts must be an int32 or int64 tensor"):
        cache.set_starts(torch.ones(B))


def test_view_shares_the_buffers_and_is_of_the_rows_asked_for():
    cache = make_cache()
    view = cache.view()
    assert (view.k, view.v, view.lengths, view.page_size) == (cache.k, cache.v, cache.lengths, MAX)
    assert view.block_table is view.keep_first is view.window is view.k_scale is None
    cache.append(*tokens(3))
    index = torch.tensor([2, 0])
    view = cache.view(index)
    assert (view.batch_size, view.length_bound) == (2, 3)
    assert torch.equal(view.gather()[0], cache.k[index, :, :3])
    with pytest.raises(TypeError, match=r"batch_index must be an int32 or int64 tensor"):
        cache.view(torch.tensor([0.0]))
    with pytest.raises(ValueError, match=r"batch_index must have shape \[3\], got \[4\]"):
        cache.view(torch.tensor([0, 1, 2, 0]))
