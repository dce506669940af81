"""The list of planted faults, and which tests of the gate look at each file.

A fault of planted/*.txt is a paragraph: its name, its file, a line (or part of one) that stands
there once, and what replaces it. `after` names a line above it where it stands more than once:

    [name]
    kernels/rules/mask.py
    after def _near(ahead, k_pos, mask):
    - near = near & (ahead <= value(mask.right))
    + near = near & (ahead < value(mask.right))

verdicts.tsv has a line a fault: its name, what became of it, and the test that saw it.
"""

import re
from pathlib import Path
from typing import NamedTuple

_FOLDER = Path(__file__).resolve().parent / "planted"
_VERDICTS = _FOLDER.with_name("verdicts.tsv")
# More test files than this with one word say nothing of where a fault is seen.
_FEW = 4
_GENERATED = "tests/functional/test_generated_calls.py"
# From the start of a file's name to the backend whose generated calls meet it, and what else looks
# at it, the likeliest first.
_AREAS: dict[str, tuple[str, str]] = {
    "kernels/hopper/": ("hopper", "kernels/test_hopper_*.py ops"),
    "kernels/append": ("triton", "cache"),
    "kernels/fp8": ("triton", "functional/test_fp8*.py test_quantization.py"),
    "kernels/rules/": ("triton or hopper", "kernels functional cache ops"),
    "kernels/": ("triton", "kernels functional cache ops"),
    "fastattn/cache": ("torch or triton", "cache functional/test_decode*.py generation modules"),
    "fastattn/torch_backend/": ("torch", "torch_backend functional"),
    "fastattn/functional/": ("torch or triton", "functional cache test_options.py"),
    "fastattn/ops/": ("triton", "ops functional"),
    "fastattn/dispatch.py": ("torch or triton", "test_dispatch.py tuned functional"),
    "fastattn/tuned/": ("", "tuned test_dispatch.py"),
    "fastattn/parallel/": ("", "parallel models/test_context_parallel.py"),
    "fastattn/training/": ("", "training"),
    "fastattn/models/": ("", "models generation"),
    "fastattn/generation/": ("", "generation"),
    "fastattn/modules/": ("", "modules compat"),
    "fastattn/compat/": ("", "compat"),
    "fastattn/cli/": ("", "cli"),
    "fastattn/": ("torch or triton", "test_*.py functional"),
    "examples/": ("", "generation"),
}


class Fault(NamedTuple):
    """One line of one file, and what replaces it. after: a line above it; "": it stands once."""

    name: str
    file: str
    old: str
    new: str
    after: str = ""


class Verdict(NamedTuple):
    """caught, survived, hung or fails without the fault, and by which test; "": not judged yet, but
    that test is meant to see it.
    """

    word: str
    by: str = ""


def verdicts() -> dict[str, Verdict]:
    """The verdicts that were recorded, by the names of faults."""
    lines = _VERDICTS.read_text(encoding="utf-8").splitlines() if _VERDICTS.exists() else []
    return {name: Verdict(*verdict) for name, *verdict in (line.split("\t") for line in lines)}


def write_verdicts(kept: dict[str, Verdict]) -> None:
    """Record verdicts in place of those that were."""
    lines = ("\t".join((name, *verdict)) + "\n" for name, verdict in kept.items())
    _VERDICTS.write_text("".join(lines), encoding="utf-8")


def read() -> list[Fault]:
    """All planted faults, in the order of their files.

    Raises:
        ValueError: a paragraph is not one of a fault, or two have one name.
    """
    texts = [path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.txt"))]
    faults = [_fault(paragraph) for text in texts for paragraph in text.strip().split("\n\n")]
    names = [x.name for x in faults]
    if twice := {x for x in names if names.count(x) > 1}:
        raise ValueError(f"two faults have the name {', '.join(sorted(twice))}")
    return faults


def _fault(paragraph: str) -> Fault:
    head, file, *lines = paragraph.splitlines()
    parts = dict(line.split(" ", 1) for line in lines)
    known = {"-", "+"} <= parts.keys() <= {"-", "+", "after"}
    if head[0] + head[-1] != "[]" or not known:
        raise ValueError(f"not a fault:\n{paragraph}")
    return Fault(head[1:-1], file, parts["-"], parts["+"], parts.get("after", ""))


def changed(text: str, fault: Fault) -> str:
    """The text of the fault's file with the fault in it.

    Raises:
        ValueError: the line stands there never, or more than once and `after` does not say which.
    """
    start = 0
    if fault.after:
        if text.count(fault.after) != 1:
            raise ValueError(f"{fault.name}: not once in {fault.file}: {fault.after}")
        start = text.index(fault.after) + len(fault.after)
    count = text.count(fault.old, start)
    if count == 0 or (count > 1 and not fault.after):
        raise ValueError(f"{fault.name}: {count} times in {fault.file}: {fault.old}")
    place = text.index(fault.old, start)
    return text[:place] + fault.new + text[place + len(fault.old) :]


def areas_of(fault: Fault, root: Path) -> list[list[str]]:
    """Arguments of pytest for the area of the fault's file, the likeliest to see it first.

    Generated calls, test files that share a word with the fault, and the rest of the area.
    """
    namesakes = _namesakes(fault, root)
    longest = max((x for x in _AREAS if fault.file.startswith(x)), key=len)
    backend, names = _AREAS[longest]
    paths = [path for name in names.split() for path in sorted((root / "tests").glob(name))]
    files = [
        str(file.relative_to(root))
        for path in paths
        for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])
    ]
    others = [x for x in dict.fromkeys(files) if x not in (*namesakes, _GENERATED)]
    return [*([[_GENERATED, "-k", backend]] if backend else []), namesakes, others]


def _namesakes(fault: Fault, root: Path) -> list[str]:
    """Test files with a word of the fault's name or file, if few have it."""
    words = _words(fault.name) | _words(fault.file)
    found: dict[str, list[str]] = {}
    for path in sorted(root.glob("tests/**/test_*.py")):
        for word in words & _words(path.stem):
            found.setdefault(word, []).append(str(path.relative_to(root)))
    few = dict.fromkeys(x for files in found.values() if len(files) <= _FEW for x in files)
    return [x for x in few if x != _GENERATED]


def _words(text: str) -> set[str]:
    return {word.removesuffix("s") for word in re.findall("[a-z]{4,}", text)} - {"test"}
