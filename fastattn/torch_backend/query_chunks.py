"""Split a call into chunks of query rows, to bound memory."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import FARTHEST
from ..options import BROADCAST, Options, along
from . import formula


def chunks(
    options: Options, T_q: int, elements: int, limit: int
) -> Iterator[tuple[slice, Options]]:
    """Slices of the queries, in order, and the options of each.

    elements: numbers per query. limit: approximate numbers in memory at once. There is at least one
    slice, empty only without queries.
    """
    count = max(1, limit // max(1, elements))
    for start in range(0, max(T_q, 1), count):
        rows = slice(start, min(start + count, T_q))
        yield rows, _of_rows(options, rows)


_BY_QUERY = along("T_q")


def _of_rows(options: Options, rows: slice) -> Options:
    offset, offsets = options.query_offset, options.query_offsets
    assert offset is not None, "packed calls are split before"
    own: dict[str, Any] = {}
    for name, behind in _BY_QUERY.items():
        x = getattr(options, name)
        broadcast = name in BROADCAST and x is not None and x.shape[-1 - behind] == 1
        if x is not None and not broadcast:
            own[name] = x[(..., rows, *(slice(None),) * behind)]
    if offsets is not None and options.q_positions is None:
        # Offsets are limited to 2^28, which a later chunk's offset could exceed.
        first = offsets.long().clamp(-FARTHEST, FARTHEST)[:, None]
        places = torch.arange(rows.start, rows.stop, device=offsets.device)
        own["q_positions"] = (first + places).to(torch.int32)
    return options._replace(query_offset=offset + rows.start, query_offsets=None, **own)


class Part(NamedTuple):
    """A part of a call whose scores are in memory at once."""

    first_row: int  # b of the first batch row; of a packed call the sequence
    first_query: int  # of the row or sequence
    rows: slice
    keys: slice
    options: Options


def parts(q: Tensor, k: Tensor, options: Options, limit: int, first_row: int = 0) -> Iterator[Part]:
    """Parts of a call in the order of their rows; packed q and k have a batch of one.

    limit: approximate number of scores in memory at once.
    """
    B, H_q, T_q, _ = q.shape
    whole = slice(0, k.shape[2])
    sequences = iter([(first_row, slice(0, T_q), whole, options)])
    if options.cu_seqlens_q is not None:
        sequences = formula.sequences(options, T_q, k.shape[2])
    for n, rows, keys, own in sequences:
        size = B * H_q * (keys.stop - keys.start)
        for part, of_part in chunks(own, rows.stop - rows.start, size, limit):
            of_whole = slice(rows.start + part.start, rows.start + part.stop)
            yield Part(n, part.start, of_whole, keys, of_part)
