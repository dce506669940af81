"""Split a call into chunks of query rows, to bound memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import tracing
from ..checks import FARTHEST
from ..options import BROADCAST, LEARNED, TENSORS, Options, along
from . import formula, masks
from .derivatives import InParts, joined, own_rows


def steps(length: int, step: int) -> Iterable[slice]:
    """Slices of a length: one alone is whole, so that a trace serves other lengths too.

    In torch.export, which has no loop for all lengths, there is one.
    """
    if torch.compiler.is_exporting() or length <= step:
        return (slice(0, length),)
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def chunks(
    options: Options, T_q: int, elements: int, limit: int
) -> Iterator[tuple[slice, Options]]:
    """Slices of the queries, in order, and the options of each.

    elements: numbers per query. limit: approximate numbers in memory at once. There is at least one
    slice, empty only without queries.
    """
    for rows in steps(T_q, max(1, limit // max(1, elements))):
        yield rows, _of_rows(options, rows)


_BY_QUERY, _BY_KEY = along("T_q"), along("T_k")


def _dim(name: str, x: Tensor | None, dims: Mapping[str, int]) -> int | None:
    """Dim in a field, such as of the queries; None if it has none, or broadcasts."""
    if x is None or name not in dims or x.dim() <= dims[name]:
        return None
    dim = x.dim() - 1 - dims[name]
    return None if name in BROADCAST and x.shape[dim] == 1 else dim


def _taken(
    options: Options, dims: Mapping[str, int], take: Callable[[Tensor, int], Tensor]
) -> dict[str, Any]:
    """Fields with these dims, each after take(field, dim)."""
    of = {name: (getattr(options, name), _dim(name, getattr(options, name), dims)) for name in dims}
    return {name: take(x, dim) for name, (x, dim) in of.items() if dim is not None}


def _of_rows(options: Options, rows: slice) -> Options:
    offset, offsets = options.query_offset, options.query_offsets
    assert offset is not None, "packed calls are split before"
    first, count = rows.start, rows.stop - rows.start
    own = _taken(options, _BY_QUERY, lambda x, dim: x.narrow(dim, first, count))
    if offsets is not None and options.q_positions is None:
        # Offsets are limited to 2^28, which a later chunk's offset could exceed.
        first = offsets.long().clamp(-FARTHEST, FARTHEST)[:, None]
        places = torch.arange(rows.start, rows.stop, device=offsets.device)
        own["q_positions"] = (first + places).to(torch.int32)
    return options._replace(query_offset=offset + rows.start, query_offsets=None, **own)


class SeenKeys(NamedTuple):
    """Keys that a chunk's queries may see: the first `kept`, and later ones."""

    kept: int
    near: slice

    @property
    def number(self) -> int:
        """Number of keys."""
        return self.kept + self.near.stop - self.near.start

    def of(self, x: Tensor, dim: int = 2) -> Tensor:
        """Rows of x; a view unless some are kept."""
        own = x.narrow(dim, self.near.start, self.near.stop - self.near.start)
        return torch.cat((x.narrow(dim, 0, self.kept), own), dim) if self.kept else own

    def options(self, options: Options, device: torch.device) -> Options:
        """Options of a call with these keys alone."""
        own, start = _taken(options, _BY_KEY, self.of), self.near.start
        lengths = options.key_lengths
        if start and lengths is not None:
            own["key_lengths"] = lengths.clamp(max=self.kept) + (lengths - start).clamp(min=0)
        if self.kept or (start and options.band is None):
            own["k_positions"] = self.of(torch.arange(self.near.stop, device=device)[None], 1)
        elif start:
            assert options.query_offset is not None
            own["query_offset"] = options.query_offset - start
        return options._replace(**own)


def seen_keys(options: Options, T_q: int, T_k: int) -> SeenKeys:
    """Keys that queries may see by numbers alone, at least one of T_k."""
    offset, kept = options.query_offset, min(options.keep_first, T_k)
    anywhere = options.stride is not None
    left = None if anywhere else options.left
    right = 0 if _sees_past(options) else None if anywhere else options.right
    if offset is None or options.query_offsets is not None or options.q_positions is not None:
        left = right = None
    # Functions and dropout read the places of keys.
    if options.mask_mod is not None or options.score_mod is not None or options.dropout:
        left = None
    first = 0 if left is None or offset is None else min(max(0, offset - left), T_k - 1)
    end = T_k if right is None or offset is None else min(offset + T_q + right, T_k)
    if first <= kept:
        return SeenKeys(0, slice(0, max(end, kept, 1)))
    return SeenKeys(kept, slice(first, max(end, first + 1)))


def widened(options: Options) -> Options:
    """Options whose learned tensors are in fp32 or wider, but for those with rows of the queries.

    So that their gradients, sums of those of chunks, are rounded once.
    """
    own: dict[str, Any] = {}
    for name in LEARNED:
        x = getattr(options, name)
        if x is not None and _dim(name, x, _BY_QUERY) is None:
            own[name] = formula.wide(x, None)
    return options._replace(**own)


