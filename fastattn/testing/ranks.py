"""Tests of distributed training: a function run by several processes at once, on the CPU."""

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from .compiling.named_functions import load_job


def run_ranks(job: str, world_size: int = 2, **kwargs: Any) -> list[Any]:
    """Calls a function once a rank, in processes that are a gloo group.

    Args:
        job: its name, as `load_job` has it. The processes inherit the environment.
        world_size: how many processes.
        kwargs: of the call, the same for every rank; picklable, as what comes back has to be.

    Returns:
        What each rank returned, in their order. The first error that a rank raises is raised.
    """
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(world_size, mp_context=context) as pool,
    ):
        store = (Path(folder) / "store").as_uri()
        ranks = [pool.submit(_run, job, store, r, world_size, kwargs) for r in range(world_size)]
        return [rank.result() for rank in ranks]


def _run(job: str, store: str, rank: int, world_size: int, kwargs: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world_size
    )
    try:
        return load_job(job)(**kwargs)
    finally:
        torch.distributed.destroy_process_group()
