"""Attention of each block of queries to the key blocks that a list names: block-sparse attention.

The primitive of NSA (Yuan et al. 2025, arXiv 2502.11089), MoBA (Lu et al. 2025, arXiv 2502.13189),
DeepSeek's sparse attention (block_k = 1) and of every static pattern of blocks.
"""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from torch import Tensor

from ... import checks, dispatch, tracing
from ...dispatch import Explanation
from ...ops.selected import attend as ops
from ...options import Options
from ...torch_backend.selected import attend as formula
from .. import call_options, inputs

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ...arguments import SelectedAttentionArguments


@overload
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, block: tuple[int, int] = ...,
    counts: Tensor | None = ..., return_lse: Literal[False] = ..., backend: str | None = ...,
    **options: "Unpack[SelectedAttentionArguments]",
) -> Tensor: ...  # fmt: skip
@overload
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, block: tuple[int, int] = ...,
    counts: Tensor | None = ..., return_lse: Literal[True], backend: str | None = ...,
    **options: "Unpack[SelectedAttentionArguments]",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, *, block: tuple[int, int] = ...,
    counts: Tensor | None = ..., return_lse: bool, backend: str | None = ...,
    **options: "Unpack[SelectedAttentionArguments]",
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
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
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T) v over the keys of the blocks that `indices` names for each block of queries.

    Time and memory follow the blocks that are named, forward and backward. The masks hide keys of
    named blocks as they do in `attention`. A block that is named twice counts once.

    Args:
        q: [B, H_q, T_q, D], fp16, bf16, fp32 or fp64.
        k: [B, H_k, T_k, D], likewise; H_k divides H_q.
        v: [B, H_k, T_k, D_v].
        indices: int32 or int64 [B, H_s, R, n], R = ceil(T_q / block_q): for queries r * block_q up
            to (r + 1) * block_q - 1, numbers of blocks of block_k keys, in any order, the last of
            which may run past T_k; -1 anywhere names none. H_s lists are shared by H_q / H_s
            neighbouring heads: H_s divides H_k (1: all heads alike), or is a multiple of it that
            divides H_q (H_q: each head has its own). It has no gradient.
        block: (block_q, block_k), each at least 1; kernels are fast where block_k is 16, 32, 64 or
            a multiple, and where H_q / max(H_k, H_s) * block_q is 16 at least.
        counts: int32 or int64 [B, H_s, R]: how many of each list count, from its start. None: all.
        return_lse: also return the log of the softmax denominators.
        backend: "triton", "torch" or "auto", as for `attention`.
        options: masks by position, of padding and of documents, scale, softcap and sinks, as for
            `attention`.

    Returns:
        o [B, H_q, T_q, D_v] in q's dtype; with return_lse also lse, fp32 [B, H_q, T_q]. Both are
        differentiable in q, k, v and sinks, deterministically. A query that sees no key has o = 0,
        lse = -inf and gradients of 0.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device, a number that
            is no block of k where indices lie on the CPU (elsewhere it names none), or a forced
            backend that cannot serve the call; the message names it.

    Examples:
        >>> q, k = torch.randn(1, 8, 256, 64), torch.randn(1, 2, 256, 64)
        >>> own = torch.arange(256).div(64, rounding_mode="floor").expand(1, 2, 256)
        >>> indices = torch.stack((torch.zeros_like(own), own), -1)  # the first block and one's own
        >>> selected_attention(q, k, k, indices, block=(1, 64), causal=True).shape
        torch.Size([1, 8, 256, 64])
    """
    return_lse = checks.check_flag("return_lse", return_lse)
    q, k, v, lists, lengths, block, checked = _checked(q, k, v, indices, block, counts, options)
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
    """Which backend `selected_attention` would use for these arguments, and why not a faster one.

    Checks the arguments as `selected_attention` does, and computes nothing.
    """
    q, k, v, *_, checked = _checked(q, k, v, indices, block, counts, options)
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


def _checked(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block: Any, counts: Any, given: dict[str, Any]
) -> _Call:
    call_options.SELECTED.refuse_others(given)
    checks.check_tensors(q, k, v)
    q, k, v, _ = inputs.autocast(q, k, v, {})
    options = call_options.dense_options(q, k, v, **given)
    block = check_block(block)
    return _Call(q, k, v, *checked_lists(indices, counts, q, k, block), block, options)


def checked_lists(
    indices: Tensor, counts: Any, q: Tensor, k: Tensor, block: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The lists in order and their lengths, as `ordered_lists` has them."""
    key_blocks = -(-k.shape[2] // block[1])
    _check_lists(indices, counts, q, k, block[0])
    if tracing.host_knows(indices) and indices.numel():
        least, most = (int(x) for x in indices.aminmax())
        if least < -1 or most >= key_blocks:
            raise ValueError(
                f"indices must number the {key_blocks} blocks of {block[1]} keys from 0 on, or be "
                f"-1, got {least if least < -1 else most}"
            )
    return formula.ordered_lists(indices, counts, key_blocks)


def check_block(block: Any) -> tuple[int, int]:
    """A pair of ints of at least 1: queries of a list and keys of a block."""
    if not isinstance(block, tuple) or len(block) != 2:
        raise TypeError(f"block must be a pair (block_q, block_k), got {block!r}")
    block_q, block_k = (checks.check_count(f"block[{n}]", x, 1) for n, x in enumerate(block))
    return block_q, block_k


def _check_lists(indices: Tensor, counts: Any, q: Tensor, k: Tensor, block_q: int) -> None:
    B, H_q, T_q, _ = q.shape
    H_k, R = k.shape[1], -(-T_q // block_q)
    checks.check_integers("indices", indices)
    shape = tuple(indices.shape)
    if len(shape) != 4 or (shape[0], shape[2]) != (B, R):
        raise ValueError(f"indices must have shape [{B}, H_s, {R}, n], got {list(shape)}")
    H_s = shape[1]
    if H_s == 0 or not (H_k % H_s == 0 or (H_s % H_k == 0 and H_q % H_s == 0)):
        raise ValueError(
            f"indices must have a number of heads that divides k's {H_k}, or a multiple of {H_k} "
            f"that divides q's {H_q}, got {H_s}"
        )
    checks.check_device("indices", indices, q)
    if counts is not None:
        checks.check_integers("counts", counts)
        checks.check_placement("counts", counts, shape[:3], q)
