"""The project's mark, its wordmark, and the card that other sites show for a link.

python docs/tools/brand.py    # docs/pictures/social.png, from social.svg; needs chromium

The mark is a mask of five queries and keys: causal, a window of two keys and the first key.
"""

import sys
from pathlib import Path

import torch

import fastattn
from fastattn.bench.results.charts import FONT

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
TILE, NIGHT = "#3f51b5", "#161a2b"
INK = {"light": "#1f2430", "dark": "#e6e8ee"}
CARD = (1280, 640)
PROMISE = ("Fused attention", "for the mask you need")
SHOWN = ("documents", "keep-first", "mod-natten-2d", "mod-tree", "mod-block-diffusion", "stride")


def svg(width: float, height: float, inside: str) -> str:
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{inside}</svg>\n'


def mark(size: float) -> str:
    """A tile with the mask's cells, at the origin."""
    q = torch.zeros(1, 1, 5, 16)
    seen = fastattn.attention_weights(q, q, causal=True, window=2, keep_first=1)[0, 0] > 0
    cells = "".join(
        f'<rect x="{4.5 + 4.8 * j:g}" y="{4.5 + 4.8 * i:g}" width="3.8" height="3.8" rx="0.8" '
        f'fill="#fff" fill-opacity="{1 if x else 0.22:g}"/>'
        for i, row in enumerate(seen.tolist())
        for j, x in enumerate(row)
    )
    tile = f'<rect width="32" height="32" rx="7" fill="{TILE}"/>'
    return f'<g transform="scale({size / 32:g})">{tile}{cells}</g>'


def word(x: float, y: float, size: float, colour: str, text: str, weight: int = 700) -> str:
    style = f'{FONT} font-size="{size:g}" font-weight="{weight}" fill="{colour}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{text}</text>'


def card(masks: dict[str, str]) -> str:
    """Name, promise and a strip of masks."""
    parts = [f'<rect width="{CARD[0]}" height="{CARD[1]}" fill="{NIGHT}"/>']
    parts.append(f'<g transform="translate(80 72)">{mark(88)}</g>')
    parts.append(word(192, 136, 64, "#fff", "fastattn"))
    parts += (word(80, 262 + 68 * n, 56, "#fff", line, 600) for n, line in enumerate(PROMISE))
    parts.append(word(80, 394, 30, "#a7b0d8", "Exact softmax attention for PyTorch in Triton", 400))
    for n, name in enumerate(SHOWN):
        place = f'<svg x="{80 + 192 * n}" y="440" width="160" height="160"'
        picture = masks[f"{name}.svg"].strip()
        place += picture.removeprefix("<svg").replace(' width="128" height="128"', "", 1)
        parts.append(place.replace("#5c6bc0", "#8c9eff").replace("#9e9e9e", "#c5cae9"))
    return svg(*CARD, "".join(parts))


def brand(masks: dict[str, str]) -> dict[str, str]:
    """The pictures by their names; `masks` are those of the documents."""
    words = {
        f"wordmark-{theme}.svg": svg(190, 40, mark(40) + word(52, 30, 30, ink, "fastattn"))
        for theme, ink in INK.items()
    }
    return words | {"mark.svg": svg(32, 32, mark(32)), "social.svg": card(masks)}


def main() -> int:
    from screenshots import browser

    page, picture = PICTURES / "social.svg", PICTURES / "social.png"
    size = f"--window-size={CARD[0]},{CARD[1]}"
    with browser(size, f"--screenshot={picture}", page.as_uri()) as process:
        return process.wait(timeout=120)


if __name__ == "__main__":
    sys.exit(main())
