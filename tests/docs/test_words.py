"""The words of documents, docstrings, comments and messages are those that readers search for."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]

# A pattern, in any case, and what to write instead. Only what is wrong in every use belongs here.
WORDS = {
    r"doors?": "integration",
    r"(is|on) a floor|(every|lower|upper|top) floors?|(the|of) floors": "layer",
    r"rehears\w*": "dry run",
    r"plant(s|ed)? ([\w-]+ )?(faults?|lines?)": "mutant, injected fault",
    r"gradients of gradients": "double backward",
    r"\*?slanted\*? (figures|rows|ones|if)|is slanted": "in italics",
    r"deals? (\w+ )?out|dealt( out)?|dealing out": "assign, distribute",
    r"mend(s|ed|ing)?": "fix, patch",
    r"longer than one GPU|sequence over several GPUs": "context parallelism",
    r"come and go": "continuous batching",
    r"passed over": "skip, not use",
    r"(is|are|was|were|be) told(?! apart)": "get, is passed",
    r"tells (of|the (rest|device))": "report, determine",
    r"books? of (a|the) (\w+ )?(cache|pages?)": "page allocator",
    r"one's own": "custom, its own",
    r"(cannot|can not|does not|do not) go with": "is not supported with",
    r"goes? nowhere": "is dropped",
    r"stands? in(?! for)": "is in, replaces",
    r"lies?|lay": "is, is stored, is held by",
    r"asked for": "requested",
    r"(is|are) of another": "has a different",
    r"of ours": "fastattn's",
    r"(is|are) not served": "is not supported",
    r"a share of attention": "attention sink",
    r"left, and (why|named)": "unchanged",
}
PATTERN = re.compile(
    r"(?<![\w-])(" + "|".join(WORDS).replace(" ", r"\s+") + r")(?![\w-])", re.IGNORECASE
)
# A docstring begins with a verb, or with the noun that the thing is.
BEGINNING = re.compile(r'^\s*r?"""(What|Those|That|As|Of|By|Which)\b', re.MULTILINE)
# Of an interface; others have no more lines than their function, or than SHORT.
SECTIONS = re.compile(r"^ *(Args|Returns|Raises|Examples):", re.MULTILINE)
SHORT = 5
BLOCK = re.compile(r'^(?! *class )[^\n]*:[^\n]*\n +r?"""((?:[^"]|"(?!""))*)', re.MULTILINE)
# Python 3.12 splits f-strings into tokens.
STRINGS, QUOTES = ("STRING", "FSTRING_MIDDLE"), ("FSTRING_START", "FSTRING_END")
# Signs around a string or before a comment, and what stands between two that go on.
QUOTE = re.compile(r"^#|^\w{0,2}(\"\"\"|'''|[\"'])|[\"']+$")
WRAPPED = re.compile(r"#|[\"']\s*\w?[\"']")
UNSEEN = re.compile(r"[^\s\"']")
CODE = ("fastattn", "kernels", "bench", "examples", "docs/tools", "tests")
# Recorded runs have the words of the version that ran; this file has them all.
NOT_READ = ("docs/recorded", "tests/docs/test_words.py")


def within(path: Path, names: tuple[str, ...]) -> bool:
    """Whether a file is one of these or in one of these folders."""
    name = path.relative_to(CHECKOUT).as_posix()
    return any(name == x or name.startswith(x + "/") for x in names)


def find_files() -> list[Path]:
    """Every document and every Python file of the repository."""
    files = [CHECKOUT / x for x in ("mkdocs.yml", "Makefile", *map(str, CHECKOUT.glob("*.md")))]
    for folder in ("docs", "kernels", "bench"):
        files += (CHECKOUT / folder).rglob("*.md")
    for folder in CODE:
        files += (CHECKOUT / folder).rglob("*.py*")
    return [x for x in sorted({*files}) if x.suffix != ".pyc" and not within(x, NOT_READ)]


def hidden(text: str) -> str:
    """Replace a text by as many characters of no word; lines end where they did."""
    return re.sub(r"[^\n]", "\0", text)


