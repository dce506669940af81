"""The README and the packages of a distribution.

Links in the README lead to the repository, because it is read outside of it. Everything else about
a distribution is in pyproject.toml.
"""

import re
import shutil
import sys
from pathlib import Path

from setuptools import find_packages, setup

if sys.version_info >= (3, 11):
    import tomllib
else:
    from setuptools.compat.py310 import tomllib

CHECKOUT = Path(__file__).resolve().parent
# Of Markdown, and of HTML for pictures.
LINK = re.compile(r'(\]\(|(?:src|srcset|href)=")(?![a-z]+:|#)([^)"\s]+)')


def with_absolute_links(text: str, home: str) -> str:
    """Pictures lead to the file itself, all else to the page about it; badges to the project's."""

    def lead(match: re.Match[str]) -> str:
        if match[2].startswith("../../"):
            return f"{match[1]}{home}/{match[2].removeprefix('../../')}"
        kind = "raw" if match[2].endswith((".svg", ".png")) else "blob"
        return f"{match[1]}{home}/{kind}/main/{match[2]}"

    return LINK.sub(lead, text)


def packages(folders: dict[str, str]) -> list[str]:
    """Name every package of fastattn/, and of the folders that are installed inside it."""
    found = {name for name in find_packages(str(CHECKOUT)) if name.split(".")[0] == "fastattn"}
    for package, folder in folders.items():
        inside = find_packages(str(CHECKOUT / folder))
        found |= {package, *(f"{package}.{name}" for name in inside)}
    return sorted(found)


if __name__ == "__main__":
    # pip builds here, and setuptools would install modules of an earlier build that are deleted.
    shutil.rmtree(CHECKOUT / "build" / "lib", ignore_errors=True)
    told = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    setup(
        packages=packages(told["tool"]["setuptools"]["package-dir"]),
        long_description=with_absolute_links(readme, told["project"]["urls"]["Source"]),
        long_description_content_type="text/markdown",
    )
