"""Pairwise testing: few sets of options that together contain every compatible pair."""

import itertools
from collections.abc import Mapping
from typing import Any

# Arguments that may occur in several options of a set, since they mean the same in each.
SHARED_ARGUMENTS = frozenset(("causal", "mod_tensors"))


def sets_that_cover_pairs(
    options: Mapping[str, Mapping[str, Any]], largest: int
) -> list[tuple[str, ...]]:
    """Sets of names that contain every compatible pair, chosen greedily.

    Two options are compatible if they share no argument and are not a mask and a bias: a float
    attn_mask is a bias.

    Args:
        options: keyword arguments of `fastattn.attention` by name.
        largest: most names in a set.
    """

    def compatible(a: str, b: str) -> bool:
        twice = (options[a].keys() & options[b].keys()) - SHARED_ARGUMENTS
        return not twice and not {"attn_mask", "attn_bias"} <= options[a].keys() | options[b].keys()

    missing = {pair for pair in itertools.combinations(options, 2) if compatible(*pair)}
    sets = []
    while missing:
        chosen = list(min(missing))
        while len(chosen) < largest:
            more = [x for x in options if x not in chosen and all(compatible(x, y) for y in chosen)]
            gain = {x: sum((x, y) in missing or (y, x) in missing for y in chosen) for x in more}
            if not gain or not max(gain.values()):
                break
            chosen.append(max(gain, key=lambda x: gain[x]))
        missing -= {pair for pair in itertools.permutations(chosen, 2)}
        sets.append(tuple(chosen))
    return sets


def together(options: Mapping[str, Mapping[str, Any]], names: tuple[str, ...]) -> dict[str, Any]:
    """The keyword arguments of all `names`."""
    return {argument: x for name in names for argument, x in options[name].items()}
