"""Draws docs/pictures: masks as the library applies them, computed blocks, caches, charts,
terminals, and the project's mark.

python docs/tools/pictures.py            # write
python docs/tools/pictures.py --check    # exit 1 if a picture is not what the library does

A row of a table in docs/masks.md, docs/gallery.md or docs/selected.md that has a picture is drawn
from its own call: the weights that it gives every key, for the last row of the batch and its first
head. A last column of the gallery counts the blocks of 8 by 8 in which a pair is visible.
"""

import argparse
import re
import runpy
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastattn
from fastattn.bench.results import charts
from fastattn.bench.results.report import gpu_of
from fastattn.bench.results.tables import reports

DOCS = Path(__file__).resolve().parents[1]
RESULTS = DOCS.parent / "bench" / "results"
ROW = re.compile(
    r"^\| !\[[^]]*\]\(pictures/([\w-]+\.svg)\)[^|]* \| [^|]+ \| `([^`]+)` \|(?: (\d+) \|)?$", re.M
)
SETUP = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
SEEN, BEHIND = "#5c6bc0", "#9e9e9e"
LEVELS = 8


def weights_of(call: str, setup: Mapping[str, Any]) -> Tensor:
    """[T_q, T_k], the weights of a call of `attention`, each row's largest 1."""
    made: list[Tensor] = []

    def record(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if p := options.pop("dropout", 0.0):
            seed = torch.tensor([1, 2])
            B, H, T_q, T_k = *q.shape[:3], k.shape[2]
            made.append(fastattn.dropout_keep_mask(seed, p, B, H, T_q, T_k)[-1, 0].float())
        made.append(fastattn.attention_weights(q, k, **options)[-1, 0])
        return v

    torch.manual_seed(0)
    # Equal products, so that what differs is what the options do.
    equal = {"q": torch.ones_like(setup["q"]), "k": torch.zeros_like(setup["k"])}
    eval(call, {**setup, **equal, "attention": record})
    weights = made[0] * (made[1] > 0) if len(made) > 1 else made[0]
    return weights / weights.amax(-1, keepdim=True).clamp_min(1e-30)


def cells(weights: Tensor) -> Iterator[tuple[int, str]]:
    """For each level of weights above 0 a path of the cells that have it, a stretch at a time."""
    levels = (weights * LEVELS).ceil().int().tolist()
    for level in range(1, LEVELS + 1):
        path: list[str] = []
        for i, row in enumerate(levels):
            text = "".join("x" if x == level else " " for x in row)
            for m in re.finditer("x+", text):
                path.append(f"M{m.start()} {i}h{len(m[0])}v1h-{len(m[0])}z")
        if path:
            yield level, "".join(path)


def draw_mask(weights: Tensor) -> str:
    """A cell for each query, downwards, and key, to the right."""
    rows, columns = weights.shape
    scale = 128 / columns
    paths = "".join(
        f'<path d="{path}" fill="{SEEN}" fill-opacity="{level / LEVELS:g}"/>'
        for level, path in cells(weights)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="128" height="{max(rows * scale, 8):g}" '
        f'viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" shape-rendering="crispEdges">'
        f'<rect width="{columns}" height="{rows}" fill="{BEHIND}" fill-opacity="0.18"/>'
        f"{paths}</svg>\n"
    )


def tables() -> Iterator[tuple[str, Tensor, str]]:
    """Name, weights and count of blocks of each picture in the tables of the two pages."""
    for page in ("masks", "gallery"):
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        first = SETUP.search(text)
        assert first is not None
        with tempfile.TemporaryDirectory() as folder:  # Triton reads functions from their file
            path = Path(folder) / "setup.py"
            path.write_text(first[1], encoding="utf-8")
            setup = runpy.run_path(str(path))
            for name, call, count in ROW.findall(text):
                yield name, weights_of(call, setup), count


def visited(weights: Tensor) -> int:
    """The number of blocks of 8 by 8 in which a weight is not 0."""
    return int((weights > 0).unfold(0, 8, 8).unfold(1, 8, 8).flatten(2).any(-1).sum())


def lists() -> dict[str, str]:
    """The pictures of docs/selected.md by their names: with one-hot values, o is the weights."""
    text = (DOCS / "selected.md").read_text(encoding="utf-8")
    first = SETUP.search(text)
    assert first is not None
    torch.manual_seed(0)
    setup: dict[str, Any] = {}
    exec(first[1], setup)
    k = setup["k"]
    setup["v"] = torch.eye(k.shape[2]).expand(*k.shape[:2], -1, -1)
    rows = ROW.findall(text)
    return {name: draw_mask((eval(call, setup)[-1, 0] > 0).float()) for name, call, _ in rows}


THEMES = {
    "light": {"ink": "#1f2430", "faint": "#6b7280", "line": "#9aa0aa", "box": "#f3f4f8"},
    "dark": {"ink": "#e6e8ee", "faint": "#a0a6b2", "line": "#6b7280", "box": "#20242e"},
}
BLOCKS, CELLS = 12, 4
MASK = {"causal": True, "window": 17, "keep_first": 4}


def overview(theme: str) -> str:
    """Fused and skipped work: the blocks of a real mask, and the work on one of them."""
    ink, faint, line, box = (THEMES[theme][x] for x in ("ink", "faint", "line", "box"))
    T = BLOCKS * CELLS
    q = torch.zeros(1, 1, T, 16)
    seen = fastattn.attention_weights(q, q, **MASK)[0, 0] > 0
    of_blocks = seen.view(BLOCKS, CELLS, BLOCKS, CELLS).transpose(1, 2).flatten(2)
    full, some = of_blocks.all(-1).tolist(), of_blocks.any(-1).tolist()
    parts: list[str] = []
    size, left, top = 18, 24, 56

    def text(x: float, y: float, words: str, colour: str = ink, weight: int = 400) -> None:
        style = f'x="{x}" y="{y}" fill="{colour}" font-weight="{weight}"'
        parts.append(f"<text {style}>{words}</text>")

    def rect(x: float, y: float, w: float, h: float, style: str) -> None:
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" {style}/>')

    text(left, 24, "Which blocks are computed", weight=600)
    text(left, 42, "causal=True, window=17, keep_first=4", faint)
    for i in range(BLOCKS):
        for j in range(BLOCKS):
            x, y = left + j * size, top + i * size
            fill = f'fill="{SEEN}"' if full[i][j] else 'fill="none"'
            rect(x, y, size, size, f'{fill} stroke="{line}" stroke-width="0.6"')
            if some[i][j] and not full[i][j]:
                block = of_blocks[i, j].view(CELLS, CELLS).float()
                path = "".join(stretch for _, stretch in cells(block))
                scale = size / CELLS
                move = f'transform="translate({x} {y}) scale({scale:g})"'
                parts.append(f'<path {move} d="{path}" fill="{SEEN}" fill-opacity="0.55"/>')
    y = top + BLOCKS * size + 20
    count = {
        "full": sum(map(sum, full)),
        "some": sum(map(sum, some)) - sum(map(sum, full)),
        "none": BLOCKS * BLOCKS - sum(map(sum, some)),
    }
    rect(left, y - 10, 11, 11, f'fill="{SEEN}"')
    text(left + 17, y, f"{count['full']} full: no mask is looked at")
    rect(left, y + 9, 11, 11, f'fill="{SEEN}" fill-opacity="0.45"')
    text(left + 17, y + 19, f"{count['some']} on a boundary")
    rect(left, y + 28, 11, 11, f'fill="none" stroke="{line}"')
    text(left + 17, y + 38, f"{count['none']} skipped: neither read nor computed")

    x = 340
    text(x, 24, "What one kernel does with a block", weight=600)
    text(x, 42, "scores and weights live in registers, T x T of nothing is stored", faint)
    steps = [
        ("q, k, v", "loaded block by block, K/V heads not expanded"),
        ("scores", "scale · q kᵀ + relative keys"),
        ("score rules", "softcap, ALiBi, biases, your own score_mod"),
        ("masks", "in blocks on a boundary only, your own mask_mod too"),
        ("online softmax", "each row's running maximum and sum, sinks, dropout"),
        ("o, lse", "written once; the backward needs no more"),
    ]
    for n, (name, about) in enumerate(steps):
        y = top + n * 45
        rect(x, y, 520, 34, f'rx="6" fill="{box}" stroke="{line}" stroke-width="0.8"')
        text(x + 14, y + 22, name, weight=600)
        text(x + 130, y + 22, about, faint)
        if n + 1 < len(steps):
            arrow = f"M{x + 260} {y + 35}v9m-4 -4l4 4l4 -4"
            parts.append(f'<path d="{arrow}" stroke="{line}" fill="none"/>')
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="884" height="345" viewBox="0 0 884 345" '
        f'{charts.FONT} font-size="13">' + "".join(parts) + "</svg>\n"
    )


