"""Charts of reports as SVG: a bar for each implementation, in groups.

Neutral colours for light and dark pages; labelled bars in Okabe and Ito's colours, for colour-blind
readers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from ..cases.case import Case
from ..cases.figures import input_bytes, least_memory
from .report import newest, timed, write_whole

# Name in a report to colour and label.
SHOWN = {
    "fastattn": ("#0072b2", "fastattn"),
    "fastattn-hopper": ("#0072b2", "fastattn, Hopper kernels"),
    "fastattn-triton": ("#56b4e9", "fastattn, portable kernels"),
    "sdpa-cudnn": ("#d55e00", "torch cuDNN"),
    "sdpa-flash": ("#e69f00", "torch flash"),
    "flex": ("#009e73", "FlexAttention"),
    "flash-attn-3": ("#cc79a7", "FlashAttention-3"),
    "flash-attn-2": ("#cc79a7", "flash-attn 2"),
}
INK, LINE = "#7a808c", "#9aa0aa"  # 3:1 and more on white and on the dark page
# In charts of memory only: its speed is no useful comparison.
UNFUSED = {"sdpa-math": (INK, "torch, all scores in memory")}
WIDTH, LEFT, ROOM, STEP = 760, 210, 470, 19
Bar = tuple[str, float, str]  # label, value, colour
Group = tuple[str, list[Bar], dict[str, float]]  # heading, bars, limits as dotted lines


def write(charts: Mapping[str, str], folder: Path) -> list[Path]:
    """Write each chart to a file of the folder, which is created; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{name}.svg": chart for name, chart in charts.items()}
    for path, chart in files.items():
        write_whole(path, chart)
    return list(files)


def measured(*reports: Mapping[str, Any]) -> dict[str, str]:
    """The charts that reports of one GPU have figures for, by name.

    measured-forward and -backward: TFLOP/s. measured-memory-forward and -backward: peak memory.
    measured-decode: GB/s.
    """
    data = {**reports[-1], "results": newest(reports)}
    device = (data["environment"].get("gpu") or {}).get("name", "a CPU")
    source = f"measured, {device}, {data['started'][:10]}"
    groups: dict[str, tuple[str, list[Group]]] = {}
    for direction in ("forward", "backward"):
        title = f"{direction.capitalize()} pass, bf16, 16384 tokens a call: TFLOP/s"
        groups[direction] = title, _sweep(data, direction, "tflops")
        which = "forward" if direction == "forward" else "forward and backward"
        title = f"Peak memory of {which} beyond the inputs, bf16, 16384 tokens a call: MiB"
        groups[f"memory-{direction}"] = title, _sweep(data, direction, "peak_mib")
    title = "A decoded token against a bf16 cache: GB/s of keys and values"
    groups["decode"] = title, _decoding(data)
    return {
        f"measured-{name}": chart(title, source, of_chart)
        for name, (title, of_chart) in groups.items()
        if of_chart
    }


def _groups(
    data: Mapping[str, Any],
    figure: str,
    key: Callable[[Mapping[str, Any]], tuple[Any, ...] | None],
    names: Mapping[str, tuple[str, str]],
) -> dict[tuple[Any, ...], list[Bar]]:
    """Bars of a figure from the timed records, grouped by a key of the case; None leaves it out."""
    groups: dict[tuple[Any, ...], dict[str, float]] = {}
    for record in timed(data["results"]):
        name, group = record["implementation"], key(record["case"]) if figure in record else None
        if name in names and group is not None:
            groups.setdefault(group, {})[name] = record[figure]
    return {
        group: [(names[n][1], values[n], names[n][0]) for n in names if n in values]
        for group, values in sorted(groups.items())
    }


def _sweep(data: Mapping[str, Any], direction: str, figure: str) -> list[Group]:
    """Groups for head dim, mask and length of FlashAttention-3's sweep."""

    def key(case: Mapping[str, Any]) -> tuple[Any, ...] | None:
        plain = case["family"] == direction == case.get("direction") and not case["label"]
        whole = case.get("B", 0) * case.get("T_q", 0) == 16384 and case["H_q"] == case["H_k"]
        chosen = plain and whole and (case["dtype"], case["layout"]) == ("bfloat16", "bthd")
        return (case["D"], not case["causal"], case["T_q"], case["H_q"]) if chosen else None

    groups = []
    names = SHOWN if figure == "tflops" else SHOWN | UNFUSED
    for (D, full, T, H), bars in _groups(data, figure, key, names).items():
        if figure == "tflops":
            limits = _limit(data, "matrix product", "matmul_tflops")
        else:
            case = Case(direction, direction, 16384 // T, H, H, T, T, D)  # type: ignore[arg-type]
            limits = {"outputs and lse": (least_memory(case) - input_bytes(case)) / 2**20}
        groups.append((f"head dim {D}, {'full' if full else 'causal'}, {T} tokens", bars, limits))
    return groups


def _limit(data: Mapping[str, Any], name: str, figure: str) -> dict[str, float]:
    """An upper limit that the run measured, if it did."""
    return {name: data["ceilings"][figure]} if data["ceilings"] else {}


def _decoding(data: Mapping[str, Any]) -> list[Group]:
    """Groups for cache, batch, and call or graph."""
    limits = _limit(data, "a copy", "copy_gbps")

    def key(case: Mapping[str, Any]) -> tuple[Any, ...] | None:
        chosen = case["dtype"] == "bfloat16" and not case["label"]
        return (case["H_q"], case["T_k"], case["B"], bool(case.get("graph"))) if chosen else None

    return [
        (f"{H} heads, {T} keys, batch {B}, {'graph' if graph else 'call'}", bars, limits)
        for (H, T, B, graph), bars in _groups(data, "kv_gbps", key, SHOWN).items()
    ]


def chart(title: str, source: str, groups: list[Group]) -> str:
    """A chart of horizontal bars with values; near limits are dotted."""
    high = max(value for _, bars, _ in groups for _, value, _ in bars)
    shown = [{n: x for n, x in limits.items() if x < 1.5 * high} for _, _, limits in groups]
    scale = ROOM / max([high, *(x for limits in shown for x in limits.values())])
    parts = [_text(16, 26, title, weight=600), _text(16, 46, source)]
    y = 66
    for (heading, bars, _), limits in zip(groups, shown, strict=True):
        legend = "; ".join(f"{name} {x:.0f}" for name, x in limits.items())
        parts += [_text(16, y + 14, heading, weight=600)]
        parts += [_text(LEFT + ROOM, y + 14, legend, anchor="end")] if legend else []
        top = y = y + 20
        for label, value, colour in bars:
            size = f'width="{value * scale:.1f}" height="{STEP - 4}"'
            parts.append(f'<rect x="{LEFT}" y="{y}" {size} fill="{colour}"/>')
            parts.append(_text(LEFT - 8, y + 12, label, anchor="end"))
            parts.append(_text(LEFT + ROOM + 12, y + 12, f"{value:.0f}"))
            y += STEP
        for limit in limits.values():
            path = f"M{LEFT + limit * scale:.1f} {top - 2}V{y}"
            parts.append(f'<path d="{path}" stroke="{LINE}" stroke-dasharray="2 4"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 14}" '
        f'viewBox="0 0 {WIDTH} {y + 14}" font-size="12" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
        + "".join(parts)
        + "</svg>\n"
    )


def _text(x: float, y: float, words: str, anchor: str = "start", weight: int = 400) -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{INK}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'
