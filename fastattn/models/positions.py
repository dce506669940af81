"""Position embeddings, and relative position terms of the scores.

With x_i the token at position i, q_i its query and k_j a key:

    learned         x_i + P_i                        P trained, one row a position
    sinusoidal      x_i + p_i                        p fixed, Vaswani et al. 2017 (arXiv 1706.03762)
    rotary          (W^i q_i) . (W^j k_j)            W a rotation: `fastattn.rotary`
    ALiBi           q_i . k_j - slope |i - j|        `fastattn.alibi_slopes`
    scalar          q_i . k_j + r_{i-j}              `RelativeScalar`, as T5 but without buckets
    content         q_i . k_j + q_i . R_{i-j}        `RelativeContent`, Shaw et al. 2018
    Transformer-XL  (q_i + u) . k_j + (q_i + v) . R_{i-j}
                                                     `RelativeTransformerXL`, Dai et al. 2019

The first two are modules of models, the last three are `relative` of `fastattn.GQAttention`,
computed inside the kernels without a [T, T, D] tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .. import checks
from ..modules.relative import RelativeTerms
from ..modules.sharded import factory_options, local_part, plain_weight
from .fields import check_type
from .model_config import Table

# Standard deviation of tables, u and v, as GPT-2's embeddings.
_INIT_STD = 0.02


def sinusoids(positions: Tensor, width: int, *, base: float = 10000.0) -> Tensor:
    """Compute sin(w_c t), cos(w_c t) in turn, w_c = base^(-2 c / width): t [...] to [..., width].

    Vaswani et al. 2017, section 3.5. p_t . p_{t+k} = sum_c cos(w_c k) depends on the distance k
    alone.

    Args:
        positions: numbers of any dtype and shape.
        width: even.

    Raises:
        ValueError: width is odd, or not positive.
    """
    width = checks.check_count("width", width, 2)
    if width % 2:
        raise ValueError(f"width must be even, for a sine and a cosine each, got {width}")
    pairs = torch.arange(width // 2, device=positions.device, dtype=torch.float64)
    # In fp64: an fp32 angle is 1e-4 off after some thousand positions.
    angles = positions[..., None].double() * base ** (-2 * pairs / width)
    waves = [angles.sin(), angles.cos()]
    return rearrange(waves, "wave ... pairs -> ... (pairs wave)").float()


class LearnedPositions(nn.Embedding):
    """Trained vector per position.

    Args:
        length: number of positions.
        width: C.
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__(length, width)

    def at(self, first: int | Tensor, count: int, device: torch.device) -> Tensor:
        """Get `count` vectors from position `first`: [count, C], or [B, count, C] for first [B].

        Tensor positions past the last one, which are padding, are clamped.
        """
        if isinstance(first, int):
            return local_part(self.weight, summed=False)[first : first + count]
        index = first[:, None] + torch.arange(count, device=device)
        index = index.clamp(max=self.num_embeddings - 1)
        return F.embedding(index, local_part(self.weight, summed=False))


