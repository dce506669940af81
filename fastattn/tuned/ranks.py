"""Results shared among the ranks of a distributed run."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from . import choices
from .environment import environment, numbered

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def share(group: "ProcessGroup | None" = None, device: torch.device | str | None = None) -> None:
    """Make all ranks use the results of the group's first rank, until the process ends.

    All ranks call it before their first attention. Nothing is stored.

    Args:
        group: default: all ranks.
        device: of this rank; default: the current GPU, or else the CPU.

    Raises:
        RuntimeError: ranks differ in GPU, driver, torch, triton or fastattn; raised on all ranks.
    """
    distributed = torch.distributed
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = numbered(torch.device(device))
    here: list[str] = [""] * distributed.get_world_size(group)
    distributed.all_gather_object(here, environment(device).hash, group)
    for rank, other in enumerate(here):
        if other != here[0]:
            raise RuntimeError(
                f"ranks 0 and {rank} differ in GPU, driver, torch, triton or fastattn: results of "
                f"{here[0]} are not those of {other}"
            )
    first = distributed.get_rank(group) == 0
    rows: list[Any] = [choices.read(device) if first else None]
    distributed.broadcast_object_list(rows, group=group, group_src=0)
    if choices.applies(device):
        choices.adopt(device, rows[0])
