"""Cache of facts about a kernel's machine code, stored next to it in Triton's cache.

Reading the facts again, with ptxas and a disassembler, would take two thirds of a compilation.
"""

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from ...files.replace import replacing


def kept(cubin: str, kind: str, read: Callable[[], Any], reader: bytes) -> Any:
    """The JSON value `read()`, cached by machine code and reader.

    cubin: path of the machine code. kind: name of the facts. reader: the code that reads it.
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
