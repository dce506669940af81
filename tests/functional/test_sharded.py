"""Generated calls with DTensors are those of one process, and what cannot be is refused."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fuzz.cases import DERIVED, TAKES, Case, drawn, legal
from fuzz.judges import check
from gloo_ranks import run_ranks, wrong_calls
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fastattn
from fastattn import KVCache, decode_attention, reference
from fastattn.score_checks import COUNTING
from fastattn.testing import make_qkv
from fastattn.testing.calls import CALLS

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

B, H_q, H_k, T, D = 2, 4, 2, 10, 8
ROWS, HEADS, WHOLE = Shard(0), Shard(1), Replicate()
# Of q, and of k and v.
PLACEMENTS = {"rows": (ROWS, ROWS), "heads": (HEADS, HEADS), "whole-keys": (HEADS, WHOLE)}
PLACEMENTS["whole"] = (WHOLE, WHOLE)
NAMES = sorted(TAKES["attention"])
# Every option by two of them.
SEEDS = [x for x in range(len(NAMES) * len(PLACEMENTS)) if (x + x // len(NAMES)) % 2 == 0]


def case_of(seed: int) -> tuple[Case, str]:
    """A call for two ranks with an option that its seed names, and how q, k and v are placed."""
    name, how = NAMES[seed % len(NAMES)], [*PLACEMENTS][seed // len(NAMES)]
    like = drawn(seed, "torch")
    options = (name, *(x for x in like.options if x in NAMES))
    # Without gradients of lse alone: torch's own redistribution of v fails without one.
    traits = like.traits - DERIVED - {"max", "lse"}
    case = legal(replace(like, call="attention", B=2, options=options, traits=traits))
    if how == "rows" and {*COUNTING} & {*case.options}:
        how = "heads"
    if how == "heads":
        case = replace(case, H_k=2)
    elif how == "whole-keys":
        H_k, G = case.random("heads").choice((1, 2), (2, 3))
        case = replace(case, H_k=H_k, G=G)
    return case, how


def inputs() -> tuple[Tensor, ...]:
    return make_qkv(B=B, H_q=H_q, H_k=H_k, T_q=T, D=D)


def spread(x: Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return DTensor.from_local(x, mesh, [WHOLE] * mesh.ndim).redistribute(placements=placements)


def placed(mesh: DeviceMesh, of_q: Placement, of_keys: Placement) -> Callable[..., Any]:
    """`attention` of DTensors, from and to whole tensors."""

    def attention(q: Tensor, k: Tensor, v: Tensor, return_lse: bool, **options: Any) -> Any:
        parts = (spread(x, mesh, one) for x, one in ((q, of_q), (k, of_keys), (v, of_keys)))
        actual = fastattn.attention(*parts, return_lse=True, **options)
        assert all(x.placements == (of_q,) for x in actual)
        o, lse = (x.full_tensor() for x in actual)
        return (o, lse) if return_lse else o

    return attention


def refused(mesh: DeviceMesh) -> list[str]:
    """Messages about calls that cannot be sharded."""
    q, k, v = inputs()
    ranks = mesh.size()
    cases: list[tuple[Any, ...]] = [
        ((q, Shard(2)), (k, Shard(2)), (v, Shard(2))),
        ((q, Shard(3)), (k, Shard(3)), (v, Shard(3))),
        ((q, HEADS), (k, ROWS), (v, ROWS)),
        ((q, HEADS), (k[:, :1], HEADS), (v[:, :1], HEADS)),
        ((q, ROWS), (k, ROWS), (v, ROWS), {"dropout": 0.5}),
    ]
    said = []
    for *tensors, last in cases:
        options = last if isinstance(last, dict) else {}
        every = tensors if options else [*tensors, last]
        parts = []
        for x, one in every:
            size = x.shape[one.dim] // ranks or 1
            parts.append(DTensor.from_local(x.narrow(one.dim, 0, size), mesh, [one]))
        if len(said) == 3:  # one head for two ranks: a part of one each is none of one
            parts[1:] = [
                DTensor.from_local(x.narrow(1, 0, 1 - dist.get_rank()), mesh, [HEADS],
                                   shape=x.shape, stride=x.stride())
                for x, _ in every[1:]
            ]  # fmt: skip
        with pytest.raises(ValueError) as raised:
            fastattn.attention(*parts, **options)
        said.append(str(raised.value))
    with pytest.raises(ValueError) as raised:
        fastattn.attention(*(DTensor.from_local(x, mesh, [Partial()]) for x in (q, k, v)))
    said.append(str(raised.value))
    with pytest.raises(TypeError) as raised_type:
        fastattn.attention(spread(q, mesh, HEADS), k, v)
    return [*said, str(raised_type.value)]


def decoded(mesh: DeviceMesh | None) -> Tensor:
    """Two new tokens by a cache, of whose heads each rank has its own."""
    q, k, v = (x.detach() for x in inputs())
    q, slopes = q[:, :, -2:], fastattn.alibi_slopes(H_q)
    if mesh is not None:
        q, k, v = (spread(x, mesh, HEADS) for x in (q, k, v))
        k, v = k.to_local(), v.to_local()
    kv = KVCache(B, k.shape[1], 16, D)
    kv.append(k, v)
    o = decode_attention(q, kv, alibi_slopes=slopes, window=7)
    return o if mesh is None else o.full_tensor()


def judge(seed: int, mesh: DeviceMesh) -> None:
    case, how = case_of(seed)
    call = CALLS["attention"]._replace(function=placed(mesh, *PLACEMENTS[how]))
    with mock.patch.dict(CALLS, attention=call):
        check(case)


def all_results() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    collected: dict[str, Any] = {"refused": refused(mesh), "decoded": decoded(mesh).numpy()}
    return collected | {"wrong": wrong_calls(SEEDS, partial(judge, mesh=mesh))}


def of_key_heads(ranks: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """q, k, v with half as many K/V heads as ranks, and relative_keys of those heads."""
    inputs = make_qkv(B=1, H_q=ranks, H_k=ranks // 2, T_q=T, D=D)
    return inputs, torch.randn(ranks // 2, 5, D).requires_grad_()


def by_key_heads() -> tuple[float, ...]:
    """How far o and the gradient of relative_keys, tensor or DTensor, are from one process's."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    (q, k, v), keys = of_key_heads(mesh.size())
    exact = fastattn.attention(q, k, v, relative_keys=keys)
    (expected,) = torch.autograd.grad(exact.sin().sum(), keys)
    far = []
    for given in (keys, spread(keys, mesh, WHOLE)):
        parts = (spread(x, mesh, one) for x, one in ((q, HEADS), (k, WHOLE), (v, WHOLE)))
        o = fastattn.attention(*parts, relative_keys=given).full_tensor()
        (actual,) = torch.autograd.grad(o.sin().sum(), keys)
        far += [(o - exact).abs().max().item(), (actual - expected).abs().max().item()]
    return tuple(far)


