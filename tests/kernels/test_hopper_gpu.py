"""The Hopper kernels on the GPU they are written for, against the oracle.

The emulator's tests cover more cases; these say whether the hardware agrees.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import reference
from fastattn.kernels.hopper.tile_table import backward_config
from fastattn.kernels.launch import tiles
from fastattn.ops import attend as ops
from fastattn.testing import assert_matches_reference, make_qkv

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_hopper(device: str) -> None:
    if not ops.on_hopper(torch.device(device)):
        pytest.skip("this GPU is not of compute capability 9.0")


def attention(*inputs: Tensor, **arguments: Any) -> Any:
    packed = inputs[0].dim() == 3
    function = fastattn.attention_varlen if packed else fastattn.attention
    return function(*inputs, **arguments, backend="hopper")


def on(device: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options whose lists are tensors."""
    given = options.items()
    return {n: torch.tensor(x, device=device) if isinstance(x, list) else x for n, x in given}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"causal": True}, id="causal"),
        pytest.param({}, id="full"),
        pytest.param({"scale": 0.5}, id="steep"),
        pytest.param({"causal": True, "window": (200, 0)}, id="window"),
        pytest.param({"causal": True, "key_lengths": [2500, 300]}, id="lengths"),
        pytest.param({"causal": True, "softcap": 5.0, "sinks": [0.5, -1.0, 3.0, 0.0]}, id="score"),
    ],
)
def test_hopper_matches_the_reference(
    options: dict[str, Any], D: int, dtype: torch.dtype, device: str
) -> None:
    """There are 144 tiles, more than multiprocessors; the last tile of each head is not whole.

    Steep scores rise in some blocks by more than 2^8, others in none but the first.
    """
    inputs = make_qkv(2, 4, 2, 2300, 2500, D, dtype=dtype, device=device)
    assert_matches_reference(attention, *inputs, **on(device, options))


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"causal": True}, id="causal"),
        pytest.param({}, id="full"),
        pytest.param({"causal": True, "window": (200, 0), "key_lengths": [2500, 300]}, id="band"),
    ],
)
def test_hopper_one_pass(options: dict[str, Any], D: int, device: str) -> None:
    """dQ of 20 tiles of keys, added up by TMA."""
    inputs = make_qkv(2, 4, 2, 2300, 2500, D, dtype=torch.bfloat16, device=device)
    assert_matches_reference(attention, *inputs, **on(device, options), deterministic=False)


@pytest.mark.parametrize("STAGES", [2, 4])
@pytest.mark.parametrize("D", [64, 128])
def test_hopper_one_pass_by_threads(D: int, STAGES: int, device: str) -> None:
    """dQ added up by the threads: without tiles for it four stages of D 128 fit."""
    config = backward_config("one_pass", D, False, False)
    config = config._replace(DQ_BY_TMA=False, STAGES=STAGES)
    inputs = make_qkv(2, 4, 2, 2300, 2500, D, dtype=torch.bfloat16, device=device)
    with tiles.forced(hopper_one_pass=config):
        assert_matches_reference(attention, *inputs, causal=True, deterministic=False)


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [True, False], ids=["two-passes", "one-pass"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_hopper_packed_sequences(causal: bool, deterministic: bool, D: int, device: str) -> None:
    starts_q = torch.tensor([0, 700, 700, 829, 1000], dtype=torch.int32, device=device)
    starts_k = torch.tensor([0, 500, 620, 620, 1100], dtype=torch.int32, device=device)
    batch = make_qkv(1, 4, 2, 1000, 1100, D, dtype=torch.bfloat16, device=device, layout="bthd")
    q, k, v = (x.detach()[0].transpose(0, 1).requires_grad_() for x in batch)
    assert_matches_reference(
        attention, q, k, v, starts_q, starts_k, oracle=reference.attention_varlen,
        causal=causal, deterministic=deterministic,
    )  # fmt: skip


@pytest.mark.parametrize("D", [64, 128])
def test_hopper_packed_sequences_in_order(D: int, device: str) -> None:
    """600 tiles of queries, which are sorted by their length first."""
    lengths = torch.tensor([0, *(37 * n * n % 1100 for n in range(17))])
    starts = lengths.cumsum(0).to(torch.int32).to(device)
    total = int(lengths.sum())
    batch = make_qkv(1, 8, 8, total, None, D, dtype=torch.bfloat16, device=device, layout="bthd")
    q, k, v = (x.detach()[0].transpose(0, 1).requires_grad_() for x in batch)
    assert_matches_reference(
        attention, q, k, v, starts, starts, oracle=reference.attention_varlen, causal=True
    )


def test_hopper_gradients_repeat_bit_for_bit(device: str) -> None:
    inputs = make_qkv(2, 4, 2, 1000, None, 128, dtype=torch.bfloat16, device=device)

    def gradients() -> tuple[Tensor, ...]:
        o = attention(*inputs, causal=True)
        return torch.autograd.grad(o.float().square().sum(), inputs)

    for once, again in zip(gradients(), gradients(), strict=True):
        assert torch.equal(once, again)
