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


BAD_PACKED = [
    (packed(q=torch.ones(1, 2, 3, 4)), ValueError, r"q must have 3 dimensions \[total, H, D\]"),
    (packed(v=None), TypeError, r"v must be a torch\.Tensor, got NoneType"),
    (packed(k=torch.ones(5, 2, 9)), ValueError, r"k must have shape \[total_k, H_k, 8\]"),
    (packed(v=torch.ones(4, 2, 8)), ValueError, r"v must have shape \[5, 2, D_v\] to match k"),
    (
        packed(key_padding_mask=torch.ones(2, 3, dtype=torch.bool)),
        TypeError,
        r"attention_varlen takes no key_padding_mask: key_lengths \[N\]",
    ),
    (packed(documents=1), TypeError, "takes no documents: cu_seqlens separates"),
    (packed(colour=1), TypeError, "takes no colour: there is no such argument"),
    (packed(deterministic=None), TypeError, "deterministic must be a bool, got NoneType"),
    (
        packed(cu_seqlens_q=torch.tensor([0, 4, 3])),
        ValueError,
        "cu_seqlens_q must not fall, got 4 then 3 at sequence 1",
    ),
    (
        packed(cu_seqlens_k=torch.tensor([1, 2, 5])),
        ValueError,
        "cu_seqlens_k must run from 0 to 5, got 1 to 5",
    ),
    (packed(cu_seqlens_q=torch.tensor([0, 2])), ValueError, "from 0 to 3, got 0 to 2"),
    (
        packed(cu_seqlens_k=torch.tensor([0, 5])),
        ValueError,
        r"cu_seqlens_k must have shape \[3\], got \[2\]",
    ),
    (packed(cu_seqlens_q=torch.tensor(3)), ValueError, r"shape \[N \+ 1\], got \[\]"),
    (packed(cu_seqlens_q=[0, 3]), TypeError, "cu_seqlens_q must be an int32 or int64 tensor"),
    (packed(cu_seqlens_k=None), ValueError, "cu_seqlens_k must be given .* 5 keys and 3 queries"),
    (
        packed(key_lengths=torch.tensor([1])),
        ValueError,
        r"key_lengths must have shape \[2\], got \[1\]",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "error", "message"), BAD_PACKED, ids=[m for *_, m in BAD_PACKED]
)
def test_bad_packed_arguments(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        fastattn.attention_varlen(**arguments)
