"""The Hopper forward in the emulator: numbers within the error budget, and no fault of protocol."""

from typing import Any

import pytest
import torch

from fastattn import reference
from fastattn.kernels.hopper import forward
from fastattn.testing import assert_within_budget, make_qkv
from fastattn.testing.gluon_emulator import Emulated

# Tiles are too small to share between threads.
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Another order of events for each test."""
    seed = sum(map(ord, request.node.name))
    kernel = Emulated(forward.hopper_forward_kernel, seed)
    monkeypatch.setattr(forward, "hopper_forward_kernel", kernel)


def check(
    B: int = 1, H_q: int = 2, H_k: int = 1, T_q: int = 150, T_k: int | None = None, D: int = 64, *,
    dtype: torch.dtype = torch.bfloat16, layout: str = "bhtd", programs: int = 3,
    causal: bool = True, window: Any = None, offset: Any = None, lengths: list[int] | None = None,
) -> None:  # fmt: skip
    """Hold o and lse to the oracle's; what lies behind `lengths` is NaN."""
    q, k, v = make_qkv(B, H_q, H_k, T_q, T_k, D, dtype=dtype, layout=layout, requires_grad=False)
    T_k = k.shape[2]
    per_row = isinstance(offset, torch.Tensor)
    left, right = (None, None) if window is None else window
    got_k, got_v = k.clone(), v.clone()
    for b, length in enumerate(lengths or []):
        got_k[b, :, max(length, 0) :] = got_v[b, :, max(length, 0) :] = float("nan")
    key_lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    o, lse = forward.launch_hopper_forward(
        q, got_k, got_v,
        left=left, right=min(0, 0 if right is None else right) if causal else right,
        query_offset=0 if per_row else T_k - T_q if offset is None else offset,
        query_offsets=offset if per_row else None,
        key_lengths=key_lengths, scale=D**-0.5, programs=programs,
    )  # fmt: skip
    arguments = dict(
        causal=causal, window=window, query_offset=offset, key_lengths=key_lengths, return_lse=True
    )
    exact = reference.attention(q.double(), k.double(), v.double(), **arguments)
    naive = reference.attention(q, k, v, **arguments)
    for name, x, ref, plain in zip(("o", "lse"), (o, lse), exact, naive, strict=True):
        assert_within_budget(name, x, ref, plain)
    assert o.stride() == q.stride()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(dict(T_q=256), id="causal-whole-tiles"),
        pytest.param(dict(T_q=1, T_k=300), id="one-query"),
        pytest.param(dict(T_q=300, T_k=1), id="one-key"),
        pytest.param(dict(T_q=200, T_k=333), id="fewer-queries"),
        pytest.param(dict(T_q=333, T_k=200), id="rows-before-the-first-key"),
        pytest.param(dict(causal=False, T_k=257), id="full"),
        pytest.param(dict(causal=False, T_q=70, T_k=640), id="every-stage-used-again"),
        pytest.param(dict(T_q=400, window=(70, None)), id="window"),
        pytest.param(dict(T_q=400, causal=False, window=(0, 140)), id="window-ahead"),
        pytest.param(dict(T_q=300, window=(0, 0)), id="own-key-only"),
        pytest.param(dict(B=2, H_q=6, H_k=2, T_q=140), id="gqa"),
        pytest.param(dict(B=2, H_q=3, H_k=1, T_q=140, layout="bthd"), id="mqa-strided"),
        pytest.param(dict(dtype=torch.float16), id="fp16"),
        pytest.param(dict(D=128, T_q=290), id="d128"),
        pytest.param(dict(D=128, T_q=290, T_k=520, causal=False), id="d128-full"),
        pytest.param(dict(D=256, T_q=150, programs=2), id="d256-output-over-queries"),
        pytest.param(dict(B=3, T_k=300, lengths=[300, 170, 0]), id="lengths"),
        pytest.param(
            dict(B=3, T_k=300, lengths=[128, 1, 299], causal=False, D=128), id="lengths-full"
        ),
        pytest.param(dict(B=2, T_k=300, offset=torch.tensor([5, 250])), id="offset-a-row"),
        pytest.param(dict(T_k=300, offset=-40), id="negative-offset"),
        pytest.param(dict(T_k=300, offset=1000, window=(20, None)), id="past-every-key"),
    ],
)
def test_matches_the_reference(case: dict[str, Any]) -> None:
    check(**case)


@pytest.mark.parametrize("programs", [1, 2, 5, 12, 100])
def test_any_grid_covers_all_tiles(programs: int) -> None:
    """12 tiles, of two heads in L2 at a time or not: `programs` deal them out among themselves."""
    check(B=2, H_q=2, T_q=290, programs=programs)


def test_heads_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "heads_in_l2", lambda k, v: 1)
    check(B=3, H_q=2, H_k=2, T_q=200, programs=4)


def test_many_orders_of_events() -> None:
    for seed in range(8):
        forward.hopper_forward_kernel.seed = 1000 * seed
        check(H_q=1, T_q=400, programs=2)


def test_no_queries() -> None:
    q, k, v = make_qkv(1, 2, 2, 0, 8, 64, dtype=torch.bfloat16, requires_grad=False)
    o, lse = forward.launch_hopper_forward(
        q, k, v, left=None, right=None, query_offset=0, scale=1.0
    )
    assert o.shape == (1, 2, 0, 64)
    assert lse.shape == (1, 2, 0)
