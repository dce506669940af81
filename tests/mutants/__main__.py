"""Makes mutants by rule in a copy of the checkout, and reports those that no test sees.

    python tests/mutants --map                 which tests run which line: as long as two gates
    python tests/mutants --count 200 --seed 7  some of all, at random
    python tests/mutants kernels/rules/mask.py fastattn/cache
    python tests/mutants --since main          on the lines that a change touches

The same command goes on where it was interrupted, and judges again what no test saw. cr-report and
cr-html read its session, build/mutants/session.sqlite.
"""

import argparse
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from zlib import crc32

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code, use_mutation
from cosmic_ray.testing import run_tests
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult
from coverage_map import CoverageMap
from operators import changes_nothing, operators

CHECKOUT = Path(__file__).resolve().parents[2]
BUILD = CHECKOUT / "build" / "mutants"
MUTATED = ("fastattn", "kernels", "bench/harness")
_PYTEST = "-p no:cacheprovider --benchmark-disable -q"


def copy_checkout(folder: Path) -> None:
    """Copy the checkout's files to folder/checkout, in the shape of the installed package."""
    listed = _git("ls-files", "-co", "--exclude-standard", "-z")
    root, links = folder / "checkout", folder / "links"
    for name in filter(None, listed.split("\0")):
        source, target = CHECKOUT / name, root / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    package = root / "fastattn"
    links.mkdir()
    for link, there in (
        (package / "kernels", root / "kernels"),
        (package / "bench", root / "bench" / "harness"),
        (links / "fastattn", package),
    ):
        link.symlink_to(there)


def enter(folder: Path) -> None:
    """Make the copy in `folder` what this process and its children import and test."""
    if not folder.exists():
        copy_checkout(folder)
    os.chdir(folder / "checkout")
    # Before the finder of an editable install.
    os.environ["PYTHONPATH"] = str(folder / "links")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    os.environ["OMP_NUM_THREADS"] = "1"


def make_map() -> None:
    """Run the suite once under coverage."""
    folder = BUILD / "map"
    shutil.rmtree(folder, ignore_errors=True)
    enter(folder)
    settings = folder / "coveragerc"
    sources = "".join(f"\n    {folder / 'checkout' / x}" for x in MUTATED)
    settings.write_text(f"[run]\nsource ={sources}\n", encoding="utf-8")
    os.environ["COVERAGE_FILE"] = str(folder / "coverage")
    subprocess.run(
        [*_pytest(f"-n auto --dist loadfile --cov --cov-config={settings} --cov-context test"),
         "--cov-report=", f"--junitxml={folder / 'junit.xml'}"], check=False,
    )  # fmt: skip


def _pytest(words: str) -> list[str]:
    # `python -m pytest` would put the copy's own folder on the path.
    return [str(Path(sys.executable).with_name("pytest")), *shlex.split(f"{_PYTEST} {words}")]


def drawn(files: list[Path], since: str | None, count: int, seed: int) -> list[WorkItem]:
    """Some of the mutants of these files: each line that has any is as likely as another."""
    lines = [
        (file, line)
        for file in files
        for line in (_changed_lines(file, since) if since else _all_lines(file))
    ]
    draws = random.Random(seed)
    draws.shuffle(lines)
    items: list[WorkItem] = []
    for file, line in lines:
        if kinds := mutants_of(file).get(line):
            if len(items) == count:
                break
            mutation = draws.choice(kinds[draws.choice(sorted(kinds))])
            items.append(WorkItem.single(_name(mutation), mutation))
    return items


def _name(mutation: MutationSpec) -> str:
    """A name of the change and its place, and of the file's text."""
    text = (CHECKOUT / mutation.module_path).read_bytes()
    place = f"{mutation.module_path}:{mutation.start_pos[0]}"
    return f"{place} {mutation.operator_name} {mutation.occurrence} of {crc32(text):x}"


@cache
def mutants_of(file: Path) -> dict[int, dict[str, list[MutationSpec]]]:
    """All mutants of a file of the checkout, by line and kind, but for those of type hints."""
    nodes = list(ast_nodes(get_ast_from_path(CHECKOUT / file)))
    found: dict[int, dict[str, list[MutationSpec]]] = defaultdict(lambda: defaultdict(list))
    for name, operator in operators().items():
        places = ((x, at) for x in nodes for at in operator.mutation_positions(x))
        for occurrence, (node, (start, end)) in enumerate(places):
            if start < end and not changes_nothing(node):
                kind = name.partition("_")[0] if name.startswith("core/") else name
                found[start[0]][kind].append(MutationSpec(file, name, occurrence, start, end))
    return found


def _all_lines(file: Path) -> list[int]:
    return list(range(1, (CHECKOUT / file).read_text(encoding="utf-8").count("\n") + 1))


