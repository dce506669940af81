"""Appending to slots that a server names: contents against a loop, bounds, and arguments."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fastattn import append_paged, view_of_tensors
from fastattn.ops.append import append_to_slots
from fastattn.quantization import codes_within, quantize_rows
from fastattn.rotary import apply_rotary, rotary_tables

P, H, S, D, D_V = 5, 2, 3, 16, 24
BACKENDS = ("triton", "torch")
SLOTS = [13, -1, 0, 14, 2, -1, 7]
STORED = {None: torch.float32, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def pools(layout: str, dtype: torch.dtype, device: str) -> tuple[Tensor, list[Tensor]]:
    """Memory that is 7 throughout, and K and V [P, H, S, width] in the middle of it."""
    width = D + D_V
    memory = torch.full(((P + 2) * S * H * width,), 7.0, device=device).to(dtype)
    if layout == "heads first":  # of a page; K and V side by side
        both = memory.view(P + 2, H, S, width)[1:-1]
    else:  # tokens first
        both = memory.view(P + 2, S, H, width)[1:-1].transpose(1, 2)
    return memory, [both[..., :D], both[..., D:]]


def view_of(pool: list[Tensor], scales: dict[str, Tensor], dtype: torch.dtype) -> Any:
    lengths = torch.zeros(0, dtype=torch.int32, device=pool[0].device)
    return view_of_tensors(*pool, lengths, dtype=dtype, **scales)


def tokens(device: str, dtype: torch.dtype, total: int = len(SLOTS)) -> list[Tensor]:
    """q, k and v of packed tokens, as a projection gives them."""
    draw = torch.Generator().manual_seed(0)
    wide = torch.randn(total, 3 * H, D_V, generator=draw).to(device, dtype)
    return [wide[:, : 2 * H, :D], wide[:, 2 * H :, :D].flip(1)[:, :H], wide[:, :H]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
@pytest.mark.parametrize(
    ("quantize", "given"),
    [(None, False), ("int8", False), ("int8", True), ("fp8", False), ("fp8", True)],
)
def test_slots_hold_their_tokens_and_nothing_else_changes(
    quantize: Any, given: bool, layout: str, backend: str, device: str
) -> None:
    memory, pool = pools(layout, STORED[quantize], device)
    expected, wanted = pools(layout, STORED[quantize], device)
    _, k, v = tokens(device, torch.float32, len(SLOTS) + 2)
    scales, of_slots = {}, []
    if quantize:
        of_slots = [torch.full((P, H, S), 7.0, device=device) for _ in "kv"]
        of_slots = [torch.full((), 0.01, device=device)] * 2 if given else of_slots
        scales = dict(zip(("k_scale", "v_scale"), of_slots, strict=True))
    kept = [x.clone() for x in of_slots]
    for token, place in enumerate(SLOTS):
        page, slot = divmod(place, S)
        for i, (x, new) in enumerate(zip(wanted, (k[token], v[token]), strict=True)):
            rows = new
            if place >= 0 and quantize and given:
                rows = codes_within(new, kept[i].expand(H, 1), quantize)
            elif place >= 0 and quantize:
                rows, kept[i][page, :, slot] = quantize_rows(new, quantize)
            if place >= 0:
                x[page, :, slot] = rows
    slots = torch.tensor(SLOTS, device=device)
    cache = view_of(pool, scales, torch.float32) if quantize else tuple(pool)
    assert append_paged(cache, k, v, slots, backend=backend) is None
    assert torch.equal(memory.view(torch.uint8), expected.view(torch.uint8))
    for x, y in zip(of_slots, kept, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_tokens_are_turned_to_their_positions(style: Any, backend: str, device: str) -> None:
    _, pool = pools("tokens first", torch.float32, device)
    q, k, v = tokens(device, torch.float32)
    tables = rotary_tables(40, 12, device=device)
    # Columns of tables, whose numbers are not neighbours.
    positions = torch.tensor([39, 0, 5, 5, 17, 1, 38], device=device)[:, None].repeat(1, 2)[:, 0]
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)[:, None].repeat(1, 3)[:, 0]
    turned = append_paged(
        tuple(pool), k, v, slots, q=q, positions=positions, rotary=tables, rotary_style=style,
        backend=backend,
    )  # fmt: skip
    at = [table[positions] for table in tables]
    expected_q, expected_k = (
        apply_rotary(x.transpose(0, 1)[None], *at, style=style)[0].transpose(0, 1) for x in (q, k)
    )
    assert torch.equal(turned, expected_q)
    for token, place in enumerate(SLOTS):
        if place >= 0:
            page, slot = divmod(place, S)
            assert torch.equal(pool[0][page, :, slot], expected_k[token])
            assert torch.equal(pool[1][page, :, slot], v[token])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_no_store_leaves_the_pool_whatever_the_slots(dtype: torch.dtype, device: str) -> None:
    """On a device, where nobody reads the slots first."""
    memory, pool = pools("heads first", torch.float32, device)
    expected, wanted = pools("heads first", torch.float32, device)
    largest = torch.iinfo(dtype).max
    slots = [P * S, -2, largest, -largest - 1, P * S - 1, -S, largest - S]
    _, k, v = tokens(device, torch.float32)
    for x, new in zip(wanted, (k, v), strict=True):
        x[P - 1, :, S - 1] = new[4]
    places = torch.tensor(slots, dtype=dtype, device=device)
    rows = [x.transpose(0, 1)[None] for x in (k, v)]
    append_to_slots((*pool, None, None), None, *rows, places, None, None, interleaved=False)
    assert torch.equal(memory, expected)
