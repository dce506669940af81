"""Messages between ranks: shards, refusals that all of them see, and when transfers start."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from gloo_ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from fastattn import reference
from fastattn.parallel import (
    ContextPlan,
    context_attention,
    decode_attention,
    gather,
    ring,
    roll,
    shard,
    unshard,
)
from fastattn.parallel.decode import REFUSED as UNSERVED
from fastattn.parallel.ranks import Ranks, replicated
from fastattn.testing import assert_within_budget, make_qkv, worst_naive
from fastattn.testing.inputs import draw

T = 90
METHODS = ("gather", "ring", "ulysses")


def world() -> dict[str, Any]:
    """Everything that this file asserts of a rank, in one start of two processes."""
    mesh = init_device_mesh("cpu", (2,))
    results = {"shards": shards(mesh), "bits": same_bits(mesh), "order": orders(mesh)}
    results["refusals"] = {name: refusal(call, mesh) for name, (call, _) in REFUSED.items()}
    results["twice"] = {method: twice(mesh, method) for method in METHODS}
    results["shares"] = sum_of_shares(mesh)
    results["tables twice"] = refusal(tables_twice, mesh)
    results["shards twice"] = shards_twice(mesh)
    results["absent"] = absent()
    return results


def plan_of(ranks: int = 2, **arguments: Any) -> ContextPlan:
    return ContextPlan.make(T, ranks, causal=True, **{"block": 8, "balance": "zigzag", **arguments})


def inputs(mesh: Any, plan: ContextPlan, **sizes: int) -> list[torch.Tensor]:
    return [shard(x, 2, plan, mesh) for x in make_qkv(**{"B": 1, "T_q": T, "D": 8, **sizes})]


def attend(
    mesh: Any, method: str, *, plan: ContextPlan | None = None, H_q: int = 4, **options: Any
) -> torch.Tensor:
    own = inputs(mesh, plan := plan or plan_of(), H_q=H_q, H_k=2 if H_q == 4 else 1)
    return context_attention(*own, mesh=mesh, plan=plan, method=method, causal=True, **options)


def shards(mesh: Any) -> dict[str, bool]:
    results = {}
    for balance in ("contiguous", "zigzag", "longest_first"):
        plan = plan_of(balance=balance)
        tokens = torch.arange(2 * T).view(2, T)
        own = shard(tokens, 1, plan, mesh)
        index, real = plan.indices(dist.get_rank()), plan.real(dist.get_rank())
        results[f"{balance} shard"] = torch.equal(own[:, :real], tokens[:, index[:real]])
        results[f"{balance} padding"] = not own[:, real:].any()
        results[f"{balance} unshard"] = torch.equal(unshard(own, 1, plan, mesh), tokens)
        for shift in (-1, 2):
            wanted = tokens.roll(shift, 1)
            wanted[:, -1:] = wanted[:, -1:] if shift > 0 else -100
            wanted[:, :2] = -100 if shift > 0 else wanted[:, :2]
            rolled = roll(own, 1, plan, mesh, shift=shift)
            same = torch.equal(rolled[:, :real], wanted[:, index[:real]])
            results[f"{balance} roll {shift}"] = same and bool((rolled[:, real:] == -100).all())
        x, weight = draw(T, 3).requires_grad_(), draw(T, 3, seed=1)
        y = unshard(shard(x, 0, plan, mesh) ** 2, 0, plan, mesh)
        (grad,) = torch.autograd.grad((y * weight).sum(), x)
        results[f"{balance} gradient"] = torch.equal(grad, 2 * x * weight)
    return results


def same_bits(mesh: Any) -> dict[str, bool]:
    """Whether two runs of forward and backward give the same bits."""
    results = {}
    for method in METHODS:
        runs = []
        for _ in range(2):
            plan = plan_of()
            whole = make_qkv(B=1, T_q=T, D=8, dtype=torch.bfloat16)
            bias = draw(4, 21).requires_grad_()
            own = [shard(x, 2, plan, mesh) for x in whole]
            how = {"mesh": mesh, "plan": plan, "method": method, "causal": True}
            o = context_attention(*own, relative_bias=bias, **how)
            grads = torch.autograd.grad(o.float().square().sum(), (*whole, bias))
            runs.append((o.detach(), *grads))
        results[method] = all(map(torch.equal, *runs))
    return results


class Recorded:
    """A transfer on its way that notes when it is waited for."""

    def __init__(self, work: Any, events: list[str]) -> None:
        self.work, self.events = work, events

    def wait(self) -> None:
        if self.events[-1] != "wait":
            self.events.append("wait")
        self.work.wait()


def orders(mesh: Any) -> dict[str, list[str]]:
    """When transfers are issued and waited for, and when a part is computed."""
    events: list[str] = []

    def noted(function: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(what)
            results = function(*args, **kwargs)
            if what == "compute":
                return results
            if isinstance(results, list):
                return [Recorded(x, events) for x in results]
            return Recorded(results, events)

        return call

    results = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", noted(dist.batch_isend_irecv, "issue"))
        patch.setattr(gather, "gather_single", noted(gather.gather_single, "issue"))
        for module, forward in ((ring.parts, "part_forward"), (gather, "whole_forward")):
            for name in (forward, "part_backward"):
                patch.setattr(module, name, noted(getattr(module, name), "compute"))
        patch.setattr(gather, "heads_at_once", lambda *_: 1)
        for method in ("ring", "gather"):
            events.clear()
            o = attend(mesh, method, softcap=5.0)
            results[f"{method} forward"] = events.copy()
            events.clear()
            o.sum().backward()
            results[f"{method} backward"] = events.copy()
    return results


def of_second_order(attend: Callable[..., Any]) -> list[torch.Tensor]:
    """Gradients of what is made of gradients, by attention of a whole sequence."""
    leaves = make_qkv(B=1, T_q=T, D=8)
    grads = torch.autograd.grad(attend(*leaves).square().sum(), leaves, create_graph=True)
    second = sum(x.square().sum() for x in grads)
    return [x.detach() for x in torch.autograd.grad(second, leaves)]


def twice(mesh: Any, method: str) -> Any:
    """Second-order gradients, or what asking for them raises."""
    plan = plan_of()

    def attend(*whole: torch.Tensor) -> torch.Tensor:
        own = (shard(x, 2, plan, mesh) for x in whole)
        o = context_attention(*own, mesh=mesh, plan=plan, method=method, causal=True)
        return unshard(o, 2, plan, mesh)

    try:
        return [x.numpy() for x in of_second_order(attend)]
    except RuntimeError as error:
        return str(error)


def tables_twice(mesh: Any) -> None:
    bias = draw(4, 21).requires_grad_()
    o = attend(mesh, "ulysses", relative_bias=bias)
    (grad,) = torch.autograd.grad(o.square().sum(), bias, create_graph=True)
    grad.sum().backward()


def sum_of_shares(mesh: Any) -> float:
    """The gradient of a table in bf16, of shares that nearly cancel."""
    ranks, x = Ranks.of(mesh), torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    share = (1 + 2**-9, -1)[ranks.rank]
    (grad,) = torch.autograd.grad(share * replicated(x, ranks).float(), x)
    return float(grad)


def shards_twice(mesh: Any) -> bool:
    plan = plan_of()
    x = draw(T).requires_grad_()
    y = unshard(shard(x, 0, plan, mesh) ** 3, 0, plan, mesh)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    return torch.equal(second, 6 * x)


def absent() -> str:
    """Error on rank 0 for a call that rank 1 never makes, in a group with a short timeout."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    attend(group, "ring")
    return "" if dist.get_rank() == 1 else refusal(lambda group: attend(group, "ring"), group)


