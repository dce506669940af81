"""The store of findings: what is written is read, and nothing that was stored is lost."""

import os
import signal
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fastattn.files import replace
from fastattn.files.lock import locked
from fastattn.tuned import findings, store
from fastattn.tuned.environment import Environment
from fastattn.tuned.store import Store

HERE = Environment("A GPU", 4, "550.1", "2.13.0", "3.7.1", "0" * 16)
ROW = {"kernel": "forward", "calls": "plain", "element_size": 2, "BLOCK_D": 64, "BLOCK_M": 128}
DAY = "2026-01-31"


@pytest.fixture(autouse=True)
def warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_warned", set())


@pytest.fixture
def here(tmp_path: Path) -> Store:
    return Store(HERE, tmp_path)


def rows(here: Store) -> list[Any]:
    return [row["BLOCK_D"] for row in here.read("tiles")]


def test_a_row_replaces_the_one_of_its_key(here: Store) -> None:
    assert here.read("tiles") == []
    assert here.put("tiles", ROW, {**ROW, "BLOCK_D": 128})
    assert here.put("tiles", {**ROW, "BLOCK_M": 64, "date": DAY})
    first, second = here.read("tiles")
    assert first == {**ROW, "BLOCK_M": 64, "date": DAY}
    assert second["BLOCK_D"] == 128 and len(second["date"]) == len(DAY)
    assert here.read("backends") == []
    assert here.clear("tiles") and here.clear("tiles")
    assert here.read("tiles") == []


def test_a_second_writer_waits_for_the_first(here: Store) -> None:
    with ThreadPoolExecutor() as pool:
        with locked(here.folder / "lock"):
            second = pool.submit(here.put, "tiles", ROW)
            wait([second], timeout=0.1)
        assert second.result() and rows(here) == [64]


def test_rows_and_kinds_are_checked(here: Store) -> None:
    with pytest.raises(ValueError, match="a row of tiles lacks BLOCK_D"):
        here.put("tiles", {name: x for name, x in ROW.items() if name != "BLOCK_D"})
    with pytest.raises(ValueError, match=r"kind must be one of verification, tiles, .* got 'tile'"):
        here.read("tile")


def test_folder_of_the_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FASTATTN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert store.cache_folder() == tmp_path / "caches" / "fastattn"
    monkeypatch.setenv("FASTATTN_CACHE_DIR", str(tmp_path / "ours"))
    assert Store(HERE).folder == tmp_path / "ours" / "v1" / HERE.hash


def truncate(text: str) -> str:
    return text[: len(text) // 2]


DAMAGES: dict[str, tuple[Callable[[str], str], str]] = {
    "truncated": (truncate, "it is damaged"),
    "empty": (lambda text: "", "it is damaged"),
    "list": (lambda text: "[]", "it is damaged"),
    "version": (lambda text: text.replace('"format": 1', '"format": 2'), "its format is 2"),
    "row": (lambda text: text.replace("BLOCK_D", "BLOCK_E"), "lacks BLOCK_D"),
    "key": (lambda text: text.replace('"forward"', '["forward"]'), "no text or number"),
    "date": (lambda text: text.replace('"date"', '"data"'), "lacks date"),
    "moved": (lambda text: text.replace("550.1", "550.2"), "its environment is not"),
    "fields": (lambda text: text.replace('"driver"', '"pilot"'), "it is damaged"),
    "rows": (lambda text: text.replace('"tiles": [', '"tiles": ["a",'), "it is damaged"),
    "nested": (lambda text: "[" * 100_000, "it is damaged"),
    # Not too deep to be read, but to be written again.
    "levels": (lambda text: text.replace("128", "[" * 20 + "]" * 20), "more than 4 levels"),
    "bytes": (lambda text: "\udcff\udcfe\0", "it is damaged"),
    "environment": (lambda text: text.replace('"A GPU"', "[[1]]"), "it is damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_cannot_be_read_is_ignored_and_kept_aside(name: str, here: Store) -> None:
    damage, reason = DAMAGES[name]
    here.put("tiles", ROW)
    path = here.path("tiles")
    for count in range(2):
        damaged = damage(path.read_text()).encode(errors="surrogateescape")
        path.write_bytes(damaged)
        with pytest.warns(UserWarning, match=f"fastattn ignores .*tiles.json: .*{reason}"):
            assert here.read("tiles") == []
        assert here.read("tiles") == []  # and says so once
        with pytest.warns(UserWarning, match=f"moved .*tiles.json to tiles.damaged-{count}.json"):
            assert here.put("tiles", {**ROW, "BLOCK_D": 128})
        assert rows(here) == [128]
        assert path.with_name(f"tiles.damaged-{count}.json").read_bytes() == damaged
        store._warned.clear()


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A file stands where the folder would be, which stops root as well."""
    (tmp_path / "home").write_text("")
    here = Store(HERE, tmp_path / "home" / "fastattn")
    with pytest.warns(UserWarning, match="cannot store results: .*set FASTATTN_CACHE_DIR"):
        assert not here.put("tiles", ROW)
    assert not here.put("tiles", ROW)
    assert here.clear("tiles")


def test_full_disk_loses_nothing(here: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    here.put("tiles", ROW)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="No space left"):
        patch.setattr(os, "fsync", full)
        assert not here.put("tiles", {**ROW, "BLOCK_D": 128})
    assert rows(here) == [64]


def killed_at(line: int, task: Callable[[], object]) -> bool:
    """Whether a process was killed before it ran this line, counted in the package's files.

    One that is not runs the task to its end.
    """
    folders = tuple(str(Path(module.__file__).parent) for module in (store, replace))
    left = line

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(folders):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    with warnings.catch_warnings():
        # Of threads: the child does nothing that has to do with them.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        sys.settrace(trace)
        task()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_a_writer_that_is_killed_loses_nothing(here: Store) -> None:
    """20 times, at lines spread over a write; then the next one goes on."""
    here.put("tiles", ROW)
    lines = 0
    while killed_at(lines + 1, lambda: here.put("tiles", ROW)):
        lines += 8
    assert lines >= 40
    stored = [64]
    assert rows(here) == stored
    for i in range(20):
        row = {**ROW, "BLOCK_D": 1000 + i}
        assert killed_at(i * lines // 20, partial(here.put, "tiles", row))
        assert rows(here) in (stored, [*stored, 1000 + i]), i
        assert here.put("tiles", row)
        stored.append(1000 + i)
        assert rows(here) == stored
    assert {path.name for path in here.folder.iterdir()} == {"tiles.json"}


def test_export_changes_its_file_alone(here: Store, tmp_path: Path) -> None:
    """Files and links beside it, whatever their names; a link in its place is replaced."""
    here.put("tiles", ROW)
    folder = tmp_path / "mine"
    folder.mkdir()
    letter = tmp_path / "letter"
    for name in ("letter", "mine/out.partial", "mine/out.json.partial", "mine/.out.json.partial"):
        (tmp_path / name).write_text("dear")
    for name in ("out.json", ".writing-out.json"):
        (folder / name).symlink_to(letter)
    here.export(folder / "out.json")
    assert len(findings.read(folder / "out.json").rows["tiles"]) == 1
    assert not (folder / "out.json").is_symlink()
    others = {".writing-out.json", ".out.json.partial", "out.json.partial", "out.partial"}
    assert {path.name for path in folder.iterdir()} == {"out.json", *others}
    for kept in others:
        assert (folder / kept).read_text() == "dear"
    assert letter.read_text() == "dear"
