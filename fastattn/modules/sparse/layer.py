"""Base of causal self-attention layers that choose key blocks."""

from typing import Any, NoReturn

from torch import Tensor

from ...rotary import RotaryTables
from ..checks import check_vectors, checked_tables, refuse_others
from ..options import SelfOptions, complete, table
from ..projection import SelfProjection

# Options of `GQAttention` that these layers take.
TAKEN = (
    "head_dim", "v_head_dim", "qkv_bias", "out_bias", "qk_norm", "output_gate", "dropout", "scale",
    "backend", "device", "dtype", "rotary", "rotary_base", "rotary_dim",
)  # fmt: skip


class SparseLayer(SelfProjection):
    """Projections of a causal layer; subclasses define `attend(x, q, k, v)`.

    Args:
        embed_dim, num_heads, num_kv_heads: as for `fastattn.GQAttention`.
        options: the options of `GQAttention` in TAKEN.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, num_kv_heads: int | None, options: dict[str, Any]
    ) -> None:
        name = type(self).__name__
        for option in options:
            if option in table(SelfOptions) and option not in TAKEN:
                raise TypeError(f"{name} does not support {option}: it selects keys by q.k alone")
        self.factory = {option: options.get(option) for option in ("device", "dtype")}
        chosen = complete(SelfOptions, options, name)
        super().__init__(embed_dim, num_heads, num_kv_heads, chosen)
        self.add_output_parameters(chosen)

    def forward(
        self, x: Tensor, *unnamed: NoReturn, positions: Tensor | None = None,
        rotary_tables: RotaryTables | None = None, **others: NoReturn,
    ) -> Tensor:  # fmt: skip
        """Attend within rows of tokens.

        Args:
            x: [B, T, C], floating.
            positions, rotary_tables: as for `fastattn.GQAttention`.

        Returns:
            [B, T, C].
        """
        if unnamed or others:
            refuse_others(self, unnamed, others)
        check_vectors("x", x, self.embed_dim)
        dim = None if self.rotary is None else self.rotary_dim
        tables = self.rotation(x, positions, checked_tables(x, positions, rotary_tables, dim))
        q, k, v = self.queries_keys_values(x, tables, None)
        return self.project_output(self.attend(x, q, k, v), x)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, H_q, T, D_v] from projected tokens."""
        raise NotImplementedError
