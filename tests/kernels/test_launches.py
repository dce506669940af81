"""Cached launches: found again by what their arguments follow from, with each call's tensors."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fastattn.kernels.backward import launch_backward
from fastattn.kernels.forward import launch_forward, prepare_forward
from fastattn.kernels.launch import interpreter, launches
from fastattn.options import OPTIONS, Options

interpreter.mend()
B, H_Q, H_K, T, D = 2, 2, 1, 12, 16


@pytest.fixture(autouse=True)
def no_launches() -> Iterator[None]:
    launches.forget()
    yield
    launches.forget()


def draw(device: str, seed: int, **changes: Any) -> dict[str, Any]:
    """Fields of Options that are tensors, such that every one changes the result."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make).to(device)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=make).to(device)

    return {
        "key_lengths": integers(3, T, B),
        "query_offsets": integers(-3, 3, B),
        "prefix_lengths": integers(2, T, B),
        "alibi_slopes": normal(B, H_Q).abs(),
        "dropout_seed": integers(0, 1 << 40, 2),
        "attn_bias": normal(B, 1, T, T),
        "relative_bias": normal(H_Q, 9),
        "relative_keys": normal(H_Q, 9, D),
        "relative_query": normal(B, H_Q, T, D),
        "query2": normal(B, H_Q, T, D),
        "key2": normal(B, 1, T, D),
        "sinks": normal(H_Q),
        "key_padding_mask": integers(0, 2, B, T) > 0,
        "q_documents": integers(0, 2, B, T),
        "q_positions": (torch.arange(T, device=device) + integers(0, 9, B, 1)).int(),
        "attn_mask": normal(1, H_Q, T, T) > -0.5,
        "cu_seqlens_q": torch.tensor([0, 2 + seed, T], device=device),
    }


# Beside a field, those that it needs.
TOGETHER = {
    "query_offsets": {"causal": True},
    "prefix_lengths": {"causal": True},
    "dropout_seed": {"dropout": 0.5},
    "q_positions": {"causal": True},
    "relative_query": {"relative_keys": torch.ones(H_Q, 9, D)},
    "query2": {"key2": torch.ones(B, H_K, T, D)},
    "key2": {"query2": torch.ones(B, H_Q, T, D)},
}


def options_of(name: str, device: str, seed: int) -> Options:
    given = {name: draw(device, seed)[name]}
    for other, value in TOGETHER.get(name, {}).items():
        given[other] = value.clone().to(device) if isinstance(value, torch.Tensor) else value
    if name == "q_documents":
        given["k_documents"] = given[name].flip(1)
    if name == "q_positions":
        given["k_positions"] = torch.arange(T, dtype=torch.int32, device=device)[None]
    if name == "cu_seqlens_q":
        given.update(cu_seqlens_k=given[name], query_offset=None)
    return Options(scale=0.25, **given)


def inputs(name: str, device: str) -> list[torch.Tensor]:
    batch = 1 if name == "cu_seqlens_q" else B
    return [torch.randn(batch, H, T, D, device=device) for H in (H_Q, H_K, H_K)]


def results(rows: list[torch.Tensor], options: Options) -> list[torch.Tensor]:
    o, lse = launch_forward(*rows, options)
    return [o, lse, *launch_backward(torch.ones_like(o), None, *rows, o, lse, options)]


def test_every_tensor_of_the_record_is_drawn(device: str) -> None:
    annotations = Options.__annotations__.items()
    tensors = {name for name, kind in annotations if "Tensor" in str(kind)} - {"mod_tensors"}
    rows = {name: row for name, row in OPTIONS.items() if "attention" in row.calls}
    taken = {field for name, row in rows.items() for field in row.fields or (name,)}
    taken |= {"cu_seqlens_q"}
    assert set(draw(device, 0)) == (tensors & taken) - {"k_documents", "k_positions"}


@pytest.mark.parametrize("name", draw("cpu", 0))
def test_a_cached_launch_takes_the_tensors_of_the_call(name: str, device: str) -> None:
    rows = inputs(name, device)
    first, second = (options_of(name, device, seed) for seed in (0, 1))
    expected = results(rows, second)
    launches.forget()
    other = results(rows, first)
    with mock.patch.object(launches.Launch, "bind") as bind:
        actual = results(rows, second)
    assert not bind.called
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
    assert not torch.equal(other[0], actual[0])


def test_nothing_that_a_call_brought_is_kept(device: str) -> None:
    """All options are in one test, since a collection of a large process takes a second."""
    left = {name: references_after(name, device) for name in draw("cpu", 0)}
    gc.collect()
    kept = {name for name, actual in left.items() if any(x() is not None for x in actual)}
    assert kept == set()


def references_after(name: str, device: str) -> list[weakref.ref]:
    """Call with this option; return weak references to its tensors and the option's memory."""
    rows = inputs(name, device)
    options = options_of(name, device, 0)
    found = [weakref.ref(x) for x in (*rows, *options) if isinstance(x, torch.Tensor)]
    ready = prepare_forward(*rows, options, launch_forward)
    results(rows, options)
    assert ready is not None and launches._slot.cache_info().currsize
    return [*found, weakref.ref(getattr(options, name).untyped_storage())]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.int(),
        lambda x: torch.cat([x, x])[:B],
        lambda x: torch.stack([x, x], 1)[:, 0],
        lambda x: torch.cat([x[:1], x])[1:],
    ],
    ids=["dtype", "the same", "strides", "alignment"],
)
def test_another_signature_is_another_launch(change: Any, device: str) -> None:
    rows = inputs("key_lengths", device)
    options = Options(scale=0.25, key_lengths=torch.tensor([7, 9], device=device))
    launch_forward(*rows, options)
    changed = change(options.key_lengths)
    launch_forward(*rows, options._replace(key_lengths=changed))
    same = (changed.dtype, changed.stride(), changed.data_ptr() % 16) == (torch.int64, (1,), 0)
    assert launches._slot.cache_info().currsize == (1 if same else 2)


def test_one_tensor_in_two_places_is_not_mixed_up(device: str) -> None:
    """Later calls of the same signature have two."""
    rows = inputs("cu_seqlens_q", device)
    q_offsets, k_offsets = (torch.tensor([0, n, T], device=device) for n in (3, 8))
    packed = Options(scale=0.25, query_offset=None)
    apart = packed._replace(cu_seqlens_q=q_offsets, cu_seqlens_k=k_offsets)
    expected = results(rows, apart)
    launches.forget()
    results(rows, packed._replace(cu_seqlens_q=q_offsets, cu_seqlens_k=q_offsets))
    assert all(torch.equal(x, y) for x, y in zip(results(rows, apart), expected, strict=True))


def test_copies_for_one_call_beside_tables_of_another(device: str) -> None:
    """A relative query that starts between 16 bytes is copied, its launch is for one call."""
    rows = inputs("relative_query", device)
    options = options_of("relative_query", device, 0)
    query = options.relative_query
    shifted = torch.empty(query.numel() + 1, device=device)[1:].view_as(query).copy_(query)
    for name in ("key_padding_mask", "attn_mask"):
        given = options._replace(**{name: draw(device, 0)[name]})
        expected = results(rows, given)
        for _ in range(2):
            actual = results(rows, given._replace(relative_query=shifted))
            assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
