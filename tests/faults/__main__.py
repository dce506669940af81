"""Plants faults in a copy of the checkout, one at a time, and reports which tests of the gate fail.

    python tests/faults                     every fault of planted/*.txt
    python tests/faults causal softcap      those whose name contains one of these words
    python tests/faults --list              does every patch apply, and was any not caught?
    python tests/faults --record            and keep the verdicts in verdicts.tsv

Tests run in copies; of the working tree only verdicts.tsv changes. For each fault the test that saw
it last runs first, then those of its area, to the first failure. That test must pass in the copy
without the fault, or it proves nothing.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

from planted import Fault, Verdict, areas_of, changed, read, verdicts, write_verdicts

CHECKOUT = Path(__file__).resolve().parents[2]
# The test of the faults themselves fails on each of them.
PYTEST = ["-q", "--tb=no", "-p", "no:cacheprovider", "--benchmark-disable",
          "--deselect=tests/test_layout.py::test_every_planted_fault_still_applies"]  # fmt: skip


class Copy:
    """The checkout's files in a temporary folder, and an environment in which they are imported."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"],
            cwd=CHECKOUT, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            source, target = CHECKOUT / name, self.root / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read_bytes())
        # In the shape of the installed package, before the finder of an editable install.
        package = self.root / "fastattn"
        (package / "kernels").symlink_to(self.root / "kernels")
        (package / "bench").symlink_to(self.root / "bench" / "harness")
        links = folder / "links"
        links.mkdir()
        (links / "fastattn").symlink_to(package)
        self.environment = {
            **os.environ, "PYTHONPATH": str(links), "OMP_NUM_THREADS": "1",
            "TRITON_CACHE_DIR": str(folder / "triton"),
        }  # fmt: skip
        where = "import fastattn, fastattn.kernels as k; print(fastattn.__file__, k.__file__)"
        actual = self._run([sys.executable, "-c", where], 120, folder).stdout.split()
        assert all(Path(x).resolve().is_relative_to(self.root) for x in actual), actual
        self._clock = 0

    def _run(
        self, command: list[str], limit: float, where: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=where or self.root, env=self.environment, timeout=limit,
            capture_output=True, text=True,
        )  # fmt: skip

    def write(self, name: str, text: str) -> None:
        """Replace a file's text; later than all before, so that no compiled file is stale."""
        path = self.root / name
        path.write_text(text, encoding="utf-8")
        self._clock += 5
        stamp = path.stat().st_mtime + self._clock
        os.utime(path, (stamp, stamp))

    def _pytest(self, limit: float, *arguments: str) -> subprocess.CompletedProcess[str]:
        # `python -m pytest` would put the copy's own folder on the path.
        program = str(Path(sys.executable).with_name("pytest"))
        return self._run([program, *PYTEST, *arguments], limit)

    def passing(self, tests: list[str], limit: float) -> list[str]:
        """The tests that pass, in one process; none if one of them has another name now."""
        lines = self._pytest(limit, "-rp", *tests).stdout.splitlines() if tests else []
        return [rest for kind, _, rest in (x.partition(" ") for x in lines) if kind == "PASSED"]

    def failing(self, tests: list[str], limit: float) -> str | None:
        """The first test that fails, or None.

        Raises:
            subprocess.TimeoutExpired: they took longer than `limit` seconds.
            RuntimeError: pytest could not run them.
        """
        done = self._pytest(limit, "-x", "-rfE", *tests)
        # 4: a test has another name now.
        renamed = done.returncode == 4 and "ERROR: not found" in done.stderr
        if done.returncode in (0, 5) or renamed:
            return None
        for line in done.stdout.splitlines():
            kind, _, rest = line.partition(" ")
            if kind in ("FAILED", "ERROR") and rest.strip():
                return rest.split(" - ")[0].strip()
        raise RuntimeError(
            f"pytest ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}"
        )


def judge(copy: Copy, fault: Fault, limit: float, sound: dict[str, bool], last: str) -> Verdict:
    """Plant one fault and say what became of it. last: the test that saw it before, or ""."""
    whole = (copy.root / fault.file).read_text(encoding="utf-8")
    copy.write(fault.file, changed(whole, fault))
    before = [[x] for x in dict.fromkeys((last, last.partition("::")[0])) if x]
    runs = filter(None, (*before, *areas_of(fault, copy.root)))
    try:
        by = next(filter(None, (copy.failing(tests, limit) for tests in runs)), None)
    except subprocess.TimeoutExpired:
        return Verdict("hung")
    finally:
        copy.write(fault.file, whole)
    if by is None:
        return Verdict("survived")
    if by not in sound:
        sound[by] = copy.failing([by], limit) is None
    return Verdict("caught" if sound[by] else "fails without the fault", by)


def judge_all(
    faults: list[Fault], workers: int, limit: float, known: dict[str, Verdict]
) -> Iterator[tuple[Fault, Verdict]]:
    """Judge faults in as many copies as there are workers; known: verdicts of another time.

    The tests that saw them then run first, without a fault.
    """
    sound: dict[str, bool] = {}
    by = {x.name: known[x.name].by for x in faults if x.name in known}
    last = sorted({x for x in by.values() if "::" in x})
    copies: SimpleQueue[Copy] = SimpleQueue()

    @contextmanager
    def a_copy() -> Iterator[Copy]:
        copy = copies.get()
        try:
            yield copy
        finally:
            copies.put(copy)

    def without_a_fault(tests: list[str]) -> list[str]:
        with a_copy() as copy, suppress(subprocess.TimeoutExpired):
            return copy.passing(tests, limit)
        return []

    def verdict_of(fault: Fault) -> Verdict:
        with a_copy() as copy:
            return judge(copy, fault, limit, sound, by.get(fault.name, ""))

    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for number in range(workers):
            copies.put(Copy(Path(folder) / str(number)))
        with ThreadPoolExecutor(workers) as pool:
            shares = pool.map(without_a_fault, (last[n::workers] for n in range(workers)))
            sound.update((x, True) for share in shares for x in share)
            yield from zip(faults, pool.map(verdict_of, faults), strict=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of names of faults; default: all")
    parser.add_argument("--list", action="store_true", help="verdicts that are known; run nothing")
    parser.add_argument("--record", action="store_true", help="keep the verdicts in verdicts.tsv")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for a run of tests")
    parser.add_argument("--workers", type=int, default=1, help="copies that run at once")
    given = parser.parse_args()
    every = read()
    faults = [x for x in every if not given.words or any(w in x.name for w in given.words)]
    for fault in faults:
        changed((CHECKOUT / fault.file).read_text(encoding="utf-8"), fault)
    known = verdicts()
    if given.list:
        say(*(f"{x.name}: {x.file}\n" for x in faults), f"{len(faults)} faults")
    else:
        for fault, verdict in judge_all(faults, given.workers, given.limit, known):
            say(fault.name, fault.file, *verdict)
            known[fault.name] = verdict
            if given.record:
                write_verdicts({x.name: known[x.name] for x in every if x.name in known})
    if missed := not_caught(faults, known):
        sys.exit(f"not caught: {', '.join(missed)}")


def not_caught(faults: list[Fault], known: dict[str, Verdict]) -> list[str]:
    """Names of faults that were judged and not caught, or whose test file is gone."""

    def holds(verdict: Verdict) -> bool:
        there = (CHECKOUT / verdict.by.partition("::")[0]).exists()
        return verdict.word in ("", "caught") and there

    return [x.name for x in faults if not holds(known.get(x.name, Verdict("")))]


def say(*parts: object) -> None:
    """A line, at once."""
    sys.stdout.write("  ".join(map(str, parts)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