def kept_memory() -> str:
    """Memory that the tutorial's model keeps for the backward pass, by its own blocks."""
    page = (DOCS / "tutorials" / "hugging_face.md").read_text(encoding="utf-8")
    make, count = SETUP.findall(page)[:2]
    count = count.partition("\n\n\neager")[0]
    values: dict[str, Any] = {}
    exec(make + count, values)
    groups: dict[str, list[charts.Bar]] = {}
    for T in (128, 256, 512):
        values["tokens"] = torch.randint(3, 256, (2, T))
        bars = groups[f"{T} tokens"] = []
        for name, colour in (("eager", charts.INK), ("fastattn", charts.SHOWN["fastattn"][0])):
            values["model"].set_attn_implementation(name)
            kept, _ = values["kept_for_backward"](values["model"])
            bars.append(charts.Bar(name, kept / 2**20, colour))
    return charts.chart("Kept for the backward pass, MiB", "counted, 2 layers, 2 rows", groups)


def pictures() -> dict[str, str]:
    """All pictures by their names."""
    every = reports(RESULTS)
    # Of the GPU with the most figures.
    gpus = Counter(gpu_of(data) for data in every for _ in data["results"])
    of_one = [x for x in every if gpu_of(x) == gpus.most_common(1)[0][0]]
    measured = charts.measured(*of_one) | {"measured-overview": charts.overview(*of_one)}
    drawn = {f"overview-{theme}.svg": overview(theme) for theme in THEMES}
    drawn |= {f"{name}.svg": chart for name, chart in measured.items()}
    drawn["kept-for-backward.svg"] = kept_memory()
    terminal = runpy.run_path(str(Path(__file__).with_name("terminal.py")))
    for name in terminal["COMMANDS"]:
        record = (terminal["RECORDED"] / f"{name}.txt").read_text(encoding="utf-8")
        drawn[f"terminal-{name}.svg"] = terminal["draw"](record)
    drawn |= runpy.run_path(str(Path(__file__).with_name("caches.py")))["caches"]() | lists()
    masks = {name: draw_mask(weights) for name, weights, _ in tables()}
    return drawn | masks | runpy.run_path(str(Path(__file__).with_name("brand.py")))["brand"](masks)


def main(show: Callable[[str], Any] = sys.stderr.write) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    arguments = parser.parse_args()
    folder = DOCS / "pictures"
    drawn = pictures()
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.svg")}
    wrong = sorted(name for name in drawn.keys() | there if drawn.get(name) != there.get(name))
    if arguments.check:
        show("".join(f"{name} is not what the library does\n" for name in wrong))
        return int(bool(wrong))
    folder.mkdir(exist_ok=True)
    for name in wrong:
        if name in drawn:
            (folder / name).write_text(drawn[name], encoding="utf-8")
        else:
            (folder / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
