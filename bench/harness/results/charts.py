"""Charts of reports as SVG, for the pages: measured ones, and those of a model, which say so.

Neutral colours for light and dark pages; series in those of Okabe and Ito, which colour-blind
readers tell apart, and with a mark of their own. Legends stand below the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .plots import Series, limits, sweep_series
from .report import timed

# Name in a report to colour, mark and what a reader sees.
SHOWN = {
    "fastattn-hopper": ("#0072b2", "square", "fastattn, Hopper kernels"),
    "fastattn-triton": ("#56b4e9", "circle", "fastattn, portable kernels"),
    "sdpa-cudnn": ("#d55e00", "diamond", "torch cuDNN"),
    "sdpa-flash": ("#e69f00", "triangle", "torch flash"),
    "flex": ("#009e73", "down", "FlexAttention"),
}
MARKS = {
    "square": "M-4 -4h8v8h-8z",
    "circle": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "diamond": "M0 -5.5L5.5 0L0 5.5L-5.5 0z",
    "triangle": "M0 -5.5L5 4h-10z",
    "down": "M0 5.5L5 -4h-10z",
}
INK, LINE = "#7a808c", "#9aa0aa"  # 3:1 and more on white and on the dark page
MODELLED = "modelled, not measured"
WIDTH, PANEL, HEIGHT = 760, 300, 190
_STEP = 200.0
Bar = tuple[str, float, str]  # label, value, colour


def measured(data: Mapping[str, Any]) -> dict[str, str]:
    """The charts that a report has figures for, by name: measured-forward, -backward, -decode."""
    device = (data["environment"].get("gpu") or {}).get("name", "a CPU")
    source = f"measured, {device}, {data['started'][:10]}"
    drawn = {}
    for direction in ("forward", "backward"):
        panels = {
            f"head dim {D}, {'causal' if causal else 'full'}": (
                {name: series[name] for name in SHOWN if name in series},
                limits(data, D, direction),
            )
            for (D, causal), series in sweep_series(data, direction).items()
        }
        if panels:
            title = f"{direction.capitalize()} pass, bf16, 16384 tokens a call"
            drawn[f"measured-{direction}"] = _lines(title, source, panels)
    bars = _decoding(data)
    if bars:
        limit = {"a copy": data["ceilings"]["copy_gbps"]} if data["ceilings"] else {}
        title = "A decoded token against a bf16 cache of 4096 keys"
        drawn["measured-decode"] = _bars(title, source, "GB/s of keys and values", bars, limit)
    return drawn


def modelled(data: Mapping[str, Any]) -> str:
    """Bounds of the model of the machine code, in a shape that no measured chart has."""
    source = f"{data['target']}, {data['ghz']} GHz, machine code of Triton {data['triton']}"
    bars = [
        (f"{row['backend']} {row['kernel']}, D {row['D']}", row["tflops"], "none")
        for row in data["rows"]
        if row["D"] in (64, 128)
    ]
    title = f"{MODELLED.capitalize()}: upper bounds of full blocks, without a mask"
    return _bars(title, source, "TFLOP/s of all products, at most", bars, {})


def _decoding(data: Mapping[str, Any]) -> list[Bar]:
    bars = []
    for record in timed(data["results"]):
        case, name = record["case"], record["implementation"]
        if "kv_gbps" in record and name in SHOWN:
            how = "graph" if case.get("graph") else "call"
            label = f"{SHOWN[name][2]}, batch {case['B']}, {how}"
            bars.append((label, float(record["kv_gbps"]), SHOWN[name][0]))
    return sorted(bars, key=lambda bar: (bar[0].partition(", batch")[2], bar[0]))


def _lines(
    title: str, source: str, panels: Mapping[str, tuple[Series, Mapping[str, float]]]
) -> str:
    """Panels of TFLOP/s against length, with dotted limits."""
    parts = _head(title, source)
    columns = 2
    names = [name for name in SHOWN if any(name in series for series, _ in panels.values())]
    for i, (about, (series, limited)) in enumerate(panels.items()):
        left, top = 56 + i % columns * 372, 88 + i // columns * (HEIGHT + 74)
        values = [y for points in series.values() for _, y in points]
        best = max(values)
        shown = {label: y for label, y in limited.items() if y < 3 * best}
        high = max([best, *shown.values()]) * 1.06
        lengths = sorted({x for points in series.values() for x, _ in points})
        place = {x: left + PANEL * (n + 0.5) / len(lengths) for n, x in enumerate(lengths)}
        parts.append(_text(left, top - 10, about, weight=600))
        for n in range(int(high // _STEP) + 1):
            y = top + HEIGHT * (1 - n * _STEP / high)
            parts.append(
                f'<path d="M{left} {y:.1f}h{PANEL}" stroke="{LINE}" stroke-opacity=".35"/>'
            )
            parts.append(_text(left - 6, y + 4, f"{n * _STEP:g}", anchor="end"))
        parts += (_text(x, top + HEIGHT + 16, f"{n:g}", anchor="middle") for n, x in place.items())
        for label, limit in shown.items():
            y = top + HEIGHT * (1 - limit / high)
            parts.append(
                f'<path d="M{left} {y:.1f}h{PANEL}" stroke="{INK}" stroke-dasharray="2 4"/>'
            )
            parts.append(_text(left + PANEL, y - 4, f"{label} {limit:.0f}", anchor="end"))
        for name in series:
            colour, mark, _ = SHOWN[name]
            spots = [(place[x], top + HEIGHT * (1 - y / high)) for x, y in sorted(series[name])]
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
            parts.append(f'<path d="M{path}" stroke="{colour}" stroke-width="2" fill="none"/>')
            parts += (_mark(x, y, colour, mark) for x, y in spots)
    bottom = 88 + -(-len(panels) // columns) * (HEIGHT + 74)
    parts.append(_text(56, bottom - 34, "TFLOP/s over sequence length"))
    for n, name in enumerate(names):
        x, y = 62 + n % 3 * 220, bottom - 10 + n // 3 * 22
        colour, mark, label = SHOWN[name]
        parts += (_mark(x, y - 4, colour, mark), _text(x + 12, y, label))
    return _svg(parts, bottom + 22 * (-(-len(names) // 3)))


def _bars(
    title: str, source: str, unit: str, bars: Sequence[Bar], limited: Mapping[str, float]
) -> str:
    """Bars to the right with their values; colour "none" is a hollow, dashed one."""
    parts = _head(title, source)
    left, room = 290, 400
    high = max([value for _, value, _ in bars] + list(limited.values()))
    for n, (label, value, colour) in enumerate(bars):
        y, length = 84 + n * 24, room * value / high
        style = f'fill="{colour}"'
        if colour == "none":
            style += f' stroke="{INK}" stroke-dasharray="4 3"'
        parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="16" {style}/>')
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
