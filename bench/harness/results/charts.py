"""Charts of reports as SVG: a bar for each implementation, in groups.

Neutral colours for light and dark pages; labelled bars in Okabe and Ito's colours, for colour-blind
readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from ..cases.case import Case
from ..cases.figures import input_bytes, least_memory
from .report import Record, gpu_of, group_of, number, ordered, timed, write_whole

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
# Family of cases, or memory of one, to title and figure.
CHARTS = {
    "forward": ("Forward pass, bf16, 16384 tokens a call: TFLOP/s", "tflops"),
    "backward": ("Backward pass, bf16, 16384 tokens a call: TFLOP/s", "tflops"),
    "decode": ("A decoded token against a bf16 cache: GB/s of keys and values", "kv_gbps"),
    "padded": ("Forward pass of 16 rows, bf16, 32 heads on 8: ms, less is better", "ms"),
    "masks": ("Forward pass of 2 rows, bf16, 16 heads: ms, less is better", "ms"),
    "memory-forward": ("Peak memory of forward beyond inputs, 16384 tokens: MiB", "peak_mib"),
    "memory-backward": ("Peak memory of both passes beyond inputs, 16384 tokens: MiB", "peak_mib"),
}
LABELS = {"dense": "no padding", "half": "rows half padded", "documents": "rows of documents"}
LIMITS = {"tflops": ("matrix product", "matmul_tflops"), "kv_gbps": ("a copy", "copy_gbps")}


class Bar(NamedTuple):
    """A value; stale: drawn as an outline."""

    label: str
    value: float
    colour: str
    stale: bool = False


Group = tuple[str, list[Bar], dict[str, float]]  # heading, bars, limits as dotted lines


def write(charts: Mapping[str, str], folder: Path) -> list[Path]:
    """Write each chart to a file of the folder, which is created; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{name}.svg": chart for name, chart in charts.items()}
    for path, chart in files.items():
        write_whole(path, chart)
    return list(files)


def measured(*reports: Mapping[str, Any]) -> dict[str, str]:
    """The charts that reports of one GPU have figures for: "measured-" and a name of `CHARTS`."""
    drawn, data, records = {}, reports[-1], list(timed(ordered(reports)))
    for name, (title, figure) in CHARTS.items():
        family = name.removeprefix("memory-")
        names = list(SHOWN if name == family else SHOWN | UNFUSED)
        shown: dict[tuple[Any, ...], Record] = {}
        for record in records:
            group, who = _group(record["case"]), record["implementation"]
            if record["case"]["family"] == family and figure in record and group and who in names:
                shown[group, names.index(who)] = record
        groups: dict[tuple[Any, ...], list[Record]] = {}
        for group, n in sorted(shown):
            groups.setdefault(group, []).append(shown[group, n])
        bars = [
            (group[-1], [_bar(x, figure) for x in of], _limits(data, figure, of[0]["case"]))
            for group, of in groups.items()
        ]
        if bars:
            drawn[f"measured-{name}"] = chart(title, _source(data, shown.values()), bars)
    return drawn


def _group(case: Mapping[str, Any]) -> tuple[Any, ...]:
    """What orders the groups of bars, the heading last; () for a case that no chart shows."""
    if case.get("dtype") != "bfloat16" or case.get("option"):
        return ()
    family, B, H, T, D = (case[name] for name in ("family", "B", "H_q", "T_k", "D"))
    mask, label = "causal" if case["causal"] else "full", case["label"]
    if family == "decode":
        how = "graph" if case["graph"] else "call"
        return () if label else (H, T, B, how, f"{H} heads, {T} keys, batch {B}, {how}")
    if family in ("padded", "masks"):
        wide = f"window of {sum(case['window']) + 1}" if case["window"] else ""
        words = (LABELS.get(label, label), mask, wide, f"{T} tokens")
        heading = ", ".join(word for word in words if word)
        return (T, mask, wide, label, heading) if case["direction"] == "forward" else ()
    # Of FlashAttention-3's sweep.
    sizes = (B * case["T_q"], H, case["H_k"]) == (16384, 2048 // D, 2048 // D)
    plain = case["direction"] == family and case["layout"] == "bthd" and not label
    return (D, mask, T, f"head dim {D}, {mask}, {T} tokens") if sizes and plain else ()


def _bar(record: Record, figure: str) -> Bar:
    colour, label = (SHOWN | UNFUSED)[record["implementation"]]
    value = record["ms"]["median"] if figure == "ms" else record[figure]
    return Bar(label, value, colour, record["stale"])


def _limits(data: Mapping[str, Any], figure: str, case: Mapping[str, Any]) -> dict[str, float]:
    """An upper limit that the run measured, if it did; the least memory of a fused kernel."""
    if figure == "peak_mib":
        call = Case(**{name: x for name, x in case.items() if name != "name"})
        return {"outputs and lse": (least_memory(call) - input_bytes(call)) / 2**20}
    name, key = LIMITS.get(figure, ("", ""))
    return {name: data["ceilings"][key]} if key in data["ceilings"] else {}


def _source(data: Mapping[str, Any], records: Iterable[Record]) -> str:
    """The GPU and date, and of our kernels the first and last commit, and whether any changed."""
    ours = sorted((x for x in records if group_of(x)), key=lambda x: str(x["date"]))
    commits = [x["commit"] for x in ours if x["commit"]]
    text = f"measured, {gpu_of(data)}, {data['started'][:10]}"
    if commits:
        text += f", at {' to '.join(dict.fromkeys((commits[0], commits[-1])))}"
    return text + "; outlined: kernels have changed since" * any(x["stale"] for x in ours)


def chart(title: str, source: str, groups: list[Group]) -> str:
    """A chart of horizontal bars with values; near limits are dotted."""
    high = max(value for _, bars, _ in groups for _, value, *_ in bars)
    shown = [{n: x for n, x in limits.items() if x < 1.5 * high} for _, _, limits in groups]
    scale = ROOM / max([high, *(x for limits in shown for x in limits.values())])
    parts = [_text(16, 26, title, weight=600), _text(16, 46, source)]
    y = 66
    for (heading, bars, _), limits in zip(groups, shown, strict=True):
        legend = "; ".join(f"{name} {number(x)}" for name, x in limits.items())
        parts += [_text(16, y + 14, heading, weight=600)]
        parts += [_text(LEFT + ROOM, y + 14, legend, anchor="end")] if legend else []
        top = y = y + 20
        for label, value, colour, stale in bars:
            size = f'width="{value * scale:.1f}" height="{STEP - 4}"'
            fill = f'fill="{colour}"' + f' fill-opacity="0.3" stroke="{colour}"' * stale
            parts.append(f'<rect x="{LEFT}" y="{y}" {size} {fill}/>')
            parts.append(_text(LEFT - 8, y + 12, label, anchor="end"))
            parts.append(_text(LEFT + ROOM + 12, y + 12, number(value)))
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
