"""Plots of a report: throughput over length beside peers and limits, and ratios to peers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ..figures import exponential_limit
from ..implementations.registry import OURS, TORCH_PEERS
from .report import timed

Series = dict[str, list[tuple[float, float]]]


def draw_all(data: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw each plot that a report has figures for.

    Returns:
        The files written, of forward.png, backward.png, decode.png and ratios.png.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        figure_module = import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'plots need matplotlib, which is not installed: pip install "fastattn[bench]"'
        ) from error
    written = []
    for name, draw in (
        ("forward", _draw_sweeps),
        ("backward", _draw_sweeps),
        ("decode", _draw_decode),
        ("ratios", _draw_ratios),
    ):
        figure = figure_module.Figure(layout="constrained")
        if draw(figure, data, name):
            path = folder / f"{name}.png"
            temporary = folder / f".writing-{name}.png"
            figure.savefig(temporary, format="png", dpi=100)
            os.replace(temporary, path)
            written.append(path)
    return written


def sweep_series(data: Mapping[str, Any], direction: str) -> dict[tuple[int, bool], Series]:
    """(D, causal) to implementation to points (length, TFLOP/s), of FlashAttention-3's sweep."""
    panels: dict[tuple[int, bool], Series] = {}
    for record in timed(data["results"]):
        case = record["case"]
        tokens = case.get("B", 0) * case.get("T_q", 0)
        plain = case["family"] == direction and case.get("direction") == direction
        if not plain or tokens != 16384 or case["H_q"] != case["H_k"] or case["label"]:
            continue
        if case["dtype"] != "bfloat16" or case["layout"] != "bthd":
            continue
        series = panels.setdefault((case["D"], case["causal"]), {})
        point = (case["T_q"], record["tflops"])
        series.setdefault(record["implementation"], []).append(point)
    return {key: panels[key] for key in sorted(panels)}


def limits(data: Mapping[str, Any], D: int, direction: str) -> dict[str, float]:
    """Upper limits in TFLOP/s: the matrix product of the same run, and the exponentials."""
    found = {}
    if data["ceilings"]:
        found["matrix product"] = data["ceilings"]["matmul_tflops"]
    gpu = data["environment"].get("gpu") or {}
    clock, count = gpu.get("max_sm_clock_mhz"), gpu.get("sm_count")
    if direction == "forward" and clock and count:
        found["exponentials"] = exponential_limit(D, count, clock)
    return found


def _draw_sweeps(figure: Any, data: Mapping[str, Any], direction: str) -> bool:
    panels = sweep_series(data, direction)
    if not panels:
        return False
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure.set_size_inches(6 * columns, 4 * rows)
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for panel, ((D, causal), series) in zip(axes, panels.items(), strict=False):
        _draw_lines(panel, series)
        best = max(y for points in series.values() for _, y in points)
        for label, limit in limits(data, D, direction).items():
            if limit < 3 * best:  # a higher line would flatten the curves
                panel.axhline(limit, linestyle=":", color="black")
                panel.annotate(label, (0.01, limit), xycoords=("axes fraction", "data"), size=7)
        mask = "causal" if causal else "full"
        panel.set(
            title=f"{direction}, D {D}, {mask}, 16384 tokens", ylabel="TFLOP/s", ylim=(0, None)
        )
        panel.set_xlabel("sequence length")
    return True


def _draw_decode(figure: Any, data: Mapping[str, Any], name: str) -> bool:
    bars: dict[str, dict[str, float]] = {}
    records = [r for r in timed(data["results"]) if "kv_gbps" in r]
    # With graphs in the report, calls outside graphs are left out: they include host time.
    graphs = any(r["case"].get("graph") for r in records)
    for record in records:
        case = record["case"]
        if bool(case.get("graph")) == graphs:
            label = f"B{case['B']} H{case['H_q']} T{case['T_k']}"
            bars.setdefault(label, {})[record["implementation"]] = record["kv_gbps"]
    if not bars:
        return False
    figure.set_size_inches(max(6, 1.5 * len(bars)), 4)
    panel = figure.subplots()
    _draw_bars(panel, bars)
    if data["ceilings"]:
        panel.axhline(data["ceilings"]["copy_gbps"], linestyle=":", color="black", label="copy")
    panel.set(title="one token against a cache", ylabel="GB/s of keys and values")
    panel.legend(fontsize=7)
    return True


def _draw_ratios(figure: Any, data: Mapping[str, Any], name: str) -> bool:
    times: dict[str, dict[str, float]] = {}
    for record in timed(data["results"]):
        if "tflops" in record:
            row = times.setdefault(record["case"]["name"], {})
            row[record["implementation"]] = record["ms"]["median"]
    bars = {
        case: {peer: row[peer] / row[OURS] for peer in TORCH_PEERS if peer in row}
        for case, row in times.items()
        if OURS in row
    }
    bars = {case: row for case, row in bars.items() if row}
    if not bars:
        return False
    figure.set_size_inches(8, max(3, 0.35 * len(bars)))
    panel = figure.subplots()
    _draw_bars(panel, bars, horizontal=True)
    panel.axvline(1.0, color="black", linewidth=0.8)
    panel.set(title=f"speed of {OURS} as a multiple of a peer's")
    panel.tick_params(axis="y", labelsize=6)
    panel.invert_yaxis()
    panel.legend(fontsize=7)
    return True


def _draw_lines(panel: Any, series: Series) -> None:
    for name, points in series.items():
        width = 2.5 if name == OURS else 1.2
        panel.plot(*zip(*sorted(points), strict=True), marker="o", label=name, linewidth=width)
    lengths = sorted({x for points in series.values() for x, _ in points})
    panel.set_xscale("log", base=2)
    panel.set_xticks(lengths, [str(int(x)) for x in lengths])
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)


def _draw_bars(panel: Any, bars: dict[str, dict[str, float]], horizontal: bool = False) -> None:
    """Groups of bars: outer names are groups, inner ones colours."""
    names = list(dict.fromkeys(name for row in bars.values() for name in row))
    thickness = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [g + i * thickness for g, row in enumerate(bars.values()) if name in row]
        heights = [row[name] for row in bars.values() if name in row]
        draw = panel.barh if horizontal else panel.bar
        draw(places, heights, thickness, label=name)
    middle = [g + 0.4 - thickness / 2 for g in range(len(bars))]
    (panel.set_yticks if horizontal else panel.set_xticks)(middle, list(bars))
