"""Errors of packed calls, and their messages."""

from typing import Any

import pytest
import torch

import fastattn
from fastattn.testing import make_qkv

B, H_q, H_k, T_q, T_k, D = 2, 4, 2, 3, 5, 8


def packed(**replaced: Any) -> dict[str, Any]:
    q, k, v = (x[0].transpose(0, 1).detach() for x in make_qkv(1, H_q, H_k, T_q, T_k, D))
    starts = {"cu_seqlens_q": torch.tensor([0, 1, 3]), "cu_seqlens_k": torch.tensor([0, 2, 5])}
    return {"q": q, "k": k, "v": v, **starts, **replaced}


at, ones = torch.tensor, torch.ones
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": ones(1, 2, 3, 4)}, ValueError, r"q must have 3 dimensions \[total, H, D\]"),
    ({"v": None}, TypeError, r"v must be a torch\.Tensor, got NoneType"),
    ({"k": ones(5, 2, 9)}, ValueError, r"k must have shape \[total_k, H_k, 8\]"),
    ({"v": ones(4, 2, 8)}, ValueError, r"v must have shape \[5, 2, D_v\] to match k"),
    ({"key_padding_mask": 1}, TypeError, r"varlen takes no key_padding_mask: key_lengths \[N\]"),
    ({"documents": 1}, TypeError, "takes no documents: cu_seqlens separates"),
    ({"colour": 1}, TypeError, "takes no colour: there is no such argument"),
    ({"deterministic": None}, TypeError, "deterministic must be a bool, got NoneType"),
    ({"cu_seqlens_q": at([0, 4, 3])}, ValueError, "q must not fall, got 4 then 3 at sequence 1"),
    ({"cu_seqlens_k": at([1, 2, 5])}, ValueError, "k must run from 0 to 5, got 1 to 5"),
    ({"cu_seqlens_q": at([0, 2])}, ValueError, "from 0 to 3, got 0 to 2"),
    ({"cu_seqlens_k": at([0, 5])}, ValueError, r"cu_seqlens_k must have .* \[3\], got \[2\]"),
    ({"cu_seqlens_q": at(3)}, ValueError, r"shape \[N \+ 1\], got \[\]"),
    ({"cu_seqlens_q": [0, 3]}, TypeError, "cu_seqlens_q must be an int32 or int64 tensor"),
    ({"cu_seqlens_k": None}, ValueError, "cu_seqlens_k must be given .* 5 keys and 3 queries"),
    ({"key_lengths": at([1])}, ValueError, r"key_lengths must have shape \[2\], got \[1\]"),
]


@pytest.mark.parametrize(("changed", "error", "message"), BAD, ids=[m for *_, m in BAD])
def test_bad_packed_arguments(changed, error, message) -> None:
    with pytest.raises(error, match=message):
        fastattn.attention_varlen(**packed(**changed))