def _changed_lines(file: Path, since: str) -> list[int]:
    diff = _git("diff", "-U0", since, "--", str(file))
    hunks = re.findall(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", diff, re.MULTILINE)
    return [int(a) + i for a, n in hunks for i in range(int(n or 1))]


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=CHECKOUT, check=True, capture_output=True, text=True)
    return done.stdout


def start_worker() -> None:
    """Give a worker its own copy, with all that pytest keeps of its files."""
    enter(BUILD / f"worker-{os.getpid()}")
    subprocess.run(_pytest("--collect-only"), check=False, stdout=subprocess.DEVNULL)


def judge(item: WorkItem) -> WorkResult:
    """Run the tests of one mutant's lines until one fails that passes without it."""
    (mutation,) = item.mutations
    operator = operators()[mutation.operator_name]
    file, first, last = mutation.module_path, mutation.start_pos[0], mutation.end_pos[0]
    old = file.read_text(encoding="utf-8")
    new = mutate_code(old, operator, mutation.occurrence)
    batches = CoverageMap(BUILD / "map").batches(Path.cwd(), str(file), first, last)
    found = (_seen_by(mutation, tests, limit) for tests, limit in batches)
    saw = next(filter(None, found), None)
    pairs = zip(old.splitlines(), new.splitlines(), strict=False)
    diff = "\n".join(f"- {a.strip()}\n+ {b.strip()}" for a, b in pairs if a != b)
    outcome = TestOutcome.KILLED if saw else TestOutcome.SURVIVED
    ran = f"{sum(len(tests) for tests, _ in batches)} tests"
    return WorkResult(WorkerOutcome.NORMAL, saw or ran, outcome, diff)


_sound: dict[str, bool] = {}


def _seen_by(mutation: MutationSpec, tests: list[str], limit: float) -> str | None:
    """The first of these tests that fails with the mutant and passes without it."""
    operator = operators()[mutation.operator_name]
    tests = [x for x in tests if _sound.get(x, True)]
    while tests:
        with use_mutation(mutation.module_path, operator, mutation.occurrence):
            saw = _first_failing(tests, limit)
        if saw is None or _sound.get(saw):
            return saw
        # Without the mutant: all of them, where pytest ended before a test.
        unsound = _first_failing([saw] if "::" in saw else tests, limit)
        _sound[unsound or saw] = unsound is None
        if unsound is None:
            return saw
        if unsound not in tests:
            return None
        tests.remove(unsound)
    return None


def _first_failing(tests: list[str], limit: float) -> str | None:
    """The first of these tests that fails, or how pytest ended without one: "timeout", too."""
    listed = Path.cwd().parent / "tests.txt"
    listed.write_text("\n".join(tests), encoding="utf-8")
    command = shlex.join(_pytest(f"-x --tb=no -rfE @{listed}"))
    outcome, output = run_tests(command, limit)
    if outcome is TestOutcome.SURVIVED:
        return None
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    if not failed and "no tests ran" in output and any("::" in x for x in tests):
        # Names of cases that are made of the file's own values are others now.
        return _first_failing(sorted({x.partition("::")[0] for x in tests}), 8 * limit)
    return failed[0] if failed else output[-300:].strip() or "pytest, which did not start"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=[Path(x) for x in MUTATED])
    parser.add_argument("--map", action="store_true", help="only find which tests run which line")
    parser.add_argument("--since", help="revision: only lines that changed since")
    parser.add_argument("--count", type=int, default=100, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=float, default=0.75, help="share that tests have to see")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    if given.map:
        return make_map()
    below = [CHECKOUT / x for x in given.files]
    files = [y for x in below for y in (sorted(x.rglob("*.py")) if x.is_dir() else [x])]
    items = drawn([x.relative_to(CHECKOUT) for x in files], given.since, given.count, given.seed)
    with use_db(BUILD / "session.sqlite", WorkDB.Mode.create) as session:
        known = {x.job_id for x in session.work_items}
        session.add_work_items(x for x in items if x.job_id not in known)
        done = {name: x for name, x in session.results if x.is_killed}
        for old in BUILD.glob("worker-*"):
            shutil.rmtree(old)
        with ProcessPoolExecutor(given.workers, initializer=start_worker) as pool:
            runs = {pool.submit(judge, x): x for x in items if x.job_id not in done}
            for run in as_completed(runs):
                done[runs[run].job_id] = result = run.result()
                session.set_result(runs[run].job_id, result)
                say(runs[run], result)
        survived = [x for x in items if not done[x.job_id].is_killed]
    print_line(f"{len(items) - len(survived)} of {len(items)} were seen")
    sys.exit(len(items) - len(survived) < given.least * len(items))


def say(item: WorkItem, result: WorkResult) -> None:
    """One mutant and what became of it."""
    word = "seen by" if result.is_killed else "SURVIVED"
    print_line(f"{item.job_id} {word} {result.output}\n{result.diff}")


def print_line(text: str) -> None:
    """A line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