Compute = Callable[..., tuple[Tensor, ...]]


def in_chunks(
    attend: Compute, main: Sequence[Any], dims: Sequence[int | None],
    of_results: Sequence[int | None], options: Options, slices: Iterable[tuple[slice, Options]], *,
    records: bool = True, at_once: Compute | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Results of a call in chunks of queries, each computed again for gradients of any order.

    In torch.compile by torch's checkpoint; in exports, torch.jit.trace and torch.func, never.

    Args:
        attend: attend(*main, options, first_query) of some queries.
        main, dims: tensors, with their dim of queries.
        of_results: that of each result; see `InParts`.
        slices: as of `chunks`.
        records: whether autograd may record the call.
        at_once: all results from the tensors, in place of those of `attend`.
    """
    learned = [getattr(options, name) for name in LEARNED]
    count, end = len(main), len(main) + len(LEARNED)
    mods = options.mod_tensors
    # Read by `slices`. Saved as well, autograd refuses a backward after a change in place.
    compiling = torch.compiler.is_compiling()
    others = [getattr(options, name) for name in TENSORS if name not in LEARNED]
    others = [x for x in others if x is not None and not (compiling or x.is_inference())]
    tensors = [*main, *learned, *mods, *others]
    of_learned = [_dim(*field, _BY_QUERY) for field in zip(LEARNED, learned, strict=True)]
    of_tensors = [*dims, *of_learned, *[None] * (len(mods) + len(others))]

    def of_rows(own: Options, first: int, *tensors: Any) -> tuple[Tensor, ...]:
        fields = dict(zip(LEARNED, tensors[count:end], strict=True))
        own = own._replace(**fields, mod_tensors=tensors[end : end + len(mods)])
        return attend(*tensors[:count], own, first)

    parts = [(rows, partial(of_rows, own, rows.start)) for rows, own in slices]
    if compiling:  # which makes constants of sizes in a NamedTuple
        if not torch.compiler.is_exporting():
            how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            parts = [(rows, partial(checkpoint, part, **how)) for rows, part in parts]
        results = (part(*own_rows(rows, tensors, of_tensors)) for rows, part in reversed(parts))
        return tuple(joined(results, of_results))  # type: ignore[arg-type]
    call = InParts(parts, of_tensors, of_results)
    if not records or tracing.transforming() or tracing.in_jit_trace():
        return call.at_once(*tensors)
    return call.recomputed(*tensors, at_once=at_once)


class QueryPart(NamedTuple):
    """A part of a call whose scores are in memory at once."""

    first_row: int  # b of the first batch row; of a packed call the sequence
    first_query: int  # of the row or sequence
    rows: slice
    keys: slice
    options: Options


def parts(
    q: Tensor, k: Tensor, options: Options, limit: int, first_row: int = 0
) -> Iterator[QueryPart]:
    """Parts of a call in the order of their rows; packed q and k have a batch of one.

    limit: approximate number of scores in memory at once.
    """
    B, H_q, T_q, _ = q.shape
    whole = slice(0, k.shape[2])
    sequences = iter([(first_row, 1, slice(0, T_q), whole, options)])
    if options.cu_seqlens_q is not None:
        sequences = formula.sequences(options, T_q, k.shape[2])
    for n, _, rows, keys, own in sequences:
        size = B * H_q * (keys.stop - keys.start)
        for part, of_part in chunks(own, rows.stop - rows.start, size, limit):
            of_whole = slice(rows.start + part.start, rows.start + part.stop)
            yield QueryPart(n, part.start, of_whole, keys, of_part)


# Of `attention_in_tiles`: queries of a tile, and keys of a block.
_ROWS, _KEYS = 16, 64
_BY_ROW = along("B")


@tracing.without_autocast
def attention_in_tiles(
    q: Tensor, k: Tensor, v: Tensor, options: Options, first_row: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute o and lse, in fp32 or wider, so that a query has the same bits in every call.

    Tiles of positions and blocks of keys have fixed sizes and places: a query is in the same row of
    the same tile in every call, and visits the same blocks in the same order. torch's operators are
    assumed to compute a row alike in tensors of one shape, whatever the other rows hold. Not for
    packed calls. Offsets and lengths are read on the host.
    """
    tracing.refuse_constants('batch_invariant with backend "torch"')
    # Once, so that gradients of tiles are not rounded before they are added.
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    learned = {name: x.to(dtype) for name in LEARNED if (x := getattr(options, name)) is not None}
    options = options._replace(**learned)
    rows = []
    for b in range(q.shape[0]):
        row = slice(b, b + 1)
        own = _at(options, _BY_ROW, b, 1)
        rows.append(_of_row(q[row], k[row], v[row], own, first_row + b))
    o, lse = (torch.cat(x) for x in zip(*rows, strict=True))
    return o, lse


def _at(options: Options, dims: Mapping[str, int], first: int, count: int) -> Options:
    """The options for `count` places of a dim, from `first` on, as `_rows` takes them."""
    return options._replace(**_taken(options, dims, partial(_rows, first=first, count=count)))


def _rows(x: Tensor, dim: int, first: int, count: int) -> Tensor:
    """Copy `count` rows from `first` on; the nearest one stands for a row that does not exist."""
    places = torch.arange(first, first + count, device=x.device).clamp(0, x.shape[dim] - 1)
    return x.index_select(dim, places)


def _of_row(q: Tensor, k: Tensor, v: Tensor, options: Options, b: int) -> tuple[Tensor, Tensor]:
    """`attention_in_tiles` for batch row b."""
    T_q, T_k = q.shape[2], k.shape[2]
    offset, end = options.query_offset or 0, T_k
    if options.query_offsets is not None:
        offset = max(-FARTHEST, min(int(options.query_offsets), FARTHEST))
    if options.key_lengths is not None:
        end = max(0, min(int(options.key_lengths), T_k))
    tiles = []
    for first in range(offset // _ROWS * _ROWS, offset + T_q, _ROWS):
        own = _at(options, _BY_QUERY, first - offset, _ROWS)
        positions = torch.arange(first, first + _ROWS, dtype=torch.int32, device=q.device)
        own = own._replace(query_offset=0, query_offsets=None, q_positions=positions[None])
        # Other rows see nothing: a NaN of theirs would reach the gradients.
        exist = ((positions >= offset) & (positions < offset + T_q)).view(1, 1, _ROWS, 1)
        own = own._replace(attn_mask=exist if own.attn_mask is None else exist & own.attn_mask)
        tile = _of_tile(_rows(q, 2, first - offset, _ROWS), k, v, own, _seen(own, first, end), b)
        inside = slice(max(0, offset - first), offset + T_q - first)
        tiles.append([x[:, :, inside] for x in tile])
    o, lse = (torch.cat(x, 2) for x in zip(*tiles, strict=True))
    return o, lse


def _seen(options: Options, first: int, end: int) -> int:
    """How many keys there are, without those that are ahead of a tile."""
    return max(0, min(end, first + _ROWS)) if _sees_past(options) else end


def _sees_past(options: Options) -> bool:
    """Whether no query sees a key ahead of it."""
    return options.causal and options.prefix_lengths is None


def _of_tile(
    q: Tensor, k: Tensor, v: Tensor, options: Options, end: int, b: int
) -> tuple[Tensor, Tensor]:
    """o and lse of the queries of a tile, block by block of their keys; all in fp32 or wider."""
    H_q, H_k = q.shape[1], k.shape[1]
    m = q.new_full((1, H_q, _ROWS), -torch.inf)
    l, acc = torch.zeros_like(m), q.new_zeros(1, H_q, _ROWS, v.shape[3])
    if options.sinks is not None:
        sinks = options.sinks[None, :, None].expand_as(m)
        m = sinks.detach()
        l = (sinks - _finite(m)).exp()
    for first, own in _blocks(options, end, q.device):
        k_block, v_block = _rows(k, 2, first, _KEYS), _rows(v, 2, first, _KEYS)
        x = formula.scores(q, k_block, own, first_row=b)
        m_next = torch.maximum(m, x.detach().amax(-1))
        p = (x - _finite(m_next)[..., None]).exp()
        rescale = (m - _finite(m_next)).exp()
        l, m = l * rescale + p.sum(-1), m_next
        wide = formula.wide(v_block, masks.existing_keys(own, _KEYS, q.device))
        groups = p.view(1, H_k, H_q // H_k * _ROWS, _KEYS)
        acc = acc * rescale[..., None] + (groups @ wide).view(acc.shape)
    blind = l == 0
    l = torch.where(blind, 1.0, l)
    return acc / l[..., None], torch.where(blind, -torch.inf, _finite(m) + l.log())


def _finite(m: Tensor) -> Tensor:
    """m, 0 in rows that have seen nothing."""
    return torch.where(m == -torch.inf, 0.0, m)


def _blocks(options: Options, end: int, device: torch.device) -> Iterator[tuple[int, Options]]:
    """The first key of each block before `end`, in order, and the options for it."""
    # Without keys an empty block, so that results depend on the inputs.
    for first in range(0, max(end, 1), _KEYS):
        own = _at(options, _BY_KEY, first, _KEYS)
        positions = torch.arange(first, first + _KEYS, dtype=torch.int32, device=device)
        exist = torch.tensor([min(_KEYS, end - first)], device=device)
        yield first, own._replace(k_positions=positions[None], key_lengths=exist)
