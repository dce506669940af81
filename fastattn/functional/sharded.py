"""Calls with DTensors: each rank computes its rows and heads, without communication.

q, k and v are sharded by batch rows (dim 0) or heads (dim 1), or replicated, in each mesh dim. A
replicated option is sliced for each rank, and its gradient is summed. Results are sharded like q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import checks
from ..options import OPTIONS, TENSORS, along
from ..score_checks import COUNTING

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

_ROW_DIMS, _HEADS = along("B"), along("H_q")
# Arguments with the dims of a field of another name.
_FIELDS = {
    "new_lengths": "key_lengths",
    **{
        name: next(field for field in row.fields if field in TENSORS)
        for name, row in OPTIONS.items()
        if not set(TENSORS).isdisjoint(row.fields)
    },
}


def is_dtensor(x: Any) -> bool:
    """Whether x is a DTensor, without importing DTensor."""
    if type(x) in (Tensor, torch.nn.Parameter) or not isinstance(x, Tensor):
        return False
    # The creator of a DTensor has imported it.
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def attend(
    call: Callable[..., Any], inputs: Mapping[str, Tensor], arguments: Mapping[str, Any]
) -> Tensor | tuple[Tensor, ...]:
    """Run `call` on this rank's part of each input; return DTensors.

    Args:
        call: takes inputs and options by name, and returns o, or o and tensors with its rows.
        inputs: DTensors [B, H, T, D], q first.
        arguments: options, maybe DTensors.

    Raises:
        TypeError: an input is no DTensor.
        ValueError: inputs have several meshes, or placements other than rows and heads; heads are
            not divisible; ranks have other heads of k and v than their queries read; or an option
            counts sharded batch rows.
    """
    _check(inputs, arguments)
    q: Any = inputs["q"]
    mesh, placements = q.device_mesh, q.placements
    first, count = _heads(q)
    options = {name: _part(name, x, q) for name, x in arguments.items()}
    if count != q.shape[1] and any(arguments.get(name) for name in COUNTING):
        before, total = arguments.get("heads") or (0, q.shape[1])
        options["heads"] = (before + first, total)
    parts = {name: _input(x, first, count, q) for name, x in inputs.items()}
    result = call(**parts, **options)
    from torch.distributed.tensor import DTensor

    def joined(x: Tensor) -> Tensor:
        shape = (*q.shape[:3], *x.shape[3:])
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            x.contiguous(),
            mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )

    return tuple(map(joined, result)) if isinstance(result, tuple) else joined(result)


def _check(inputs: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> None:
    for name, x in inputs.items():
        if not is_dtensor(x):
            raise TypeError(
                f"{', '.join(inputs)} must all be DTensors or none, got {checks.type_name(x)} "
                f"for {name}"
            )
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions [B, H, T, D], got {list(x.shape)}")
    q: Any = inputs["q"]
    for name, x in inputs.items():
        placed: Any = x
        mesh = placed.device_mesh
        if mesh != q.device_mesh:
            raise ValueError(f"{name} must be on q's mesh {q.device_mesh}, got {mesh}")
        for one, of_q in zip(placed.placements, q.placements, strict=True):
            sizes = zip(mesh.shape, placed.placements, strict=True)
            _check_placement(name, x, one, of_q, math.prod(n for n, other in sizes if other == one))
        if name != "q":
            checks.check_group(name, "q", q.shape[1], x.shape[1])
        _check_order(name, placed, q)
    if any(one.is_shard(0) for one in q.placements):
        for name in COUNTING:
            if arguments.get(name):
                raise ValueError(f"{name} is not supported with q sharded by rows, which it counts")


def _check_placement(name: str, x: Tensor, one: Placement, of_q: Placement, ranks: int) -> None:
    """Check a mesh dim: rows or heads as q's, or replicated, also for sharded heads of q."""
    from torch.distributed.tensor import Replicate, Shard

    if one == Shard(2):
        raise ValueError(
            f"{name} is sharded along its sequence (dim 2): "
            "fastattn.parallel.context_attention serves that"
        )
    if one not in (Shard(0), Shard(1), Replicate()):
        raise ValueError(
            f"{name} must be sharded by rows or heads (Shard(0), Shard(1)) or replicated, got {one}"
        )
    shared = isinstance(one, Replicate) and of_q == Shard(1)
    if one != of_q and not shared:
        raise ValueError(f"{name} must be placed as q, {of_q}, got {one}")
    for dim, what in ((0, "rows"), (1, "heads")):
        if one == Shard(dim) and x.shape[dim] % ranks:
            raise ValueError(
                f"{name} must have a multiple of {ranks} {what} where {ranks} ranks share them, "
                f"got {x.shape[dim]}"
            )