@pytest.mark.nightly
def test_relative_keys_of_fewer_heads_than_ranks(monkeypatch):
    monkeypatch.setenv("FASTATTN_BACKEND", "torch")
    for far in run_ranks(f"{__file__}:by_key_heads", 4):
        assert max(far) < 1e-5


@pytest.fixture(scope="module")
def by_rank() -> list[dict[Any, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTATTN_BACKEND", "torch")
        return run_ranks(f"{__file__}:all_results", 2)


def test_generated_calls(by_rank):
    for rank in by_rank:
        assert not rank["wrong"], "\n".join(rank["wrong"])


def test_a_cache_of_a_ranks_heads(by_rank):
    for rank in by_rank:
        torch.testing.assert_close(torch.from_numpy(rank["decoded"]), decoded(None))


def test_what_cannot_be_shared_out(by_rank):
    wanted = "must be sharded by rows or heads (Shard(0), Shard(1)) or replicated, got"
    for rank in by_rank:
        said = rank["refused"]
        assert said[0] == (
            "q is sharded along its sequence (dim 2): "
            "fastattn.parallel.context_attention serves that"
        )
        assert said[1].startswith(f"q {wanted} S")
        assert said[2].startswith("k must be placed as q, S")
        assert said[3] == "k must have a multiple of 2 heads where 2 ranks share them, got 1"
        assert said[4].startswith("dropout is not supported with q sharded by rows")
        assert said[5].startswith(f"q {wanted} P")
        assert said[6] == "q, k, v must all be DTensors or none, got torch.Tensor for k"


@pytest.fixture
def square() -> Iterator[DeviceMesh]:
    """A mesh of 2 x 2 ranks, of which this process is the third; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield init_device_mesh("cpu", (2, 2))
    dist.destroy_process_group()


def test_heads_over_two_mesh_dims(square):
    """The rank has heads 4 and 5 of 8, which read the third of four K/V heads; of 16 in all."""
    q, k, v = make_qkv(1, 8, 4, T, D=D)
    how = {"dropout": 0.5, "dropout_seed": torch.tensor([3, 5]), "heads": (8, 16)}
    expected = reference.attention(q, k, v, **how)[:, 4:6]
    for of_keys in ((HEADS, HEADS), (HEADS, WHOLE), (WHOLE, WHOLE)):
        keys = (spread(x, square, *of_keys) for x in (k, v))
        o = fastattn.attention(spread(q, square, HEADS, HEADS), *keys, **how)
        torch.testing.assert_close(o.to_local(), expected)


@pytest.mark.parametrize(
    ("H_q", "H_k", "of_keys", "said"),
    [
        (2, 2, (HEADS, HEADS), "q must have a multiple of 4 heads where 4 ranks share them, got 2"),
        (8, 4, (WHOLE, HEADS), "k must be replicated in mesh dims after the first that shards q's"),
        (8, 3, (WHOLE, WHOLE), "k must have a number of heads that divides q's 8, got 3"),
        (8, 4, (HEADS, HEADS), "key2 must have one head or a multiple of 4, as so many"),
        (8, 4, None, "k must be on q's mesh"),
    ],
)
def test_what_two_mesh_dims_cannot_share(H_q, H_k, of_keys, said, square):
    q, k, v = make_qkv(1, H_q, H_k, T, D=D)
    mesh = square if of_keys else DeviceMesh("cpu", [[2, 3], [0, 1]])
    keys = [spread(x, mesh, *(of_keys or (HEADS, HEADS))) for x in (k, v)]
    second = {"query2": q, "key2": k[:, :2]}
    with pytest.raises(ValueError, match=said):
        fastattn.attention(spread(q, square, HEADS, HEADS), *keys, **second)
