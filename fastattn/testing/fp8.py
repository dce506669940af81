"""Error bound of FP8 attention, element by element.

The reference is the oracle in fp64 on dequantised inputs:

    |o - ref|  <=  (2^-4 + a) W + 2^-18 M S  +  eps(dtype) |ref|  +  64 eps(fp32)

W = sum_j w_j |v_j|, S = sum_j |v_j|, both over the keys that a row sees, and M its largest weight,
sink included. The first term is the rounding of weights to e4m3's 3 bits, the second the rounding
of subnormal weights. The others are one rounding of the output and the floor of `budget`. a is the
error of the sums. In fp32 it is 2^-15: scores reach 2^5 in log2 units and sums have 2^10 terms or
more, each exact to 2^-24, with signs that cancel in part. Hopper's tensor cores keep 14 bits, so
they lose 2^-13 of the accumulator in every instruction of 32 keys, and of 32 columns of q and k;
the latter shifts a score, and with it weights and lse, by up to

    d = (D / 32) 2^-13 max_j scale |q| . |k_j|        a = 2^-15 + (T_k / 32) 2^-13 + 2 d
"""

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..ops.gradients import as_batch
from ..position_tables import document_ids
from .budget import PastBudget, assert_within_budget
from .orders import worst_naive

# A softmax of scores times _HOT approximates the maximum.
_HOT = 64.0


def dequantized(codes: Tensor, scale: Tensor | None, cu_seqlens: Tensor | None = None) -> Tensor:
    """scale * codes in fp64; with cu_seqlens codes are [total, H, D]."""
    if scale is None:
        return codes.double()
    if cu_seqlens is None:
        return codes.double() * scale.double()[..., None, None]
    sequences = document_ids(cu_seqlens, codes.shape[0])[0]  # of the rows of none, any
    return codes.double() * scale.double()[sequences][..., None]


def fp8_bounds(
    q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, *, tensor_cores: bool, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """Bounds on the errors of o [B, H_q, T_q, D_v] in `dtype`, and of lse in addition to fp32's.

    q, k, v: fp64, dequantised. tensor_cores: sums are in Hopper's tensor cores, not fp32.
    """
    D, T_k = q.shape[3], k.shape[2]
    o, lse = reference.attention(q, k, v, return_lse=True, **arguments)
    heavy = reference.attention(q, k, v.abs(), **arguments)
    assert isinstance(heavy, Tensor)
    # Without scores every weight is 1 over the number of visible keys, and the sink.
    masks = {n: x for n, x in arguments.items() if n not in ("scale", "softcap")}
    mean, log_count = reference.attention(q * 0, k, v.abs(), return_lse=True, **masks)
    total = mean * log_count.exp()[..., None]
    scale = arguments.get("scale") or D**-0.5
    softcap = arguments.get("softcap")
    sinks = arguments.get("sinks")
    hot = masks | {"scale": scale * _HOT, "softcap": softcap and softcap * _HOT}
    hot["sinks"] = None if sinks is None else sinks * _HOT
    largest = reference.attention(q, k, v, return_lse=True, **hot)[1] / _HOT
    largest_weight = (largest - lse).exp().nan_to_num(0.0)[..., None]
    shift = torch.zeros_like(lse)
    a = torch.tensor(2.0**-15, dtype=lse.dtype, device=lse.device)
    if tensor_cores:
        hot["softcap"] = hot["sinks"] = None
        most = reference.attention(q.abs(), k.abs(), v, return_lse=True, **hot)[1] / _HOT
        shift = (D / 32 * 2.0**-13 * most).clamp(min=0.0)
        a = a + T_k / 32 * 2.0**-13 + 2 * shift[..., None]
    bound = (2.0**-4 + a) * heavy + 2.0**-18 * largest_weight * total
    bound = bound + torch.finfo(dtype).eps * o.abs() + 64 * torch.finfo(torch.float32).eps
    return bound, shift


def assert_output_within_fp8_bounds(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, *, tensor_cores: bool, **arguments: Any
) -> float:
    """Check o of `attention_fp8` against `fp8_bounds`; the worst error as a share of its bound."""
    exact = reference.attention(q, k, v, **arguments)
    assert isinstance(exact, Tensor)
    bound, _ = fp8_bounds(q, k, v, o.dtype, tensor_cores=tensor_cores, **arguments)
    assert o.isfinite().all(), "o has NaN or inf"
    error = (o.double() - exact).abs()
    if not error.numel():
        return 0.0
    shares = error / bound
    assert not shares.isnan().any(), "o: the reference has NaN, so nothing can be compared"
    share = float(shares.max())
    if share > 1:
        worst = int((error - bound).argmax())
        raise PastBudget(
            f"o: error {float(error.flatten()[worst]):.3e} exceeds its bound "
            f"{float(bound.flatten()[worst]):.3e}",
            share,
        )
    return share


def assert_within_fp8_bounds(
    o: Tensor,
    lse: Tensor,
    codes: tuple[Tensor, Tensor, Tensor],
    scales: tuple[Tensor | None, Tensor | None, Tensor | None],
    *,
    tensor_cores: bool = False,
    **arguments: Any,
) -> float:
    """Check o and lse of `attention_fp8` against the oracle on its codes and scales.

    o is bounded by `fp8_bounds`, lse by fp32's budget and the tensor cores' shift. Returns the
    worst error as a share of its bound.
    """
    q, k, v = (dequantized(x, scale) for x, scale in zip(codes, scales, strict=True))
    wide = {n: x.double() if n == "sinks" else x for n, x in arguments.items()}
    share = assert_output_within_fp8_bounds(o, q, k, v, tensor_cores=tensor_cores, **wide)
    _, shift = fp8_bounds(q, k, v, o.dtype, tensor_cores=tensor_cores, **wide)
    _, exact_lse = reference.attention(q, k, v, return_lse=True, **wide)
    narrow = [x.float() for x in (q, k, v)]
    plain_lse = worst_naive(
        exact_lse, lambda: reference.attention(*narrow, return_lse=True, **arguments)[1]
    )
    moved = lse.double() - exact_lse
    within = lse - moved.clamp(-shift, shift).nan_to_num(0.0).to(lse.dtype)
    return max(share, assert_within_budget("lse", within, exact_lse, plain_lse))


def assert_packed_within_fp8_bounds(
    o: Tensor,
    lse: Tensor,
    codes: tuple[Tensor, Tensor, Tensor],
    scales: tuple[Tensor, Tensor, Tensor],
    offsets: tuple[Tensor, Tensor],
    *,
    tensor_cores: bool = False,
    **arguments: Any,
) -> float:
    """Check packed sequences by `assert_within_fp8_bounds`; offsets: both cu_seqlens."""
    share = 0.0
    in_order = (offsets[0], offsets[1], offsets[1])
    for n in range(offsets[0].shape[0] - 1):
        places = [slice(int(x[n]), int(x[n + 1])) for x in in_order]
        q, k, v = (as_batch(x[rows]) for x, rows in zip(codes, places, strict=True))
        q_scale, k_scale, v_scale = (x[n : n + 1] for x in scales)
        own = {
            name: x[n : n + 1] if name in ("key_lengths", "prefix_lengths") else x
            for name, x in arguments.items()
        }
        share = max(
            share,
            assert_within_fp8_bounds(
                as_batch(o[places[0]]),
                lse[None, :, places[0]],
                (q, k, v),
                (q_scale, k_scale, v_scale),
                tensor_cores=tensor_cores,
                **own,
            ),
        )
    return share
