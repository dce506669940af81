"""Charts of reports as SVG.

Neutral colours for light and dark pages; series in those of Okabe and Ito, which colour-blind
readers tell apart, and with a mark of their own. Legends stand below the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from ..cases.case import Case
from ..cases.figures import exponential_limit, input_bytes, least_memory
from .report import Report, timed, write_whole

# Name in a report to colour, mark and what a reader sees.
SHOWN = {
    "fastattn-hopper": ("#0072b2", "square", "fastattn, Hopper kernels"),
    "fastattn-triton": ("#56b4e9", "circle", "fastattn, portable kernels"),
    "sdpa-cudnn": ("#d55e00", "diamond", "torch cuDNN"),
    "sdpa-flash": ("#e69f00", "triangle", "torch flash"),
    "flex": ("#009e73", "down", "FlexAttention"),
    "flash-attn-3": ("#cc79a7", "hexagon", "FlashAttention-3"),
    "flash-attn-2": ("#cc79a7", "plus", "flash-attn 2"),
}
INK, LINE = "#7a808c", "#9aa0aa"  # 3:1 and more on white and on the dark page
# Of memory alone: its speed is not what anyone compares with.
UNFUSED = {"sdpa-math": (INK, "cross", "torch, all scores in memory")}
_ALL = SHOWN | UNFUSED
MARKS = {
    "square": "M-4 -4h8v8h-8z",
    "circle": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "diamond": "M0 -5.5L5.5 0L0 5.5L-5.5 0z",
    "triangle": "M0 -5.5L5 4h-10z",
    "down": "M0 5.5L5 -4h-10z",
    "hexagon": "M-5 0l2.5 -4.5h5l2.5 4.5l-2.5 4.5h-5z",
    "plus": "M-5 -1.5h3.5v-3.5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5z",
    "cross": "M-5 -3l2 -2l3 3l3 -3l2 2l-3 3l3 3l-2 2l-3 -3l-3 3l-2 -2l3 -3z",
}
WIDTH, PANEL, HEIGHT = 760, 300, 190
LEFT, TOP, ACROSS, DOWN = 56, 88, 372, HEIGHT + 74  # of the first panel; to the next ones
# Steps of axes.
_ROUND = [m * 10.0**e for e in range(-3, 8) for m in (1, 2, 5)]
Bar = tuple[str, float, str]  # label, value, colour
Series = dict[str, list[tuple[float, float]]]


class Panel(NamedTuple):
    """Points of each implementation by its name, beside limits that are dotted lines."""

    about: str
    series: Series
    limits: Mapping[str, float]


class Axis(NamedTuple):
    """Upwards: where lines go, and how high a value is, from 0 to 1."""

    ticks: Sequence[float]
    height: Callable[[float], float]


def drawn(path: Path) -> dict[str, str]:
    """The charts of a run's results.json by name.

    Raises:
        ValueError: it is no report.
    """
    return measured(Report.load(path).data)


def write(charts: Mapping[str, str], folder: Path) -> list[Path]:
    """Each chart as a file of the folder, which is made; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{name}.svg": chart for name, chart in charts.items()}
    for path, chart in files.items():
        write_whole(path, chart)
    return list(files)


def measured(data: Mapping[str, Any]) -> dict[str, str]:
    """The charts that a report has figures for, by name.

    measured-forward and -backward: TFLOP/s over length. measured-memory-forward and -backward: peak
    memory over length. measured-decode: GB/s, with heads and keys in the name if there are several.
    """
    device = (data["environment"].get("gpu") or {}).get("name", "a CPU")
    source = f"measured, {device}, {data['started'][:10]}"
    charts = {}
    for direction in ("forward", "backward"):
        if panels := _panels(data, direction, "tflops", SHOWN):
            title = f"{direction.capitalize()} pass, bf16, 16384 tokens a call"
            unit = "TFLOP/s over sequence length"
            charts[f"measured-{direction}"] = _lines(title, source, unit, panels, _linear)
        if panels := _panels(data, direction, "peak_mib", SHOWN | UNFUSED):
            which = "forward" if direction == "forward" else "forward and backward"
            title = f"Peak memory of {which} beyond the inputs, bf16, 16384 tokens a call"
            unit = "MiB over sequence length; less is better"
            charts[f"measured-memory-{direction}"] = _lines(title, source, unit, panels, _log)
    return charts | _decoding(data, source)


