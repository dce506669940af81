"""Programs of several ranks, run as by torchrun on ranks that have imported torch already."""

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Iterator
from unittest import mock

import torch.distributed as dist
from gloo_ranks import run_ranks


@contextlib.contextmanager
def as_by_torchrun() -> Iterator[None]:
    """On a rank: the environment that torchrun gives, and one group for all programs of the block.

    In one process torch makes a second group at times only.
    """
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    given |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "GROUP_RANK": "0"}
    given |= {"TORCHELASTIC_RUN_ID": "tests", "FASTATTN_BACKEND": "torch"}
    with (
        mock.patch.dict(os.environ, given),
        mock.patch.object(dist, "init_process_group", mock.Mock()),
        mock.patch.object(dist, "destroy_process_group", mock.Mock()),
    ):
        yield


def run_here(path: str, arguments: list[str]) -> str:
    """Run a program on this rank, and return what it prints."""
    printed = io.StringIO()
    with (
        as_by_torchrun(),
        contextlib.redirect_stdout(printed),
        mock.patch.object(sys, "argv", [path, *arguments]),
    ):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def run_on_ranks(path: str, *arguments: str) -> str:
    """Run a program on two ranks, and return what the first prints."""
    printed, other = run_ranks(f"{__file__}:run_here", 2, path=path, arguments=list(arguments))
    assert not other, "one rank prints"
    return printed
