"""Few sets of options in which every two that fit together meet: pairs, not products."""

import itertools
from collections.abc import Mapping
from typing import Any

# Arguments that several options may name together, since they mean the same in each.
SHARED_ARGUMENTS = frozenset(("causal", "mod_tensors"))


def sets_that_cover_pairs(
    options: Mapping[str, Mapping[str, Any]], largest: int
) -> list[tuple[str, ...]]:
    """Sets of names in which every pair that fits is found together, drawn greedily.

    Two options fit if they name no argument twice and not both a mask and a bias: a float
    attn_mask is a bias.

    Args:
        options: keyword arguments of `fastattn.attention` by name.
        largest: names in a set at most.
    """

    def fit(a: str, b: str) -> bool:
        twice = (options[a].keys() & options[b].keys()) - SHARED_ARGUMENTS
        return not twice and not {"attn_mask", "attn_bias"} <= options[a].keys() | options[b].keys()

    missing = {pair for pair in itertools.combinations(options, 2) if fit(*pair)}
    sets = []
    while missing:
        chosen = list(min(missing))
        while len(chosen) < largest:
            more = [x for x in options if x not in chosen and all(fit(x, y) for y in chosen)]
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
