"""Modelled bounds: the file is of the kernels that ship, and no figure is past what a GPU does."""

import json
from pathlib import Path
from typing import Any

import pytest
import triton

from fastattn.bench.results import modelled
from fastattn.bench.results.bounds import GHZ, MULTIPROCESSORS, PRODUCTS, TERABYTES
from fastattn.bench.results.decode_bounds import CACHES, Cache
from fastattn.testing.compiling.compile_pool import CompilePool, compiled_cases

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"
# Multiply-adds of 16-bit numbers a clock of a multiprocessor; 8-bit ones are twice as many.
RATE = 2048


@pytest.fixture(scope="module")
def data() -> Any:
    return json.loads((RESULTS / "modelled" / "sm_90.json").read_text(encoding="utf-8"))


@pytest.fixture
def of_this_triton(data: Any) -> Any:
    if data["triton"] != triton.__version__:
        pytest.skip(f"the file is of Triton {data['triton']}")
    return data


@pytest.mark.parametrize("D", compiled_cases([64], [128, 256]))
def test_bounds_are_of_the_kernels_that_ship(
    D: int, of_this_triton: Any, compile_pool: CompilePool
):
    """Rows of the file, made anew: where a kernel changes, `python bench/model.py` follows.

    Always of the head dim of which `kernels/test_hopper_compile.py` compiles the least.
    """
    again = compile_pool.call("fastattn.bench.results.bounds:rows_of", "sm_90", D=D)
    assert again == [row for row in of_this_triton["rows"] if row["D"] == D]
    assert len(again) == (9 if D <= 128 else 11)


@pytest.mark.parametrize("cache", compiled_cases([CACHES[1]], [*CACHES[:1], *CACHES[2:]]), ids=str)
def test_decoding_is_of_the_kernel_that_ships(
    cache: Cache, of_this_triton: Any, compile_pool: CompilePool
):
    again = compile_pool.call("fastattn.bench.results.decode_bounds:row_of", "sm_90", cache=cache)
    assert again == of_this_triton["decode"][CACHES.index(cache)]


def test_products_are_as_many_as_the_figures_say(data: Any):
    """By the time that matrix units take for them; and units are not busy for longer than all."""
    for row in data["rows"]:
        rate = RATE * (2 if row["kernel"] == "forward_fp8" else 1)
        multiplied = PRODUCTS[row["kernel"]] * row["D"]
        assert row["tensor"] == round(multiplied / rate, 4), row
        peak = 2 * rate * MULTIPROCESSORS * GHZ / 1000
        assert row["tflops"] <= round(peak) and row["bound"] >= row["tensor"], row


def test_decoding_is_no_faster_than_memory(data: Any):
    assert len(data["decode"]) == len(CACHES)
    for row, cache in zip(data["decode"], CACHES, strict=True):
        assert (row["cache"], row["D"], row["page"]) == cache
        of_memory = cache.bytes_of_key * MULTIPROCESSORS * GHZ / 1000 / TERABYTES
        assert row["memory"] == pytest.approx(of_memory, abs=1e-3)
        assert row["bound"] >= max(row["memory"], row["issue"], row["shared"])
        assert row["tb_s"] == TERABYTES, "this cache is bound by its kernel"


def test_the_page_shows_every_bound(data: Any):
    _, _, kernels, decoding_head, decoding = modelled.section(RESULTS)
    assert len(kernels.splitlines()) == 2 + len(data["rows"])
    assert len(decoding.splitlines()) == 2 + len(data["decode"])
    assert "| int8 | 64 | 128 |" in decoding and "4.8 TB/s" in decoding_head
