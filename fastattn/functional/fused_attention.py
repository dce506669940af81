"""`attention`, `attention_varlen` and `explain`: check, choose a backend, compute."""

from collections.abc import Hashable
from functools import partial
from typing import Any

from torch import Tensor

from .. import checks, dispatch, tracing
from ..block_mask import with_tensors
from ..dispatch import Explanation
from ..ops import attention_ops as ops
from ..ops import spread, torch_varlen
from ..options import Options
from ..torch_backend import dropout
from ..torch_backend import torch_attention as torch_backend
from ..tuned import choices
from . import call_memo, call_options, inputs, sharded, statistics


@call_options.DENSE.sign
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    return_max: bool = False,
    backend: str | None = None,
    **options: Any,
) -> call_options.Results:
    """Exact attention softmax(q k^T * scale + mask) v with grouped-query heads; differentiable.

    Query i of batch row b has position p = i + query_offset among the keys. It sees key j if all
    given masks allow it. With T_q = 2, T_k = 4 (rows are queries):

        causal        window=2      window=(0, 1)    key_lengths=[3]    causal, query_offset=0
        1 1 1 0       0 1 1 0       0 0 1 1          1 1 1 0            1 0 0 0
        1 1 1 1       0 0 1 1       0 0 0 1          1 1 1 0            1 1 0 0

    With T_q = T_k = 5:

        causal,             causal, window=2,   causal,             causal, window=2,   documents=
        prefix_lengths=3    keep_first=1        stride=2            stride=3            [0 0 0 1 1]
        1 1 1 0 0           1 0 0 0 0           1 0 0 0 0           1 0 0 0 0           1 1 1 0 0
        1 1 1 0 0           1 1 0 0 0           0 1 0 0 0           1 1 0 0 0           1 1 1 0 0
        1 1 1 0 0           1 1 1 0 0           1 0 1 0 0           0 1 1 0 0           1 1 1 0 0
        1 1 1 1 0           1 0 1 1 0           0 1 0 1 0           1 0 1 1 0           0 0 0 1 1
        1 1 1 1 1           1 0 0 1 1           1 0 1 0 1           0 1 0 1 1           0 0 0 1 1

    The score of a visible key is computed in this order:

        x = scale * (q.k + query2.key2 + relative_query . relative_keys[h, p - j])
        x = softcap * tanh(x / softcap)
        x = x - alibi_slopes[h] * |p - j| + relative_bias[h, p - j] + attn_bias[b, h, i, j]
        x = score_mod(x, b, h, p, j, *mod_tensors)
        weight = exp(x) / (sum of exp(x) over visible keys, + exp(sinks[h]))

    Args:
        q: [B, H_q, T_q, D], fp16, bf16, fp32 or fp64, any strides. Copied for the kernels if the
            last dim is not contiguous or rows are not multiples of 16 bytes.
        k: [B, H_k, T_k, D], same dtype and device. H_k divides H_q; query head h reads K/V head
            h // (H_q // H_k), and K/V are not expanded in memory.
        v: [B, H_k, T_k, D_v].
        causal: p sees keys j <= p.
        window: (left, right) sees p - left <= j <= p + right, None = unbounded on that side, and
            (None, None) no window; an int W is the last W keys, the query's own counted:
            (W - 1, 0).
        prefix_lengths: with causal, all queries see the keys j < prefix_lengths[b] (prefix LM). An
            int, or int32 or int64 [B].
        keep_first: keys j < keep_first stay visible outside the window and stride (StreamingLLM).
        stride: only keys at distances p - j that are multiples of it are visible, with a window
            also its keys.
        key_padding_mask: bool [B, T_k], True = attend.
        key_lengths: int32 or int64 [B]; row b has keys 0..key_lengths[b] - 1. Values are clamped to
            [0, T_k].
        documents: int32 or int64 ids [B, T], or a pair (q_ids [B, T_q], k_ids [B, T_k]): a query
            sees the keys with its own id. Keys with negative ids are padding. `document_ids` makes
            ids from offsets.
        attn_mask: bool (True = attend) with 2 to 4 dims that broadcast to [B, H_q, T_q, T_k]; not
            expanded in memory. A float tensor is taken as attn_bias.
        mask_mod: function mask_mod(b, h, q_pos, k_pos) -> bool, True = attend, with q_pos = p and
            k_pos = j, in Python over torch tensors, as for FlexAttention: translated to Triton in
            each call; or one of `mods.from_python`; or a `BlockMask` of one. Or a @triton.jit
            function mask_mod(b, h, q_pos, k_pos, *mod_tensors).
        query_offset: position of query 0, an int or int32/int64 [B]. Default T_k - T_q: the last
            query is at the last key (bottom-right). Within +-2^28; a tensor's values are clamped to
            this range.
        positions: (q_positions int32 [B or 1, T_q], k_positions int32 [B or 1, T_k]), positions of
            queries and keys in the full sequence, which replace p and j in causal, window,
            prefix_lengths, keep_first, stride, alibi_slopes, relative_bias, relative_keys, q_pos
            and k_pos of mods, and dropout. They must rise by 1 within each aligned block of 128;
            with dropout each such block of keys must begin at a multiple of 4. This is not checked
            on a GPU. key_lengths, key_padding_mask, documents, attn_mask and attn_bias still index
            memory.
        heads: (first, total): q is a slice of the heads, from `first` of the full model's `total`.
            Then h in mods and dropout is the full model's. Options with a head dim have q's number
            of heads. For dropout of a part of a batch, first is row * total + head.
        scale: factor on q.k, > 0; default D ** -0.5, with key2 (D + D2) ** -0.5. Required with key2
            if v is k or key2 (latents with an absorbed projection, whose scale is the original head
            dim's).
        softcap: bound of the scores, > 0.
        alibi_slopes: fp32 [H_q] or [B, H_q], without gradient. `fastattn.alibi_slopes` makes the
            paper's.
        relative_bias: float [H_q, 2 R + 1], differentiable. Entry R + p - j is added, with
            distances clamped to R. `t5_relative_bias` makes it from T5's buckets.
        relative_keys: [H, 2 R + 1, D] in q's dtype, H one of H_q, H_k and 1, differentiable: a
            vector per distance (Shaw et al., Transformer-XL), clamped as in relative_bias.
        relative_query: as q, differentiable: the query of relative_keys. Default q.
        query2: [B, H_q, T_q, D2] in q's dtype, differentiable: queries of a second product.
        key2: [B, H_k2, T_k, D2], differentiable: keys of the second product, with H_k2 heads, a
            divisor of H_k, which the kernels do not expand (such as shared rotary keys in
            multi-head latent attention). The kernels do not serve it with relative_keys.
        attn_bias: float, broadcasting as attn_mask, differentiable. -inf hides a key, unless
            score_mod, which comes after it, makes another number of it; in the kernels, so do
            values below -2.3e38, such as torch.finfo(torch.float32).min.
        score_mod: function score_mod(x, b, h, q_pos, k_pos) -> score, likewise, or @triton.jit with
            mod_tensors. The tensors that it reads are differentiable, once, in fp32: by a kernel,
            or by torch in chunks of queries if no derivative of score_mod is known.
        score_mod_grad: @triton.jit function score_mod_grad(dx, x, b, h, q_pos, k_pos, *mod_tensors)
            -> gradient of score_mod's x, from the gradient dx of its result. Default: derived from
            score_mod.
        mod_tensors: contiguous tensors, passed to @triton.jit functions as pointers for tl.load.
        sinks: float [H_q], differentiable attention sinks: per head, the score of a key of value 0.
        dropout: probability in [0, 1) to drop a weight; the others are divided by 1 - dropout.
            Always applied: pass 0 for evaluation.
        dropout_seed: int64 [2] on q's device: the same weights with every backend, those of
            `dropout_keep_mask`. Default: by torch's generator of that device, which
            torch.manual_seed repeats with one backend and release of torch.
        deterministic: gradients are bitwise equal from run to run. False permits "triton" and
            "hopper" to compute all gradients in one pass, with q's summed by fp32 atomics: less
            work, more traffic, and last bits that may differ. The forward is not affected, and
            torch.use_deterministic_algorithms(True) overrides it. The "torch" backend is as
            deterministic as torch, which on a GPU depends on that flag alone.
        batch_invariant: o and lse of a query are bitwise equal in every call of a backend with the
            same query, keys and values: in any batch, with key_lengths, packed, in chunks of any
            size, decoding, over pages of any size. No keys are split among programs, so one long
            row alone has few of them. Not by "hopper", nor with dropout, key_padding_mask,
            documents or positions. It says nothing of gradients.
        return_lse: also return the log of the softmax denominators.
        return_max: also return, last, the largest score x of each query, -inf without visible keys;
            sinks do not count. QK-clip uses its `amax((0, 2))`. No gradient. "hopper" and
            "triton" compute it in the same pass, "torch" separately.
        backend: "hopper", "triton", "torch" or "auto" (default; the environment variable
            FASTATTN_BACKEND replaces it). `fastattn.explain` takes the same arguments and reports
            the choice.

    Returns:
        o [B, H_q, T_q, D_v] in q's dtype; with return_lse also lse, fp32 [B, H_q, T_q], in natural
        log, sink included; with return_max also the maximum, as lse. o and lse are differentiable.
        A query that sees no key has o = 0, lse = -inf (with sinks, lse = sinks[h]) and gradients 0
        in q, k and v. A NaN in padded-out keys or values (key_padding_mask, key_lengths, negative
        document ids) reaches no output and no gradient. Under autocast q, k, v, relative_keys,
        relative_query, query2 and key2 are cast as in torch's own attention. DTensors that are
        sharded by rows or heads, or replicated, give DTensors: each rank computes its part
        (`fastattn.functional.sharded`). Under forward-mode AD, o and lse have tangents from q, k, v
        and all differentiable options, at any depth of torch.func's transforms.

    Raises:
        TypeError, ValueError: an argument of the wrong type, dtype, shape or device, contradictory
            arguments, a score_mod whose derivative is needed and unknown, or a forced backend that
            cannot serve the call; the message names it.
    """
    if type(return_lse) is not bool:
        return_lse = checks.check_flag("return_lse", return_lse)
    if spread.attend is not None:
        how = {"return_lse": return_lse, "return_max": return_max, "backend": backend}
        return spread.attend(q, k, v, **how, **options)
    arguments: dict[str, Any] = options
    largest = checks.check_flag("return_max", return_max) if return_max is not False else False
    key = None if largest else call_memo.key_of((q, k, v), arguments, backend, return_lse)
    cached = call_memo.find(key)
    if cached is not None:
        if cached.cast:
            q, k, v, arguments = inputs.autocast(q, k, v, arguments)
        return cached.run(q, k, v, cached.options_of(arguments))
    if key is None and any(map(sharded.is_dtensor, (q, k, v))):
        call = partial(attention, return_lse=return_lse, return_max=return_max, backend=backend)
        return sharded.attend(call, {"q": q, "k": k, "v": v}, options)
    call_options.DENSE.refuse_others(options)
    q, k, v, checked, options = _checked_attention(q, k, v, options)
    if largest:
        return statistics.attention_with_max(q, k, v, checked, return_lse, backend)
    cast = key is not None and options is not arguments
    return compute(q, k, v, checked, return_lse, backend, key, options, cast=cast)


