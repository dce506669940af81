"""A call's options for some of its queries, so that torch need not hold every score at once."""

from collections.abc import Iterator

from torch import Tensor

from ..options import Options


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


def _of_rows(options: Options, rows: slice) -> Options:
    documents, query = options.q_documents, options.relative_query
    offset, offsets = options.query_offset, options.query_offsets
    assert offset is not None, "packed calls are taken apart before"

    def one(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[2] == 1 else x[:, :, rows]

    return options._replace(
        query_offset=offset + rows.start,
        query_offsets=None if offsets is None else offsets.long() + rows.start,
        q_documents=None if documents is None else documents[:, rows],
        attn_mask=one(options.attn_mask),
        attn_bias=one(options.attn_bias),
        relative_query=None if query is None else query[:, :, rows],
    )
