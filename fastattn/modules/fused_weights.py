"""Load older state dicts, whose projections are fused into one parameter.

Each projection has its own parameter, so that its rows can be sharded by heads over ranks: a shard
of a fused parameter would hold rows of q and none of k. A module lists the projections that it once
fused in `fused_projections`, and loads both kinds of state dicts.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

# Name of the fused projection, and the projections in the order of their rows.
Fused = Mapping[str, tuple[str, ...]]


class SeparateProjections(nn.Module):
    """A module that loads fused projections too."""

    fused_projections: ClassVar[Fused] = {}

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(_separate)  # type: ignore[no-untyped-call]


def separated(model: nn.Module, tensors: Mapping[str, Tensor], prefix: str = "") -> dict[str, Any]:
    """Split fused tensors, named `prefix`, parameter and maybe a suffix, such as ".exp_avg".

    The results have the names of a model's parameters. Values without rows, such as a step count,
    are copied to each part.
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
                continue  # one projection under the fused name
            pieces = torch.split(x, rows) if x.dim() else [x] * len(parts)
            del tensors[name]
            for part, piece in zip(parts, pieces, strict=True):
                tensors.setdefault(f"{prefix}{part}.{kind}", piece)
