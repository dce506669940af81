"""Attention of a sequence that is spread over ranks is that of one device, by every method."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from nightly import gate_cases
from torch.distributed.device_mesh import init_device_mesh

from fastattn import alibi_slopes, reference
from fastattn.options import LEARNED
from fastattn.parallel import ContextPlan, context_attention, shard, unshard
from fastattn.testing import assert_within_budget, make_qkv, worst_naive
from fastattn.testing.compare import DIFFERENTIABLE, NAMES, results
from fastattn.testing.inputs import draw
from fastattn.testing.option_examples import option_examples, together

pytestmark = pytest.mark.usefixtures("one_thread")

T, H_q, H_k, D = 100, 4, 2, 16
METHODS = ("gather", "ring", "ulysses", "usp")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@cache
def examples(T: int) -> dict[str, dict[str, Any]]:
    """Every option by itself that a sequence's attention to itself has, and some sets."""
    lengths = torch.tensor([40, 0, 3, 50, 0, T - 93])
    documents = torch.arange(6).repeat_interleave(lengths).expand(2, T)
    results = option_examples(H_q, H_k, T, T, D, reach=20)
    # Of other queries than keys, or refused.
    results = {
        name: x
        for name, x in results.items()
        if name not in ("offsets", "first-ahead", "documents-anywhere", "positions", "two-products")
    }
    results["documents"]["documents"] = results["documents"]["documents"][1]
    results["no-option"] = {}
    results["causal-window"] = {"causal": True, "window": 33}
    results["packed"] = {"causal": True, "documents": documents}
    results["near"] = {"causal": True, "window": 20}
    results["near-both"] = {"window": (20, 15), "sinks": draw(H_q), "relative_bias": draw(H_q, 41)}
    results["near-documents"] = {"documents": documents // 2}
    results["all"] = {
        "causal": True, "window": 60, "keep_first": 5, "documents": documents, "sinks": draw(H_q),
        "softcap": 2.0, "alibi_slopes": alibi_slopes(H_q), "relative_bias": draw(H_q, 41),
        "attn_bias": draw(2, 1, T, T), "key_lengths": torch.tensor([T, T - 20]),
    }  # fmt: skip
    return results


# Of a call: how it differs from two rows of q, k and v of the sizes above.
SIZES: dict[str, dict[str, Any]] = {
    "one-row": {"B": 1},
    "one-key-head": {"H_k": 1},
    "fewer-tokens-than-blocks": {"T_q": 20},
    "one-token": {"T_q": 1},
    "wide-values": {"D_v": 24},
}
IN_STRETCHES = ("near", "near-both", "near-documents")  # one of each rank: rings that end early
SCATTERED = ("all", "packed", "one-row")  # with plans of many short runs
IN_BOTH = ("causal", "causal-window", "packed", "sinks", "bias", "alibi", "softcap", "all")
IN_BOTH += ("relative-bias",)
# By positions, in blocks of 128: a sequence of so many tokens, each with dropout.
FAR = 300
BY_POSITIONS = {
    "far-dropout": ("dropout",),
    "far-mask-mod": ("mask-mod",),
    "far-score-mod": ("score-mod",),
    "far-lengths": ("lengths",),
    "far-heads": ("heads",),
    "far-all": ("all", "mask-mod", "score-mod"),
}
MODS = ("mask-mod", "score-mod", "dropout", "heads")


def named_calls(ranks: int) -> list[tuple[str, str, str]]:
    """(example, method, dtype) of the calls that a world makes."""
    every = [name for name in examples(T) if name not in (*MODS, *IN_STRETCHES)]
    names = every if ranks == 2 else list(IN_BOTH)
    methods = {name: METHODS if name in IN_BOTH else METHODS[:3] for name in names}
    calls = [(name, method, "fp32") for name in names for method in methods[name]]
    calls += [(name, method, "bf16") for name in IN_BOTH for method in METHODS]
    calls += [(name, "gather", "fp32") for name in MODS[:2] if ranks == 2]
    calls += [(name, "ulysses", "fp32") for name in MODS if ranks == 2]
    calls += [("far-all", method, dtype) for method in METHODS for dtype in ("fp32", "bf16")]
    calls += [("sinks", method, "fp64") for method in METHODS]
    far = [name for name in BY_POSITIONS if name != "far-all"] if ranks == 2 else ["far-heads"]
    methods_of_far = METHODS[:2] if ranks == 2 else METHODS
    calls += [(name, method, "fp32") for name in far for method in methods_of_far]
    calls += [(name, "ring", "fp32") for name in IN_STRETCHES if ranks == 4]
    return calls + [(name, method, "fp32") for name in SIZES for method in METHODS]


def of_the_gate(ranks: int, call: tuple[str, str, str]) -> bool:
    """Whether a call is made by day."""
    name, method, dtype = call
    turn = [*examples(T), *SIZES, *BY_POSITIONS].index(name) + METHODS.index(method)
    if name in (*MODS, *IN_STRETCHES):
        return True
    if dtype == "bf16":
        return turn % 4 == ranks % 4
    return method == "ulysses" or turn % 2 == ranks // 4


CALLS = {
    ranks: gate_cases(
        [call for call in named_calls(ranks) if of_the_gate(ranks, call)],
        [call for call in named_calls(ranks) if not of_the_gate(ranks, call)],
    )
    for ranks in (2, 4)
}


def inputs_of(name: str, dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    far = BY_POSITIONS.get(name)
    length = FAR if far else T
    sizes = {"B": 2, "H_q": H_q, "H_k": H_k, "T_q": length, "D": D, **SIZES.get(name, {})}
    options = {"causal": True} if name in SIZES else together(examples(length), far or (name,))
    if far:  # so that every such call goes by positions
        options = options | examples(length)["dropout"]
    cast = (*LEARNED, "relative_query")
    options = {key: x.to(dtype) if key in cast else x for key, x in options.items()}
    q, k, v = make_qkv(**sizes, dtype=dtype)
    if dtype == torch.float64:  # what is as coarse as fp32 is then far past the budget
        v = (v.detach() * 2**20).requires_grad_()
        options = {key: x.double() if key in LEARNED else x for key, x in options.items()}
    return (q, k, v), options


def learned(options: dict[str, Any]) -> list[str]:
    given = [key for key in DIFFERENTIABLE if key in options]
    return [key for key in given if options[key].is_floating_point()]


def spread(method: str, plan: ContextPlan, mesh: Any):
    """`attention` of the whole sequence by `context_attention`."""
    dims = {"documents": 1, "key_padding_mask": 1, "relative_query": 2}
    dims |= {"attn_mask": -2, "attn_bias": -2}

    def attention(q, k, v, **options):
        for name, dim in dims.items():
            x = options.get(name)
            if x is not None and x.shape[dim] == plan.T:
                options[name] = shard(x, dim, plan, mesh)
        own = (shard(x, 2, plan, mesh) for x in (q, k, v))
        o, lse = context_attention(*own, mesh=mesh, plan=plan, method=method, **options)
        return unshard(o, 2, plan, mesh), unshard(lse, 2, plan, mesh)

    return attention


def all_results() -> dict[tuple[str, str, str], list[Any]] | None:
    """Collect rank 0's o, lse and all gradients of every call."""
    ranks = dist.get_world_size()
    flat = init_device_mesh("cpu", (ranks,))
    square = init_device_mesh("cpu", (2, ranks // 2))
    collected = {}
    for name, method, dtype in CALLS[ranks]:
        (q, k, v), options = inputs_of(name, DTYPES[dtype])
        far = name in BY_POSITIONS
        balance = "longest_first" if far or name in SCATTERED else "zigzag"
        balance = "contiguous" if name in IN_STRETCHES else balance
        block = 128 if far else 8
        plan = ContextPlan.make(q.shape[2], ranks, causal=True, block=block, balance=balance)
        attend = spread(method, plan, square if method == "usp" else flat)
        call = results(attend, q, k, v, **options)
        collected[name, method, dtype] = [
            (x if x.dtype == torch.float64 else x.float()).numpy() for x in call
        ]
    return collected if dist.get_rank() == 0 else None


@cache
def expected(name: str, dtype: str) -> tuple[tuple[torch.Tensor, ...], ...]:
    """(exact, naive) results of one device."""
    (q, k, v), options = inputs_of(name, DTYPES[dtype])
    wide = options | {key: options[key].double() for key in learned(options)}
    exact = results(reference.attention, q.double(), k.double(), v.double(), **wide)
    naive = worst_naive(exact, lambda: results(reference.attention, q, k, v, **options))
    return exact, naive


def started(ranks: int) -> Iterator[dict[tuple[str, str, str], list[Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTATTN_BACKEND", "torch")
        yield run_ranks(f"{__file__}:all_results", ranks)[0]


@pytest.fixture(scope="module")
def two() -> Iterator[dict[tuple[str, str, str], list[Any]]]:
    yield from started(2)


@pytest.fixture(scope="module")
def four() -> Iterator[dict[tuple[str, str, str], list[Any]]]:
    yield from started(4)


def check(call: tuple[str, str, str], actual: dict[tuple[str, str, str], list[Any]]) -> None:
    name, _, dtype = call
    exact, naive = expected(name, dtype)
    _, options = inputs_of(name, DTYPES[dtype])
    names = (*NAMES, *(f"d{key}" for key in learned(options)))
    for what, x, *both in zip(names, actual[call], exact, naive, strict=True):
        x = torch.from_numpy(x).to(DTYPES[dtype] if what != "lse" else torch.float32)
        assert_within_budget(what, x, *both)


@pytest.mark.parametrize("call", CALLS[2], ids="-".join)
def test_two_ranks(call, two):
    check(call, two)


@pytest.mark.parametrize("call", CALLS[4], ids="-".join)
def test_four_ranks(call, four):
    check(call, four)


@pytest.mark.parametrize("method", METHODS[:3])
def test_every_option_that_is_learned_is_among_the_calls(method):
    calls = [inputs_of(name, torch.float32)[1] for name, by, _ in named_calls(2) if by == method]
    refused = {"query2", "key2"}
    assert {key for options in calls for key in learned(options)} >= {*LEARNED} - refused
