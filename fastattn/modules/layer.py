"""Base of attention layers: head sizes, scoring functions, norms, the output projection."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..cache.dense import KVCache
from . import checks as module_checks
from .fused_weights import SeparateProjections
from .options import OutputGate, SharedOptions, passed_as
from .options import Scoring as Scoring
from .sharded import factory_options, local_part

_SCORE_OPTIONS = passed_as(SharedOptions, "score")


class HeadNorm(nn.RMSNorm):
    """`nn.RMSNorm` over the channels of a head or a latent, in the dtype of its input.

    Under autocast the weight has another dtype. torch's own norm then warns and is slow.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., D] to the same shape and dtype."""
        weight = local_part(self.weight).to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps).to(x.dtype)


class AttentionLayer(SeparateProjections):
    """Heads, scores and output of a layer; subclasses project tokens to q, k and v, and attend.

    Args:
        embed_dim, num_heads, num_kv_heads: as for `fastattn.GQAttention`.
        options: all `SharedOptions`, from `fastattn.modules.options.complete`.

    Parameters:
        output_gate_proj.weight: [H_q, C] or [H_q D_v, C], rows head by head; with output_gate. A
            state dict whose q_proj alternates query rows and gate rows by head, as Qwen3-Next's,
            also loads.
        q_norm.weight, k_norm.weight: [D], from 1; with qk_norm.
        sinks: [H_q], from 0.
        score_weight: [H_q, D, D], from the identity; with scoring="multiplicative".
        score_vector: [H_q, D], normal with standard deviation D ** -0.5; with scoring="additive".
    """

    out_proj: nn.Linear
    qk_norm: bool
    output_gate: OutputGate | None
    scoring: Scoring
    softcap: float | None
    batch_invariant: bool
    dropout: float
    attention_dropout: float
    scale: float | None
    backend: str | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = module_checks.head_size(embed_dim, num_heads, num_kv_heads, options["head_dim"])
        v_head_dim = options["v_head_dim"]
        module_checks.check_dropouts(options["dropout"], options["attention_dropout"])
        checks.check_scale(options["scale"], head_dim)
        module_checks.check_scoring(options)
        checks.check_backend(options["backend"])
        self.embed_dim = embed_dim
        # Heads of this rank; see `fastattn.models.tensor_parallel`.
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.first_head, self.total_heads = 0, num_heads
        self.first_row = 0  # this rank's first row of the batch
        self.head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        own = ("qk_norm", "output_gate", "scoring", "dropout", "attention_dropout", "scale")
        for name in (*own, "backend", *_SCORE_OPTIONS):
            setattr(self, name, options[name])

    def add_output_parameters(self, options: Mapping[str, Any]) -> None:
        """Add the output projection, norms and learned score parameters, in this order."""
        H_q, D = self.num_heads, self.head_dim
        factory: dict[str, Any] = {"device": options["device"], "dtype": options["dtype"]}
        bias = options["out_bias"]
        self.out_proj = nn.Linear(H_q * self.v_head_dim, self.embed_dim, bias=bias, **factory)
        if self.qk_norm:
            self.q_norm, self.k_norm = (HeadNorm(D, eps=1e-6, **factory) for _ in range(2))
        self.sinks = nn.Parameter(torch.zeros(H_q, **factory)) if options["sinks"] else None
        if self.scoring == "multiplicative":
            same = torch.eye(D, **factory).expand(H_q, D, D)
            self.score_weight = nn.Parameter(same.clone())
        elif self.scoring == "additive":
            drawn = torch.randn(H_q, D, **factory)
            self.score_vector = nn.Parameter(drawn * D**-0.5)
        if self.output_gate is not None:
            rows = H_q * (self.v_head_dim if self.output_gate == "element" else 1)
            bias = options["qkv_bias"]
            self.output_gate_proj = nn.Linear(self.embed_dim, rows, bias=bias, **factory)
            self.register_load_state_dict_pre_hook(_separate_gates)  # type: ignore[no-untyped-call]

    @property
    def score_scale(self) -> float | None:
        """The factor on q.k; None = D ** -0.5."""
        return self.scale if self.scoring == "scaled_dot" else 1.0

    def score_options(self) -> dict[str, Any]:
        """Options of `attention` for the scores, without those that have its defaults."""
        options = {name: value for name in _SCORE_OPTIONS if (value := getattr(self, name))}
        if (scale := self.score_scale) is not None:
            options["scale"] = scale
        if self.sinks is not None:
            options["sinks"] = local_part(self.sinks)
        return options

    def dropout_options(self) -> dict[str, Any]:
        """Options of `attention` for dropout, if this call drops weights."""
        # A rank with a part of the heads or rows drops the weights of a single process with one
        # seed.
        # None without dropout: torch.compile would make a float dynamic.
        dropout = self.attention_dropout if self.training else 0
        if not dropout:
            return {}
        if self.num_heads != self.total_heads or self.first_row:
            first = self.first_row * self.total_heads + self.first_head
            return {"dropout": dropout, "heads": (first, self.total_heads)}
        return {"dropout": dropout}

    def split_heads(self, x: Tensor, head_dim: int | None = None) -> Tensor:
        """[B, T, H D] to [B, H, T, D]; head_dim: D, by default the queries' and keys'."""
        D = head_dim or self.head_dim
        B, T, width = x.shape
        # Not einops, which takes twice as long on the host, for every decoded token.
        return x.view(B, T, width // D, D).transpose(1, 2)

    def project_output(self, out: Tensor, x: Tensor) -> Tensor:
        """[B, H_q, T, D_v] to [B, T, C], gated by tokens x [B, T, C] if the layer has gates."""
        out = out.transpose(1, 2)
        if self.output_gate is not None:
            gates = self.output_gate_proj(x).sigmoid()
            out = out * gates.unflatten(2, (self.num_heads, -1))
        y: Tensor = self.out_proj(out.flatten(2))
        return F.dropout(y, self.dropout) if self.training and self.dropout else y

    def new_cache(
        self,
        batch_size: int,
        max_length: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> KVCache:
        """An empty cache for this layer.

        Args:
            batch_size: B.
            max_length: capacity of a row, in tokens.
            device: default: the parameters' device.
            dtype: of keys and values as attention gets them. Default: autocast's dtype under
                autocast, else the dtype of the parameters, or torch's default if none are floats.
        """
        options = factory_options(device, dtype, self.out_proj, self)
        sizes = (batch_size, self.num_kv_heads, max_length, self.head_dim)
        return KVCache(*sizes, value_dim=self.v_head_dim, **options)

    def extra_repr(self) -> str:
        sizes = ("embed_dim", "num_heads", "num_kv_heads", "head_dim")
        return shown({
            **{name: getattr(self, name) for name in sizes},
            "v_head_dim": None if self.v_head_dim == self.head_dim else self.v_head_dim,
            **self.repr_values(),
            "scoring": None if self.scoring == "scaled_dot" else repr(self.scoring),
            **{name: getattr(self, name) for name in _SCORE_OPTIONS},
            "sinks": self.sinks is not None,
            "output_gate": self.output_gate and repr(self.output_gate),
            "dropout": self.dropout,
            "attention_dropout": self.attention_dropout,
            "scale": self.scale,
            "backend": self.backend and repr(self.backend),
        })  # fmt: skip

    def repr_values(self) -> dict[str, Any]:
        """Further constructor arguments; shown unless None, 0 or False."""
        return {}


def shown(options: Mapping[str, Any]) -> str:
    """Arguments of a constructor, but for those that are None, 0 or False."""
    return ", ".join(f"{name}={value}" for name, value in options.items() if value)


def _separate_gates(layer: Any, tensors: MutableMapping[str, Any], prefix: str, *_: object) -> None:
    """Split a q_proj that alternates rows of queries and gates."""
    q, gate, D = layer.q_proj.out_features, layer.output_gate_proj.out_features, layer.head_dim
    for kind in ("weight", "bias"):
        rows = tensors.get(f"{prefix}q_proj.{kind}")
        if rows is not None and rows.shape[0] == q + gate:
            heads = rows.unflatten(0, (layer.total_heads, -1))
            tensors[f"{prefix}q_proj.{kind}"] = heads[:, :D].flatten(0, 1)
            tensors[f"{prefix}output_gate_proj.{kind}"] = heads[:, D:].flatten(0, 1)
