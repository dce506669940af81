"""Findings that ranks share."""

from pathlib import Path

import pytest
import torch
from gloo_ranks import run_ranks

from fastattn import explain
from fastattn.testing import make_qkv
from fastattn.tuned import choices, share
from fastattn.tuned.environment import Environment
from fastattn.tuned.store import Store

HERE = Environment("A GPU", 4, "550.1", "2.13.0", "3.7.1", "0" * 16)
ROW = {
    "backend": "triton", "family": "forward", "dtype": "bfloat16", "head_dim": 64,
    "verdict": "hang", "reason": "causal said nothing for 60 s",
}  # fmt: skip


def shared_by_rank(folder: str) -> tuple[str, bool, str]:
    """Backend of a call on this rank after a finding of the first rank, whether its current GPU
    has one, and the message where the other rank has another driver.
    """
    rank = torch.distributed.get_rank()
    qkv = make_qkv(1, 2, 1, 5, D=64, dtype=torch.bfloat16)
    here = [HERE]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTATTN_CACHE_DIR", f"{folder}/{rank}")
        patch.delenv("FASTATTN_TUNED")
        for module in ("choices", "ranks"):
            patch.setattr(f"fastattn.tuned.{module}.environment", lambda device: here[0])
        patch.setattr(choices, "applies", lambda device: True)
        if rank == 0:
            Store(HERE).put("verification", ROW)
        # Alone, each rank is the first.
        share(torch.distributed.new_subgroups(1)[0], device="cpu")
        share(device="cpu")
        told = str(explain(*qkv))
        patch.setattr(torch.cuda, "current_device", lambda: rank)
        share(device="cuda")
        of_rank = choices.choices(torch.device("cuda", rank))
        of_gpu = bool(of_rank.verdicts("triton", ("forward",), torch.bfloat16, 64))
        here[0] = HERE._replace(driver="560.0") if rank else HERE
        with pytest.raises(RuntimeError) as refused:
            share(device="cpu")
    return told, of_gpu, str(refused.value)


def test_ranks_go_by_the_findings_of_the_first(tmp_path: Path) -> None:
    first, second = run_ranks(f"{__file__}:shared_by_rank", folder=str(tmp_path))
    assert first == second
    told, of_gpu, refused = first
    assert of_gpu
    assert told.startswith("backend: torch\n  not triton: fastattn verify found forward hang")
    assert told.endswith(ROW["reason"])
    assert [path.name for path in tmp_path.iterdir()] == ["0"], "nothing is written"
    assert "ranks 0 and 1 differ" in refused
    assert all(here.hash in refused for here in (HERE, HERE._replace(driver="560.0")))
