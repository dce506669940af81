"""Contents of a release: versions, distributions, and workflows that call make."""

import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from setuptools.compat.py310 import tomllib

yaml = pytest.importorskip("yaml")
CHECKOUT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((CHECKOUT / ".github" / "workflows").glob("*.yml"))
BUILD = """
import os, sys, setuptools.build_meta as backend
os.chdir(sys.argv[1])
print(getattr(backend, f"build_{sys.argv[3]}")(sys.argv[2]))
"""


def files() -> list[str]:
    """Files that git tracks, and untracked ones that it does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("this is no clone")
    return [name for name in done.stdout.splitlines() if (CHECKOUT / name).is_file()]


def build(source: Path, out: Path, kind: str) -> Path:
    command = [sys.executable, "-c", BUILD, str(source), str(out), kind]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist from files without git, and the wheel that the sdist makes."""
    pytest.importorskip("setuptools_scm")
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    for name in files():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((CHECKOUT / name).read_bytes())
    sdist = build(source, folder, "sdist")
    with tarfile.open(sdist) as tar:
        tar.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    # A module of an earlier build, deleted since.
    stale = unpacked / "build" / "lib" / "fastattn" / "deleted.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    return sdist, build(unpacked, folder, "wheel")


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (x for x in archive.namelist() if x.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_an_sdist_has_what_git_has(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as tar:
        packed = {x.name.partition("/")[2] for x in tar.getmembers() if x.isfile()}
    made = {x for x in packed if "egg-info" in x} | {"PKG-INFO", "setup.cfg"}
    assert packed - made == set(files())


def test_a_wheel_has_the_packages_and_nothing_else(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = set()
    for folder, package in (("fastattn/", "fastattn/"), ("kernels/", "fastattn/kernels/"),
                            ("bench/harness/", "fastattn/bench/")):  # fmt: skip
        names = (name for name in files() if name.startswith(folder))
        expected |= {package + name.removeprefix(folder) for name in names}
    assert packed == expected


def test_the_wheel_of_an_sdist_has_its_version(distributions: tuple[Path, Path]) -> None:
    sdist, wheel = distributions
    version = metadata(wheel)["Version"]
    assert version == "0.1.dev0"  # without git and tags
    assert sdist.name == f"fastattn-{version}.tar.gz"


def test_the_readme_of_a_distribution_leads_to_the_repository(
    distributions: tuple[Path, Path],
) -> None:
    told = metadata(distributions[1])
    assert told["Description-Content-Type"] == "text/markdown"
    home = re.search(r"Source, (\S+)", told["Project-URL"])
    assert home is not None
    text = str(told.get_payload())
    links = re.findall(r'\]\(([^)]+)\)|(?:src|srcset)="([^"]+)"', text)
    assert len(links) > 20
    for link in map("".join, links):
        assert link.startswith(("https://", "#")), link
        name = link.removeprefix(home[1])
        if name != link:
            name = re.sub(
                r"^/actions/(workflows/\w+\.yml)(/badge\.svg)?$", r"/raw/main/.github/\1", name
            )
            place = re.fullmatch(r"/(?:blob|raw)/main/([^#]*)(#.*)?", name)
            assert place is not None and (CHECKOUT / place[1]).exists(), link


def test_distributions_pass_pypis_check(distributions: tuple[Path, Path]) -> None:
    pytest.importorskip("twine")
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, distributions)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def steps(workflow: Any) -> list[str]:
    return [
        step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step
    ]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_a_contributor_runs(path: Path) -> None:
    """Targets of make and the gate; and no job may write more than it says."""
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    makefile = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    assert workflow["permissions"] == {"contents": "read"}
    assert steps(workflow)
    for command in steps(workflow):
        words = command.split()
        if words[0] == "make":
            assert words[1] in targets, command
        else:
            assert words[:2] == ["bash", ".ci/run"] or words[:2] == ["test", "-e"], command


def test_the_changelog_of_a_version_is_a_page() -> None:
    """Sections are kinds of change; a merge may put lines elsewhere."""
    text = (CHECKOUT / "CHANGELOG.md").read_text(encoding="utf-8")
    parts = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert parts[0].startswith("[Unreleased]")
    for part in parts:
        kinds = re.findall(r"^### (.*)$", part, re.MULTILINE)
        assert kinds == [x for x in ("Added", "Changed", "Removed", "Fixed") if x in kinds]
        assert part.count("\n") < 130


@pytest.fixture(scope="module")
def versions() -> dict[str, Any]:
    """Definitions in tests/versions.py."""
    return runpy.run_path(str(CHECKOUT / "tests" / "versions.py"))


def test_the_matrix_has_the_rows_of_the_versions(versions: dict[str, Any]) -> None:
    workflow = yaml.safe_load((CHECKOUT / ".github/workflows/test.yml").read_text())
    rows = [row.name for row in versions["ROWS"]]
    assert workflow["jobs"]["versions"]["strategy"]["matrix"]["row"] == rows


def test_the_checks_of_the_versions_are_there(versions: dict[str, Any]) -> None:
    """pytest would run none of a list in which one file is missing."""
    named = [name for names in versions["CHECKS"].values() for name in names if ".py" in name]
    assert named == list(dict.fromkeys(named))
    assert [name for name in named if not (CHECKOUT / "tests" / name).is_file()] == []


def newest_release() -> str:
    """Return the version of the newest tag, or "" before the first."""
    command = ["git", "tag", "--list", "v*", "--sort=-v:refname"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    return done.stdout.partition("\n")[0].removeprefix("v")


def test_the_citation_is_of_the_newest_release() -> None:
    citation = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text(encoding="utf-8"))
    told = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    unreleased = told["tool"]["setuptools_scm"]["fallback_version"]
    assert citation["version"] == (newest_release() or unreleased)
    assert ("date-released" in citation) == bool(newest_release())
    assert citation["url"] == told["project"]["urls"]["Source"]


def test_no_text_installs_an_unreleased_package_by_name() -> None:
    """An index may have another project under this name."""
    if newest_release():
        pytest.skip("a release is on the index")
    own = r"pip install (?:-\S+ )*[\"']?fastattn(?![\w.-])"
    texts = {name for name in files() if name.endswith((".py", ".md", ".yml", ".toml"))}
    texts.remove("docs/releases.md")
    found = [x for x in texts if re.search(own, (CHECKOUT / x).read_text(encoding="utf-8"))]
    assert found == []


def test_what_is_read_by_forms_is_well_formed() -> None:
    citation = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    for reference in citation["references"]:
        assert {"type", "title", "authors", "year"} <= reference.keys()
    for path in (CHECKOUT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= form.keys(), path
        assert all(part["attributes"]["label"] for part in form["body"]), path
