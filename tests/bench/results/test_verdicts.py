"""The verdicts that ship: what the files of a folder say of each family of Hopper's kernels."""

import json
from pathlib import Path
from typing import Any

from fastattn.bench.results import verdicts
from fastattn.bench.results.report import empty, save
from fastattn.tuned import findings
from fastattn.tuned.environment import Environment
from fastattn.tuned.findings import Findings

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"
GPU = "NVIDIA H100 80GB HBM3"
HERE = Environment(GPU, 132, "580.1", "2.11.0", "3.6.0", "0123456789abcdef")
WRONG = {"backend": "hopper", "family": "forward", "dtype": "bfloat16", "head_dim": 64, "cases": 3}
WRONG |= {"verdict": "wrong", "case": "causal", "reason": "o is off", "share": 9.1, "code": "c0de"}


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["family"]: row for row in json.loads(verdicts.text(folder))["rows"]}


def test_the_shipped_file_is_what_the_results_say() -> None:
    shipped = verdicts.FILE.read_text(encoding="utf-8")
    assert shipped == verdicts.text(RESULTS), "bench/results_table.py writes it"


def test_the_newest_verdict_holds_with_its_commit(tmp_path: Path) -> None:
    """A wrong one too; in whatever order their files come."""
    (tmp_path / "tuned").mkdir()
    right = WRONG | {"verdict": "right", "code": "f1xed", "date": "2026-11-25"}
    days = {"b": WRONG | {"date": "2026-11-23"}, "a": right, "c": {**WRONG, "backend": "triton"}}
    days["d"] = WRONG | {"family": "backward", "date": "2026-11-24", "commit": "89abcdef01"}
    for name, row in days.items():
        dated = {"verification": [{"date": "2026-11-26"} | row]}
        findings.write(tmp_path / "tuned" / f"{name}.json", Findings(HERE, dated))
    environment = {"gpu": {"name": GPU}, "commit": "0123456789"}
    save(tmp_path / "a.json", empty("x") | {"environment": environment})
    found = rows(tmp_path)
    assert found["forward"] == {
        "backend": "hopper", "family": "forward", "dtype": "bfloat16", "head_dim": 64,
        "verdict": "right", "date": "2026-11-25", "gpu": GPU, "commit": "0123456", "code": "f1xed",
    }  # fmt: skip
    expected = {"verdict": "wrong", "case": "causal", "reason": "o is off", "commit": "89abcde"}
    assert found["backward"].items() >= expected.items() and len(found) == 2
