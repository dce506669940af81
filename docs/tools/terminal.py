"""A terminal's picture: commands and what they answered, recorded once, drawn by rich.

python docs/tools/terminal.py    # type the commands again: docs/recorded/terminal.txt

`python docs/tools/pictures.py` draws the record. Its figures are those of the machine that it was
recorded on.
"""

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

RECORD = Path(__file__).resolve().parents[1] / "recorded" / "terminal.txt"
COLUMNS = 96
COMMANDS = [
    "fastattn train --out runs/small --tokenizer bpe --layers 2 --embed-dim 96 --steps 200",
    "fastattn generate --checkpoint runs/small --prompt 'def __init__(self' --tokens 80 --seed 0",
    "fastattn info | sed 1,2d    # what runs here, and why",
]
THEME = TerminalTheme(
    (32, 36, 46),
    (230, 232, 238),
    # Black, red, green, yellow, blue, magenta, cyan, white.
    [
        *((32, 36, 46), (213, 94, 0), (0, 158, 115), (230, 159, 0)),
        *((0, 114, 178), (204, 121, 167), (86, 180, 233), (230, 232, 238)),
    ],
)
# Without rich's fonts, which a browser would fetch from elsewhere.
FORMAT = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def draw(record: str) -> str:
    """The picture of a record, in which lines that begin with "$ " were typed."""
    # Not by what the environment says of colours and of the terminal.
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor", _environ={}
    )
    for line in record.splitlines():
        console.print(Text(line, style="bold cyan" if line.startswith("$ ") else ""))
    drawn = console.export_svg(theme=THEME, code_format=FORMAT, title="", unique_id="terminal")
    return "".join(f"{line.rstrip()}\n" for line in drawn.splitlines())


def record() -> str:
    """Answers of the commands in an empty folder."""
    programs = str(Path(sys.executable).parent)
    environment = os.environ | {
        "PATH": programs + os.pathsep + os.environ["PATH"],
        "PYTHONUNBUFFERED": "1",  # or its two streams come out of order
    }
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            done = subprocess.run(
                ["bash", "-o", "pipefail", "-c", command],
                cwd=folder,
                env=environment,
                check=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            parts.append(f"$ {command}\n{done.stdout.rstrip()}\n")
        text = "\n".join(parts)
        assert folder not in text and programs not in text
    return text


if __name__ == "__main__":
    RECORD.write_text(record(), encoding="utf-8")