def refusal(call: Callable[[Any], Any], mesh: Any) -> str:
    """The type and message of what a call raises."""
    try:
        call(mesh)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "served"


def other_plans(mesh: Any) -> None:
    attend(mesh, "auto", plan=plan_of(balance=("contiguous", "zigzag")[dist.get_rank()]))


def other_length(mesh: Any) -> None:
    q, k, v = inputs(mesh, plan := plan_of())
    context_attention(q, k[:, :, dist.get_rank() :], v, mesh=mesh, plan=plan)


def crossed(mesh: Any) -> None:
    """Both calls are known; now each rank makes one of them."""
    for softcap in (5.0, 9.0):
        attend(mesh, "ring", softcap=softcap)
    attend(mesh, "ring", softcap=(5.0, 9.0)[dist.get_rank()])


def crossed_backward(mesh: Any) -> None:
    """Two calls that are alike; each rank comes to the gradients of another."""
    outputs = [attend(mesh, "ring") for _ in range(2)]
    outputs[dist.get_rank()].sum().backward()


def known_to_one(mesh: Any) -> None:
    attend(mesh, "ring")
    attend(mesh, "ring", **({"softcap": -1.0} if dist.get_rank() == 1 else {}))


def other_gradients(mesh: Any) -> None:
    plan = plan_of()
    own = [x.detach().requires_grad_(dist.get_rank() == 0) for x in inputs(mesh, plan)]
    context_attention(*own, mesh=mesh, plan=plan, method="gather")


