"""Plants faults in a copy of the checkout, one at a time, and reports which tests of the gate fail.

    python tests/faults                     every fault of planted/*.txt
    python tests/faults causal softcap      those whose name contains one of these words
    python tests/faults --list              names and files; does every patch still apply?

The working tree is not touched: tests run in a copy, which is first on the path. For each fault the
tests that are meant to see it run first, then those of its area, to the first failure. That test
must pass in the copy without the fault, or it proves nothing.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from planted import Fault, areas_of, changed, read

CHECKOUT = Path(__file__).resolve().parents[2]
PYTEST = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "--benchmark-disable", "-rfE"]


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

    def failing(self, tests: list[str], limit: float) -> str | None:
        """The first test that fails, or None.

        Raises:
            subprocess.TimeoutExpired: they took longer than `limit` seconds.
            RuntimeError: pytest could not run them.
        """
        # `python -m pytest` would put the copy's own folder on the path.
        program = str(Path(sys.executable).with_name("pytest"))
        done = self._run([program, *PYTEST, *tests], limit)
        if done.returncode in (0, 5):
            return None
        for line in done.stdout.splitlines():
            kind, _, rest = line.partition(" ")
            if kind in ("FAILED", "ERROR") and rest.strip():
                return rest.split(" - ")[0].strip()
        raise RuntimeError(
            f"pytest ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}"
        )


def used() -> float:
    """Seconds of processors that finished children have taken."""
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return of_children.ru_utime + of_children.ru_stime


def judge(copy: Copy, fault: Fault, limit: float, sound: dict[str, bool]) -> dict[str, object]:
    """The verdict on one fault: caught, survived or hung, by which test, in how much CPU time."""
    whole = (copy.root / fault.file).read_text(encoding="utf-8")
    copy.write(fault.file, changed(whole, fault))
    before = used()
    verdict: dict[str, object] = {"file": fault.file, "verdict": "survived"}
    try:
        for tests in (list(fault.meant), *areas_of(fault, copy.root)):
            by = copy.failing(tests, limit) if tests else None
            if by is not None:
                verdict |= {"verdict": "caught", "by": by}
                break
    except subprocess.TimeoutExpired:
        verdict["verdict"] = "hung"
    finally:
        copy.write(fault.file, whole)
    verdict["seconds"] = round(used() - before)
    by = verdict.get("by")
    if isinstance(by, str):
        if by not in sound:
            sound[by] = copy.failing([by], limit) is None
        if not sound[by]:
            verdict["verdict"] = "fails without the fault"
    return verdict


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of names of faults; default: all")
    parser.add_argument("--list", action="store_true", help="check that patches apply, run nothing")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for a run of tests")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="every N-th, from the I-th")
    parser.add_argument("--out", type=Path, help="JSON to write, kept up to date after each fault")
    given = parser.parse_args()
    faults = [x for x in read() if not given.words or any(w in x.name for w in given.words)]
    for fault in faults:
        changed((CHECKOUT / fault.file).read_text(encoding="utf-8"), fault)
    index, count = map(int, given.share.split("/"))
    faults = faults[index::count]
    if given.list:
        say(*(f"{x.name}: {x.file}\n" for x in faults), f"{len(faults)} faults")
        return
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=CHECKOUT, capture_output=True, text=True
    ).stdout.strip()
    results: dict[str, object] = {}
    sound: dict[str, bool] = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Copy(Path(folder))
        for fault in faults:
            verdict = judge(copy, fault, given.limit, sound)
            results[fault.name] = verdict
            say(fault.name, *verdict.values())
            if given.out:
                written = {"commit": commit, "faults": results}
                given.out.write_text(json.dumps(written, indent=1) + "\n")
    caught = sum(x["verdict"] == "caught" for x in results.values() if isinstance(x, dict))
    say(f"{caught} of {len(results)} caught at {commit}")


def say(*parts: object) -> None:
    """A line, at once."""
    sys.stdout.write("  ".join(map(str, parts)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
