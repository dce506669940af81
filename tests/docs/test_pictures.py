"""The pictures of the documents are what the library does now."""

import importlib.util
import re
import shlex
import struct
from pathlib import Path
from types import ModuleType

import pytest

from fastattn.cli.main import build_parser

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"


def tool(name: str) -> ModuleType:
    path = PICTURES.parent / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"docs_{name}", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    return tool("pictures")


def test_pictures_are_those_of_today(drawing: ModuleType, on_torch: None) -> None:
    """After a change that is wanted, `python docs/tools/pictures.py` draws them again."""
    drawn = drawing.pictures()
    there = {path.name: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")}
    assert len(drawn) > 15 and sorted(drawn) == sorted(there)
    assert [name for name in drawn if drawn[name] != there[name]] == []


def test_the_gallery_counts_the_blocks_that_it_shows(drawing: ModuleType, on_torch: None) -> None:
    rows = {name: (count, str(drawing.visited(x))) for name, x, count in drawing.tables() if count}
    assert len(rows) >= 12
    assert {name: pair for name, pair in rows.items() if pair[0] != pair[1]} == {}
    shown = set(re.findall(r"mods\.(\w+)", (PICTURES.parent / "gallery.md").read_text()))
    names = (PICTURES.parents[1] / "tests" / "public_names.txt").read_text()
    assert set(re.findall(r"^fastattn\.mods\.(\w+)", names, re.M)) - shown == {
        "bind",
        "from_python",
        "or_masks",
    }


def test_the_front_pages_masks_have_the_arguments_of_their_pictures(drawing: ModuleType) -> None:
    rows = {
        name: call
        for page in ("masks", "gallery")
        for name, call, _ in drawing.ROW.findall((PICTURES.parent / f"{page}.md").read_text())
    }
    page = (PICTURES.parent / "index.md").read_text(encoding="utf-8")
    shown = re.findall(r"^- \[!\[[^]]+\]\(pictures/([^)]+)\)\]\(\S+\)\n  `([^`]+)`$", page, re.M)
    assert len(shown) == page.count("\n- [!") >= 12
    assert [name for name, argument in shown if argument not in rows[name]] == []


def test_the_card_of_the_site_has_its_size() -> None:
    """A change of social.svg shows after `python docs/tools/brand.py`."""
    header = (PICTURES / "social.png").read_bytes()[:24]
    assert struct.unpack(">8s8xII", header) == (b"\x89PNG\r\n\x1a\n", 1280, 640)


@pytest.mark.parametrize("name", ["training", "first"])
def test_the_terminals_commands_are_those_of_today(name: str) -> None:
    """After a change of them, `python docs/tools/terminal.py` types them again."""
    terminal = tool("terminal")
    record = (terminal.RECORDED / f"{name}.txt").read_text(encoding="utf-8")
    assert re.findall(r"^\$ (.*)$", record, re.M) == terminal.COMMANDS[name]
    commands = [shlex.split(command.partition(" |")[0]) for command in terminal.COMMANDS[name]]
    ours = [command for command in commands if command[0].endswith("fastattn")]
    assert ours != []
    for _, *arguments in ours:
        assert callable(build_parser().parse_args(arguments).command)
    # Nothing of the machine that it was recorded on.
    assert re.findall(r"(?<![\w.])/\w+|Linux-", record.replace("try/bin/", "")) == []