@triton.jit
def hides_odd(b, h, q_pos, k_pos):
    return k_pos % 2 == 0


@triton.jit
def hides_even(b, h, q_pos, k_pos):
    return k_pos % 2 == 1


@triton.jit
def summed(x, b, h, q_pos, k_pos):
    return tl.cumsum(x, 1)


ALIKE = "ValueError: plan, shapes and options must be the same on every rank: rank 0 has"
MASK, MODS = torch.ones(T, T, dtype=torch.bool), (hides_odd, hides_even)
# What cannot be served, and the beginning of what every rank says.
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "plans": (other_plans, ALIKE),
    "options": (lambda mesh: attend(mesh, "ring", softcap=(1.0, 2.0)[dist.get_rank()]), ALIKE),
    "crossed": (crossed, ALIKE),
    "backward": (crossed_backward, ALIKE),
    "known to one": (known_to_one, "ValueError: "),
    "gradients": (other_gradients, ALIKE),
    "functions": (lambda mesh: attend(mesh, "ulysses", mask_mod=MODS[dist.get_rank()]), ALIKE),
    "length": (other_length, "ValueError: "),
    "heads": (lambda mesh: attend(mesh, "ulysses", H_q=3),
              "ValueError: method 'ulysses' cannot serve this call: its 2 ranks do not divide the "
              "3 heads of q; gather and ring can"),
    "ranks": (lambda mesh: context_attention(*inputs(mesh, plan_of()), mesh=mesh,
                                             plan=plan_of(ranks=4)),
              "ValueError: mesh must have the plan's 4 ranks, got 2"),
    "plan": (lambda mesh: context_attention(*inputs(mesh, plan_of()), mesh=mesh, plan=T),
             "TypeError: plan must be a ContextPlan, got int"),
    "mesh": (lambda mesh: attend("cpu", "ring"),
             "TypeError: mesh must be a DeviceMesh or ProcessGroup, got str"),
    "cube": (lambda mesh: attend(init_device_mesh("cpu", (2, 1, 1)), "ring"),
             "ValueError: mesh must have one dimension, or two (ring, heads), got 3"),
    "method": (lambda mesh: attend(mesh, "star"),
               "ValueError: method must be one of auto, gather, ring, ulysses, usp, got 'star'"),
    "dropout": (lambda mesh: attend(mesh, "gather", dropout=0.5),
                "ValueError: method 'gather' cannot serve this call: dropout depends on pos"),
    "mask": (lambda mesh: attend(mesh, "gather", attn_mask=MASK),
             "ValueError: attn_mask must be sharded by its queries, [..., 48 or 1, 90 or 1], got "
             "[90, 90]: shard(x, -2, plan, mesh) does it"),
    "documents": (lambda mesh: attend(mesh, "ring", documents=torch.zeros(1, T).int()),
                  "ValueError: documents must have shape [B, T] = [1, 48], got [1, 90]"),
    "padding": (lambda mesh: attend(mesh, "ring", key_padding_mask=MASK[:1]),
                "ValueError: key_padding_mask must have shape [B, T_k] = [1, 48], got [1, 90]"),
    "offset": (lambda mesh: attend(mesh, "ring", query_offset=3),
               "TypeError: context_attention does not support query_offset: the plan has the"),
    "typo": (lambda mesh: attend(mesh, "ring", windw=3),
             "TypeError: context_attention() got an unexpected argument 'windw'; did you mean"),
    "score_mod": (lambda mesh: attend(mesh, "ring", score_mod=summed),
                  "ValueError: score_mod needs score_mod_grad where an input requires grad"),
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTATTN_BACKEND", "torch")
        return run_ranks(f"{__file__}:world", 2)


