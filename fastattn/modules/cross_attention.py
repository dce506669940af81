"""Cross-attention as a torch module: queries from one sequence, keys and values from another."""

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

import torch
from einops import repeat
from torch import Tensor, nn

from .. import checks
from ..cache.views import view_of_tensors
from ..functional.additive import additive_attention
from ..functional.decode import decode_attention
from ..functional.fused_attention import attention
from .checks import check_unprojected, check_vectors, refuse_others
from .fused_weights import Fused
from .layer import AttentionLayer
from .options import SharedOptions, complete, shows_options
from .sharded import local_part

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ProjectedMemory(NamedTuple):
    """Keys and values of a memory, projected for one layer.

    k: [B, H_k, S, D].
    v: [B, H_k, S, D_v].
    lengths: int32 or int64 [B], or None: the first lengths[b] tokens of row b exist.
    padding_mask: bool [B, S], or None: True = the token exists.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor | None = None
    padding_mask: Tensor | None = None

    def repeat_rows(self, count: int) -> "ProjectedMemory":
        """Copy with each row repeated `count` times in succession, as beam search needs."""
        k, v, *rest = (
            None if x is None else repeat(x, "b ... -> (b count) ...", count=count) for x in self
        )
        assert k is not None and v is not None
        return ProjectedMemory(k, v, *rest)


class CrossGQAttention(AttentionLayer):
    """Cross-attention with grouped-query heads: tokens attend to a memory.

        q = q_norm(q_proj(x));  k, v = k_norm(k_proj(memory)), v_proj(memory)
        out = dropout(out_proj(attention(q, k, v)))

    Every token sees the whole memory except padding (Vaswani et al. 2017, arXiv 1706.03762, section
    3.2.3). H_q = num_heads query heads share H_k = num_kv_heads key/value heads.

    Args:
        embed_dim: width C of the tokens.
        num_heads: H_q.
        num_kv_heads: H_k, divides H_q; default H_q.
        memory_dim: width M of the memory; default C.
        head_dim: D of a head; default embed_dim // num_heads.
        v_head_dim: D_v of a value head; default D.
        options: `fastattn.modules.options.SharedOptions`, as for `GQAttention`.

    Parameters (the projections initialised as `nn.Linear` does):
        q_proj.weight: [H_q D, C].
        k_proj.weight, v_proj.weight: [H_k D, M] and [H_k D_v, M], rows head by head. A state dict
            with one fused kv_proj also loads.
        out_proj.weight: [C, H_q D_v].
        output_gate_proj.weight, q_norm.weight, k_norm.weight, sinks, score_weight, score_vector: as
            in `GQAttention`.

    Raises:
        ValueError: sizes do not divide, an argument is out of its range, or arguments exclude each
            other.

    Examples:
        >>> layer = CrossGQAttention(64, num_heads=4, memory_dim=32)
        >>> x, memory = torch.randn(2, 5, 64), torch.randn(2, 9, 32)
        >>> y = layer(x, memory, memory_lengths=torch.tensor([9, 7]))  # [2, 5, 64]
        >>> projected = layer.project_memory(memory, torch.tensor([9, 7]))  # once for all steps
        >>> with torch.no_grad():
        ...     steps = [layer(token, projected) for token in x.split(1, dim=1)]
        >>> torch.allclose(torch.cat(steps, dim=1), y, atol=1e-5)
        True
    """

    fused_projections: ClassVar[Fused] = {"kv_proj": ("k_proj", "v_proj")}

    @shows_options(SharedOptions)
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        memory_dim: int | None = None,
        **options: "Unpack[SharedOptions]",
    ) -> None:
        chosen = complete(SharedOptions, options, type(self).__name__)
        super().__init__(embed_dim, num_heads, num_kv_heads, chosen)
        if memory_dim is not None:
            memory_dim = checks.check_count("memory_dim", memory_dim, 1)
        self.memory_dim = embed_dim if memory_dim is None else memory_dim
        factory = {name: chosen[name] for name in ("device", "dtype")}
        factory["bias"] = chosen["qkv_bias"]
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, **factory)
        self.k_proj = nn.Linear(self.memory_dim, self.num_kv_heads * self.head_dim, **factory)
        self.v_proj = nn.Linear(self.memory_dim, self.num_kv_heads * self.v_head_dim, **factory)
        self.add_output_parameters(chosen)

    def project_memory(
        self,
        memory: Tensor,
        lengths: Tensor | None = None,
        *,
        padding_mask: Tensor | None = None,
    ) -> ProjectedMemory:
        """Project a memory once for any number of calls of this layer; differentiable.

        Args:
            memory: [B, S, M].
            lengths: int32 or int64 [B]: row b's first lengths[b] vectors are real.
            padding_mask: bool [B, S], True = real.

        Raises:
            ValueError: the memory has another shape.
        """
        check_vectors("memory", memory, self.memory_dim, "S")
        k = self.split_heads(self.k_proj(memory))
        v = self.split_heads(self.v_proj(memory), self.v_head_dim)
        if self.qk_norm:
            k = self.k_norm(k)
        if not torch.is_grad_enabled():
            # As the decode kernels read them. A copy of one token has its own strides too.
            k, v = (x.clone(memory_format=torch.contiguous_format) for x in (k, v))
        return ProjectedMemory(k, v, lengths, padding_mask)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | ProjectedMemory,
        *unnamed: NoReturn,
        memory_lengths: Tensor | None = None,
        memory_padding_mask: Tensor | None = None,
        **others: NoReturn,
    ) -> Tensor:
        """Attend to a memory.

        Args:
            x: [B, T, C].
            memory: [B, S, M], or the result of `project_memory`.
            memory_lengths, memory_padding_mask: as in `project_memory`; not with a projected
                memory.
        Returns:
            [B, T, C]. Padding in the memory, NaN included, affects no output. If a row of the
            memory is all padding, its attention is 0.
        Raises:
            TypeError: x, the memory, a mask or lengths are of the wrong dtype, or no tensors.
            ValueError: a shape disagrees, or a projected memory comes with lengths or a mask.
        """
        if unnamed or others:
            refuse_others(self, unnamed, others)
        check_vectors("x", x, self.embed_dim)
        if isinstance(memory, ProjectedMemory):
            check_unprojected(memory_lengths, memory_padding_mask)
        else:
            memory = self.project_memory(memory, memory_lengths, padding_mask=memory_padding_mask)
        k, v, lengths, padding_mask = memory
        if k.shape[0] != x.shape[0]:
            raise ValueError(f"memory must have {x.shape[0]} rows to match x, got {k.shape[0]}")
        q, backend = self.project_queries(x), self.backend
        masks: dict[str, Any] = {"key_lengths": lengths, "key_padding_mask": padding_mask}
        if self.scoring == "additive":
            u = local_part(self.score_vector)
            out = additive_attention(q, k, v, u, backend=backend, **masks)
            return self.project_output(out, x)
        drop = self.dropout_options()
        scores = self.score_options()
        if not drop and padding_mask is None and _decodes(q, k, v):
            if lengths is None:
                lengths = k.new_full(k.shape[:1], k.shape[2], dtype=torch.int32)
            checks.check_input("key_lengths", lengths, "integer", "B", q, {"B": k.shape[0]})
            view = view_of_tensors(k, v, lengths.clamp(0, k.shape[2]))
            out = decode_attention(q, view, causal=False, backend=backend, **scores)
        else:
            out = attention(q, k, v, backend=backend, **drop, **masks, **scores)
        return self.project_output(out, x)

    def project_queries(self, x: Tensor) -> Tensor:
        """Queries [B, H_q, T, D] of tokens [B, T, C], normalised."""
        q = self.split_heads(self.q_proj(x))
        if self.qk_norm:
            q = self.q_norm(q)
        if self.scoring == "multiplicative":
            q = q @ local_part(self.score_weight).mT
        return q

    def repr_values(self) -> dict[str, Any]:
        return {"memory_dim": self.memory_dim, "qk_norm": self.qk_norm}


def _decodes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `decode_attention` serves the call: one new token, and strides that it can read."""
    # It has no gradients. It aligns the last query with the last key: of several queries, the first
    # could have a position before a short memory.
    if q.shape[2] != 1 or k.shape[2] == 0 or torch.is_grad_enabled():
        return False
    # A dim of one has any stride in a tensor that counts as contiguous.
    return all(
        x.is_contiguous() and x.stride(2) == x.shape[3] and x.shape[3] * x.element_size() % 16 == 0
        for x in (k, v)
    )