def _check_order(name: str, x: DTensor, q: DTensor) -> None:
    """Check that a rank has the heads that its queries read: the first mesh dims shard them."""
    whole = False
    sizes = x.device_mesh.shape
    for n, one, of_q in zip(sizes, x.placements, q.placements, strict=True):
        if n == 1 or not of_q.is_shard(1):
            continue
        if whole and one.is_shard(1):
            raise ValueError(
                f"{name} must be replicated in mesh dims after the first that shards q's heads and "
                f"not its own, got {x.placements}"
            )
        whole = one.is_replicate()


def _heads(x: DTensor) -> tuple[int, int]:
    """This rank's first head, and its number of heads."""
    first, count = 0, x.shape[1]
    for i, one in enumerate(x.placements):
        if one.is_shard(1):
            count //= x.device_mesh.size(i)
            first += x.device_mesh.get_local_rank(i) * count
    return first, count


def _local(x: DTensor, q: DTensor) -> Tensor:
    """This rank's part; gradients of replicated tensors are summed over the ranks that shard q."""
    from torch.distributed.tensor import Partial

    grads = [
        Partial() if one.is_replicate() and not of_q.is_replicate() else one
        for one, of_q in zip(x.placements, q.placements, strict=True)
    ]
    return x.redistribute(placements=x.placements).to_local(grad_placements=grads)


def _input(x: Any, first: int, count: int, q: DTensor) -> Tensor:
    """This rank's part of q, k or v; of replicated keys only the heads that its queries read."""
    part = _local(x, q)
    if x.placements == q.placements:
        return part
    group = q.shape[1] // x.shape[1]
    if count % group and group % count:
        raise ValueError(
            f"replicated k and v must have heads that ranks do not split, got {x.shape[1]} "
            f"for {count} of the {q.shape[1]} heads of q on each"
        )
    return part.narrow(1, first // group - _heads(x)[0], max(count // group, 1))


def _part(name: str, x: Any, q: DTensor) -> Any:
    """This rank's part of an option."""
    if isinstance(x, tuple):
        return tuple(_part(name, one, q) for one in x)
    if not isinstance(x, Tensor):
        return x
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if name == "relative_keys":
        x = _shareable(x, q)
    wanted: list[Placement] = []
    dims = {0: _dim(_ROW_DIMS, name, x, q.shape[0]), 1: _dim(_HEADS, name, x, q.shape[1])}
    shared = name == "key2" and dims[1] == 1
    if shared and x.shape[1] % (ranks := q.shape[1] // _heads(q)[1]):
        raise ValueError(
            f"key2 must have one head or a multiple of {ranks}, as so many ranks share the "
            f"heads of q, got {x.shape[1]}"
        )
    for one in q.placements:
        dim = dims.get(one.dim) if isinstance(one, Shard) else None
        wanted.append(Replicate() if dim is None else Shard(dim))
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, q.device_mesh, [Replicate()] * len(wanted), run_check=False)
    return _local(x.redistribute(placements=wanted), q)


def _shareable(keys: Tensor, q: DTensor) -> Tensor:
    """relative_keys of K/V heads, expanded to query heads if ranks cannot shard them."""
    H_q, H = q.shape[1], len(keys)
    ranks = H_q // _heads(q)[1]
    if keys.dim() != 3 or H < 2 or H % ranks == 0 or H_q % H:
        return keys  # unchanged, or invalid, which the call refuses
    return keys[:, None].expand(-1, H_q // H, -1, -1).flatten(0, 1)


def _dim(table: Mapping[str, int], name: str, x: Tensor, size: int) -> int | None:
    """The dim of an option with rows or heads; None if absent or of size 1."""
    if name == "relative_keys":
        return 0 if table is _HEADS and len(x) > 1 else None
    if name == "key2" and table is _HEADS:
        return 1 if x.dim() == 4 and x.shape[1] > 1 else None
    behind = table.get(_FIELDS.get(name, name))
    if behind is None or x.dim() <= behind or x.shape[-1 - behind] != size:
        return None
    return x.dim() - 1 - behind
