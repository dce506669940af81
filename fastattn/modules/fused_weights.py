"""Weights of before: projections that were fused into one parameter are read as separate ones.

Each projection has a parameter of its own, so that its rows can be sharded by heads over ranks: as
one parameter, a shard of its rows would hold some of q's and none of k's. A module that once fused
some names them in `fused_projections`, and loads state dicts of either kind.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

# The name of what was fused, and the projections whose rows it had, in their order.
Fused = Mapping[str, tuple[str, ...]]


class SeparateProjections(nn.Module):
    """A module that reads projections which were fused once."""

    fused_projections: ClassVar[Fused] = {}

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(_separate)  # type: ignore[no-untyped-call]


def separated(model: nn.Module, tensors: Mapping[str, Tensor], prefix: str = "") -> dict[str, Any]:
    """Tensors by the names of a model's parameters, with a part for each projection.

    Args:
        model: whose names follow the prefix.
        tensors: what belongs to a parameter has its name and may have more behind it, such as
            ".exp_avg". What has no rows, such as a count of steps, is each part's.
        prefix: before the names.
    """
    weights = dict(tensors)
    for name, module in model.named_modules():
        if isinstance(module, SeparateProjections):
            _separate(module, weights, f"{prefix}{name}." if name else prefix)
    return weights


def _separate(
    module: nn.Module, tensors: MutableMapping[str, Any], prefix: str, *_: object
) -> None:
    """Replace the module's fused tensors, if there are any, by their parts."""
    assert isinstance(module, SeparateProjections)
    for fused, parts in module.fused_projections.items():
        projections = [getattr(module, part) for part in parts]
        if None in projections:
            continue
        rows = [projection.out_features for projection in projections]
        before = f"{prefix}{fused}."
        for name in [name for name in tensors if name.startswith(before)]:
            x, kind = tensors[name], name.removeprefix(before)
            if x.dim() and x.shape[0] != sum(rows):
                continue  # of one projection, under the name that they had together
            pieces = torch.split(x, rows) if x.dim() else [x] * len(parts)
            del tensors[name]
            for part, piece in zip(parts, pieces, strict=True):
                tensors.setdefault(f"{prefix}{part}.{kind}", piece)