def _panels(
    data: Mapping[str, Any], direction: str, figure: str, names: Mapping[str, object]
) -> list[Panel]:
    """One for each head dim and mask of which the report has such figures."""
    panels = []
    for (D, causal), series in sweep_series(data, direction, figure).items():
        about = f"head dim {D}, {'causal' if causal else 'full'}"
        chosen = {name: series[name] for name in names if name in series}
        if figure == "tflops":
            limited = limits(data, D, direction)
        else:
            limited = {"outputs and lse": least_mib(data, D, direction)}
        if chosen:
            panels.append(Panel(about, chosen, limited))
    return panels


def sweep_series(
    data: Mapping[str, Any], direction: str, figure: str = "tflops"
) -> dict[tuple[int, bool], Series]:
    """(D, causal) to implementation to points (length, figure), of FlashAttention-3's sweep.

    figure: "tflops", or "peak_mib" beyond the inputs. A record without it gives no point.
    """
    panels: dict[tuple[int, bool], Series] = {}
    for record in timed(data["results"]):
        case = record["case"]
        if figure in record and _of_the_sweep(case, direction):
            series = panels.setdefault((case["D"], case["causal"]), {})
            point = (case["T_q"], record[figure])
            series.setdefault(record["implementation"], []).append(point)
    return {key: panels[key] for key in sorted(panels)}


def _of_the_sweep(case: Mapping[str, Any], direction: str) -> bool:
    tokens = case.get("B", 0) * case.get("T_q", 0)
    plain = case["family"] == direction and case.get("direction") == direction
    if not plain or tokens != 16384 or case["H_q"] != case["H_k"] or case["label"]:
        return False
    return case["dtype"] == "bfloat16" and case["layout"] == "bthd"


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


def least_mib(data: Mapping[str, Any], D: int, direction: str) -> float:
    """The least memory beyond the inputs, in MiB: outputs and lse. All lengths need the same."""
    known = {field.name for field in fields(Case)}
    described = next(
        record["case"]
        for record in data["results"]
        if record["case"].get("D") == D and _of_the_sweep(record["case"], direction)
    )
    case = Case(**{name: value for name, value in described.items() if name in known})
    # A backward is measured with its forward.
    return (least_memory(case) - input_bytes(case)) / 2**20


def _caches(data: Mapping[str, Any]) -> dict[tuple[int, int], list[Mapping[str, Any]]]:
    """(query heads, keys) to the timed records of decoding against such a cache in bf16."""
    groups: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for record in timed(data["results"]):
        case = record["case"]
        if "kv_gbps" in record and case["dtype"] == "bfloat16":
            groups.setdefault((case["H_q"], case["T_k"]), []).append(record)
    return {key: groups[key] for key in sorted(groups)}


def _decoding(data: Mapping[str, Any], source: str) -> dict[str, str]:
    limit = {"a copy": data["ceilings"]["copy_gbps"]} if data["ceilings"] else {}
    groups = {
        key: [record for record in records if record["implementation"] in SHOWN]
        for key, records in _caches(data).items()
    }
    groups = {key: records for key, records in groups.items() if records}
    charts = {}
    for (heads, keys), records in groups.items():
        bars = [bar for _, bar in sorted(map(_decoded, records))]
        name = "measured-decode" + (f"-{heads}-heads-{keys}-keys" if len(groups) > 1 else "")
        title = f"A decoded token, {heads} heads, against a bf16 cache of {keys} keys"
        charts[name] = _bars(title, source, "GB/s of keys and values", bars, limit)
    return charts


def _decoded(record: Mapping[str, Any]) -> tuple[tuple[int, str], Bar]:
    """A bar, and what it is sorted by first."""
    colour, _, shown = SHOWN[record["implementation"]]
    batch, how = record["case"]["B"], "graph" if record["case"].get("graph") else "call"
    return (batch, how), (f"{shown}, batch {batch}, {how}", float(record["kv_gbps"]), colour)


def _linear(values: Sequence[float], limited: Mapping[str, float]) -> Axis:
    """From 0, with about six lines."""
    high = max([*values, *limited.values()]) * 1.06
    step = next(x for x in _ROUND if x >= high / 5)
    return Axis([n * step for n in range(int(high / step) + 1)], lambda y: y / high)


def _log(values: Sequence[float], limited: Mapping[str, float]) -> Axis:
    """With room below the least for its words."""
    every = [*values, *limited.values()]
    low = max(x for x in _ROUND if x <= min(every) / 3)
    high = min(x for x in _ROUND if x >= max(every) * 1.2)
    ticks = [x for x in _ROUND if low <= x <= high]
    if len(ticks) > 6:
        ticks = [x for x in ticks if f"{x:e}"[0] == "1"]
    return Axis(ticks, lambda y: math.log(y / low) / math.log(high / low))