def blanks(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def prose_of_document(text: str) -> str:
    """The text with code and the targets of links hidden."""
    text = re.sub(r"^ *```.*?^ *```$", lambda x: hidden(x[0]), text, flags=re.M | re.S)
    return re.sub(r"(``?)[^`]+?\1|(?<=\])\([^)\n]+\)", lambda x: hidden(x[0]), text)


def prose_of_program(text: str) -> str:
    """The text with all but comments and strings of several words hidden."""
    lines = text.splitlines(keepends=True)
    begins = [0, *accumulate(map(len, lines))]
    parts, end = [], 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        first, last = (begins[row - 1] + column for row, column in (token.start, token.end))
        if kind in QUOTES:
            parts += [UNSEEN.sub("\0", text[end:first]), " " * (last - first)]
            end = last
        elif kind == "COMMENT" or (kind in STRINGS and " " in token.string):
            # A message may go on in the next string, and a comment in the next line.
            parts += [UNSEEN.sub("\0", text[end:first]), QUOTE.sub(blanks, text[first:last])]
            end = last
    prose = "".join(parts) + UNSEEN.sub("\0", text[end:])
    # Names in backticks, and the fields of a template.
    return re.sub(r"(``?)[^`\n]+?\1|\{[^{}\n]*\}", lambda x: hidden(x[0]), prose)


def find_words(path: Path) -> Iterator[str]:
    """Each word of the list in a file, with its line and better words."""
    text = path.read_text(encoding="utf-8")
    program = path.suffix in (".py", ".pyi")
    if not PATTERN.search(WRAPPED.sub(blanks, text) if program else text):
        return  # most files end here
    prose = prose_of_program(text) if program else prose_of_document(text)
    for match in PATTERN.finditer(prose):
        found = " ".join(match[1].split())
        better = next(y for x, y in WORDS.items() if re.fullmatch(x, found, re.IGNORECASE))
        yield f'{place(path, prose, match)}: "{found}": better "{better}"'


def find_beginnings(path: Path) -> Iterator[str]:
    """Each docstring that begins with such a word."""
    text = path.read_text(encoding="utf-8") if path.suffix in (".py", ".pyi") else ""
    for match in BEGINNING.finditer(text):
        better = "a verb, or the noun that the thing is"
        yield f'{place(path, text, match)}: a docstring begins with "{match[1]}": better {better}'


def find_long_docstrings(path: Path) -> Iterator[str]:
    """Each docstring that is longer than its function, except of an interface."""
    text = path.read_text(encoding="utf-8") if path.suffix == ".py" else ""
    if not any(x.count("\n") >= SHORT and not SECTIONS.search(x) for x in BLOCK.findall(text)):
        return  # most files end here
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = node.body[0]
        docstring = ast.get_docstring(node) or ""
        lines = (first.end_lineno or 0) + 1 - first.lineno
        others = (node.end_lineno or 0) + 1 - node.lineno - lines
        if docstring and lines > max(SHORT, others) and not SECTIONS.search(docstring):
            at = f"{shortened(path)}:{first.lineno}"
            yield f"{at}: {lines} lines on {others} of {node.name}: better a comment"


def shortened(path: Path) -> str:
    return path.relative_to(CHECKOUT).as_posix() if path.is_relative_to(CHECKOUT) else path.name


def place(path: Path, text: str, match: re.Match[str]) -> str:
    return f"{shortened(path)}:{text.count(chr(10), 0, match.start(1)) + 1}"


def test_words_are_those_of_the_field() -> None:
    finds = (find_words, find_beginnings)
    found = [line for path in find_files() for find in finds for line in find(path)]
    assert not found, "\n".join(found)


def test_docstrings_are_no_longer_than_their_functions() -> None:
    files = [x for x in find_files() if within(x, ("fastattn", "kernels", "bench", "examples"))]
    assert len(files) > 100
    found = [line for path in files for line in find_long_docstrings(path)]
    assert not found, "\n".join(found)


PROGRAM = '''
"""Which doors there are."""

doors = f"{doors} is slanted and has to be"  # what lies
raise ValueError("it was asked "
    f"for at the `door` of {doors}, one"
    "'s own")  # dealt
# out
'''


def test_words_in_programs_are_found(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(PROGRAM, encoding="utf-8")
    found = [x.rpartition(": ")[0] for x in find_words(path)]
    assert found == [
        'a.py:2: "doors"',
        'a.py:4: "is slanted"',
        'a.py:4: "lies"',
        'a.py:5: "asked for"',
        'a.py:7: "dealt out"',
    ]
    (found,) = find_beginnings(path)
    assert found.startswith('a.py:2: a docstring begins with "Which": ')


def test_a_docstring_longer_than_its_function_is_found(tmp_path: Path) -> None:
    lines = "\n".join(f"    line {i}" for i in range(4))
    path = tmp_path / "a.py"
    program = f'def f():\n    """One.\n\n{lines}\n    """\n    return 1\n'
    path.write_text(program, encoding="utf-8")
    assert list(find_long_docstrings(path)) == ["a.py:2: 7 lines on 2 of f: better a comment"]
    path.write_text(program.replace("line 0", "Args:"), encoding="utf-8")
    assert list(find_long_docstrings(path)) == []


def test_words_in_documents_are_found(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("`mend` [x](doors/)\n```\nmend\n```\nand one's\nown\n", encoding="utf-8")
    assert list(find_words(path)) == ['a.md:5: "one\'s own": better "custom, its own"']
