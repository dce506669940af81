"""Examples of every option of `attention`, and few sets that cover all pairs."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .inputs import draw

EVERY = tl.constexpr(3)


@triton.jit
def near_or_striped(b, h, q_pos, k_pos, table, ends):  # type: ignore[no-untyped-def]
    # A query before every key has a negative position.
    end = tl.load(ends + tl.maximum(q_pos, 0)) + tl.load(ends + k_pos) % 2
    close = tl.abs(q_pos - k_pos) <= tl.load(table + h).to(tl.int32)
    return (close | (k_pos % EVERY == b)) & (k_pos < end)


@triton.jit
def squash(x, b, h, q_pos, k_pos, table, ends):  # type: ignore[no-untyped-def]
    length = tl.load(ends + k_pos) - tl.load(ends + tl.maximum(q_pos, 0))
    return tl.where(k_pos % 2 == 0, x * tl.sigmoid(x), x) + tl.load(table + h) * (b + 1) * length


@triton.jit
def squash_grad(dx, x, b, h, q_pos, k_pos, table, ends):  # type: ignore[no-untyped-def]
    s = tl.sigmoid(x)
    return dx * tl.where(k_pos % 2 == 0, s + x * s * (1 - s), 1.0)


def option_examples(
    H_q: int, H_k: int, T_q: int, T_k: int, D: int, *, reach: int
) -> dict[str, dict[str, Any]]:
    """Make keyword arguments of `fastattn.attention` by name, for calls of these sizes and B = 2.

    Each example has one option, and options that it requires. `reach`: the last distance of the
    tables of relative biases and keys.
    """
    B, bias, documents = 2, draw(1, H_q, T_q, T_k), _documents(T_k)
    # With an offset, positions exceed the keys.
    ends = torch.arange(2 * T_k) % 5 + T_k - 7
    # For up to 8 heads in the full model, of which these are the last.
    mod_tensors = (torch.tensor([5.0, 0.5, 2.0, 3.0, 0.7, 6.0, 2.5, 4.0]), ends)
    seed = torch.tensor([3 << 40 | 7, 1 << 33 | 5])
    # Including fully masked rows.
    holes = bias.masked_fill(_chance(*bias.shape), -math.inf)
    holes[..., -4, :] = -math.inf
    return {
        "causal": {"causal": True},
        "prefix": {"causal": True, "prefix_lengths": torch.tensor([T_k * 3 // 5, 3])},
        "prefix-int": {"causal": True, "prefix_lengths": 6},
        "window": {"window": (T_k // 2 - 1, 1)},
        "window-first": {"window": 5, "keep_first": 3},
        "first-ahead": {"window": (3, 2), "keep_first": T_k - 3, "query_offset": 0},
        "stride": {"stride": 5},
        "stride-window-first": {
            "window": (T_k // 9, T_k // 9),
            "stride": T_k // 2 - 1,
            "keep_first": 2,
        },
        "padding": {"key_padding_mask": ~_chance(B, T_k)},
        "lengths": {"key_lengths": torch.tensor([T_k // 2, T_k - 4], dtype=torch.int32)},
        "lengths-of-none": {"key_lengths": torch.tensor([5, 0])},
        "offsets": {"query_offset": torch.tensor([2, T_k // 2 + 2]), "causal": True},
        "positions": {
            "positions": (
                torch.stack((torch.arange(T_q) + T_k - T_q, torch.arange(T_q) + 16)).int(),
                torch.arange(8, T_k + 8, dtype=torch.int32)[None],
            ),
            "causal": True,
        },
        "documents": {"documents": (documents[:, T_k - T_q :], documents)},
        "documents-anywhere": {"documents": (draw(B, T_q).long(), draw(B, T_k).long())},
        "mask": {"attn_mask": ~_chance(B, H_q, T_q, T_k)},
        "mask-of-pairs": {"attn_mask": _chance(H_q, T_q, T_k)},
        "mask-of-keys": {"attn_mask": torch.arange(T_k).expand(B, 1, 1, T_k) < T_k * 5 // 9},
        "mask-of-queries": {"attn_mask": torch.arange(T_q).expand(H_q, T_q)[..., None] % 9 > 0},
        "mask-mod": {"mask_mod": near_or_striped, "mod_tensors": mod_tensors},
        "softcap": {"softcap": 0.7, "scale": 0.9},
        "alibi": {"alibi_slopes": draw(H_q).abs()},
        "alibi-rows": {"alibi_slopes": draw(B, H_q).abs()},
        "relative-bias": {"relative_bias": draw(H_q, 2 * reach + 1)},
        "relative-keys": {"relative_keys": draw(H_q, 2 * reach + 1, D)},
        "relative-keys-shared": {"relative_keys": draw(H_k, 2 * reach + 1, D)},
        "relative-query": {
            "relative_keys": draw(1, 2 * reach + 1, D),
            "relative_query": draw(B, H_q, T_q, D, seed=1),
        },
        "two-products": {
            "query2": draw(B, H_q, T_q, D // 2, seed=1),
            "key2": draw(B, 1, T_k, D // 2, seed=2),
        },
        "bias": {"attn_bias": draw(B, H_q, T_q, T_k)},
        "bias-with-holes": {"attn_bias": holes},
        "bias-of-pairs": {"attn_mask": draw(T_q, T_k)},
        "bias-of-rows": {"attn_bias": draw(B, 1, 1, T_k)},
        "bias-of-heads": {"attn_bias": draw(H_q, T_q, 1)},
        "bias-of-keys": {"attn_mask": draw(H_q, 1, T_k)},
        "score-mod": {
            "score_mod": squash,
            "score_mod_grad": squash_grad,
            "mod_tensors": mod_tensors,
        },
        "sinks": {"sinks": draw(H_q)},
        "dropout": {"dropout": 0.4, "dropout_seed": seed},
        "heads": {"heads": (8 - H_q, 8), "dropout": 0.4, "dropout_seed": seed},
    }


def _chance(*shape: int) -> Tensor:
    return draw(*shape, seed=2) < 0.3


def _documents(T: int) -> Tensor:
    """Ids [2, T] of consecutive documents, with padding -1 between two."""
    ends = torch.tensor([[T // 4, T * 5 // 9, T, T], [T * 5 // 9, T * 2 // 3, T * 3 // 4, T - 2]])
    ids = (torch.arange(T)[None, :, None] >= ends[:, None, :]).sum(-1)
    return torch.where(ids == 3, -1, ids).to(torch.int32)


# Arguments that several examples of a set may share.
SHARED_ARGUMENTS = frozenset(("causal", "mod_tensors"))


_APART = (
    {"attn_mask", "attn_bias"}, {"positions", "query_offset"}, {"relative_keys", "key2"}
)  # fmt: skip


def sets_that_cover_pairs(
    options: Mapping[str, Mapping[str, Any]], largest: int
) -> list[tuple[str, ...]]:
    """Choose sets of at most `largest` names that contain every compatible pair, greedily.

    Two options are compatible if they share no argument, are not a mask and a bias (a float
    attn_mask is a bias), and do not both set query positions.
    """

    def compatible(a: str, b: str) -> bool:
        twice = (options[a].keys() & options[b].keys()) - SHARED_ARGUMENTS
        both = options[a].keys() | options[b].keys()
        return not twice and not any(pair <= both for pair in _APART)

    return cover_pairs(options, compatible, largest)


def cover_pairs(
    names: Iterable[str], compatible: Callable[[str, str], bool], largest: int
) -> list[tuple[str, ...]]:
    """Choose sets of at most `largest` names that contain every compatible pair, greedily."""
    names = list(names)
    missing = {pair for pair in itertools.combinations(names, 2) if compatible(*pair)}
    sets = []
    while missing:
        chosen = list(min(missing))
        while len(chosen) < largest:
            more = [x for x in names if x not in chosen and all(compatible(x, y) for y in chosen)]
            gain = {x: sum((x, y) in missing or (y, x) in missing for y in chosen) for x in more}
            if not gain or not max(gain.values()):
                break
            chosen.append(max(gain, key=lambda x: gain[x]))
        missing -= {pair for pair in itertools.permutations(chosen, 2)}
        sets.append(tuple(chosen))
    return sets


def together(options: Mapping[str, Mapping[str, Any]], names: tuple[str, ...]) -> dict[str, Any]:
    """Merge the keyword arguments of all `names`."""
    return {argument: x for name in names for argument, x in options[name].items()}
