"""Lines of `fastattn info` about kernels."""

from pathlib import Path

import pytest
import torch

from fastattn.tuned import choices, report
from fastattn.tuned.environment import environment
from fastattn.tuned.store import Store

DAY = "2026-01-31"
VERDICT = {"backend": "triton", "dtype": "float32", "head_dim": 64, "verdict": "right", "date": DAY}
TILE = {"calls": "plain", "element_size": 2, "BLOCK_D": 128, "date": DAY}


@pytest.mark.parametrize("applies", [True, False])
def test_what_is_known_of_kernels(
    applies: bool, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("FASTATTN_TUNED")
    monkeypatch.setattr(choices, "applies", lambda device: applies)
    monkeypatch.setattr(report.call, "interpreting", lambda: True)
    where = "on this device" if applies else "in the interpreter"
    place = torch.device(device)
    choices.forget()
    assert report.describe(place)[-1] == f"not verified {where}: run fastattn verify"

    here = Store(environment(place))
    failed = {**VERDICT, "family": "decode", "verdict": "crash", "reason": "signal 11 in pages"}
    failed["date"] = "2026-01-30"
    here.put("verification", {**VERDICT, "family": "forward"}, failed)
    here.put("tiles", {"kernel": "forward", "BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, **TILE})
    shape = {"BLOCK": 64, "STAGES": 2, "D": 128}
    here.put("tiles", {"kernel": "hopper_dq", **shape, **TILE})
    here.put("splits", {"element_size": 2, "BLOCK_D": 64, "programs": 3, "date": DAY})
    wide = {"element_size": 2, "BLOCK_D": 128, "programs": 2, "one_launch": True}
    here.put("splits", {**wide, "date": DAY})
    key = {"direction": "forward", "dtype": "float16", "head_dim": 64, "causal": True}
    names = {"few": "torch", "some": "triton", "many": "triton"}
    for waves, name in names.items():
        here.put("backends", {**key, "waves": waves, "backend": name})
    choices.forget()
    lines = report.describe(place)
    choices.forget()
    assert lines[-2:] == [
        f"verified {where}, last {DAY}: 1 of 2 families of kernels right",
        "  triton decode float32 64: crash: signal 11 in pages",
    ]
    if applies:
        (forward,) = (line for line in lines if line.startswith("  forward, 2 bytes"))
        assert f", 128 tuned here {DAY}, " in forward
        assert f"  hopper_dq: 128 tuned here {DAY}" in lines
        splits = "  splits of decode, 2 bytes, 64: 3 programs per multiprocessor"
        assert f"{splits}, tuned here {DAY}" in lines
        one = (
            "  splits of decode, 2 bytes, 128: 2 programs per multiprocessor, merged in one launch"
        )
        assert f"{one}, tuned here {DAY}" in lines
        assert "fastest backend of 3 kinds of plain calls: triton 2, torch 1" in lines
    else:
        assert len(lines) == 2
