"""Dot-product and multiplicative attention, by the kernels of `attention`.

dot product      q . k                        Luong et al. 2015 (arXiv 1508.04025), "dot"
multiplicative   k^T W q                      the same, "general"
"""

from typing import TYPE_CHECKING

from torch import Tensor

from .. import checks
from . import fused_attention, inputs

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..arguments import AttentionArguments


def dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    **options: "Unpack[AttentionArguments]",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` with the unscaled score q . k (Luong et al. 2015, "dot").

    Args:
        q: [B, H_q, T_q, D].
        k: [B, H_k, T_k, D].
        v: [B, H_k, T_k, D_v].
        return_lse, backend, options: as for `attention`, without scale.

    Returns:
        As `attention`; differentiable likewise.

    Raises:
        TypeError, ValueError: as `attention`.
    """
    return _unscaled("dot_product_attention", q, k, v, return_lse, backend, options)


def multiplicative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    **options: "Unpack[AttentionArguments]",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` with the score k^T W q (Luong et al. 2015, "general").

    Queries are projected by W to the width of the keys, then the kernels compute dot products.

    Args:
        q: [B, H_q, T_q, D_q].
        k: [B, H_k, T_k, D_k].
        v: [B, H_k, T_k, D_v].
        weight: W in q's dtype, [D_k, D_q] as in nn.Linear(D_q, D_k), or [H_q, D_k, D_q] per head;
            differentiable.
        return_lse, backend, options: as for `attention`, without scale.

    Returns:
        As `attention`; differentiable in q, k, v and weight.

    Raises:
        TypeError, ValueError: as `attention`, or a weight of another dtype, shape or device.
    """
    checks.check_tensors(q, k, v)
    q = inputs.projected("weight", weight, "q", q, k.shape[-1])
    return _unscaled("multiplicative_attention", q, k, v, return_lse, backend, options)


def _unscaled(
    name: str, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, backend: str | None,
    options: "AttentionArguments",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    if "scale" in options:
        raise TypeError(f"{name} does not support scale: its score is not scaled")
    options["scale"] = 1.0
    if checks.check_flag("return_lse", return_lse):
        return fused_attention.attention(q, k, v, return_lse=True, backend=backend, **options)
    return fused_attention.attention(q, k, v, backend=backend, **options)