@call_options.PACKED.sign
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: bool = False,
    return_max: bool = False,
    backend: str | None = None,
    **options: Any,
) -> call_options.Results:
    """`attention` within each of N packed sequences, without padding.

    Sequence n has the queries cu_seqlens_q[n] to cu_seqlens_q[n + 1] - 1, and keys likewise; both
    may be empty. Positions count from the start of each sequence's keys, and its last query is at
    its last key. Sequences replace the batch rows b of `attention`: in key_lengths [N],
    prefix_lengths [N], alibi_slopes [N, H_q], and for mask_mod, score_mod and dropout.

    Args:
        q: [total_q, H_q, D].
        k: [total_k, H_k, D].
        v: [total_k, H_k, D_v].
        cu_seqlens_q: int32 or int64 [N + 1] on q's device, non-decreasing from 0 to at most
            total_q: further rows, such as a batch padded to a fixed size has, are of no sequence.
        cu_seqlens_k: likewise to total_k; default cu_seqlens_q.
        return_lse, return_max, backend: as for `attention`.
        options: as for `attention`, except key_padding_mask, documents, attn_mask, attn_bias and
            query_offset. relative_query has q's shape; query2 is [total_q, H_q, D2] and key2
            [total_k, H_k2, D2].

    Returns:
        o [total_q, H_q, D_v]; with return_lse also lse, fp32 [H_q, total_q], and with return_max
        the maximum, as lse. Rows of no sequence have o = 0, lse = -inf (sinks do not count) and
        gradients 0, whatever they hold.

    Raises:
        TypeError, ValueError: as `attention`. The values of offsets are checked on the CPU only; on
            a GPU no access leaves the tensors, whatever offsets hold.
    """
    if type(return_lse) is not bool:
        return_lse = checks.check_flag("return_lse", return_lse)
    arguments = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, **options}
    largest = checks.check_flag("return_max", return_max) if return_max is not False else False
    key = None if largest else call_memo.key_of((q, k, v), arguments, backend, return_lse)
    cached = call_memo.find(key)
    if cached is not None:
        if tracing.host_knows(q):  # their values are not part of the key
            checks.check_offset_values("cu_seqlens_q", cu_seqlens_q, q.shape[0])
            if cu_seqlens_k is not None:
                checks.check_offset_values("cu_seqlens_k", cu_seqlens_k, k.shape[0])
        if cached.cast:
            q, k, v, arguments = inputs.autocast(q, k, v, arguments)
        return cached.run(q, k, v, cached.options_of(arguments))
    q, k, v, checked, changed = _checked_attention(q, k, v, options, (cu_seqlens_q, cu_seqlens_k))
    if largest:
        return statistics.attention_with_max(q, k, v, checked, return_lse, backend)
    cast = changed is not options
    return compute(q, k, v, checked, return_lse, backend, key, arguments | changed, cast=cast)


