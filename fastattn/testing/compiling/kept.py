"""Cache of facts read from a kernel's machine code, beside that code in Triton's cache.

A second process finds the code there and need not compile it; reading it again, with ptxas and a
disassembler, would take two thirds as long.
"""

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from ...files.replace import replacing


def kept(cubin: str, kind: str, read: Callable[[], Any], reader: bytes) -> Any:
    """The JSON value `read()`, or what it was before for the same code and the same reader.

    Args:
        cubin: path of the machine code.
        kind: names what is read of it.
        reader: the code that reads it.
    """
    digest = sha256(reader + Path(cubin).read_bytes()).hexdigest()
    path = Path(f"{cubin}.{kind}-{digest[:16]}.json")
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    value = read()
    # Other processes may be reading the same kernel.
    with replacing(path) as file:
        json.dump(value, file)
    return value
