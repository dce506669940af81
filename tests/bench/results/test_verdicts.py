"""The verdicts that ship: what the files of a folder say of each family of Hopper's kernels."""

import json
from pathlib import Path
from typing import Any

import pytest

from fastattn.bench.results import tables, verdicts
from fastattn.bench.results.report import empty, save
from fastattn.tuned import findings
from fastattn.tuned.environment import Environment
from fastattn.tuned.findings import Findings

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"
GPU = "NVIDIA H100 80GB HBM3"
HERE = Environment(GPU, 132, "580.1", "2.11.0", "3.6.0", "0123456789abcdef")
CASE = {"name": "x", "family": "forward", "direction": "forward", "B": 4, "D": 64, "window": None}
CASE |= {"lengths": None, "dtype": "bfloat16"}
WRONG = {"backend": "hopper", "family": "forward", "dtype": "bfloat16", "head_dim": 64, "cases": 3}
WRONG |= {"verdict": "wrong", "case": "causal", "reason": "o is off", "share": 9.1, "code": "c0de"}


def report(folder: Path, day: str, *records: dict[str, Any]) -> None:
    data = empty("python run_all.py")
    environment = {"gpu": {"name": GPU}, "commit": "0123456789", "kernels": {"hopper forward": day}}
    results = [
        {"case": CASE, "implementation": "fastattn-hopper", "status": "timed"} | x for x in records
    ]
    data |= {"started": f"2026-11-{day}T10:00:00", "environment": environment, "results": results}
    save(folder / f"h100-2026-11-{day}.json", data)


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["family"]: row for row in json.loads(verdicts.text(folder))["rows"]}


def test_the_shipped_file_is_what_the_results_say() -> None:
    shipped = verdicts.FILE.read_text(encoding="utf-8")
    assert shipped == verdicts.text(RESULTS), "bench/results_table.py writes it"


def test_what_was_timed_ran_right(tmp_path: Path) -> None:
    report(
        tmp_path,
        "22",
        {},
        {"case": CASE | {"window": [9, 0], "direction": "backward"}},
        {"implementation": "fastattn-hopper-fp8", "case": CASE | {"lengths": [3]}},
        {"implementation": "fastattn-hopper-one-pass", "case": CASE | {"D": 96}},
        {"implementation": "fastattn-triton", "case": CASE | {"D": 128}},
        {"status": "failed", "case": CASE | {"D": 256}},
        {"rel": 0.1, "case": CASE | {"D": 256}},
        {"case": CASE | {"family": "decode", "D": 256}},
        {"case": CASE | {"option": "alibi", "D": 256}},
    )
    found = rows(tmp_path)
    assert set(found) == {
        "forward", "forward+window", "backward", "backward+window", "fp8", "fp8+key_lengths",
        "one-pass", "one-pass+head_dim",
    }  # fmt: skip
    assert found["forward"] == {
        "backend": "hopper", "family": "forward", "dtype": "bfloat16", "head_dim": 64,
        "verdict": "right", "gpu": GPU, "date": "2026-11-22", "commit": "0123456", "code": "22",
    }  # fmt: skip
    assert {row["head_dim"] for row in found.values()} == {64, 128}
    assert found["backward"]["code"] == "", "its report does not know the code"


@pytest.mark.parametrize("lifted", [False, True])
def test_a_verdict_is_lifted_by_another_one_alone(lifted: bool, tmp_path: Path) -> None:
    """A wrong case of `fastattn verify` stands though a call at another size was timed."""
    (tmp_path / "results").mkdir()
    report(tmp_path / "results", "22", {})
    days = {"23": WRONG}
    days |= {"25": WRONG | {"verdict": "right", "code": "f1xed"}} if lifted else {}
    for day, row in days.items():
        dated = {"verification": [row | {"date": f"2026-11-{day}"}]}
        findings.write(tmp_path / "sent.json", Findings(HERE, dated))
        tables.add(tmp_path / "sent.json", tmp_path / "results", tmp_path)
    report(tmp_path / "results", "24", {})
    row = rows(tmp_path / "results")["forward"]
    if lifted:
        assert (row["verdict"], row["code"], row["date"]) == ("right", "f1xed", "2026-11-25")
    else:
        expected = {"verdict": "wrong", "case": "causal", "reason": "o is off", "code": "c0de"}
        assert row.items() >= (expected | {"gpu": GPU, "commit": "", "date": "2026-11-23"}).items()
    report(tmp_path / "results", "25" if lifted else "23", {})
    assert rows(tmp_path / "results")["forward"]["commit"] == "0123456"