def test_shards_and_back(ranks):
    for rank in ranks:
        assert len(rank["shards"]) == 18
        assert [name for name, holds in rank["shards"].items() if not holds] == []


@pytest.mark.parametrize("method", METHODS)
def test_results_are_the_same_bits_again(ranks, method):
    assert all(rank["bits"][method] for rank in ranks)


def test_the_next_transfer_starts_before_this_part_is_computed(ranks):
    for rank in ranks:
        assert rank["order"]["ring forward"] == ["issue", "compute", "wait", "compute"]
        # Backward the gradients of the keys go home.
        backward = ["issue", "compute", "wait", "compute", "issue", "wait"]
        assert rank["order"]["ring backward"] == backward
        gathered = ["issue", "wait", "issue", "compute", "wait", "compute"]
        assert rank["order"]["gather forward"] == gathered


@pytest.mark.parametrize("name", REFUSED)
def test_every_rank_refuses_by_name(ranks, name):
    for rank in ranks:
        assert rank["refusals"][name].startswith(REFUSED[name][1])


def test_a_rank_hears_why_another_refused(ranks):
    """Also of a call that it has made before."""
    tokens = "k must have 48 tokens, as a rank has by the plan for 90 tokens on 2 ranks, got 47"
    softcap = "softcap must be positive and finite, got -1.0"
    for name, reason in {"length": tokens, "known to one": softcap}.items():
        assert ranks[1]["refusals"][name] == f"ValueError: {reason}"
        assert ranks[0]["refusals"][name] == f"ValueError: rank 1 refused the call: {reason}"


def test_a_rank_that_does_not_come_is_an_error(ranks):
    assert ranks[0]["absent"].startswith("RuntimeError: a rank did not make this call: it has")


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_gradients_that_have_none_say_so(ranks, method):
    for rank in ranks:
        assert rank["twice"][method].startswith("context_attention by ring, gather or usp is diff")
        assert rank["tables twice"].startswith("RuntimeError: a table that context_attention sums")


def test_a_table_s_gradient_is_rounded_once(ranks):
    assert [rank["shares"] for rank in ranks] == [2**-9, 2**-9]


def test_ulysses_and_shards_are_differentiable_twice(ranks):
    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        return of_second_order(
            lambda *whole: reference.attention(*(x.to(dtype) for x in whole), causal=True)
        )

    exact = run(torch.float64)
    naive = worst_naive(exact, lambda: run(torch.float32))
    for rank in ranks:
        assert rank["shards twice"]
        for name, x, *both in zip("qkv", rank["twice"]["ulysses"], exact, naive, strict=True):
            assert_within_budget(name, torch.from_numpy(x), *both)


@pytest.mark.parametrize("name", [*UNSERVED, "windw"])
def test_a_cache_over_ranks_refuses_an_option_by_name(name):
    """An option that goes by positions would count those of one rank's cache."""
    refusal = rf"decode_attention over ranks (does not support {name}: |got .* argument '{name}')"
    with pytest.raises(TypeError, match=refusal):
        decode_attention(torch.ones(1), None, group=None, **{name: 1})
