"""The site builds strictly, fetches nothing from elsewhere, and documents every public name."""

import html
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import fastattn

CHECKOUT = Path(__file__).resolve().parents[2]
pytest.importorskip("mkdocs", reason="its packages need Python 3.11")


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    path = CHECKOUT / "docs" / "tools" / "hooks.py"
    spec = importlib.util.spec_from_file_location("docs_hooks", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


# `make docs` builds it too; what the pages hold is read by night.
@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(["make", "links"], cwd=CHECKOUT, check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=CHECKOUT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


# What a browser fetches by itself.
FETCHED = re.compile(
    r'<(?:img|script|iframe|source|object)\b[^>]*?\s(?:src|srcset|data)="([^"]+)"'
    r'|<link\b[^>]*?\shref="([^"]+)"'
)


@pytest.mark.nightly
def test_pages_fetch_what_the_site_has_and_nothing_else(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    count = 0
    for page in pages:
        for address in map("".join, FETCHED.findall(page.read_text(encoding="utf-8"))):
            count += 1
            assert not re.match(r"(\w+:)?//", address), (page, address)
            if page.name != "404.html":  # its addresses are absolute
                assert (page.parent / re.split("[?#]", address)[0]).exists(), (page, address)
    assert count > 5 * len(pages)


@pytest.mark.nightly
def test_every_public_name_is_in_the_reference(site: Path, hooks: ModuleType) -> None:
    pages: dict[str, set[str]] = {}
    names = list(hooks.public_names())
    assert len(names) > 150
    for module, name, same in names:
        if module not in pages:
            text = (site / "reference" / module / "index.html").read_text(encoding="utf-8")
            pages[module] = set(re.findall(r'\sid="([\w.]+)"', text))
        assert same or f"{module}.{name}" in pages[module], f"{module}.{name}"


@pytest.mark.nightly
def test_signatures_are_wrapped(site: Path) -> None:
    """A line is longer than 80 characters for a text alone, such as a help text."""
    pages = [x.read_text(encoding="utf-8") for x in (site / "reference").rglob("*.html")]
    blocks = re.findall(r'<div class="[^"]*doc-signature.*?</pre>', "".join(pages), re.S)
    lines = html.unescape(re.sub("<[^>]+>", "", "\n".join(blocks))).splitlines()
    assert len(blocks) > 300
    assert [x for x in lines if len(x) > 80 and not re.fullmatch(r' *".*",', x)] == []


def test_long_code_breaks_in_tables(hooks: ModuleType) -> None:
    row = "<td><img src='pictures/mod-natten-1d.svg'> <code>torch.nn.functional.gelu(x)</code></td>"
    cut = row.replace("torch.nn.functional.gelu(", "torch.<wbr>nn.<wbr>functional.<wbr>gelu(<wbr>")
    assert hooks.on_page_content(row, None, None, None) == cut


def test_the_reference_is_in_groups_and_begins_with_attention(hooks: ModuleType) -> None:
    first, *_, last = hooks.navigation()
    assert first["Attention"][0] == "reference/fastattn.md" and last == "reference/commands.md"
    page = hooks.reference()["reference/fastattn.md"]
    headings = re.findall(r"^(?:## |::: )(.*)$", page, re.M)
    assert headings[:2] == ["Calls", "fastattn.attention"]
    assert headings.index("fastattn.KVCache") > headings.index("Caches")


def test_a_notebook_has_the_blocks_of_its_tutorial(hooks: ModuleType) -> None:
    """The text of each tutorial is run as one program: so is the notebook's."""
    assert len(hooks.tutorials()) >= 4
    for page in hooks.tutorials():
        text = (CHECKOUT / "docs" / page).read_text(encoding="utf-8")
        book = json.loads(json.dumps(hooks.notebook(page)))
        assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
        cells = {"markdown": [], "code": []}
        for cell in book["cells"]:
            of_code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
            assert cell.keys() == {"cell_type", "id", "metadata", "source"} | of_code
            cells[cell["cell_type"]].append("".join(cell["source"]))
        assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
        blocks = re.findall(r"^```python\n(.*?)\n^```$", text, re.M | re.S)
        assert cells["code"] == blocks and len(blocks) > 3
        prose = "\n".join(cells["markdown"])
        assert "```math" not in prose and prose.count("\n$$") == 2 * text.count("```math")
        links = re.findall(r"\]\(([^)]+)", prose)
        assert links and all(link.startswith(f"{hooks.home()}/") for link in links)


def test_former_addresses_lead_to_the_integrations(hooks: ModuleType, tmp_path: Path) -> None:
    """Each page of docs/integrations had an address in `doors/`."""
    names = [x.stem for x in (CHECKOUT / "docs" / "integrations").glob("*.md")]
    pages = {"" if name == "index" else name for name in names}
    for page in pages:
        (tmp_path / "integrations" / page).mkdir(parents=True, exist_ok=True)
        (tmp_path / "integrations" / page / "index.html").touch()
    hooks.on_post_build(SimpleNamespace(site_dir=str(tmp_path)))
    for page in pages:
        former = tmp_path / "doors" / page
        (to,) = re.findall(r'content="0; url=([^"]+)"', (former / "index.html").read_text())
        assert (former / to).resolve() == tmp_path / "integrations" / page


def test_a_public_name_without_a_docstring_is_found(
    hooks: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hooks.reference()
    assert caplog.messages == []
    monkeypatch.setattr(fastattn.merge, "__doc__", None)
    hooks.reference()
    assert caplog.messages == ["fastattn.merge has no docstring"]
