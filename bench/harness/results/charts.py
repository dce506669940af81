"""Charts of reports as SVG: a bar for each implementation, in groups.

Neutral colours for light and dark pages; labelled bars in Okabe and Ito's colours, for colour-blind
readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from html import escape
from typing import Any, NamedTuple

from ..cases.case import Case, padded, sweep
from ..cases.figures import input_bytes, least_memory
from ..cases.registry import BY_DEFAULT, OURS
from .report import Record, gpu_of, group_of, number, ordered, timed

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
FONT = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
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
LIMITS = {"tflops": ("a matrix product", "matmul_tflops"), "kv_gbps": ("a copy", "copy_gbps")}
# Heading of a group of the overview to its case.
OVERVIEW = {
    "16 documents of 21 to 4096 tokens, padded; 32 query, 8 K/V heads": padded(
        "forward", "documents", 4096, False
    ),
    "16 rows of 4096 tokens, half padding; 32 query, 8 K/V heads": padded(
        "forward", "half", 4096, False
    ),
    "2 x 8192 tokens, causal window of 1024; 16 heads": replace(
        sweep("forward", 128, 8192, True), family="masks", window=(1023, 0)
    ),
    "4 x 4096 tokens, causal; 16 heads": sweep("forward", 128, 4096, True),
    "4 x 4096 tokens, no mask; 16 heads": sweep("forward", 128, 4096, False),
}


class Bar(NamedTuple):
    """A value; stale: drawn as an outline."""

    label: str
    value: float
    colour: str
    stale: bool = False


def measured(*reports: Mapping[str, Any]) -> dict[str, str]:
    """The charts that reports of one GPU have figures for: "measured-" and a name of `CHARTS`."""
    drawn, data, records = {}, reports[-1], list(timed(ordered(reports)))
    for name, (title, figure) in CHARTS.items():
        names = SHOWN | UNFUSED if name.startswith("memory") else SHOWN
        shown: dict[tuple[Any, ...], Record] = {}
        for record in records:
            case, who = record["case"], record["implementation"]
            chosen = case["family"] == name.removeprefix("memory-") and figure in record
            if chosen and who in names and (group := _group(case)):
                shown[(*group, list(names).index(who))] = record
        groups: dict[str, list[Bar]] = {}
        for key in sorted(shown):
            record, (colour, label) = shown[key], names[shown[key]["implementation"]]
            value = record["ms"]["median"] if figure == "ms" else record[figure]
            bars = groups.setdefault(key[-2], _limit(data, figure, record["case"]))
            bars.append(Bar(label, value, colour, record["stale"]))
        if groups:
            drawn[f"measured-{name}"] = chart(title, _source(data, shown.values()), groups)
    return drawn


def beside_peers(*reports: Mapping[str, Any]) -> dict[str, list[Record]]:
    """Timed records of each case of `OVERVIEW`, all of one run: the default's, then its peers'.

    The default is the first of `BY_DEFAULT` that was timed.
    """
    groups: dict[str, list[Record]] = {}
    for heading, case in OVERVIEW.items():
        records = [x for x in timed(ordered(reports)) if x["case"]["name"] == case.name]
        newest = {x["implementation"]: x for x in records}
        ours = next((newest[x] for x in BY_DEFAULT if x in newest), None)
        if ours is not None:
            run = {x["implementation"]: x for x in records if x["run"] == ours["run"]}
            peers = (run[x] for x in SHOWN if x in run and not x.startswith(OURS))
            groups[heading] = [ours, *peers]
    return groups


def overview(*reports: Mapping[str, Any]) -> str:
    """The chart of `beside_peers`: times as multiples of the default's."""
    groups = beside_peers(*reports)
    bars: dict[str, list[Bar]] = {}
    for heading, (ours, *peers) in groups.items():
        least = ours["ms"]["median"]
        rows = bars[f"{heading}; fastattn: {number(least)} ms"] = []
        for record in (ours, *peers):
            colour, label = SHOWN[OURS if record is ours else record["implementation"]]
            rows.append(Bar(label, record["ms"]["median"] / least, colour, record["stale"]))
    records = [record for of_case in groups.values() for record in of_case]
    title = "Forward pass, bf16, head dim 128: time as a multiple of fastattn's, less is better"
    return chart(title, _source(reports[-1], records), bars)


def _group(case: Mapping[str, Any]) -> tuple[Any, ...]:
    """Sort key of a group of bars, its heading last; () for a case that no chart shows."""
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


def _limit(data: Mapping[str, Any], figure: str, case: Mapping[str, Any]) -> list[Bar]:
    """A bound of every kernel: a limit that the run measured, or the memory of the outputs."""
    if figure == "peak_mib":
        call = Case.of(case)
        return [Bar("outputs and lse", (least_memory(call) - input_bytes(call)) / 2**20, LINE)]
    label, key = LIMITS.get(figure, ("", ""))
    return [Bar(label, data["ceilings"][key], LINE)] if key in data["ceilings"] else []


def _source(data: Mapping[str, Any], records: Iterable[Record]) -> str:
    """The GPU and date, and of our kernels the first and last commit, and whether any changed."""
    ours = sorted((x for x in records if group_of(x)), key=lambda x: str(x["date"]))
    commits = [x["commit"] for x in ours if x["commit"]]
    text = f"measured, {gpu_of(data)}, {data['started'][:10]}"
    if commits:
        text += f", at {' to '.join(dict.fromkeys((commits[0], commits[-1])))}"
    return text + "; outlined: kernels have changed since" * any(x["stale"] for x in ours)


def chart(title: str, source: str, groups: Mapping[str, Iterable[Bar]]) -> str:
    """A chart of horizontal bars with values, in groups by heading."""
    scale = ROOM / max(bar.value for bars in groups.values() for bar in bars)
    parts, y = [_text(16, 26, title, weight=600), _text(16, 46, source)], 66
    for heading, bars in groups.items():
        parts.append(_text(16, y + 14, heading, weight=600))
        y += 20
        for label, value, colour, stale in bars:
            size = f'width="{value * scale:.1f}" height="{STEP - 4}"'
            fill = f'fill="{colour}"' + f' fill-opacity="0.3" stroke="{colour}"' * stale
            parts.append(f'<rect x="{LEFT}" y="{y}" {size} {fill}/>')
            parts.append(_text(LEFT - 8, y + 12, label, anchor="end"))
            parts.append(_text(LEFT + ROOM + 12, y + 12, number(value)))
            y += STEP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 14}" '
        f'viewBox="0 0 {WIDTH} {y + 14}" font-size="12" {FONT}>' + "".join(parts) + "</svg>\n"
    )


def _text(x: float, y: float, words: str, anchor: str = "start", weight: int = 400) -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{INK}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'
