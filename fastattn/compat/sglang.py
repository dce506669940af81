"""SGLang's attention backend "fastattn", which reads SGLang's token pool in place.

The entry point `sglang.srt.plugins` registers it in every process of SGLang 0.5.23:

    python -m sglang.launch_server --model-path MODEL --attention-backend fastattn

The contract is the unversioned sglang/srt/layers/attention/base_attn_backend.py.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache.views import view_of_tensors
from ..cache_view import CacheView
from ..functional.paged import attention_paged

NAME = "fastattn"


def register() -> None:
    """Register "fastattn" as an attention backend; called by SGLang's plugins."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(NAME)(_create)
    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])
        choices.add_deterministic_attention_backend_choices([NAME])
        choices.add_radix_supported_deterministic_attention_backend_choices([NAME])


def _create(runner: Any) -> Any:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    kind = type("FastattnBackend", (_Backend, AttentionBackend), {"__module__": __name__})
    return kind(runner)


def _refuse(what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(
        f"fastattn's SGLang backend does not support {what}: {instead}, or choose another "
        "--attention-backend"
    )


class Metadata(NamedTuple):
    """Metadata of a forward pass, for all layers: B rows of the pool's table, and packed tokens.

    rows [B], of lengths and table; lengths int32 [all rows], with the new tokens; offsets int32
    [B + 1]; tree_mask bool [total, n]: visibility between drafts.
    """

    rows: Tensor | None
    table: Tensor
    lengths: Tensor
    offsets: Tensor
    longest: int | None
    tree_mask: Tensor | None


class _Buffers(NamedTuple):
    """Static tensors of CUDA graphs, for B up to max_bs, filled before each replay."""

    rows: Tensor
    table: Tensor
    lengths: Tensor
    offsets: Tensor
    tree_mask: Tensor


class _Backend:
    """Attention on a `MHATokenToKVPool`."""

    def __init__(self, runner: Any) -> None:
        pool = runner.token_to_kv_pool
        _check_pool(runner, pool)
        self.device = runner.device
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, pool
        self.page_size = int(pool.page_size)
        server = runner.server_args
        self._invariant = bool(getattr(server, "enable_deterministic_inference", False))
        self._drafts = int(getattr(server, "speculative_num_draft_tokens", None) or 1)
        self.forward_metadata: Metadata | None = None
        self._buffers: _Buffers | None = None
        self._views: dict[int, CacheView] = {}
        table = self.req_to_token_pool.req_to_token
        self._columns = -(-table.shape[1] // self.page_size)

    # Layers read the table itself, which may change after a pass.
    def shared_read_ends(self, fm: Any) -> Any:
        from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

        graphs = fm.is_decode() or fm.is_target_verify()
        return SharedReadEnds.POST_REPLAY if graphs else SharedReadEnds.UNKNOWN

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return True

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        rows = self.req_to_token_pool.req_to_token.shape[0]

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        by_row = self.page_size == 1
        self._buffers = _Buffers(
            zeros(max_bs, dtype=torch.int64),
            self.req_to_token_pool.req_to_token if by_row else zeros(max_bs, self._columns),
            zeros(rows if by_row else max_bs),
            zeros(max_bs + 1),
            zeros(max_num_tokens, self._drafts, dtype=torch.bool),
        )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a pass without a CUDA graph, in new tensors."""
        fb = forward_batch
        if fb.forward_mode.is_idle():
            self.forward_metadata = None
            return
        _check_batch(fb)
        n = self._new_tokens(fb)
        lengths = _lengths(fb, n)
        if n is None:
            offsets = torch.nn.functional.pad(fb.extend_seq_lens.cumsum(0), (1, 0)).int()
            cpu_lengths = fb.extend_seq_lens_cpu
            n = None if cpu_lengths is None else max(map(int, cpu_lengths), default=0)
        else:
            offsets = torch.arange(0, n * (lengths.shape[0] + 1), n, device=lengths.device).int()
        table, rows = self.req_to_token_pool.req_to_token, fb.req_pool_indices
        if self.page_size == 1:
            of_rows = lengths.new_zeros(table.shape[0], dtype=torch.int32)
            lengths = of_rows.index_copy_(0, rows.long(), lengths)
        else:
            table, rows = self._pages_of(rows), None
        tree = _tree_of(fb, n)
        self.forward_metadata = Metadata(rows, table, lengths, offsets, n, tree)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the graph's static tensors, before its capture and each replay."""
        fb, buffers = forward_batch, self._buffers
        if buffers is None:
            raise RuntimeError("init_cuda_graph_state comes before init_forward_metadata_out_graph")
        _check_batch(fb)
        n, B = self._new_tokens(fb), fb.batch_size
        if n is None:
            raise _refuse(
                f"CUDA graphs of {fb.forward_mode.name}", "give --disable-prefill-cuda-graph"
            )
        lengths, rows = _lengths(fb, n)[:B], fb.req_pool_indices[:B]
        steps = torch.arange(0, n * (B + 1), n, device=lengths.device)
        buffers.offsets[: B + 1].copy_(steps)
        tree = _tree_of(fb, n)
        if tree is not None:
            tree = buffers.tree_mask[: n * B, :n].copy_(tree)
        if self.page_size == 1:
            buffers.rows[:B].copy_(rows)
            buffers.lengths.index_copy_(0, rows.long(), lengths)
            of_batch, table, held = buffers.rows[:B], buffers.table, buffers.lengths
        else:
            buffers.table[:B].copy_(self._pages_of(rows))
            buffers.lengths[:B].copy_(lengths)
            of_batch, table, held = None, buffers.table[:B], buffers.lengths[:B]
        offsets = buffers.offsets[: B + 1]
        self.forward_metadata = Metadata(of_batch, table, held, offsets, n, tree)

    def forward_decode(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Store k and v, and attend: o [tokens, H_q * D_v], and lse [tokens, H_q] on request."""
        step = self.forward_metadata
        assert step is not None, "init_forward_metadata comes before a layer"
        sinks, return_lse = kwargs.pop("sinks", None), bool(kwargs.pop("return_lse", False))
        options = _options(layer, kwargs, step.tree_mask is not None)
        if save_kv_cache and k is not None and v is not None:
            self._store(k, v, layer, forward_batch)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if sinks is not None:
            options["sinks"] = sinks
        how: dict[str, Any] = {"max_seqlen_q": step.longest, "tree_mask": step.tree_mask, **options}
        result = attention_paged(
            q, self._view(layer, q.dtype, step), step.offsets, return_lse=return_lse,
            batch_invariant=self._invariant, **how,
        )  # fmt: skip
        o, lse = result if isinstance(result, tuple) else (result, None)
        o = o.view(-1, layer.tp_q_head_num * layer.v_head_dim)
        return o if lse is None else (o, lse.T.contiguous())

    forward_extend = forward_decode

    def _store(self, k: Tensor, v: Tensor, layer: Any, fb: Any) -> None:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        where = KVWriteLoc.for_batch(fb)
        scales: tuple[Any, ...] = ()
        if layer.k_scale is not None:
            # The pool divides in place.
            k, v, scales = k.clone(), v.clone(), (layer.k_scale, layer.v_scale)
        self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, *scales)

    def _view(self, layer: Any, dtype: torch.dtype, step: Metadata) -> CacheView:
        """The pool of a layer, checked once, with the rows of this pass."""
        k, v = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        view = self._views.get(layer.layer_id)
        if view is None or view.k.data_ptr() != k.data_ptr() or view.dtype != dtype:
            view = self._views[layer.layer_id] = self._checked_view(k, v, layer, dtype)
        return view._replace(
            lengths=step.lengths,
            block_table=step.table,
            batch_index=step.rows,
            length_bound=step.table.shape[1] * self.page_size,
        )

    def _checked_view(self, k: Tensor, v: Tensor, layer: Any, dtype: torch.dtype) -> CacheView:
        if k.dim() == 3:  # [slots, H_k, D], else [pages, H_k, page_size, D]
            whole = k.shape[0] // self.page_size * self.page_size
            sizes = (-1, self.page_size, *k.shape[1:2])
            k, v = (x[:whole].view(*sizes, x.shape[2]).transpose(1, 2) for x in (k, v))
        scales: list[Tensor | None] = [None, None]
        if k.dtype == torch.float8_e4m3fn:
            scales = [
                torch.ones((), device=k.device) if x is None else x.detach().float().to(k.device)
                for x in (layer.k_scale, layer.v_scale)
            ]
        nothing = k.new_zeros(1, dtype=torch.int32)
        return view_of_tensors(
            k, v, nothing, block_table=nothing[None], k_scale=scales[0], v_scale=scales[1],
            dtype=dtype,
        )  # fmt: skip

    def _pages_of(self, rows: Tensor) -> Tensor:
        """Get the pages of rows, int32 [B, N], from the pool's token table."""
        table = self.req_to_token_pool.req_to_token[:, :: self.page_size]
        return (table.index_select(0, rows) // self.page_size).int()

    def _new_tokens(self, fb: Any) -> int | None:
        """Number of new tokens of each row, None where they differ."""
        mode = fb.forward_mode
        if mode.is_target_verify():
            tokens = 0 if fb.spec_info is None else fb.spec_info.num_tokens_per_req
            return int(tokens) if tokens > 0 else self._drafts
        return 1 if mode.is_decode() else None


def _lengths(fb: Any, drafts: int | None) -> Tensor:
    """Count the tokens of each row, new ones and drafts included: int32 [B]."""
    if fb.forward_mode.is_target_verify():
        return (fb.seq_lens + drafts).int()
    if fb.forward_mode.is_decode():
        return fb.seq_lens.int()
    return (fb.extend_prefix_lens + fb.extend_seq_lens).int()


def _tree_of(fb: Any, n: int | None) -> Tensor | None:
    """Cut the visibility between drafts, bool [B n, n], from SGLang's mask, older keys first.

    The mask is flat: n rows of seq_len + n entries for each request, or n rows of n (QLEN_ONLY).
    """
    if not fb.forward_mode.is_target_verify() or fb.spec_info is None or n is None:
        return None
    mask = fb.spec_info.custom_mask
    if mask is None:
        return None
    B, mask = fb.seq_lens.shape[0], mask.view(-1)
    only_drafts = mask.numel() == B * n * n
    older = torch.zeros_like(fb.seq_lens) if only_drafts else fb.seq_lens
    width = older.long() + n
    first = (n * width).cumsum(0) - n * width
    step = torch.arange(n, device=mask.device)
    offset = (first[:, None] + step * width[:, None] + older[:, None])[..., None] + step
    # Padding requests of a graph's batch have no mask.
    return mask[offset.clamp(max=mask.numel() - 1)].bool().view(B * n, n)


def _options(layer: Any, kwargs: dict[str, Any], tree: bool) -> dict[str, Any]:
    """Options of `attention_paged` for a layer; unsupported features raise by name."""
    for name, x in kwargs.items():
        if x is not None:
            raise _refuse(name, "run the model without it")
    if layer.is_cross_attention:
        raise _refuse("cross-attention (is_cross_attention)", "it serves decoders")
    kind = str(getattr(layer.attn_type, "value", layer.attn_type))
    if kind not in ("decoder", "encoder_only"):
        raise _refuse(f"attn_type={kind!r}", "it serves decoders and encoders")
    if layer.xai_temperature_len > 0:
        raise _refuse(f"xai_temperature_len={layer.xai_temperature_len}", "run another model")
    if layer.pos_encoding_mode != "NONE":
        raise _refuse(f"pos_encoding_mode={layer.pos_encoding_mode!r}", "rotate before attention")
    options: dict[str, Any] = {"scale": layer.scaling, "causal": kind == "decoder" and not tree}
    if layer.logit_cap:
        if layer.logit_capping_method != "tanh":
            raise _refuse(f"logit_capping_method={layer.logit_capping_method!r}", 'take "tanh"')
        options["softcap"] = layer.logit_cap
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        if kind != "decoder":
            raise _refuse("a sliding window of an encoder", "run the model without")
        # SGLang's window excludes the own token, as does window=(left, right).
        options["window"] = (layer.sliding_window_size, None)
    return options


def _check_pool(runner: Any, pool: Any) -> None:
    if getattr(runner, "use_mla_backend", False):
        raise _refuse("MLA", "it reads keys and values of each head")
    if getattr(pool, "swa_kv_pool", None) is not None:
        raise _refuse("a pool with a part for windows", "give --disable-hybrid-swa-memory")
    if getattr(pool, "requires_physical_write_loc", False):
        raise _refuse("the unified pool", "turn it off")
    if getattr(pool, "is_quantized_kv_cache", False):
        raise _refuse("a pool of fp4", 'give --kv-cache-dtype "auto" or "fp8_e4m3"')
    if pool.dtype == torch.float8_e5m2:
        raise _refuse("a pool of float8_e5m2", 'give --kv-cache-dtype "fp8_e4m3"')


def _check_batch(fb: Any) -> None:
    if getattr(fb, "encoder_lens", None) is not None:
        raise _refuse("encoder_lens", "it serves decoders")
    mode = fb.forward_mode
    if mode.is_dllm_extend():
        raise _refuse("diffusion language models (DLLM_EXTEND)", "run another model")
    if mode.is_decode() and getattr(fb.spec_info, "kv_indptr", None) is not None:
        raise _refuse(
            "a draft model's own steps", "give --speculative-draft-attention-backend triton"
        )
