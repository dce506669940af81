"""Commands that end with their arguments end before torch is imported."""

import json
import subprocess
import sys
from pathlib import Path

# What a shell starts: its arguments, and the exit status.
COMMANDS = {
    "--help": 0,
    "train --help": 0,
    "generate --help": 0,
    "train --stpes 3": 2,
    "train --model gtp": 2,
    "fly": 2,
    "generate --checkpoint x --tokens many": 2,
    "generate --checkpoint x --draft y": 2,
    "generate --checkpoint x --beams 2 --top-k 3": 1,
    "generate --checkpoint x --prompts-file nowhere": 1,
    "prepare --out x": 2,
}
PROCESS = """
import json, sys
sys.argv = ["/usr/bin/fastattn"]
from fastattn.cli import main

found = {}
for command in json.loads(sys.stdin.read()):
    found[command] = main(command.split()), "torch" in sys.modules
import fastattn
used = fastattn.attention, fastattn.KVCache
later = "torch" in sys.modules, [hasattr(fastattn, name) for name in fastattn.__all__]
with open("found.json", "w") as file:
    json.dump([found, *later], file)
"""


def test_arguments_are_checked_without_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROCESS]
    subprocess.run(command, input=json.dumps(list(COMMANDS)), text=True, cwd=tmp_path, check=True)
    actual, torch_later, names = json.loads((tmp_path / "found.json").read_text())
    assert actual == {command: [status, False] for command, status in COMMANDS.items()}
    assert torch_later and all(names), "a name that is used brings them all"


def test_python_m_is_the_command_as_well(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "fastattn", "train", "--stpes", "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "fastattn" in imported and not {"torch", "rich.console"} & imported
