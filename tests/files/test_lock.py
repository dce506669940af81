"""Locks between processes, and atomic replacement: a crash leaves nothing that blocks anybody."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastattn.files.lock import LockedError, locked, locked_folder
from fastattn.files.replace import remove_partial, replacing

HOLD = """
import sys
from pathlib import Path
from fastattn.files.lock import locked

with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock `tmp_path / "lock"` until its input ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(command, text=True, cwd=tmp_path, **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_lock_ends_with_its_process(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(LockedError, match=f"held by process {holder.pid} on "), locked(path):
        raise AssertionError("two hold it")
    assert path.exists(), "it is the holder's"
    waited: list[bool] = []
    killed = threading.Event()

    def wait() -> None:
        with locked(path, wait=True):
            waited.append(killed.is_set())

    waiter = threading.Thread(target=wait)
    waiter.start()
    waiter.join(0.2)
    killed.set()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    waiter.join()
    assert waited == [True]
    assert list(tmp_path.iterdir()) == []


def test_what_a_crash_has_left_blocks_nobody(tmp_path: Path) -> None:
    path, ours = tmp_path / "new" / "folder" / "lock", f"process {os.getpid()} on "
    with locked(path):
        assert path.read_text().startswith(ours)
        with pytest.raises(LockedError), locked(path):
            pass
    assert list(tmp_path.iterdir()) == [], "with the folders that were made for it"
    (tmp_path / "lock").write_text("process 1 on another host, which has lost its power\n")
    with locked(tmp_path / "lock"):
        assert (tmp_path / "lock").read_text().startswith(ours)


def test_the_lock_of_a_file_that_was_removed_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder lets go of it, and removes it, between the opening and the locking."""
    path, real = tmp_path / "lock", fcntl.flock
    removed: list[bool] = []

    def flock(file: int, operation: int) -> None:
        if not removed:
            removed.append(True)
            path.unlink()
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(path):
        assert path.exists()
        with pytest.raises(LockedError), locked(path):
            pass


def test_a_folder_that_is_removed_before_its_lock_is_opened_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "folder" / "lock", os.open
    removed: list[bool] = []

    def opened(*arguments: Any) -> int:
        if not removed:
            removed.append(True)
            path.parent.rmdir()
        return real(*arguments)

    monkeypatch.setattr(os, "open", opened)
    with locked(path):
        assert path.exists()


def test_a_link_is_not_followed_and_missing_locks_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "letter").write_text("dear")
    (tmp_path / "link").symlink_to(tmp_path / "letter")
    with pytest.raises(OSError, match="symbolic link"), locked(tmp_path / "link"):
        pass
    assert (tmp_path / "letter").read_text() == "dear"

    def flock(file: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="no flock: No locks available"), locked(tmp_path / "a" / "b"):
        pass
    assert not (tmp_path / "a").exists()
    said: list[str] = []
    with locked_folder(tmp_path / "a", said.append):
        pass
    assert len(said) == 1 and "has no lock" in said[0] and "No locks available" in said[0]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file[1]"
    with replacing(path) as file:
        file.write("first ä")
        assert not path.exists()
    with pytest.raises(KeyboardInterrupt), replacing(path, "wb") as file:
        file.write(b"second")
        raise KeyboardInterrupt
    assert path.read_text("utf-8") == "first ä" and list(tmp_path.iterdir()) == [path]
    os.umask(before := os.umask(0))
    assert path.stat().st_mode & 0o777 == 0o666 & ~before, "as of any file that is made here"
    left = tmp_path / f".file[1].{'0a' * 8}.partial"
    kept = tmp_path / ".file[1].mine.partial"
    for each in (left, kept):
        each.touch()
    remove_partial(path)
    assert sorted(tmp_path.iterdir()) == [kept, path]