def _lines(
    title: str,
    source: str,
    unit: str,
    panels: Sequence[Panel],
    scale: Callable[[Sequence[float], Mapping[str, float]], Axis],
) -> str:
    """Panels of figures against length, with dotted limits, and a legend below."""
    parts = _head(title, source)
    for i, panel in enumerate(panels):
        parts += _panel(LEFT + i % 2 * ACROSS, TOP + i // 2 * DOWN, panel, scale)
    bottom = TOP + -(-len(panels) // 2) * DOWN
    parts.append(_text(LEFT, bottom - 34, unit))
    names = [name for name in _ALL if any(name in panel.series for panel in panels)]
    for n, name in enumerate(names):
        x, y = 62 + n % 3 * 220, bottom - 10 + n // 3 * 22
        colour, mark, label = _ALL[name]
        parts += (_mark(x, y - 4, colour, mark), _text(x + 12, y, label))
    return _svg(parts, bottom + 22 * (-(-len(names) // 3)))


def _panel(
    left: float,
    top: float,
    panel: Panel,
    scale: Callable[[Sequence[float], Mapping[str, float]], Axis],
) -> list[str]:
    values = [y for points in panel.series.values() for _, y in points]
    # A limit that is far above would flatten the curves.
    shown = {label: y for label, y in panel.limits.items() if y < 3 * max(values)}
    axis = scale(values, shown)
    lengths = sorted({x for points in panel.series.values() for x, _ in points})
    place = {x: left + PANEL * (n + 0.5) / len(lengths) for n, x in enumerate(lengths)}
    # Equal figures stand side by side.
    aside = 0.0 if scale is _linear else min(10.0, 0.6 * PANEL / len(lengths) / len(panel.series))

    def upwards(y: float) -> float:
        return top + HEIGHT * (1 - axis.height(y))

    parts = [_text(left, top - 10, panel.about, weight=600)]
    for tick in axis.ticks:
        y = upwards(tick)
        parts.append(f'<path d="M{left} {y:.1f}h{PANEL}" stroke="{LINE}" stroke-opacity=".35"/>')
        parts.append(_text(left - 6, y + 4, f"{tick:g}", anchor="end"))
    parts += (_text(x, top + HEIGHT + 16, f"{n:g}", anchor="middle") for n, x in place.items())
    for label, limit in shown.items():
        y = upwards(limit)
        parts.append(f'<path d="M{left} {y:.1f}h{PANEL}" stroke="{INK}" stroke-dasharray="2 4"/>')
        below = 22 if scale is _log else -4
        parts.append(_text(left + PANEL, y + below, f"{label} {limit:.0f}", anchor="end"))
    for n, (name, points) in enumerate(panel.series.items()):
        colour, mark, _ = _ALL[name]
        shift = aside * (n - (len(panel.series) - 1) / 2)
        spots = [(place[x] + shift, upwards(y)) for x, y in sorted(points)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
        parts.append(f'<path d="M{path}" stroke="{colour}" stroke-width="2" fill="none"/>')
        parts += (_mark(x, y, colour, mark) for x, y in spots)
    return parts


def _bars(
    title: str, source: str, unit: str, bars: Sequence[Bar], limited: Mapping[str, float]
) -> str:
    """Bars to the right with their values."""
    parts = _head(title, source)
    left, room = 290, 400
    high = max([value for _, value, _ in bars] + list(limited.values()))
    for n, (label, value, colour) in enumerate(bars):
        y, length = 84 + n * 24, room * value / high
        size = f'width="{length:.1f}" height="16"'
        parts.append(f'<rect x="{left}" y="{y}" {size} fill="{colour}"/>')
        parts.append(_text(left - 8, y + 13, label, anchor="end"))
        parts.append(_text(left + room + 12, y + 13, f"{value:.0f}"))
    bottom = 84 + len(bars) * 24
    for label, limit in limited.items():
        x = left + room * limit / high
        parts.append(f'<path d="M{x:.1f} 74V{bottom}" stroke="{INK}" stroke-dasharray="2 4"/>')
        parts.append(_text(x, bottom + 14, f"{label} {limit:.0f}", anchor="end"))
    parts.append(_text(left, bottom + 14, unit))
    return _svg(parts, bottom + 26)


def _head(title: str, source: str) -> list[str]:
    return [_text(16, 26, title, weight=600), _text(16, 46, source)]


def _text(x: float, y: float, words: str, anchor: str = "start", weight: int = 400) -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{INK}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def _mark(x: float, y: float, colour: str, mark: str) -> str:
    return f'<path d="{MARKS[mark]}" fill="{colour}" transform="translate({x:.1f} {y:.1f})"/>'


def _svg(parts: Sequence[str], height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {WIDTH} {height:g}" font-size="12" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
        + "".join(parts)
        + "</svg>\n"
    )