@call_options.DENSE.sign
def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    return_max: bool = False,
    backend: str | None = None,
    **options: Any,
) -> Explanation:
    """Return the backend of a call of `attention`, and why a faster one was not used.

    With deterministic=False also whether gradients would come in one pass, or why not. With few
    queries and many keys also whether keys are split among programs.

    Checks the arguments as `attention` does, and computes nothing.

    Returns:
        An `Explanation`: `.backend`, `.one_pass`, `.split_keys`, and `.reasons` by name of a
        backend that was not used; `str()` formats it.
    """
    arguments: dict[str, Any] = dict(options)
    call_options.DENSE.refuse_others(arguments)
    checks.check_flag("return_lse", return_lse)
    q, k, v, checked, _ = _checked_attention(q, k, v, arguments)
    if checks.check_flag("return_max", return_max):
        statistics.check_max(checked)
    choice = dispatch.choose(q, k, v, checked, backend, among=dispatch.BACKENDS)
    choice = dispatch.with_forward(choice, q, k, v, checked)
    training = choices.wants_gradients(q, k, v, checked)
    families = choices.families(choice.backend, q, k, v, checked, training)
    choice = dispatch.with_findings(choice, q, v, families, checked.registers)
    return dispatch.with_backward(choice, q, k, v, checked)


