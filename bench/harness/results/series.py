"""What the charts of a report show: figures over length, decoding by cache, limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..attention import input_bytes
from ..cases import Case
from ..figures import exponential_limit, least_memory
from .report import timed

Series = dict[str, list[tuple[float, float]]]


def sweep_series(
    data: Mapping[str, Any], direction: str, figure: str = "tflops"
) -> dict[tuple[int, bool], Series]:
    """(D, causal) to implementation to points (length, figure), of FlashAttention-3's sweep.

    figure: "tflops", or "peak_mib" beyond the inputs. A record without it gives no point.
    """
    panels: dict[tuple[int, bool], Series] = {}
    for record in timed(data["results"]):
        case = record["case"]
        if figure in record and _of_the_sweep(case, direction):
            series = panels.setdefault((case["D"], case["causal"]), {})
            point = (case["T_q"], record[figure])
            series.setdefault(record["implementation"], []).append(point)
    return {key: panels[key] for key in sorted(panels)}


def _of_the_sweep(case: Mapping[str, Any], direction: str) -> bool:
    tokens = case.get("B", 0) * case.get("T_q", 0)
    plain = case["family"] == direction and case.get("direction") == direction
    if not plain or tokens != 16384 or case["H_q"] != case["H_k"] or case["label"]:
        return False
    return case["dtype"] == "bfloat16" and case["layout"] == "bthd"


def limits(data: Mapping[str, Any], D: int, direction: str) -> dict[str, float]:
    """Upper limits in TFLOP/s: the matrix product of the same run, and the exponentials."""
    found = {}
    if data["ceilings"]:
        found["matrix product"] = data["ceilings"]["matmul_tflops"]
    gpu = data["environment"].get("gpu") or {}
    clock, count = gpu.get("max_sm_clock_mhz"), gpu.get("sm_count")
    if direction == "forward" and clock and count:
        found["exponentials"] = exponential_limit(D, count, clock)
    return found


def least_mib(data: Mapping[str, Any], D: int, direction: str) -> float:
    """The least memory beyond the inputs, in MiB: outputs and lse. All lengths need the same."""
    known = {field.name for field in fields(Case)}
    described = next(
        record["case"]
        for record in data["results"]
        if record["case"].get("D") == D and _of_the_sweep(record["case"], direction)
    )
    case = Case(**{name: value for name, value in described.items() if name in known})
    # A backward is measured with its forward.
    return (least_memory(case) - input_bytes(case)) / 2**20


def decoding(data: Mapping[str, Any]) -> dict[tuple[int, int], list[Mapping[str, Any]]]:
    """(query heads, keys) to the timed records of decoding against such a cache in bf16."""
    groups: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for record in timed(data["results"]):
        case = record["case"]
        if "kv_gbps" in record and case["dtype"] == "bfloat16":
            groups.setdefault((case["H_q"], case["T_k"]), []).append(record)
    return {key: groups[key] for key in sorted(groups)}
