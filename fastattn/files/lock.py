"""Locks between processes, released when a process ends or crashes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO


class LockedError(OSError):
    """Error: a lock is held, by this process or by another; the message names the process."""


# Name of a folder's lock.
LOCK = ".fastattn.lock"


@contextmanager
def locked_folder(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a folder while a command writes there.

    Without locks, as on some network file systems, it says so and goes on.

    Raises:
        LockedError: another command writes there.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / LOCK))
        except LockedError as error:
            raise LockedError(
                f"{folder} is in use ({error}): wait for that to end, or choose another folder"
            ) from None
        except OSError as error:
            say(f"{folder} has no lock ({error}): see that nothing else writes there")
        yield


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a file. The file and its new folders are removed at the end.

    The lock ends with its process: a file left by a crash blocks no process.

    Args:
        path: the file; contains the process's number and host, for people.
        wait: wait until it is free, instead of raising.

    Raises:
        LockedError: the lock is held, and wait is False.
        OSError: the file cannot be made or is a link, or the system has no locks.
    """
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        with _acquired(path, wait):
            try:
                yield
            finally:
                # Removed while locked: later processes make a new file.
                path.unlink(missing_ok=True)
    finally:
        for folder in made:
            try:
                folder.rmdir()
            except OSError:
                break


def _acquired(path: Path, wait: bool) -> BinaryIO:
    """Open and lock the file."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        # To read and to append to; an error if it is a link.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        try:
            file = os.fdopen(os.open(path, flags, 0o666), "a+b")
        except FileNotFoundError:
            continue  # another process has just removed its folder
        try:
            _lock(file, wait)
            # The former holder may have removed it during the wait: then it locks nothing.
            if _is_at(file, path):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                file.flush()
                return file
        except BaseException as error:
            if isinstance(error, OSError) and not isinstance(error, LockedError):
                path.unlink(missing_ok=True)  # no other process holds it
            file.close()
            raise
        file.close()


def _lock(file: BinaryIO, wait: bool) -> None:
    try:
        import fcntl
    except ImportError:
        raise OSError("this system has no flock") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(200).decode("utf-8", "replace").strip()
        raise LockedError(f"held by {holder or 'another process'}") from None
    except OSError as error:
        raise OSError(error.errno, f"no flock: {error.strerror}") from None


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False
