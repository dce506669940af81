"""Pictures of terminals: commands and their output, recorded once, drawn by rich.

python docs/tools/terminal.py training        # type the commands again: docs/recorded/training.txt
make dist && python docs/tools/terminal.py first    # an install, from the wheel in dist/

`python docs/tools/pictures.py` draws the records. Their figures are those of the machine that they
were recorded on.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

CHECKOUT = Path(__file__).resolve().parents[2]
RECORDED = CHECKOUT / "docs" / "recorded"
COLUMNS = 96
SWAP = "import torch, fastattn; print(fastattn.swap(torch.nn.TransformerEncoderLayer(64, 4)))"
COMMANDS = {
    "training": [
        "fastattn train --out runs/small --tokenizer bpe --embed-dim 192 --context 128 "
        "--steps 2000",
        "fastattn generate --checkpoint runs/small --prompt 'def __init__(self' --tokens 150 "
        "--temperature 0.6 --seed 0",
        "fastattn info | sed 1,2d    # what runs here, and why",
    ],
    "first": [
        "python3 -m venv try",
        "try/bin/pip install -qq fastattn-*.whl",
        f"try/bin/python -c '{SWAP}'",
        "try/bin/fastattn bench",
    ],
}
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
    # Of many lines of progress, the first ones and the last.
    record = re.sub(
        r"^((?:step .*\n){4})(?:step .*\n){4,}((?:step .*\n){4})", r"\1...\n\2", record, flags=re.M
    )
    for line in record.splitlines():
        console.print(Text(line, style="bold cyan" if line.startswith("$ ") else ""))
    drawn = console.export_svg(theme=THEME, code_format=FORMAT, title="", unique_id="terminal")
    return "".join(f"{line.rstrip()}\n" for line in drawn.splitlines())


def record(name: str) -> str:
    """Answers of a session's commands in a folder that has the wheel, and the time of all."""
    programs = str(Path(sys.executable).parent)
    environment = os.environ | {
        "PATH": programs + os.pathsep + os.environ["PATH"],
        "PYTHONUNBUFFERED": "1",  # or its two streams come out of order
    }
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        for wheel in (CHECKOUT / "dist").glob("*.whl"):
            shutil.copy(wheel, folder)
        start = time.monotonic()
        for command in COMMANDS[name]:
            done = subprocess.run(
                ["bash", "-o", "pipefail", "-c", command],
                cwd=folder,
                env=environment,
                check=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            parts.append(f"$ {command}\n{done.stdout.rstrip()}".rstrip() + "\n")
        text = "\n".join(parts)
        assert folder not in text and programs not in text
    return f"{text}\n[{time.monotonic() - start:.0f} s in all]\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        (RECORDED / f"{name}.txt").write_text(record(name), encoding="utf-8")
