"""Heads between the widths of tiles, and those of v narrower than those of q, emulated."""

from typing import Any

import pytest
import torch
from emulated_hopper import attention_on_hopper, check_on_hopper, grid_of, passes
from nightly import gate_cases

from fastattn import reference
from fastattn.testing.compare import assert_matches_reference
from fastattn.testing.inputs import make_qkv

pytestmark = pytest.mark.usefixtures("emulated")

# Columns of q and v, the kernels of backward, and the rest of the call.
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "96": (96, 96, 2, dict(T_q=140)),
    "192/128": (192, 128, 3, dict(T_q=140)),
    "192": (192, 192, 3, dict(T_q=70, T_k=150, causal=False)),
    "40": (40, 40, 2, dict(B=2, T_q=70, T_k=200, key_lengths=[150, 130])),
    "128/64": (128, 64, 2, dict(T_q=140, softcap=3.0)),
    "128/64-one": (128, 64, 1, dict(T_q=140, deterministic=False)),
    "192/128-parts": (192, 128, 3, dict(H_q=8, T_q=200, causal=False, programs=16)),
    "256/72": (256, 72, 3, dict(T_q=140, window=(50, 0))),
}
GATE = ("96", "192/128", "128/64", "40")


@pytest.mark.parametrize("name", gate_cases(GATE, [x for x in CASES if x not in GATE]))
def test_matches_the_reference(name: str) -> None:
    D, D_v, kernels, call = CASES[name]
    check_on_hopper(attention_on_hopper, D=D, D_v=D_v, **call)
    assert passes() == kernels


def test_packed_sequences_end_within_a_tile() -> None:
    """Rows that leave through registers end with their columns: other rows lie behind."""
    T, D, D_v = 170, 96, 72
    dense = make_qkv(1, 2, 1, T, T, D, D_v, dtype=torch.bfloat16)
    packed = (x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in dense)
    offsets = torch.tensor([0, 70, 70, T], dtype=torch.int32)
    with grid_of(2):
        assert_matches_reference(
            attention_on_hopper,
            *packed,
            offsets,
            offsets,
            causal=True,
            oracle=reference.attention_varlen,
        )