class SinusoidalPositions(nn.Module):
    """Fixed `sinusoids` of width C, for any position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def at(self, first: int | Tensor, count: int, device: torch.device) -> Tensor:
        """Get `count` vectors from position `first`: [count, C], or [B, count, C] for first [B]."""
        begin = first[:, None] if isinstance(first, Tensor) else first
        return sinusoids(begin + torch.arange(count, device=device), self.width)


class DistanceVectors(nn.Module):
    """Vectors of the distances from -R to R: [H, 2 R + 1, D], row R + d for distance d.

    Args:
        num_heads: H: query heads or K/V heads, or 1 = shared by all.
        head_dim: D.
        max_distance: R, at least 1.
        table: "trained" vectors; or "sinusoidal": W p_d, a trained projection of fixed sinusoids as
            in Transformer-XL.

    Parameters:
        vectors: [H, 2 R + 1, D], normal with standard deviation 0.02; trained.
        proj.weight: [H D, width]; sinusoidal, with the least even width of at least H D.
    """

    def __init__(
        self, num_heads: int, head_dim: int, max_distance: int, table: Table = "trained"
    ) -> None:
        super().__init__()
        max_distance = checks.check_count("max_distance", max_distance, 1)
        check_type("table", table, Table)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.max_distance = max_distance
        if table == "trained":
            drawn = _INIT_STD * torch.randn(num_heads, 2 * max_distance + 1, head_dim)
            self.vectors = nn.Parameter(drawn)
            self.proj = None
        else:
            rows = num_heads * head_dim
            self.proj = nn.Linear(rows + rows % 2, rows, bias=False)

    def forward(self) -> Tensor:
        """[H, 2 R + 1, D]."""
        if self.proj is None:
            return local_part(self.vectors)
        weight, R = plain_weight(self.proj), self.max_distance
        options = factory_options(None, None, self.proj)
        distances = torch.arange(-R, R + 1, device=options["device"])
        waves = sinusoids(distances, self.proj.in_features).to(options["dtype"])
        rows = self.proj(waves) if weight is None else F.linear(waves, local_part(weight))
        return rearrange(rows, "r (h d) -> h r d", d=self.head_dim)


class _Relative(nn.Module):
    """Base of relative schemes: the reach R, and vectors added to the values (Shaw)."""

    has_keys = False

    def __init__(self, max_distance: int, value_dim: int | None, table: Table) -> None:
        super().__init__()
        max_distance = checks.check_count("max_distance", max_distance, 1)
        self.max_distance = max_distance
        self.values = (
            None if value_dim is None else DistanceVectors(1, value_dim, max_distance, table)
        )

    @property
    def has_values(self) -> bool:
        return self.values is not None

    def _values(self) -> Tensor | None:
        return None if self.values is None else self.values()

    def extra_repr(self) -> str:
        return f"max_distance={self.max_distance}"


class RelativeScalar(_Relative):
    """score_ij = scale q_i . k_j + r_{i-j}, a trained number per head and distance.

    T5's bias (Raffel et al. 2020, arXiv 1910.10683) with a bucket for each distance.

    Args:
        num_heads: H_q.
        max_distance: R; distances beyond it are taken as R.
        value_dim: D_v, to add vectors R^V_{i-j} to the values too; None = none.
        table: of those vectors; see `DistanceVectors`.

    Parameters:
        bias: [H_q, 2 R + 1], from 0.
    """

    def __init__(
        self,
        num_heads: int,
        max_distance: int,
        *,
        value_dim: int | None = None,
        table: Table = "trained",
    ) -> None:
        super().__init__(max_distance, value_dim, table)
        self.bias = nn.Parameter(torch.zeros(num_heads, 2 * max_distance + 1))

    def forward(self, q: Tensor) -> RelativeTerms:
        """Compute the terms for queries [B, H_q, T, D]."""
        return RelativeTerms(q, bias=local_part(self.bias), values=self._values())


class RelativeContent(_Relative):
    """score_ij = scale q_i . (k_j + R_{i-j}), and on the values sum_j a_ij (v_j + R^V_{i-j}).

    Shaw et al. 2018, arXiv 1803.02155, equations 3 and 4; they share the vectors among the heads.

    Args:
        head_dim: D.
        max_distance: R; distances beyond it are taken as R.
        num_heads: 1 = all heads share the vectors; else H_q or H_k.
        value_dim: D_v, to add vectors to the values too; None = none.
        table: how the vectors are made; see `DistanceVectors`.
    """

    has_keys = True

    def __init__(
        self,
        head_dim: int,
        max_distance: int,
        *,
        num_heads: int = 1,
        value_dim: int | None = None,
        table: Table = "trained",
    ) -> None:
        super().__init__(max_distance, value_dim, table)
        self.keys = DistanceVectors(num_heads, head_dim, max_distance, table)

    def forward(self, q: Tensor) -> RelativeTerms:
        """Compute the terms for queries [B, H_q, T, D]."""
        return RelativeTerms(q, keys=self.keys(), values=self._values())


class RelativeTransformerXL(_Relative):
    """score_ij = scale (q_i . k_j + q_i . R_{i-j} + u . k_j + v . R_{i-j}).

    The terms (a) to (d) of Transformer-XL (Dai et al. 2019, arXiv 1901.02860, section 3.3): content
    to content, content to distance, and the global biases u for contents and v for distances. In
    the paper R = W p_d, projected sinusoids: table="sinusoidal".

    Args:
        num_heads: H_q.
        head_dim: D.
        max_distance: R; distances beyond it are taken as R.
        value_dim: D_v, to add vectors to the values too; None = none.
        table: how the vectors are made; see `DistanceVectors`.

    Parameters:
        u, v: [H_q, D], normal with standard deviation 0.02.
    """

    has_keys = True

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        max_distance: int,
        *,
        value_dim: int | None = None,
        table: Table = "sinusoidal",
    ) -> None:
        super().__init__(max_distance, value_dim, table)
        self.keys = DistanceVectors(num_heads, head_dim, max_distance, table)
        self.u, self.v = (
            nn.Parameter(_INIT_STD * torch.randn(num_heads, head_dim)) for _ in range(2)
        )

    def forward(self, q: Tensor) -> RelativeTerms:
        """Compute the terms for queries [B, H_q, T, D]."""
        u, v = (local_part(x)[:, None].to(q.dtype) for x in (self.u, self.v))
        return RelativeTerms(q + u, keys=self.keys(), key_query=q + v, values=self._values())
