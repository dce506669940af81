"""Generated parts of the site: the reference, notebooks, and links into the repository.

A page of the reference is made for each module with public names, which tests/public_names.txt
lists, and one of the commands. Links that leave docs/ lead to the repository, at the address that
pyproject.toml has. A public name without a docstring and a link to nothing fail a strict build.
Each tutorial can be downloaded as a notebook of the same text.
"""

import importlib
import json
import logging
import os
import posixpath
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import fastattn
from fastattn.cli.main import build_parser

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CHECKOUT = Path(__file__).resolve().parents[2]
PUBLIC_NAMES = CHECKOUT / "tests" / "public_names.txt"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)")
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
MATH = re.compile(r"^```math\n(.*?)^```$", re.M | re.S)
CELL, CODE = re.compile(r"<td.*?</td>", re.S), re.compile(r"(?<=<code>)[^<]+")
LONG = re.compile(r"\S{24,}")
log = logging.getLogger("mkdocs.fastattn")
# Titles in the reference, and their modules; other modules are under the last one.
MODULES = {
    "Attention": ("fastattn", "fastattn.mods", "fastattn.functional", "fastattn.cache"),
    "Several GPUs": ("fastattn.parallel",),
    "Layers and models": ("fastattn.modules", "fastattn.models", "fastattn.generation"),
    "Training": ("fastattn.training",),
    "Integrations": ("fastattn.compat",),
    "Formulas and checks": (),
}
# Of the module fastattn, by the modules that define its names.
NAMES = {
    "Calls": ("fastattn.functional", "fastattn.block_mask"),
    "Caches": ("fastattn.cache", "fastattn.cache_view"),
    "Layers": ("fastattn.modules", "fastattn.compat"),
    "Backends, checks and tools": (),
}


