"""Findings that someone sends: a copy, tables for people, and tiles to ship."""

import json
import shutil
from dataclasses import asdict

import pytest

from fastattn.bench.results import tables as tuned
from fastattn.bench.results.report import empty, load, save
from fastattn.bench.tune import tables
from fastattn.kernels.hopper.tile_table import forward_config
from fastattn.kernels.launch import tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.tuned import findings
from fastattn.tuned.environment import Environment
from fastattn.tuned.findings import Findings

H100 = Environment("NVIDIA H100 80GB HBM3", 132, "580.1", "2.11.0", "3.6.0", "0123456789abcdef")
TILE = TileConfig(64, 64, 4, 3, sum_parts=4)
MEASURED = {"ms": 0.5, "ms_full": 0.9, "ms_shipped": 0.625, "ms_full_shipped": 1.0}
COMMON = {"element_size": 2, "BLOCK_D": 64, "arch": "sm_90", "date": "2026-11-22"}


def row(kernel, config, calls="plain", **change):
    return {"kernel": kernel, "calls": calls, **config, **MEASURED, **COMMON, **change}


TORCH = {"direction": "training", "dtype": "bfloat16", "head_dim": 128, "causal": True}
TORCH |= {"waves": "many", "backend": "torch", "ms": {"hopper": 2.0, "torch": 1.5}}
ROWS = {
    "tiles": [
        row("forward", asdict(TILE), gain=0.15),
        row("forward", asdict(TILE), "masked", gain=0.1),
        row("hopper_forward", forward_config(64, False)._asdict(), gain=0.0),
        # Of a GPU that takes another one's table.
        row("decode", asdict(TILE), gain=0.5, arch="sm_89"),
    ],
    "backends": [TORCH | {"gain": 0.25, "date": "2026-11-21"}],
}


@pytest.fixture
def folders(tmp_path):
    """A file of findings, a folder of results, and one of tables."""
    shutil.copytree(tables.FOLDER, tmp_path / "shipped")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "notes.md").touch()
    findings.write(tmp_path / "sent.json", Findings(H100, ROWS))
    return tmp_path / "sent.json", tmp_path / "results", tmp_path / "shipped"


def rows_of(table):
    return {(r["kernel"], r["element_size"], r["BLOCK_D"]): r for r in table}


def test_findings_are_copied_shipped_and_shown(folders):
    sent, results, shipped = folders
    written = tuned.add(sent, results, shipped)
    assert written == [results / "tuned" / "h100-2026-11-22.json", shipped / "sm_90.json"]
    assert findings.read(written[0]) == findings.read(sent)
    rows = rows_of(json.loads(written[1].read_text())["rows"])
    before = rows_of(tiles.table("sm_90"))
    changed = {key for key in rows if rows[key] != before.get(key)}
    assert changed == {("forward", 2, 64), ("forward_masked", 2, 64)}
    key = {"kernel": "forward", "element_size": 2, "BLOCK_D": 64}
    about = {"gpu": H100.gpu, "torch": "2.11.0", "triton": "3.6.0", "date": "2026-11-22"}
    measured = {"source": "measured", "ms": 0.5, "ms_full": 0.9, "command": "fastattn tune"}
    assert rows["forward", 2, 64] == {**key, **asdict(TILE), **measured, **about}
    # The others stand as they stood, to the letter.
    kept = (tables.FOLDER / "sm_90.json").read_text().splitlines()
    assert len(set(kept) - set(written[1].read_text().splitlines())) == 2
    text = tuned.page(results)
    assert "## NVIDIA H100 80GB HBM3: what `fastattn tune` found, 2026-11-22" in text
    # A column for what any row has.
    assert "| forward | masked | 2 | 64 | 64 | 64 | 4 | 3 | False | 4 |" in text
    assert "| hopper_forward | plain | 2 | 64 |  |  |  |" in text
    assert "| many | torch | {'hopper': 2.0, 'torch': 1.5} | 0.25 | 2026-11-21 |" in text


def test_a_report_is_copied_under_its_gpu_and_date(folders, tmp_path):
    _, results, shipped = folders
    path, data = tmp_path / "out.json", empty("python run_all.py")
    save(path, data)
    with pytest.raises(ValueError, match=r"out\.json is a report of no GPU"):
        tuned.add(path, results, shipped)
    data["started"] = "2026-11-22T10:00:00"
    names = {"NVIDIA GeForce RTX 4090": "rtx-4090", "NVIDIA A100-SXM4-80GB": "a100"}
    for gpu, name in (names | {"NVIDIA H200": "h200", "AMD Instinct MI300X": "mi300x"}).items():
        save(path, data | {"environment": {"gpu": {"name": gpu}}})
        (copy,) = tuned.add(path, results, shipped)
        assert copy == results / f"{name}-2026-11-22.json" and load(copy) == load(path)


def test_no_run_overwrites_another(folders, tmp_path):
    """Two reports of a day; findings of a day, where the environment is the same in one file."""
    sent, results, shipped = folders
    path, data = tmp_path / "out.json", empty("python run_all.py")
    for hour in ("10", "11", "10"):
        about = {"started": f"2026-11-22T{hour}:00:00", "environment": {"gpu": {"name": "H200"}}}
        save(path, data | about)
        tuned.add(path, results, shipped)
    tuned.add(sent, results, shipped)
    for environment in (H100, H100._replace(driver="590.0")):
        other = {"backends": [TORCH | {"gain": 0.5, "head_dim": 64, "date": "2026-11-22"}]}
        findings.write(sent, Findings(environment, other))
        tuned.add(sent, results, shipped)
    hours = {x.name: load(x)["started"][11:13] for x in results.glob("*.json")}
    assert hours == {"h200-2026-11-22.json": "10", "h200-2026-11-22-2.json": "11"}
    both, alone = (findings.read(x) for x in sorted((results / "tuned").iterdir(), reverse=True))
    assert [x["head_dim"] for x in both.rows["backends"]] == [128, 64] and both.rows["tiles"]
    assert alone.environment.driver == "590.0" and len(alone.rows["backends"]) == 1


def test_what_is_neither_is_an_error_and_changes_nothing(folders):
    sent, results, shipped = folders
    interpreted = sent.read_text().replace(H100.gpu, "interpreter")
    neither = r"neither a report nor findings|of no GPU"
    wrong = {"{": neither, "{}": neither, '{"format": 1}': neither}
    for text, message in (wrong | {interpreted: "has no findings of a GPU"}).items():
        sent.write_text(text)
        with pytest.raises(ValueError, match=message):
            tuned.add(sent, results, shipped)
    assert [path.name for path in results.iterdir()] == ["notes.md"]
