"""Values of a layer's arguments, for the call itself and for its formula."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from naive_layers import turns
from torch import Tensor

from fastattn.rotary import RotaryPositions, rotary_tables
from fastattn.testing.calls import Draw

from .layers import SCALINGS, LayerCase


class Given(NamedTuple):
    """Arguments of a call, and of the formula of its layer; real: bool [B, T], no padding."""

    ours: dict[str, Any]
    theirs: dict[str, Any]
    real: Tensor


def drawn_arguments(case: LayerCase, layer: Any) -> Given:
    """Arguments by the names in `case.call`."""
    given = Given({}, {}, torch.ones(case.B, case.T, dtype=torch.bool))
    for name in case.call:
        draw = case.random(name)
        if name in ("positions", "rotary_tables"):
            given.ours[name], given.theirs["turned"] = _ROTATIONS[name](case, draw, layer)
            continue
        value, real = _MASKS[name](case, draw)
        given.ours[name] = given.theirs[name] = value
        if real is not None:
            given = given._replace(real=given.real & real)
    if case.kind == "latent" and layer.rope_dim and "turned" not in given.theirs:
        given.theirs["turned"] = of_positions(layer, torch.arange(case.T))
    return given


def of_positions(layer: Any, positions: Tensor) -> Tensor:
    """Turns of a layer's own rotation."""
    own = layer.rotary_positions
    return turns(positions, own.rotary_dim, own.base, own.scaling)


def _positions(case: LayerCase, draw: Draw, layer: Any) -> tuple[Tensor, Tensor]:
    """Positions that a call implies, or others, for all rows or each."""
    positions = torch.arange(case.T)
    if draw.chance(0.7):
        positions = draw.integers(0, 60, case.T)
    if draw.chance(0.5):
        positions = torch.stack([positions + 3 * b for b in range(case.B)])
    positions = positions.to(draw.choice(torch.int32, torch.int64))
    return positions, of_positions(layer, positions)


def _tables(case: LayerCase, draw: Draw, layer: Any) -> tuple[Any, Tensor]:
    """Other tables than the layer's own: a pair, a complex tensor, or positions of any length."""
    dim, base = layer.rotary_positions.rotary_dim, draw.choice(30.0, 10000.0)
    scaling = draw.choice(*(x for x in SCALINGS if dim > 2 or "NTK" not in str(x)))
    if draw.chance(0.4):
        whole = RotaryPositions(dim, base=base, scaling=scaling)
        return whole, turns(torch.arange(case.T), dim, base, scaling)
    positions, _ = _positions(case, draw, layer)
    pair = rotary_tables(positions, dim, base=base, scaling=scaling)
    given = torch.complex(*pair) if draw.chance(0.5) else pair
    return given, turns(positions, dim, base, scaling)


_ROTATIONS: dict[str, Callable[..., tuple[Any, Tensor]]] = {
    "positions": _positions,
    "rotary_tables": _tables,
}


def _padding(case: LayerCase, draw: Draw) -> tuple[Tensor, Tensor]:
    mask = draw.bools(draw.choice(0.0, 0.6, 0.9), case.B, case.T)
    return mask, mask


def _lengths(case: LayerCase, draw: Draw) -> tuple[Tensor, Tensor]:
    lengths = draw.integers(0, case.T, case.B)
    return lengths, torch.arange(case.T) < lengths[:, None]


def _prefixes(case: LayerCase, draw: Draw) -> tuple[Any, None]:
    count = draw.integer(0, case.T)
    return (count if draw.chance(0.4) else draw.integers(0, case.T, case.B)), None


def _documents(case: LayerCase, draw: Draw) -> tuple[Tensor, Tensor]:
    ids = draw.integers(-1, 2, case.B, case.T)
    ids = ids.sort(1).values if draw.chance(0.6) else ids
    return ids, ids >= 0


_MASKS: dict[str, Callable[[LayerCase, Draw], tuple[Any, Tensor | None]]] = {
    "key_padding_mask": _padding,
    "key_lengths": _lengths,
    "prefix_lengths": _prefixes,
    "documents": _documents,
    "memory_padding_mask": _padding,
    "memory_lengths": _lengths,
}
