"""Calls on a CPU beside torch's: rows of each kind run, and are written down."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from fastattn.bench.results.tables import cpu_table

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "compare_cpu.py"


def test_rows_are_timed_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("compare_cpu", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "_ROUNDS", 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    words = [
        "all keys; T 64; float32",
        "causal, ALiBi; T 64; bfloat16",
        "need_weights; 1",
        "1 rows, 8:2 heads, 128 keys; float32",
    ]
    file = tmp_path / "cpu.json"
    monkeypatch.setattr(sys, "argv", ["compare_cpu.py", *words, "--out", str(file)])
    assert script.main() == 0
    report = json.loads(file.read_text("utf-8"))
    assert len(report["rows"]) == 8
    assert cpu_table(report).count("\n") == 6
