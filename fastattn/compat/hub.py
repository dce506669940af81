"""Write a kernel folder for Hugging Face's `kernels` package: flash-attn's functions, by fastattn.

    python -m fastattn.compat.hub OUT
    LOCAL_KERNELS="me/fastattn-flash=OUT" python program.py

    from kernels import get_kernel, get_local_kernel

The folder holds two files per torch backend, which import the installed fastattn.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..files.replace import replacing
from . import flash_attn

BACKENDS = ("cuda", "rocm", "cpu")
# Without `install` and `uninstall`, which are no kernels.
FUNCTIONS = tuple(name for name in flash_attn.__all__ if name.startswith("flash_attn"))
_SOURCE = '''"""flash-attn's functions, computed by the installed package fastattn."""

from fastattn.compat.flash_attn import (
{names}
)

__all__ = [
{quoted}
]
'''


def write(folder: str | Path) -> list[Path]:
    """Write a kernel folder: build/torch-cuda, build/torch-rocm and build/torch-cpu in `folder`.

    Files of these names are replaced, links too. Returns the files, two for each backend.

    Raises:
        OSError: a folder below `folder` is a link, or cannot be written.
    """
    source = _SOURCE.format(
        names="\n".join(f"    {name}," for name in FUNCTIONS),
        quoted="\n".join(f'    "{name}",' for name in FUNCTIONS),
    )
    written = []
    for backend in BACKENDS:
        variant = Path(folder) / "build" / f"torch-{backend}"
        for link in filter(Path.is_symlink, (variant.parent, variant)):
            raise OSError(f"{link} is a link, to {link.readlink()}: nothing is written there")
        variant.mkdir(parents=True, exist_ok=True)
        # The keys that kernels 0.17.2 asks of every variant.
        metadata = {
            "id": f"fastattn_flash_{backend}",
            "name": "fastattn-flash",
            "version": 1,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        files = {"__init__.py": source, "metadata.json": json.dumps(metadata, indent=2) + "\n"}
        for name, text in files.items():
            with replacing(variant / name) as file:
                file.write(text)
            written.append(variant / name)
    return written


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder named on the command line, and print its files."""
    parser = argparse.ArgumentParser(
        prog="python -m fastattn.compat.hub",
        description="Write a folder that Hugging Face's kernels loads as a kernel: the functions "
        "of flash-attn, by the installed fastattn.",
    )
    parser.add_argument("folder", metavar="OUT", help="where the folder build goes")
    if not (folder := parser.parse_args(argv).folder):
        parser.error("OUT must not be empty (.: the current folder)")
    try:
        written = write(folder)
    except OSError as error:
        parser.error(str(error))
    sys.stdout.writelines(f"{path}\n" for path in written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
