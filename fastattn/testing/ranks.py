"""Run a function on several ranks: processes of a gloo group on the CPU."""

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from .compiling.named_functions import load_function


def run_ranks(function: str, world_size: int = 2, **kwargs: Any) -> list[Any]:
    """Call a function on every rank of a gloo group of new processes.

    Args:
        function: its name, as in `load_function`. The processes inherit the environment.
        world_size: how many processes.
        kwargs: of the call, the same for every rank. Arguments and results must be picklable.

    Returns:
        The results, by rank. The first error of a rank is raised.
    """
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(world_size, mp_context=context) as pool,
    ):
        store = (Path(folder) / "store").as_uri()
        ranks = [
            pool.submit(_run, function, store, r, world_size, kwargs) for r in range(world_size)
        ]
        return [rank.result() for rank in ranks]


def _run(function: str, store: str, rank: int, world_size: int, kwargs: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world_size
    )
    try:
        return load_function(function)(**kwargs)
    finally:
        torch.distributed.destroy_process_group()
