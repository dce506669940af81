"""Map from lines to the tests that run them: coverage of the whole suite, a context a test.

Made once by `python tests/mutants --map`, in a copy of the checkout that stays: lines that moved
since are found again by comparing files.
"""

import random
from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path
from xml.etree import ElementTree

from coverage import CoverageData
from parso import parse
from parso.tree import NodeOrLeaf

# Compilers and ranks run in processes of their own, which coverage does not see; and signatures are
# made as modules are imported.
_ELSEWHERE = {
    "fastattn/": ["tests/test_public_names.py"],
    "kernels/": ["tests/kernels/test_compile.py", "tests/kernels/test_assembly.py"],
    "fastattn/parallel/": ["tests/parallel"],
    "fastattn/models/tensor_parallel.py": ["tests/parallel"],
    "fastattn/functional/sharded.py": ["tests/functional/test_sharded.py"],
}
_FIRST_FILES, _FIRST_SECONDS, _SECONDS = 4, 20.0, 150.0


class CoverageMap:
    """Tests of each line, and how long they took, as found in `folder`.

    Raises:
        FileNotFoundError: it was not made.
    """

    def __init__(self, folder: Path) -> None:
        self._checkout = folder / "checkout"
        self._data = CoverageData(str(folder / "coverage"))
        self._data.read()
        self._seconds = {
            f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}": float(
                case.attrib["time"]
            )
            for case in ElementTree.parse(folder / "junit.xml").iter("testcase")
            if len(case) == 0  # neither failed nor skipped
        }

    def batches(
        self, root: Path, file: str, first: int, last: int
    ) -> list[tuple[list[str], float]]:
        """Arguments of pytest, and seconds that they may take at most: some tests of these lines,
        spread over test files, then others.

        file: below `root`. Tests that did not pass without a mutant are left out.
        """
        tests = self._passing(file, self._lines(root, file, first, last))
        # What torch.compile traces, coverage does not see.
        tests = tests or self._passing(file, list(self._contexts(file)))
        by_file: dict[str, list[str]] = {}
        for test in tests:
            by_file.setdefault(test.partition("::")[0], []).append(test)
        word = Path(file).stem.split("_")
        nearest = sorted(by_file, key=lambda x: (not any(w in x for w in word), -len(by_file[x])))
        early = list(_within(_FIRST_SECONDS, self._spread(by_file, nearest[:_FIRST_FILES])))
        rest = list(_within(_SECONDS, self._spread(by_file, nearest, {x for x, _ in early})))
        chosen = [zip(*tests, strict=True) for tests in (early, rest) if tests]
        batches = [([*names], 60 + 8 * sum(seconds)) for names, seconds in chosen]
        others = [(tests, 3600.0) for name, tests in _ELSEWHERE.items() if file.startswith(name)]
        return [*batches, *others]

    def _spread(
        self, by_file: dict[str, list[str]], files: list[str], seen: set[str] = frozenset()
    ) -> Iterator[tuple[str, float]]:
        """Tests of these files in turn with their seconds, each file's in an order of chance."""
        shuffled = [[x for x in by_file[file] if x not in seen] for file in files]
        for tests in shuffled:
            random.Random(0).shuffle(tests)
        for number in range(max(map(len, shuffled), default=0)):
            for tests in shuffled:
                if number < len(tests):
                    yield tests[number], self._seconds[tests[number]]

    def _passing(self, file: str, lines: list[int]) -> list[str]:
        contexts = self._contexts(file)
        found = (x.rpartition("|")[0] for line in lines for x in contexts.get(line, ()))
        return [x for x in dict.fromkeys(found) if x in self._seconds]

    @lru_cache(maxsize=8)  # noqa: B019
    def _contexts(self, file: str) -> dict[int, list[str]]:
        measured = [x for x in self._data.measured_files() if x.endswith(f"/{file}")]
        return self._data.contexts_by_lineno(measured[0]) if measured else {}

    def _lines(self, root: Path, file: str, first: int, last: int) -> list[int]:
        """Where lines of the file are in the copy that was measured, widened where they run once.

        A line outside of a function runs as its file is imported, in no test or in any: then all
        lines of its class or file count, and of a function whose head it is.
        """
        if not (self._checkout / file).is_file():
            return []
        new, old = ((x / file).read_text(encoding="utf-8") for x in (root, self._checkout))
        first, last = _widened(new, first, last)
        pairs = SequenceMatcher(None, new.splitlines(), old.splitlines(), autojunk=False)
        return [
            block.b + line - block.a + 1
            for block in pairs.get_matching_blocks()
            for line in range(max(first - 1, block.a), min(last, block.a + block.size))
        ] or list(range(1, old.count("\n") + 2))


def _within(seconds: float, tests: Iterator[tuple[str, float]]) -> Iterator[tuple[str, float]]:
    """The tests that fit into that time together."""
    for test, took in tests:
        if took <= seconds:
            seconds -= took
            yield test, took


def _widened(text: str, first: int, last: int) -> tuple[int, int]:
    """Lines of one statement, or all that it is read by where it runs but once."""
    node: NodeOrLeaf = parse(text).get_leaf_for_position((first, 0), include_prefixes=True)
    inner = node
    while node is not None and node.type not in ("funcdef", "file_input"):
        if node.type in ("simple_stmt", "if_stmt", "for_stmt", "while_stmt", "with_stmt"):
            inner = inner if inner.type.endswith("stmt") else node
        node = node.parent
    if node is None or node.type == "file_input":
        return 1, text.count("\n") + 1
    if first < node.children[-1].get_first_leaf().start_pos[0]:
        return node.start_pos[0], node.end_pos[0]
    return min(first, inner.start_pos[0]), max(last, min(inner.end_pos[0], first + 12))
