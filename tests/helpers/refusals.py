"""Files named refusals.txt: calls that are refused, and the errors that say so.

A row is an expression of Python, " -> ", an error and a regular expression of its message. The file
beside it has what the names of the rows stand for.
"""

import builtins
import re
from collections import defaultdict
from pathlib import Path
from typing import Any


def rows_of(path: str) -> dict[str, list[str]]:
    """Rows of the file beside a test file, by the function that they call."""
    actual: dict[str, list[str]] = defaultdict(list)
    for row in Path(path).with_name("refusals.txt").read_text(encoding="utf-8").splitlines():
        if row and not row.startswith("#"):
            actual[row.partition("(")[0]].append(row)
    return dict(actual)


def served(rows: list[str], names: dict[str, Any]) -> list[str]:
    """Rows whose call does not raise their error, each with what comes of it."""
    wrong = []
    for row in rows:
        call, _, said = row.partition(" -> ")
        error, _, message = said.partition(": ")
        expected = vars(builtins).get(error) or names[error]
        try:
            eval(call, names)
            wrong.append(f"{row}: served")
        except expected as raised:
            if not re.search(message, str(raised)):
                wrong.append(f"{row}: {raised}")
    return wrong