@cache
def home() -> str:
    """The repository's address."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address: str = project["urls"]["Source"]
    return address


def in_repository(path: str) -> str:
    """The address of a file: of a picture itself, else of the page about it."""
    return f"{home()}/{'raw' if path.endswith(('.png', '.svg')) else 'blob'}/main/{path}"


def public_names() -> Iterator[tuple[str, str, str]]:
    """Yields module, name, and "" or the name under which another module documents the same."""
    for line in PUBLIC_NAMES.read_text(encoding="utf-8").splitlines():
        if line[0] == "$":
            continue
        full, same = re.fullmatch(r"([\w.]+)(?: is ([\w.]+))?.*", line).groups()
        module, _, name = full.rpartition(".")
        path = CHECKOUT / module.replace(".", "/")
        if path.is_dir() or path.with_suffix(".py").exists():  # else it is a class
            yield module, name, same or ""


def title(module: str, titles: dict[str, tuple[str, ...]]) -> str:
    """The title of a module among those of `MODULES` or `NAMES`: by itself, else by its parent."""
    while module:
        for name, modules in titles.items():
            if module in modules and module != "fastattn":
                return name
        module = module.rpartition(".")[0]
    return [*titles][-1]


def navigation() -> list[Any]:
    """The reference in groups, the module fastattn first and the commands last."""
    groups: dict[str, list[str]] = {name: [] for name in MODULES}
    for path in sorted(reference()):
        module = posixpath.basename(path).removesuffix(".md")
        if module not in ("fastattn", "commands"):
            groups[title(module, MODULES)].append(path)
    groups["Attention"].insert(0, "reference/fastattn.md")
    return [*({name: paths} for name, paths in groups.items()), "reference/commands.md"]


def reference() -> dict[str, str]:
    """The pages of the reference by their paths."""
    pages: dict[str, list[str]] = {}
    groups: dict[str, list[str]] = {name: [] for name in NAMES}
    for module, name, same in public_names():
        path = f"reference/{module}.md"
        if path not in pages:
            about = (importlib.import_module(module).__doc__ or "").strip()
            pages[path] = [f"# {module}", about]
        entry = f"`{module}.{name}` is [{same}][]." if same else _entry(module, name)
        if module == "fastattn":
            home = getattr(getattr(fastattn, name), "__module__", "")
            of_title = groups[title(same.rpartition(".")[0] or home, NAMES)]
            of_title.insert(0 if name == "attention" else len(of_title), entry)
        else:
            pages[path].append(entry)
    for name, entries in groups.items():
        pages["reference/fastattn.md"] += [f"## {name}", *entries]
    pages["reference/commands.md"] = ["# Commands", *_commands(build_parser())]
    return {path: "\n\n".join(parts) + "\n" for path, parts in pages.items()}


def _entry(module: str, name: str) -> str:
    owner = importlib.import_module(module)
    x: Any = getattr(owner, name)
    # Triton's functions, where they are interpreted, have none: what they hold has.
    if callable(x) and not (getattr(x, "fn", x).__doc__ or "").strip():
        log.warning(f"{module}.{name} has no docstring")
    level = f"    options:\n      heading_level: {3 if module == 'fastattn' else 2}"
    if name in vars(owner):
        return f"::: {module}.{name}\n{level}"
    anchor = f'<a id="{module}.{name}"></a>'
    heading = f"{level}\n      heading: {module}.{name}"
    return f"{anchor}\n\n::: {x.__module__}.{x.__qualname__}\n{heading}"


def _commands(parser: Any) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for command in action.choices.values():
                if not any(isinstance(x.choices, dict) for x in command._actions):
                    yield f"## {command.prog}\n\n```\n{command.format_help().rstrip()}\n```"
                yield from _commands(command)


def formula(source: str, *_: object, **options: object) -> str:
    """The MathML of a ```math fence."""
    return f'<div class="formula">{latex2mathml.converter.convert(source, display="block")}</div>'


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    fence = {"name": "math", "class": "math", "format": formula}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    config.repo_url = home()
    config.repo_name = "Source"
    config.edit_uri = ""
    os.environ["COLUMNS"] = "82"  # of the commands' help
    # An address that other sites can show: a card must have a full one.
    config.extra["card"] = in_repository("docs/pictures/social.png")
    for entry in config.nav:
        if "Reference" in entry:
            entry["Reference"] = navigation()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in reference().items():
        files.append(File.generated(config, path, content=text))
    changes = (CHECKOUT / "CHANGELOG.md").read_text(encoding="utf-8")
    # As from a page of docs/.
    changes = LINK.sub(lambda match: posixpath.relpath(match[1], "docs"), changes)
    files.append(File.generated(config, "changelog.md", content=changes))
    for path in tutorials():
        text = json.dumps(notebook(path), ensure_ascii=False, indent=1)
        files.append(File.generated(config, notebook_path(path), content=text))
    return files


def tutorials() -> list[str]:
    """The pages whose blocks together are one program."""
    docs = CHECKOUT / "docs"
    pages = (
        docs / "guide" / "gpt.md",
        docs / "tutorial.md",
        *sorted((docs / "tutorials").iterdir()),
    )
    return [x.relative_to(docs).as_posix() for x in pages]


def notebook_path(page: str) -> str:
    return f"notebooks/{Path(page).stem}.ipynb"


def notebook(page: str) -> dict[str, Any]:
    """A page as a Jupyter notebook: a code cell for each Python block, Markdown between them."""
    folder = posixpath.join("docs", posixpath.dirname(page))

    def lead(match: re.Match[str]) -> str:
        return in_repository(posixpath.normpath(posixpath.join(folder, match[1])))

    cells: list[dict[str, Any]] = []
    parts = PYTHON.split((CHECKOUT / "docs" / page).read_text(encoding="utf-8"))
    for n, part in enumerate(parts):
        cell: dict[str, Any] = {"cell_type": "markdown", "id": f"cell-{n}", "metadata": {}}
        if n % 2:
            cell |= {"cell_type": "code", "execution_count": None, "outputs": []}
        else:
            part = LINK.sub(lead, MATH.sub(r"$$\n\1$$", part))
        if part.strip():
            cells.append(cell | {"source": part.strip().splitlines(keepends=True)})
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": python}, "cells": cells}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def lead(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, match[1]))
        if path.startswith("docs/"):
            return match[1]
        if not (CHECKOUT / path).exists():
            log.warning(f"{page.file.src_uri} leads to {path}, which is not there")
        return in_repository(path)

    markdown = LINK.sub(lead, markdown)
    if page.file.src_uri not in tutorials():
        return markdown
    address = posixpath.relpath(notebook_path(page.file.src_uri), folder or ".")
    title, rest = markdown.split("\n", 1)
    return f"{title}\n\n[Download this page as a notebook]({address}){{download}}\n{rest}"


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lets long code in the cells of tables break after its dots and brackets."""

    def split(code: re.Match[str]) -> str:
        return LONG.sub(lambda x: re.sub(r"[.(\[=]", r"\g<0><wbr>", x[0]), code[0])

    return CELL.sub(lambda cell: CODE.sub(split, cell[0]), html)


def on_post_build(config: MkDocsConfig) -> None:
    """Redirects from the former addresses of the integrations."""
    site = Path(config.site_dir)
    for page in sorted((site / "integrations").rglob("index.html")):
        to = page.parent.relative_to(site)
        former = site / "doors" / to.relative_to("integrations")
        former.mkdir(parents=True, exist_ok=True)
        address = f"{posixpath.relpath(to, former.relative_to(site))}/"
        html = f'<!doctype html><meta http-equiv="refresh" content="0; url={address}">'
        (former / "index.html").write_text(html, encoding="utf-8")
