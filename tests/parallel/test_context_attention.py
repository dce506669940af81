"""Generated calls over ranks give one device's results: of a sequence, by any method, or a cache.

Every option meets every method; FASTATTN_FUZZ_SEED draws other calls.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fuzz.cases import DERIVED, ORDERS, TAKES, Case, drawn, legal
from fuzz.judges import check
from fuzz.tensors import inputs
from fuzz.values import VALUES, drawn_options
from gloo_ranks import run_ranks, wrong_calls
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fastattn.parallel import (
    ContextPlan,
    context_attention,
    decode_attention,
    explain_context,
    shard,
    unshard,
)
from fastattn.parallel.choose import METHODS
from fastattn.parallel.context_parallel_attention import _REFUSED
from fastattn.parallel.decode import REFUSED
from fastattn.parallel.plan import BALANCES
from fastattn.score_checks import COUNTING
from fastattn.testing.calls import CALLS, Draw
from fastattn.testing.decoding import KINDS, assert_decoded, fill

FIRST = int(os.environ.get("FASTATTN_FUZZ_SEED", "0"))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NAMES = sorted(TAKES["attention"] - _REFUSED.keys())
DECODING = sorted(TAKES["decode_attention"] - REFUSED.keys())
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
    """A call with an option that its seed names: by position of more than two blocks of 128."""
    backend = "triton" if ranks == 2 and seed % 4 == 3 and INTERPRETED else "torch"
    name, draw, like = NAMES[seed % len(NAMES)], Draw(f"{seed}/ranks"), drawn(seed, backend)
    near, by_place = draw.integer(2, 40), name in COUNTING
    T = draw.choice(1, near, draw.integer(41, 150), *[draw.integer(257, 300)] * 4 * by_place)
    sizes = {"B": max(1, like.B), "H_k": like.H_k, "G": like.G, "D": like.D, "D_v": like.D_v}
    left = DERIVED | {"max"}
    if T > 40:  # the oracle's memory and the interpreter's time grow by the square
        most = 1 if backend == "triton" else 2
        sizes = {name: min(x, 8 if name[0] == "D" else most) for name, x in sizes.items()}
        left |= {"again"}
    beside = ("score_mod", "relative_bias", "sinks") if name == "mod_tensors" else ()
    drawn_too = (x for x in like.options if x in NAMES)
    options = tuple(dict.fromkeys((name, *beside, *drawn_too)))
    traits = (like.traits - left) | {"environment"}  # no argument names a backend
    case = legal(
        replace(like, call="attention", T_q=T, T_k=T, options=options, traits=traits, **sizes)
    )
    shared = method_of(seed) in METHODS[2:] and case.H_q % ranks
    return replace(case, G=ranks) if shared else case


def decoding_of(seed: int) -> Case:
    """A step over a cache with an option that its seed names."""
    name, like = DECODING[seed % len(DECODING)], drawn(seed, "torch")
    options = (name, *(x for x in like.options if x in DECODING and x != name))
    sizes = {"B": max(1, like.B), "T_q": max(1, like.T_q), "T_k": max(1, like.T_k)}
    return legal(replace(like, call="decode_attention", options=options, **sizes))


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
        for name, dim in DIMS.items():  # in one order on every rank, as gradients are sent
            if name in options and options[name].shape[dim] == plan.T:
                options[name] = shard(options[name], dim, plan, mesh)
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


def decode(case: Case) -> None:
    """Judge a step over a cache of any kind whose keys the ranks share, page by page."""
    draw, group = case.random("pages"), dist.group.WORLD
    page, T_q = draw.choice(1, 2, 3, 5, 16), min(case.T_q, draw.choice(1, 1, 2, 3))
    kind = draw.choice(*(x for x, how in KINDS.items() if not {"window", "starts"} & how.keys()))
    case = replace(case, T_q=T_q)
    q, k, v = inputs(case)
    lengths = torch.tensor([draw.integer(0, case.T_k) for _ in range(case.B)], dtype=torch.int32)
    places = torch.arange(case.T_k)
    mine = places // page % dist.get_world_size() == dist.get_rank()
    counts = (mine & (places < lengths[:, None])).sum(1, dtype=torch.int32)
    options = drawn_options(case, case.B)
    own = {
        name: x[..., : case.T_k][..., mine] if name in DIMS and x.shape[-1] > 1 else x
        for name, x in options.items()
    }
    cache = fill(kind, k[:, :, mine], v[:, :, mine], counts).view
    o, lse = decode_attention(q, cache, group=group, page=page, return_lse=True, **own)
    assert_decoded((o, lse), q, fill(kind, k, v, lengths), orders=ORDERS, **options)
    first = o.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, o), "ranks differ"


def judge(seed: int, line: DeviceMesh, squares: list[DeviceMesh]) -> None:
    """Judge the sequence and the cache of a seed, on this rank."""
    case = case_of(seed, dist.get_world_size())
    mesh = squares[seed % 2] if method_of(seed) == "usp" else line
    call = CALLS["attention"]._replace(function=spread(case, mesh))
    ours = mock.patch.dict(CALLS, attention=call)
    with ours, mock.patch.dict(VALUES, documents=documents_of):
        check(case)
    decode(decoding_of(seed))


def wrong(seeds: list[int]) -> list[str]:
    ranks = dist.get_world_size()
    line = init_device_mesh("cpu", (ranks,))
    squares = [init_device_mesh("cpu", (n, ranks // n)) for n in (2, 1)]
    return wrong_calls(seeds, partial(judge, line=line, squares=squares))


@pytest.mark.parametrize("ranks", EVERY)
def test_generated_calls_on_ranks(ranks: int) -> None:
    seeds = range(FIRST, FIRST + len(METHODS) * len(NAMES))[:: EVERY[ranks]]
    for of_rank in run_ranks(f"{__file__}:wrong", ranks, seeds=[*seeds]):
        assert not of_rank, "\n".join(of_rank)
