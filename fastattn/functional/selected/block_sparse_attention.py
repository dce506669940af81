"""Block-sparse attention: each block of queries attends to a list of key blocks.

For NSA (Yuan et al. 2025, arXiv 2502.11089), MoBA (Lu et al. 2025, arXiv 2502.13189), DeepSeek's
sparse attention (block_k = 1) and static block patterns.
"""

from typing import Any, NamedTuple

from torch import Tensor

from ... import checks, dispatch, tracing
from ...dispatch import Explanation
from ...ops.selected import selected_ops as ops
from ...options import Options
from ...torch_backend.selected import selected_formula as formula
from .. import call_options, inputs


@call_options.SELECTED.sign
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    block: tuple[int, int] = (1, 64),
    counts: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **options: Any,
) -> call_options.Results:
    """softmax(q k^T) v over the key blocks in `indices` for each block of queries.

    Time and memory are proportional to the listed blocks, forward and backward. Masks apply within
    listed blocks as in `attention`. A block listed twice counts once.

    Args:
        q: [B, H_q, T_q, D], fp16, bf16, fp32 or fp64.
        k: [B, H_k, T_k, D], likewise; H_k divides H_q.
        v: [B, H_k, T_k, D_v].
        indices: int32 or int64 [B, H_s, R, n], R = ceil(T_q / block_q): for queries r * block_q to
            (r + 1) * block_q - 1, numbers of blocks of block_k keys, in any order; the last block
            may exceed T_k; -1 = none. Each of the H_s lists is shared by H_q / H_s adjacent heads:
            H_s divides H_k (1: all heads share), or is a multiple of it that divides H_q (H_q: one
            list per head). No gradient.
        block: (block_q, block_k), each at least 1; kernels are fast if block_k is 16, 32, 64 or a
            multiple, and H_q / max(H_k, H_s) * block_q is at least 16 or neighbouring lists name
            the same blocks.
        counts: int32 or int64 [B, H_s, R]: number of valid entries at the start of each list. None:
            all.
        return_lse: also return the log of the softmax denominators.
        backend: "triton", "torch" or "auto", as for `attention`.
        options: masks by position, of padding and of documents, scale, softcap and sinks, as for
            `attention`.

    Returns:
        o [B, H_q, T_q, D_v] in q's dtype; with return_lse also lse, fp32 [B, H_q, T_q]. Both are
        differentiable in q, k, v and sinks, deterministically. A query that sees no key has o = 0,
        lse = -inf and gradients of 0.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device, an invalid
            block number in indices on the CPU (ignored elsewhere), or a forced backend that cannot
            serve the call; the message names it.

    Examples:
        >>> q, k = torch.randn(1, 8, 256, 64), torch.randn(1, 2, 256, 64)
        >>> own = torch.arange(256).div(64, rounding_mode="floor").expand(1, 2, 256)
        >>> indices = torch.stack((torch.zeros_like(own), own), -1)  # the first block and its own
        >>> selected_attention(q, k, k, indices, block=(1, 64), causal=True).shape
        torch.Size([1, 8, 256, 64])
    """
    return_lse = checks.check_flag("return_lse", return_lse)
    q, k, v, lists, lengths, block, checked = _checked_selection(
        q, k, v, indices, block, counts, options
    )
    choice = dispatch.choose(q, k, v, checked, backend, family="selected")
    if choice.backend == "torch":
        dispatch.warn_if_slow(choice, q.device)
        o, lse = formula.attention(q, k, v, lists, block, checked)
        return (o, lse.float()) if return_lse else o
    width = v.shape[-1]
    q, k, v = (inputs.kernel_rows(x) for x in (q, k, v))
    o, lse = ops.attend(q, k, v, lists, lengths, block, checked)
    o = o if o.shape[-1] == width else o[..., :width]
    return (o, lse) if return_lse else o


@call_options.SELECTED.sign
def explain_selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    block: tuple[int, int] = (1, 64),
    counts: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **options: Any,
) -> Explanation:
    """Return the backend of a call of `selected_attention`, and why a faster one was not used.

    Checks the arguments as `selected_attention` does, and computes nothing.
    """
    checks.check_flag("return_lse", return_lse)
    q, k, v, *_, checked = _checked_selection(q, k, v, indices, block, counts, options)
    choice = dispatch.choose(q, k, v, checked, backend, family="selected")
    return dispatch.with_findings(choice, q, v, ("selected",))


class _Call(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    lists: Tensor
    counts: Tensor
    block: tuple[int, int]
    options: Options


def _checked_selection(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block: Any, counts: Any,
    arguments: dict[str, Any],
) -> _Call:  # fmt: skip
    call_options.SELECTED.refuse_others(arguments)
    checks.check_tensors(q, k, v)
    q, k, v, _ = inputs.autocast(q, k, v, {})
    options = call_options.dense_options(q, k, v, **arguments)
    block = check_block(block)
    return _Call(q, k, v, *checked_lists(indices, counts, q, k, block), block, options)


def checked_lists(
    indices: Tensor, counts: Any, q: Tensor, k: Tensor, block: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Checked lists and their lengths, from `ordered_lists`."""
    key_blocks = tracing.ceil_div(k.shape[2], block[1])
    check_lists(indices, counts, q, k, block[0])
    if tracing.host_knows(indices) and indices.numel():
        least, most = (int(x) for x in indices.aminmax())
        if least < -1 or most >= key_blocks:
            raise ValueError(
                f"indices must number the {key_blocks} blocks of {block[1]} keys from 0 on, or be "
                f"-1, got {least if least < -1 else most}"
            )
    return formula.ordered_lists(indices, counts, key_blocks)


def check_block(block: Any) -> tuple[int, int]:
    """Check (block_q, block_k): two ints of at least 1."""
    checks.check_pair("block", block, "(block_q, block_k)")
    block_q, block_k = (checks.check_count(f"block[{n}]", x, 1) for n, x in enumerate(block))
    return block_q, block_k


def check_lists(
    indices: Tensor, counts: Any, q: Tensor, k: Tensor, block_q: int, whose: str = "k's"
) -> None:
    """Check lists [B, H_s, ceil(T_q / block_q), n] and their counts.

    whose: k, as a message names it.
    """
    H_q, H_k = q.shape[1], k.shape[1]
    sizes = {"B": q.shape[0], "R": tracing.ceil_div(q.shape[2], block_q)}
    checks.check_input("indices", indices, "integer", "B H_s R n", q, sizes)
    H_s = indices.shape[1]
    if H_s == 0 or not (H_k % H_s == 0 or (H_s % H_k == 0 and H_q % H_s == 0)):
        raise ValueError(
            f"indices must have a number of heads that divides {whose} {H_k}, or a multiple of "
            f"{H_k} that divides q's {H_q}, got {H_s}"
        )
    if counts is not None:
        checks.check_input("counts", counts, "integer", "B H_s R", q, sizes)
