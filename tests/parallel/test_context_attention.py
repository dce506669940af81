"""Generated calls of a sequence that is spread over ranks have one device's results, by any method.

Every option meets every method; FASTATTN_FUZZ_SEED draws other calls.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from fuzz.cases import DERIVED, TAKES, Case, drawn, legal
from fuzz.judges import check
from fuzz.values import VALUES
from gloo_ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fastattn.parallel import ContextPlan, context_attention, explain_context, shard, unshard
from fastattn.parallel.choose import METHODS
from fastattn.parallel.context_parallel_attention import _REFUSED
from fastattn.parallel.plan import BALANCES
from fastattn.score_checks import COUNTING
from fastattn.testing.calls import CALLS, Draw

FIRST = int(os.environ.get("FASTATTN_FUZZ_SEED", "0"))
NAMES = sorted(TAKES["attention"] - _REFUSED.keys())
# By ranks, of so many each seed is taken.
EVERY = {2: 1, 4: 3}
# Options that are sharded, with the dim of their tokens.
DIMS = {
    "documents": 1,
    "key_padding_mask": 1,
    "relative_query": 2,
    "attn_mask": -2,
    "attn_bias": -2,
}


def method_of(seed: int) -> str:
    return METHODS[seed // len(NAMES) % len(METHODS)]


def case_of(seed: int, ranks: int) -> Case:
    """A call with an option that its seed names, of few tokens or of more than a block of 128."""
    name, draw, like = NAMES[seed % len(NAMES)], Draw(f"{seed}/ranks"), drawn(seed, "torch")
    T = draw.choice(1, draw.integer(2, 40), draw.integer(41, 150), draw.integer(257, 300))
    sizes = {"B": max(1, like.B), "H_k": like.H_k, "G": like.G, "D": like.D, "D_v": like.D_v}
    if T > 40:  # the oracle's memory grows by the square
        sizes = {name: min(x, 8 if name[0] == "D" else 2) for name, x in sizes.items()}
    if method_of(seed) in METHODS[2:] and sizes["H_k"] * sizes["G"] % ranks:
        sizes["G"] = ranks
    options = (name, *(x for x in like.options if x in NAMES and x != name))
    # A call that has no argument for a backend.
    traits = (like.traits - DERIVED - {"max"}) | {"environment"}
    return legal(
        replace(like, call="attention", T_q=T, T_k=T, options=options, traits=traits, **sizes)
    )


def documents_of(s: Any, draw: Draw) -> Tensor:
    """Ids of a sequence that attends to itself."""
    ids = draw.integers(-1, draw.choice(2, 8), s.B, s.T_k)
    return ids.sort(1).values if draw.chance(0.6) else ids


def spread(case: Case, mesh: DeviceMesh) -> Callable[..., Any]:
    """`attention` of whole sequences by `context_attention`."""
    draw, ranks = case.random("plan"), dist.get_world_size()
    # What depends on positions goes in blocks of 128.
    block = 128 if {*COUNTING} & {*case.options} else draw.choice(4, 8, 16, 128)
    how = {"block": block, "balance": draw.choice("auto", *BALANCES)}
    planned, method = draw.chance(0.5), method_of(case.seed)

    def attention(q: Tensor, k: Tensor, v: Tensor, return_lse: bool, **options: Any) -> Any:
        named = ("causal", "window", "documents") if planned else ()
        plan = ContextPlan.make(case.T_q, ranks, **how, **{x: options.get(x) for x in named})
        for name in DIMS.keys() & options.keys():
            if options[name].shape[DIMS[name]] == plan.T:
                options[name] = shard(options[name], DIMS[name], plan, mesh)
        if plan.documents is not None:
            plan.mark(options["documents"])
        own = [shard(x, 2, plan, mesh) for x in (q, k, v)]
        where: dict[str, Any] = {"mesh": mesh, "plan": plan, "method": method}
        assert explain_context(*own, **where, **options).method == method
        actual = context_attention(*own, **where, return_lse=return_lse, **options)
        if not return_lse:
            return unshard(actual, 2, plan, mesh)
        return tuple(unshard(x, 2, plan, mesh) for x in actual)

    return attention


def wrong_calls(seeds: list[int]) -> list[str]:
    """The calls of these seeds with a result that is wrong on this rank."""
    ranks = dist.get_world_size()
    line = init_device_mesh("cpu", (ranks,))
    squares = [init_device_mesh("cpu", (n, ranks // n)) for n in (2, 1)]
    wrong = []
    for seed in seeds:
        case = case_of(seed, ranks)
        mesh = squares[seed % 2] if method_of(seed) == "usp" else line
        call = CALLS["attention"]._replace(function=spread(case, mesh))
        with (
            mock.patch.dict(VALUES, documents=documents_of),
            mock.patch.dict(CALLS, attention=call),
        ):
            try:
                check(case)
            except AssertionError as error:
                wrong.append(f"{method_of(seed)}: {error}\n{case}")
            except Exception:
                sys.stderr.write(f"{method_of(seed)} on rank {dist.get_rank()}: {case}\n")
                raise
    return wrong


@pytest.mark.parametrize("ranks", EVERY)
def test_generated_calls_on_ranks(ranks: int) -> None:
    seeds = range(FIRST, FIRST + len(METHODS) * len(NAMES))[:: EVERY[ranks]]
    for wrong in run_ranks(f"{__file__}:wrong_calls", ranks, seeds=[*seeds]):
        assert not wrong, "\n".join(wrong)
