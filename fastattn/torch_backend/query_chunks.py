"""A call's options for some of its queries, so that torch need not hold every score at once."""

from collections.abc import Iterator
from typing import Any

import torch

from ..checks import FARTHEST
from ..options import BROADCAST, Options, along


def chunks(
    options: Options, T_q: int, elements: int, limit: int
) -> Iterator[tuple[slice, Options]]:
    """Slices of the queries, in order, and the options of each by itself.

    elements: how many numbers one query takes. limit: about how many are held at once. There is at
    least one slice, and it is empty only where there are no queries.
    """
    count = max(1, limit // max(1, elements))
    for start in range(0, max(T_q, 1), count):
        rows = slice(start, min(start + count, T_q))
        yield rows, _of_rows(options, rows)


_BY_QUERY = along("T_q")


def _of_rows(options: Options, rows: slice) -> Options:
    offset, offsets = options.query_offset, options.query_offsets
    assert offset is not None, "packed calls are taken apart before"
    own: dict[str, Any] = {}
    for name, behind in _BY_QUERY.items():
        x = getattr(options, name)
        broadcast = name in BROADCAST and x is not None and x.shape[-1 - behind] == 1
        if x is not None and not broadcast:
            own[name] = x[(..., rows, *(slice(None),) * behind)]
    if offsets is not None and options.q_positions is None:
        # Offsets end at 2^28. The queries behind do not: a chunk's offset would end there too.
        first = offsets.long().clamp(-FARTHEST, FARTHEST)[:, None]
        places = torch.arange(rows.start, rows.stop, device=offsets.device)
        own["q_positions"] = (first + places).to(torch.int32)
    return options._replace(query_offset=offset + rows.start, query_offsets=None, **own)
