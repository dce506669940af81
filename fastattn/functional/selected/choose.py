"""Select the best key blocks of each query, without scores of all pairs."""

import torch
from torch import Tensor

from ... import checks, dispatch, tracing
from ...ops.selected import choose as ops
from ...torch_backend.query_chunks import steps
from ...torch_backend.selected import choose as formula
from .. import inputs

# Scores in memory at once: 64 MiB in fp32.
_AT_ONCE = 2**24


@torch.no_grad()
def select_blocks(
    q: Tensor,
    k: Tensor,
    n: int,
    *,
    block_k: int,
    lse: Tensor | None = None,
    pool: tuple[int, int] = (1, 1),
    lists: int | None = None,
    causal: bool = True,
    first: int = 0,
    latest: int = 1,
    query_offset: int = 0,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """The n best key blocks of each query, as `indices` of `selected_attention`.

    Scores of blocks are computed in chunks of queries, without a [T_q, T_k] tensor. No gradient.

    Args:
        q: [B, H_q, T_q, D].
        k: [B, H_k, T_k, D]: one key per token or, pooled, per `pool[0]` tokens with stride
            `pool[1]`.
        n: blocks of each list, at least first + latest.
        block_k: tokens of a block: 1, 2, 4, ... 128 times `pool[1]`.
        lse: fp32 [B, H_q, T_q] of these queries over these keys: a block's score is the sum of its
            keys' weights, summed over a list's heads (NSA: arXiv 2502.11089, equations 9 and 10).
            None: the largest score of its keys and heads (MSA; MoBA with the blocks' means as k).
        pool: (tokens of a key, stride); tokens is a multiple of the stride. A key counts in each
            block that it overlaps, once per stride.
        lists: H_s, number of lists, each shared by adjacent heads: divides H_q. Default: H_k.
        causal: a query sees keys whose last token is not after it, and blocks that begin no later.
        first, latest: numbers of blocks that are always selected: at the start, and up to the
            query's own.
        query_offset: position of query 0 among the T_q + query_offset tokens.
        scale: default D ** -0.5.
        backend: "triton", "torch" or "auto".

    Returns:
        int32 [B, H_s, T_q, n], the best first; padded with -1.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device.
    """
    checks.check_tensors(q, k, k)
    q, k, _, _ = inputs.autocast(q, k, k, {})
    sizes = checks.check_qkv(q, k, k)
    per_block = _keys_of_block(pool, block_k)
    n, first, latest = check_block_counts(n, first, latest)
    offset = checks.check_count("query_offset", query_offset, 0)
    H_s = k.shape[1] if lists is None else checks.check_count("lists", lists, 1)
    if q.shape[1] % H_s:
        raise ValueError(f"lists must divide q's {q.shape[1]} heads, got {H_s}")
    if lse is not None:
        checks.check_input("lse", lse, "", "B H_q T_q", q, sizes)
        lse = lse.contiguous()
    scale = checks.check_scale(scale, q.shape[3])
    causal = checks.check_flag("causal", causal)
    by_kernel = dispatch.takes_kernel("score key blocks", backend, {"q": q, "k": k}, "selected")
    if by_kernel:
        tracing.refuse_constants('select_blocks by "triton"')
    rows = (inputs.kernel_rows(q), inputs.kernel_rows(k)) if by_kernel else (q, k)
    B, _, T_q, _ = q.shape
    count = tracing.ceil_div(T_q + offset, block_k)
    step = max(1, _AT_ONCE // max(1, B * q.shape[1] * (count if by_kernel else k.shape[2])))
    parts = [q.new_empty(B, H_s, 0, n, dtype=torch.int32)]
    for some in steps(T_q, step):
        part = some.start, some.stop
        if by_kernel:
            scores = ops.block_scores(
                *rows, lse, H_s, per_block, *pool, count, *part, offset, scale, causal
            )
        else:
            scores = formula.block_scores(
                *rows, lse, H_s, per_block, pool, count, part, offset, scale, causal
            )
        parts.append(_best(scores, n, block_k, part[0] + offset, causal, first, latest))
    return torch.cat(parts, 2)


def _best(
    scores: Tensor, n: int, block_k: int, position: int, causal: bool, first: int, latest: int
) -> Tensor:
    """Best blocks, int32 [B, H_s, rows, n]; position: of the first row."""
    rows, count = scores.shape[2:]
    block = torch.arange(count, device=scores.device)
    own = (torch.arange(rows, device=scores.device)[:, None] + position) // block_k
    taken = (block < first) | ((block > own - latest) & (block <= own))
    scores = scores.masked_fill(taken, torch.inf)
    if causal:
        scores = scores.masked_fill(block > own, -torch.inf)
    return formula.best(scores, n)


def check_block_counts(n: int, first: int, latest: int) -> tuple[int, int, int]:
    """Check how many blocks a list has, and how many of them are always selected."""
    numbers = {"n": n, "first": first, "latest": latest}
    n, first, latest = (checks.check_count(x, y, 0) for x, y in numbers.items())
    if n < first + latest:
        raise ValueError(f"n must be at least first + latest = {first + latest}, got {n}")
    return n, first, latest


def check_pool(pool: tuple[int, int]) -> tuple[int, int]:
    """Check the number of a pooled key's tokens, and the distance between keys."""
    checks.check_pair("pool", pool, "(tokens, step)")
    tokens, step = (checks.check_count(f"pool[{i}]", x, 1) for i, x in enumerate(pool))
    return tokens, step


def _keys_of_block(pool: tuple[int, int], block_k: int) -> int:
    """Number of keys that begin in a block."""
    tokens, step = check_pool(pool)
    block_k = checks.check_count("block_k", block_k, 1)
    if tokens % step:
        raise ValueError(f"pool[0] must be a multiple of pool[1], got {tokens} and {step}")
    per_block = block_k // step
    if block_k % step or per_block not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise ValueError(
            f"block_k must be 1, 2, 4 up to 128 times the step of pool, {step}, got {block_k}"
        )
    return per_block