def _checked_attention(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any],
    offsets: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Options, dict[str, Any]]:  # fmt: skip
    """q, k, v and the options as checked, and the options as autocast leaves them.

    offsets: of packed sequences.
    """
    duals = inputs.duals(q, k, v, options)
    if duals:
        q, k, v, options = inputs.detached(q, k, v, options, duals)
    checks.check_tensors(q, k, v, checks.DENSE if offsets is None else checks.PACKED)
    options = with_tensors(options, q.device)
    q, k, v, options = inputs.autocast(q, k, v, options)
    checked = checked_options(q, k, v, options, offsets)
    if duals:
        q, k, v, checked = inputs.restored(q, k, v, checked, duals)
    return q, k, v, checked, options


def checked_options(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any],
    offsets: tuple[Tensor, Tensor | None] | None,
) -> Options:  # fmt: skip
    """The options as checked; mod_tensors may learn, with @triton.jit functions."""
    plain, mods = inputs.apart(options)
    if offsets is None:
        checked = call_options.dense_options(q, k, v, **plain)
    else:
        checked = call_options.packed_options(q, k, v, *offsets, **plain)
    return checked._replace(mod_tensors=mods) if mods else checked


def compute(
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool, backend: str | None,
    key: list[Hashable] | None, arguments: dict[str, Any], *, cast: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """o, or (o, lse), from the backend that serves the checked call.

    key, arguments: memo key and unchecked options of the call. cast: autocast changed a tensor.
    """
    choice = dispatch.choose(q, k, v, options, backend, among=dispatch.BACKENDS)
    if choice.backend != "torch" or not torch_backend.draws(q, k, v, options, return_lse):
        options = dropout.seeded(options, q.device)
    dispatch.log_once("attention", choice, q, k, v, options)
    if choice.reasons and not q.is_cpu:
        dispatch.warn_if_slow(choice, q.device)
    if choice.backend == "torch":
        if torch_varlen.serves(options):
            return torch_varlen.attend(q, k, v, options, return_lse)
        run = torch_backend.bind(q, k, v, options, return_lse)
        call = (q, k, v, options)
        return call_memo.first(run, call, key, arguments, options, cast=cast, by_torch=True)
    kernels, options = dispatch.launched(choice, q, k, v, options)
    options = inputs.kernel_options(options)
    rows = (inputs.kernel_rows(q), inputs.kernel_rows(k), inputs.kernel_rows(v))
    if key is not None and rows[0] is q and rows[1] is k and rows[2] is v:
        launch = ops.prepare(q, k, v, options, kernels, return_lse)
        call = (q, k, v, options)
        results = call_memo.first(launch, call, key, arguments, options, cast=cast)
        if results is not None:
            return results
    o, lse = ops.attend(*rows, options, kernels)
    if o.shape[-1] != v.shape[-1]:
        o = o[..., : v.shape[-1]]
    return (o, lse) if return_lse else o
