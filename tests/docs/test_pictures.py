"""The pictures of the documents are what the library does now."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "docs_pictures", PICTURES.parent / "tools" / "pictures.py"
    )
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def test_pictures_are_those_of_today(drawing: ModuleType, on_torch: None) -> None:
    """After a change that is wanted, `python docs/tools/pictures.py` draws them again."""
    drawn = drawing.pictures()
    there = {path.name: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")}
    assert len(drawn) > 15 and sorted(drawn) == sorted(there)
    assert [name for name in drawn if drawn[name] != there[name]] == []


def test_a_mask_is_drawn_a_stretch_at_a_time(drawing: ModuleType) -> None:
    weights = torch.tensor([[1.0, 1.0, 0.0], [0.5, 0.0, 1.0]])
    assert dict(drawing.cells(weights)) == {
        4: "M0 1h1v1h-1z",
        8: "M0 0h2v1h-2zM2 1h1v1h-1z",
    }
