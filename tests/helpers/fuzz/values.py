"""A value of every option, drawn for a case. A row of the table of options has an entry here."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn import BlockMask
from fastattn.testing.calls import Draw
from fastattn.testing.inputs import to_device

from . import mods
from .cases import Case
from .tensors import negative

# Farther than int32 counts, and than fp32 does.
_FAR, _NEARER = 1 << 40, 1 << 28


def drawn_options(case: Case, rows: int, salt: str = "") -> dict[str, Any]:
    """Keyword arguments of the case's call.

    rows: B, or packed sequences. salt: of other numbers.
    """
    results = {}
    for name in case.options:
        results[name] = VALUES[name](_Sizes(case, rows), case.random(name + salt))
    return to_device(results, case.device)


class _Sizes:
    """Sizes that the values of options depend on."""

    def __init__(self, case: Case, rows: int) -> None:
        self.case = case
        self.rows = rows
        self.B, self.H_q, self.H_k = case.B, case.H_q, case.H_k
        self.T_q, self.T_k, self.D = case.T_q, case.T_k, case.D
        self.has = set(case.options).__contains__
        self.packed = case.packed


def _near(draw: Draw, x: int, block: int) -> int:
    """A number within a length, its ends and the edges of blocks more often than others."""
    edges = (0, 1, 2, block - 1, block, block + 1, x - 1, x, x + 1)
    return max(0, int(draw.choice(draw.integer(0, x), draw.choice(*edges))))


def _window(s: _Sizes, draw: Draw) -> Any:
    def side() -> int | None:
        return draw.choice(None, _near(draw, s.T_k, s.case.tile[1]), draw.integer(0, 9), _FAR)

    if draw.chance(0.4):
        return max(1, _near(draw, s.T_k, s.case.tile[1]))
    left, right = side(), side()
    if left is None and right is None and s.has("keep_first"):
        left = 3
    return left, right


def _per_row(s: _Sizes, draw: Draw, most: int) -> Tensor:
    """Lengths, each from below 0 to past the most there is."""
    dtype = draw.choice(torch.int32, torch.int64)
    ends = (-2, most + 5) if dtype is torch.int32 else (-_FAR, _FAR)
    lengths = [
        draw.choice(*ends, 0, 1, most, _near(draw, most, s.case.tile[1])) for _ in range(s.rows)
    ]
    return torch.tensor(lengths, dtype=dtype)


def _prefix_lengths(s: _Sizes, draw: Draw) -> Any:
    if draw.chance(0.3):
        return _near(draw, s.T_k, s.case.tile[1])
    return _per_row(s, draw, s.T_k)


def _query_offset(s: _Sizes, draw: Draw) -> Any:
    kind = draw.choice(int, int, torch.int32, torch.int64)

    def one() -> int:
        far = draw.choice(1 << 20, _NEARER)
        if kind is torch.int64 and not s.has("stride"):  # which would repeat from another place
            far = _FAR
        near = s.T_k - s.T_q + draw.integer(-4, 4)
        # Slopes times such a distance leave fp32 nothing of the score.
        sloped = s.has("alibi_slopes")
        return int(
            draw.choice(0, near, near, -s.T_q, s.T_k, near if sloped else draw.choice(-1, 1) * far)
        )

    return one() if kind is int else torch.tensor([one() for _ in range(s.B)], dtype=kind)


def _positions(s: _Sizes, draw: Draw) -> tuple[Tensor, Tensor]:
    def one(T: int, steps: int) -> Tensor:
        rows = draw.choice(1, s.B)
        blocks = -(-T // 128)
        first = steps * draw.integers(0, max(8, s.T_k) // steps, rows, blocks).int()
        ahead = torch.arange(blocks * 128, dtype=torch.int32) % 128
        actual = first.repeat_interleave(128, 1) + ahead
        return actual[:, :T].contiguous()

    return one(s.T_q, 1), one(s.T_k, 4)


def _dims(s: _Sizes, draw: Draw) -> tuple[int, ...]:
    """A shape of 2 to 4 dims that broadcasts to every score."""
    whole = (s.B, s.H_q, s.T_q, s.T_k)
    shape = [size if draw.chance(0.7) else 1 for size in whole]
    if s.case.call == "decode_attention":
        shape[3] = s.T_k + draw.choice(0, 0, 3)
    return tuple(shape[draw.choice(0, 0, 1, 2) :])


def _strided(s: _Sizes, x: Tensor, draw: Draw) -> Tensor:
    """x in another layout: of [B] [H_q] [T_q] [T_k] any strides are taken."""
    kind = draw.choice("plain", "plain", "turned", "wide", "every-second", "expanded", "negative")
    if kind == "turned":
        return x.mT.contiguous().mT
    if kind == "wide":
        return torch.nn.functional.pad(x, (0, 3))[..., : x.shape[-1]]
    if kind == "every-second":
        return torch.stack((x, x), -1)[..., 0]
    if kind == "expanded" and x.dim() == 4:
        return x.expand(s.B, s.H_q, -1, -1)
    if kind == "negative" and x.is_floating_point():
        return negative(x)
    return x


def _attn_mask(s: _Sizes, draw: Draw) -> Tensor:
    dense = s.case.call in ("attention", "attention_block", "attention_statistics")
    if dense and not s.has("attn_bias") and draw.chance(0.2):
        return _attn_bias(s, draw)
    mask = draw.bools(draw.choice(0.1, 0.5, 0.95, 1.0), *_dims(s, draw))
    return _strided(s, mask, draw)


def _float_dtype(s: _Sizes, draw: Draw) -> torch.dtype:
    return draw.choice(s.case.dtype, s.case.dtype, torch.float32, torch.bfloat16)


def _attn_bias(s: _Sizes, draw: Draw) -> Tensor:
    bias = draw.normal(*_dims(s, draw))
    # A score of -inf is for the mask of a function to hide, and has no slope.
    if not s.has("score_mod") and draw.chance(0.4):
        bias = bias.masked_fill(draw.bools(0.3, *bias.shape), -math.inf)
    return _strided(s, bias.to(_float_dtype(s, draw)), draw)


def _key_padding_mask(s: _Sizes, draw: Draw) -> Tensor:
    kind = draw.choice("holes", "ends", "few", "none")
    mask = draw.bools({"holes": 0.7, "few": 0.1, "none": 0.0}.get(kind, 1.0), s.B, s.T_k)
    if kind == "ends":
        places = torch.arange(s.T_k)
        first = draw.integers(0, s.T_k // 2, s.B, 1)
        last = draw.integers(s.T_k // 2, s.T_k, s.B, 1)
        mask = (places >= first) & (places < last)
    return mask.mT.contiguous().mT if draw.chance(0.3) else mask


def _documents(s: _Sizes, draw: Draw) -> Any:
    def one(T: int) -> Tensor:
        ids = draw.integers(-1, 2, s.B, T)
        return ids.sort(1).values if draw.chance(0.6) else ids

    if s.T_q == s.T_k and draw.chance(0.5):
        return one(s.T_q)
    return one(s.T_q), one(s.T_k)


def _mod_tensors(s: _Sizes, draw: Draw) -> tuple[Tensor, ...]:
    n = mods.TABLE.value
    return draw.normal(n).abs() + 0.2, draw.integers(0, 9, n).int()


def _mask_mod(s: _Sizes, draw: Draw) -> Any:
    known = mods.MASKS_OF_TENSORS if s.has("mod_tensors") else mods.MASKS
    function, of_batch, of_heads = draw.choice(*known)
    return draw.choice(function, BlockMask(function, per_batch=of_batch, per_head=of_heads))


def _score_mods(s: _Sizes) -> tuple[Any, Any]:
    known = mods.SCORES_OF_TENSORS if s.has("mod_tensors") else mods.SCORES
    pair: tuple[Any, Any] = s.case.random("score_mod").choice(*known)
    return pair


def _heads(s: _Sizes, draw: Draw) -> tuple[int, int]:
    total = s.H_q + draw.integer(0, 4)
    first = draw.integer(0, total - s.H_q)
    counted = s.has("mask_mod") or s.has("score_mod")
    if s.has("dropout") and not counted and draw.chance(0.3):
        first += total * draw.integer(1, 3)
    return first, total


def _table(s: _Sizes, draw: Draw) -> int:
    """Entries of a table by distance."""
    return 2 * int(draw.choice(0, 1, 5, s.T_k, draw.integer(0, s.T_k))) + 1


def _relative_keys(s: _Sizes, draw: Draw) -> Tensor:
    heads = draw.choice(1, s.H_k, s.H_q)
    return draw.normal(heads, _table(s, draw), s.D).to(s.case.dtype)


def _relative_query(s: _Sizes, draw: Draw) -> Tensor:
    # Packed sequences are as long as their queries; see `judges`.
    if s.packed:
        return draw.normal(s.T_q, s.H_q, s.D).to(s.case.dtype)
    return draw.normal(s.B, s.H_q, s.T_q, s.D).to(s.case.dtype)


def _second(s: _Sizes, draw: Draw, of: str) -> Tensor:
    """query2 or key2, of a width that both draw alike."""
    width = s.case.random("second").choice(1, 8, 16)
    heads = s.H_q if of == "q" else draw.choice(*(H for H in (1, 2, s.H_k) if s.H_k % H == 0))
    T = s.T_q if of == "q" else s.T_k
    shape = (T, heads, width) if s.packed else (s.B, heads, T, width)
    return draw.normal(*shape).to(s.case.dtype)


def _alibi_slopes(s: _Sizes, draw: Draw) -> Tensor:
    slopes = draw.normal(*draw.choice((s.H_q,), (s.rows, s.H_q))) * 0.3
    return slopes.abs() if draw.chance(0.8) else slopes


VALUES: dict[str, Callable[[_Sizes, Draw], Any]] = {
    "causal": lambda s, draw: draw.chance(0.9) or s.has("prefix_lengths"),
    "window": _window,
    "keep_first": lambda s, draw: _near(draw, s.T_k, s.case.tile[1]),
    "stride": lambda s, draw: draw.choice(1, 2, 3, 5, 16, max(1, s.T_k - 1), s.T_k + 3),
    "mod_tensors": _mod_tensors,
    "mask_mod": _mask_mod,
    "heads": _heads,
    "prefix_lengths": _prefix_lengths,
    "key_lengths": lambda s, draw: _per_row(s, draw, s.T_k),
    "query_offset": _query_offset,
    "attn_mask": _attn_mask,
    "key_padding_mask": _key_padding_mask,
    "documents": _documents,
    "positions": _positions,
    "scale": lambda s, draw: draw.choice(1, draw.uniform(0.02, 1.5)),
    "softcap": lambda s, draw: draw.choice(30.0, 2, draw.uniform(0.3, 9)),
    "sinks": lambda s, draw: (2 * draw.normal(s.H_q)).to(_float_dtype(s, draw)),
    "attn_bias": _attn_bias,
    "relative_keys": _relative_keys,
    "relative_query": _relative_query,
    "query2": lambda s, draw: _second(s, draw, "q"),
    "key2": lambda s, draw: _second(s, draw, "k"),
    "score_mod": lambda s, draw: _score_mods(s)[0],
    "score_mod_grad": lambda s, draw: _score_mods(s)[1],
    "dropout": lambda s, draw: draw.choice(0.1, 0.5, 0.9),
    "dropout_seed": lambda s, draw: torch.tensor([draw.integer(0, 2**63 - 1) for _ in range(2)]),
    "deterministic": lambda s, draw: draw.chance(0.2),
    "batch_invariant": lambda s, draw: True,
    "alibi_slopes": _alibi_slopes,
    "relative_bias": lambda s, draw: draw.normal(s.H_q, _table(s, draw)).to(_float_dtype(s, draw)),
}
