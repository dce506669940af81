"""The Hopper kernels on the GPU they are written for: the oracle, and the bound of 8 bits."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import dispatch
from fastattn.functional.fp8.codes import E4M3
from fastattn.kernels.hopper.tile_table import backward_config
from fastattn.kernels.launch import tiles
from fastattn.mods import dilated
from fastattn.testing import assert_matches_reference, assert_within_budget, make_qkv
from fastattn.testing.fp8 import assert_within_fp8_bounds, dequantized

pytestmark = pytest.mark.gpu
# 144 tiles, more than multiprocessors; the last tile of each head is not whole.
SIZES = (2, 4, 2, 2300, 2500)
LENGTHS, SINKS = [2500, 301], [0.5, -1.0, 3.0, 0.0]
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    # Scores rise in some blocks by more than 2^8, in others in none but the first.
    "steep": {"scale": 0.5},
    "window": {"causal": True, "window": (200, 0), "keep_first": 3},
    "lengths": {"causal": True, "key_lengths": LENGTHS},
    "score": {"causal": True, "softcap": 5.0, "sinks": SINKS},
}
BY_D = pytest.mark.parametrize("D", [64, 128, 256])
BY_OPTION = pytest.mark.parametrize("option", OPTIONS)


@pytest.fixture(autouse=True)
def on_hopper(device: str) -> None:
    if not dispatch.on_hopper(torch.device(device)):
        pytest.skip("this GPU is not of compute capability 9.0")


def on(device: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options whose lists are tensors."""
    given = options.items()
    return {n: torch.tensor(x, device=device) if isinstance(x, list) else x for n, x in given}


attention = partial(fastattn.attention, backend="hopper")
attention_fp8 = partial(fastattn.attention_fp8, backend="hopper")


@BY_D
@BY_OPTION
def test_hopper_matches_the_reference(option: str, D: int, device: str) -> None:
    dtype = torch.float16 if option == "steep" else torch.bfloat16
    inputs = make_qkv(*SIZES, D, dtype=dtype, device=device)
    assert_matches_reference(attention, *inputs, **on(device, OPTIONS[option]))


@pytest.mark.parametrize(("D", "D_v"), [(40, 40), (96, 96), (128, 64), (192, 128), (192, 192)])
@pytest.mark.parametrize("option", ["full", "causal", "lengths"])
def test_hopper_heads_between_tiles(option: str, D: int, D_v: int, device: str) -> None:
    inputs = make_qkv(*SIZES, D, D_v, dtype=torch.bfloat16, device=device)
    assert_matches_reference(attention, *inputs, **on(device, OPTIONS[option]))


@BY_D
@pytest.mark.parametrize("deterministic", [True, False])
def test_hopper_masks_by_functions(D: int, deterministic: bool, device: str) -> None:
    inputs = make_qkv(*SIZES, D, dtype=torch.bfloat16, device=device)
    mask = fastattn.BlockMask(dilated(64, 3), per_head=False)
    assert_matches_reference(attention, *inputs, mask_mod=mask, deterministic=deterministic)


@pytest.mark.parametrize("by", ["tma", "threads-2", "threads-4"])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("option", ["full", "causal", "window", "lengths"])
def test_hopper_one_pass(option: str, D: int, by: str, device: str) -> None:
    """dQ of 20 tiles of keys, added by TMA or by threads, which have room for four stages."""
    config = backward_config("one_pass", D, False, False)
    if by != "tma":
        config = config._replace(DQ_BY_TMA=False, STAGES=int(by[-1]))
    inputs = make_qkv(*SIZES, D, dtype=torch.bfloat16, device=device)
    options = on(device, OPTIONS[option])
    with tiles.forced(hopper_one_pass=config):
        assert_matches_reference(attention, *inputs, **options, deterministic=False)


def drawn(T_q: int, T_k: int, D: int, device: str) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Codes of 2 rows, 4 heads of queries and 2 of keys, with scales that differ by head."""
    tensors = make_qkv(2, 4, 2, T_q, T_k, D, device=device, layout="bthd", requires_grad=False)
    codes, scales = {}, {}
    for name, x, grow in zip("qkv", tensors, (3.0, 1 / 9, 5.0), strict=True):
        sizes = grow ** torch.arange(x.shape[1], device=device)
        codes[name], scales[f"{name}_scale"] = fastattn.quantize_fp8(x * sizes[:, None, None])
    return tuple(codes.values()), scales


@BY_D
@BY_OPTION
def test_hopper_in_8_bits_is_within_its_bound(option: str, D: int, device: str) -> None:
    """A query that sees its own key alone has that key's value, which costs no accuracy."""
    codes, scales = drawn(*SIZES[3:], D, device)
    options = on(device, OPTIONS[option])
    if "key_lengths" in options:
        for x in codes[1:]:
            x[1, :, LENGTHS[1] :] = torch.full((), math.nan, device=device).to(E4M3)
    o, lse = attention_fp8(*codes, **scales, **options, return_lse=True)
    assert_within_fp8_bounds(o, lse, codes, tuple(scales.values()), tensor_cores=True, **options)
    codes, scales = drawn(1000, 1000, D, device)
    expected = dequantized(codes[2], scales["v_scale"]).repeat_interleave(2, 1)
    own = attention_fp8(*codes, **scales, window=(0, 0))
    assert_within_budget("o", own, expected, expected.bfloat16())
