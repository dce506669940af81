"""DeepSeek's sparse attention (V3.2 report, arXiv 2512.02556): the indexer's selection and loss.

An indexer with few small heads scores every key, I[t, s] = sum_j w[t, j] relu(q[t, j] . k[s]). All
attention heads use a query's n best keys.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ... import checks
from ...torch_backend.selected import indexer as formula
from .. import call_options, inputs
from .block_sparse_attention import checked_lists

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ...arguments import SelectedAttentionArguments

_LOSS = call_options.SELECTED._replace(name="indexer_loss")
_MASKS = call_options.ADDITIVE.taken.keys()
_TOKENS = call_options.ADDITIVE._replace(
    name="select_tokens", taken={x: row for x, row in _LOSS.taken.items() if x in _MASKS}
)


@_TOKENS.sign
def select_tokens(
    q_index: Tensor,
    k_index: Tensor,
    w: Tensor,
    n: int,
    **options: "Unpack[SelectedAttentionArguments]",
) -> Tensor:
    """The indexer's n best keys of each query, as `indices` of `selected_attention`.

    Pass them with block=(1, 1) and the same masks. Scores are computed by torch in fp32 or wider,
    in chunks of queries, without a [T_q, T_k] tensor. No gradient.

    Args:
        q_index: [B, H_I, T_q, D_I], fp16, bf16, fp32 or fp64.
        k_index: [B, 1, T_k, D_I], likewise: one key a token.
        w: [B, H_I, T_q], any of these dtypes: weights of the heads, including all scales (V3.2: H_I
            ** -0.5 * D_I ** -0.5).
        n: keys of each list.
        options: masks by position, of padding and of documents, as for `selected_attention`.

    Returns:
        int32 [B, 1, T_q, n], the best first, equal scores in any order; padded with -1.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device.

    Examples:
        >>> k = torch.tensor([1.0, 3.0, 2.0]).reshape(1, 1, 3, 1)
        >>> select_tokens(torch.ones(1, 1, 1, 1), k, torch.ones(1, 1, 1), 2).tolist()
        [[[[1, 2]]]]
    """
    arguments: dict[str, Any] = {**options}
    _TOKENS.refuse_others(arguments)
    q, k = _checked_index(q_index, k_index, w)
    n = checks.check_count("n", n, 0)
    return formula.select(q, k, w, n, call_options.dense_options(q, k, k, **arguments))


@_LOSS.sign
def indexer_loss(
    q_index: Tensor,
    k_index: Tensor,
    w: Tensor,
    q: Tensor,
    k: Tensor,
    indices: Tensor | None = None,
    **options: "Unpack[SelectedAttentionArguments]",
) -> Tensor:
    """KL(p || softmax(I)) of each query, the training loss of the indexer of `select_tokens`.

    p: the attention weights, summed over heads and normalised. Without `indices` both are over all
    visible keys (the warm-up stage), with them over the listed keys. Computed by torch in fp32 or
    wider, in chunks of queries that are recomputed for gradients, so memory is linear in T. Time is
    proportional to T_q * T_k, as for the selection.

    Args:
        q_index, k_index, w: [B, H_I, T_q, D_I], [B, 1, T_k, D_I] and [B, H_I, T_q], as for
            `select_tokens`.
        q: [B, H_q, T_q, D] of the attention, fp16, bf16, fp32 or fp64.
        k: [B, H_k, T_k, D], likewise; H_k divides H_q.
        indices: int32 or int64 [B, 1, T_q, n], keys in any order; -1 = none; repeated keys count
            once.
        options: of the attention: masks, scale, softcap and sinks as for `selected_attention`.

    Returns:
        fp32 or fp64 [B, T_q], 0 for queries without keys: sum it for the report's loss.
        Differentiable only in q_index, k_index and w, deterministically; q, k and sinks get no
        gradient.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device, or an invalid
            key in indices on the CPU (ignored elsewhere).

    Examples:
        >>> q, k, w = torch.randn(1, 4, 8, 16), torch.randn(1, 1, 8, 16), torch.rand(1, 4, 8)
        >>> indexer_loss(q, k, w, q, k, causal=True).shape
        torch.Size([1, 8])
    """
    arguments: dict[str, Any] = {**options}
    _LOSS.refuse_others(arguments)
    q_index, k_index = _checked_index(q_index, k_index, w)
    checks.check_tensors(q, k, k)
    sizes = {"B": q_index.shape[0], "T_q": q_index.shape[2], "T_k": k_index.shape[2]}
    for name, x, dims in zip("qk", (q, k), checks.DENSE, strict=False):
        checks.check_input(name, x, "", dims, q_index, sizes)
    q, k, _, _ = inputs.autocast(q, k, k, {})
    checked = call_options.dense_options(q, k, k, **arguments)
    lists = None
    if indices is not None:
        lists, _ = checked_lists(indices, None, q, k, (1, 1))
        if indices.shape[1] != 1:
            raise ValueError(f"indices must have one list for all heads, got {indices.shape[1]}")
    return formula.loss((q_index, k_index, w), q, k, lists, checked)


def _checked_index(q: Tensor, k: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Checked q and k of the indexer, in autocast's dtype."""
    sizes: checks.Sizes = {}
    all_dims = "B H_i T_q D_i", "B 1 T_k D_i", "B H_i T_q"
    for name, x, dims in zip(("q_index", "k_index", "w"), (q, k, w), all_dims, strict=True):
        checks.check_input(name, x, "float", dims, q, sizes)
    q, k, _, _ = inputs.autocast(q, k, k, {})
    checks.check_input("k_index", k, "as q_index", "...", q, sizes)
    return q, k
