"""Lines of `pytest bench` beside pytest-benchmark's table: expected duration, device times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# Seconds of a benchmark on a GPU: check against the oracle, samples, sometimes a compilation.
_SECONDS_EACH = 1.0


@dataclass(frozen=True)
class Row:
    """A benchmark: case, implementation, milliseconds on the device, and a rate in a unit."""

    case: str
    implementation: str
    ms: float
    rate: float
    unit: str


def estimate(benchmarks: int) -> str:
    """A sentence on how long so many benchmarks on a GPU take."""
    minutes = benchmarks * _SECONDS_EACH / 60
    return (
        f"{benchmarks} benchmarks on the GPU: about {max(1, round(minutes))} min, and longer where "
        "a peer compiles first (--case-set minute has the least)"
    )


def table(rows: Iterable[Row]) -> Iterator[str]:
    """Lines: a case, then its implementations, the fastest first.

    The last column is the speed as a multiple of the fastest peer's.
    """
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        by_case.setdefault(row.case, []).append(row)
    for case, found in by_case.items():
        yield case
        peers = [row.ms for row in found if not row.implementation.startswith("fastattn")]
        for row in sorted(found, key=lambda row: row.ms):
            ratio = f"{min(peers) / row.ms:6.2f} x best peer" if peers else ""
            yield (
                f"  {row.implementation:<26} {row.ms:9.4f} ms {row.rate:9.4g} {row.unit:<8} {ratio}"
            ).rstrip()
