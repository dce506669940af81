"""Attention of few queries to many keys, which splits the keys among programs."""

from functools import partial

import pytest
import torch

import fastattn
from fastattn.kernels.hopper import host
from fastattn.kernels.launch import decode_splits, tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.options import Options
from fastattn.testing import assert_matches_reference, make_qkv
from fastattn.testing.inputs import to_device
from fastattn.testing.option_examples import option_examples

H_Q, H_K, T_Q, T_K, D = 4, 2, 7, 45, 16
EXAMPLES = option_examples(H_Q, H_K, T_Q, T_K, D, reach=9)
WITHOUT_KERNEL = {"relative-keys", "relative-keys-shared", "relative-query", "positions"}
WITHOUT_KERNEL |= {"dropout", "heads", "two-products"}


@pytest.fixture
def few_keys(monkeypatch: pytest.MonkeyPatch):
    """Keys that are few are split too, in tiles and splits that are small beside them."""
    monkeypatch.setattr(decode_splits, "MANY_KEYS", 1)
    with tiles.forced(decode=TileConfig(16, 16), decode_chunk=TileConfig(16, 16)):
        yield


@pytest.mark.parametrize("name", EXAMPLES)
def test_which_options_split_keys(name: str, few_keys: None, device: str) -> None:
    q, k, v = make_qkv(2, H_Q, H_K, T_Q, T_K, D, device=device)
    choice = fastattn.explain(q, k, v, **to_device(EXAMPLES[name], device))
    assert choice.split_keys == (name not in WITHOUT_KERNEL)


def test_rows_of_a_padded_width_are_contiguous(few_keys: None, device: str) -> None:
    """torch's padding keeps the memory format of channels_last."""
    q, k, v = make_qkv(2, H_Q, H_K, T_Q, T_K, 6, device=device)
    q = q.detach().contiguous(memory_format=torch.channels_last)
    assert_matches_reference(partial(fastattn.attention, backend="triton"), q, k, v)


def test_which_calls_split_their_keys(device: str) -> None:
    def split(*sizes: int, **options: object) -> bool:
        B, H_q, H_k, T_q, T_k = sizes
        q = torch.empty(B, H_q, T_q, 16, device=device)
        k = v = torch.empty(B, H_k, T_k, 16, device=device)
        choice = fastattn.explain(q, k, v, **options)
        assert ("forward: keys split among programs" in str(choice)) == choice.split_keys
        return choice.split_keys

    assert split(1, 32, 8, 1, 8192)
    assert split(1, 32, 8, 4, 8192)
    assert split(1, 4, 4, 16, decode_splits.MANY_KEYS)
    assert not split(1, 4, 4, 16, decode_splits.MANY_KEYS - 1)
    assert not split(1, 4, 4, 1, 8192, backend="torch")
    assert not split(1, 4, 4, 1, 8192, dropout=0.1)


@pytest.mark.parametrize("multiprocessors", [4, 108, 132, 148])
def test_chunks_are_split_where_forward_would_be_idle(
    multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modelled time of what is chosen, in rows of a multiprocessor and keys, is the less."""
    monkeypatch.setattr(tiles, "multiprocessors", lambda device: multiprocessors)

    def pays(*sizes: int, **options: object) -> bool:
        B, H_q, H_k, T_q, T_k = sizes
        q, k = (torch.empty(B, *x, 64, device="meta") for x in ((H_q, T_q), (H_k, T_k)))
        return decode_splits.why_not_split(q, k, k, Options(scale=1.0, **options)) is None

    # Eight heads of 64 queries each would walk 4096 keys in eight programs.
    assert pays(1, 8, 8, 64, 4096) == (multiprocessors > 4)
    assert not pays(1, 8, 8, 64, 1024), "merging costs as much"
    assert not pays(1, 8, 8, 64, 4096, left=255), "so few keys are seen"
    # Four heads share keys: their queries fill one tile, and forward has a tile for each.
    assert pays(64, 32, 8, 16, 4096)
    assert not pays(64, 32, 32, 64, 4096)
    # Forward has enough programs, or queries are as many as keys.
    assert not pays(8, 32, 8, 256, 8192)
    assert not pays(1, 1, 1, 4096, 4096)
    for T_q, T_k in decode_splits.SPLIT_CALLS:
        assert pays(2, 2, 1, T_q, T_k)


def test_auto_prefers_split_keys_to_hopper(
    device: str, monkeypatch: pytest.MonkeyPatch, hopper_ran: None
) -> None:
    """A tile of its kernels has 128 queries."""
    monkeypatch.delenv("FASTATTN_BACKEND", raising=False)
    monkeypatch.setattr(host, "why_not_hopper", lambda *call: None)
    q, k, v = make_qkv(1, 4, 2, 1, 300, 16, device=device)
    choice = fastattn.explain(q, k, v)
    assert (choice.backend, choice.split_keys) == ("triton", True)
    assert choice.reasons["hopper"].startswith("there are few queries")
    assert fastattn.explain(q, k, v, backend="hopper").backend == "hopper"
    q, k, v = make_qkv(1, 4, 2, 64, 300, 16, device=device)
    assert fastattn.explain(q, k, v).backend == "hopper"
