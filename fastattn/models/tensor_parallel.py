"""Tensor parallelism: heads, hidden units and vocabulary sharded over ranks.

    mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, tp_plan(model))

Every parameter becomes a DTensor, sharded or replicated, so FSDP2 and torch.distributed.checkpoint
work as usual. Each rank computes its own heads and hidden units with plain tensors. The only
communication is the sum of outputs after out_proj and down_proj, and the sum of gradients before
the other projections (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from ..modules.cross_attention import CrossGQAttention
from ..modules.latent_attention import MultiheadLatentAttention
from ..modules.layer import AttentionLayer
from ..modules.self_attention import GQAttention, place_slopes
from ..modules.sharded import local_part
from ..modules.vocabulary import enter, first_row, leave
from .encoder import MaskedLM, Tagger
from .gpt import GPT
from .layers import MLP
from .positions import DistanceVectors, LearnedPositions, RelativeScalar, RelativeTransformerXL
from .seq2seq import Seq2Seq
from .stack import TokenStack

_MODELS = (GPT, TokenStack, Tagger, MaskedLM, Seq2Seq)
# Dim of the query heads in a layer's parameters.
_OF_HEADS = {"sinks": 0, "relative_bias": 1, "score_weight": 0, "score_vector": 0}


def tp_plan(module: nn.Module) -> ParallelStyle | dict[str, ParallelStyle]:
    """Make a plan for `parallelize_module`, on a mesh of one dimension.

    Args:
        module: a `GQAttention`, `CausalGQAttention`, `CrossGQAttention` or `MLP`; or a `GPT`,
            `Encoder`, `Tagger`, `MaskedLM` or `Seq2Seq`, with token embedding and logits sharded by
            vocabulary.

    Returns:
        The style of a layer, or the styles of a model's parts by name.

    Raises:
        TypeError: it is another module.

    `parallelize_module` raises ValueError, before any change, if num_heads, hidden_dim or the heads
    of relative vectors (unless shared) are not divisible by the number of ranks, or num_kv_heads is
    neither a multiple nor a divisor of it. With fewer K/V heads than ranks, K/V heads are computed
    redundantly.
    """
    sizes = _Sizes.of(module)
    if isinstance(module, AttentionLayer):
        return HeadParallel(sizes)
    if isinstance(module, MLP):
        return HiddenParallel(sizes)
    if not isinstance(module, _MODELS):
        raise TypeError(
            "module must be an attention layer, an MLP or a model of fastattn, "
            f"got {type(module).__name__}"
        )
    plan: dict[str, ParallelStyle] = {}
    if getattr(module, "head_bias", None) is not None:
        plan[""] = _OfVocabulary(sizes)
    done: list[str] = []
    for name, part in module.named_modules():  # each once, under its first name
        if isinstance(part, MultiheadLatentAttention):
            raise TypeError(f"{name} is a MultiheadLatentAttention: not supported")
        style = _style(name, part, isinstance(module, Tagger), sizes)
        if style is not None and not any(name.startswith(f"{above}.") for above in done):
            plan[name] = style
            done.append(name)
    return plan


def _style(name: str, part: nn.Module, tagger: bool, sizes: _Sizes) -> ParallelStyle | None:
    """Return the style of a model's part, or None for containers."""
    if isinstance(part, AttentionLayer):
        return HeadParallel(sizes)
    if isinstance(part, MLP):
        return HiddenParallel(sizes)
    if isinstance(part, LearnedPositions):
        return _Whole(sizes, called=False)
    if isinstance(part, nn.Embedding):
        return _TokenEmbedding(sizes)
    if isinstance(part, nn.Linear):
        whole = tagger or name.endswith(".residual")
        return _Whole(sizes) if whole else _OfVocabulary(sizes)
    return _Whole(sizes) if isinstance(part, (nn.LayerNorm, nn.RMSNorm)) else None


class _Sizes(NamedTuple):
    """Sizes that must be divisible by the number of ranks, by name."""

    counts: frozenset[tuple[str, int]]
    kv_heads: frozenset[int]

    @staticmethod
    def of(module: nn.Module) -> _Sizes:
        layers = [x for x in module.modules() if isinstance(x, AttentionLayer)]
        hidden = [x.down_proj.in_features for x in module.modules() if isinstance(x, MLP)]
        counts = {("num_heads", x.num_heads) for x in layers}
        counts |= {("hidden_dim", count) for count in hidden}
        tables = [x for x in module.modules() if isinstance(x, DistanceVectors)]
        counts |= {
            ("num_heads of relative vectors", x.num_heads) for x in tables if x.num_heads > 1
        }
        return _Sizes(frozenset(counts), frozenset(x.num_kv_heads for x in layers))

    def check(self, mesh: DeviceMesh) -> None:
        """Raise ValueError if the ranks' parts would be unequal."""
        if mesh.ndim != 1:
            raise ValueError(
                f"device_mesh must have one dimension, got {mesh.ndim}: take a slice of it, such "
                'as mesh["tp"]'
            )
        ranks = mesh.size()
        for name, count in sorted(self.counts):
            if count % ranks:
                raise ValueError(
                    f"{name} must be divisible by the {ranks} ranks of tensor parallelism, "
                    f"got {count}"
                )
        for count in self.kv_heads:
            if count % ranks and ranks % count:
                raise ValueError(
                    f"num_kv_heads must divide the {ranks} ranks of tensor parallelism, or be "
                    f"divisible by them, got {count}"
                )


class _Style(ParallelStyle):
    """A style that checks the sizes of the whole module before any change."""

    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        self.sizes = sizes

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.sizes.check(device_mesh)
        self.apply_to(module, device_mesh)
        return module

    def apply_to(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Change the module."""
        raise NotImplementedError

    def shard(self, module: nn.Module, mesh: DeviceMesh, placement: Placement, *names: str) -> None:
        """Make parameters of a module DTensors; all direct ones, if none is named."""
        for name in names or [name for name, _ in module.named_parameters(recurse=False)]:
            x = getattr(module, name)
            if isinstance(x, DTensor):
                raise ValueError(
                    f"{name} of {type(module).__name__} is sharded already: parallelize a module "
                    "once, and before fully_shard"
                )
            if x is not None:
                source = getattr(self, "src_data_rank", 0)
                sharded = distribute_tensor(x, mesh, [placement], src_data_rank=source)
                setattr(module, name, nn.Parameter(sharded, requires_grad=x.requires_grad))

    def column(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Shard the rows of a linear layer's weight (its outputs)."""
        self.shard(module, mesh, Shard(0))
        module.__class__ = _Column

    def row(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Shard the columns of a linear layer's weight (its inputs)."""
        self.shard(module, mesh, Shard(1), "weight")
        self.shard(module, mesh, Replicate(), "bias")
        module.__class__ = _RowParallelLinear
        cast(Any, module).mesh = mesh


class HeadParallel(_Style):
    """Style that shards an attention layer by heads; from `tp_plan`."""

    def apply_to(self, module: nn.Module, mesh: DeviceMesh) -> None:
        layer = cast(Any, module)
        ranks, rank = mesh.size(), mesh.get_local_rank()
        H_k = layer.num_kv_heads
        self.column(layer.q_proj, mesh)
        for proj in (layer.k_proj, layer.v_proj):
            if H_k % ranks == 0:
                self.column(proj, mesh)
            else:
                self.shared(proj, mesh, rank * H_k // ranks, H_k)
        if layer.output_gate is not None:
            self.column(layer.output_gate_proj, mesh)
        self.row(layer.out_proj, mesh)
        for name, dim in _OF_HEADS.items():
            if hasattr(layer, name):
                self.shard(layer, mesh, Shard(dim), name)
        if layer.qk_norm:
            self.shard(layer.q_norm, mesh, Replicate())
            self.shard(layer.k_norm, mesh, Replicate())
        if getattr(layer, "relative", None) is not None:
            self.relative(layer, mesh)
        layer.num_heads //= ranks
        layer.num_kv_heads = max(H_k // ranks, 1)
        layer.first_head = rank * layer.num_heads
        if isinstance(layer, GQAttention):
            place_slopes(layer)
        elif isinstance(layer, CrossGQAttention):
            _enter_memory(layer, mesh)
        module.register_forward_pre_hook(partial(_enter, mesh))

    def shared(self, proj: nn.Module, mesh: DeviceMesh, head: int, heads: int) -> None:
        """Replicate a projection; this rank computes one of its heads."""
        self.shard(proj, mesh, Replicate())
        size = cast(Any, proj).out_features // heads
        proj.__class__ = _Column
        cast(Any, proj).rows = slice(head * size, (head + 1) * size)

    def relative(self, layer: AttentionLayer, mesh: DeviceMesh) -> None:
        """Shard a layer's relative tables by heads, or replicate shared ones."""
        scheme: Any = cast(Any, layer).relative
        if isinstance(scheme, RelativeScalar):
            self.shard(scheme, mesh, Shard(0), "bias")
        elif isinstance(scheme, RelativeTransformerXL):
            self.shard(scheme, mesh, Shard(0), "u", "v")
        for table in scheme.modules():
            if isinstance(table, DistanceVectors):
                placement = Shard(0) if table.num_heads > 1 else Replicate()
                for owner in (table, *([table.proj] if table.proj is not None else [])):
                    self.shard(owner, mesh, placement)


class HiddenParallel(_Style):
    """Style that shards an `MLP` by hidden units; from `tp_plan`."""

    def apply_to(self, module: nn.Module, mesh: DeviceMesh) -> None:
        mlp = cast(MLP, module)
        for proj in (mlp.gate_proj, mlp.up_proj):
            if proj is not None:
                self.column(proj, mesh)
        self.row(mlp.down_proj, mesh)
        mlp.register_forward_pre_hook(partial(_enter, mesh))


class _Whole(_Style):
    """Style of replicated parameters.

    called: used by the module's own forward; otherwise the reader handles DTensors.
    """

    def __init__(self, sizes: _Sizes, *, called: bool = True) -> None:
        super().__init__(sizes)
        self.called = called

    def apply_to(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.shard(module, mesh, Replicate())
        if self.called:
            module.register_forward_pre_hook(partial(_as_whole, mesh))
            module.register_forward_hook(_as_local)


class _OfVocabulary(_Style):
    """Style of parameters sharded by vocabulary, for `stack.token_logits`."""

    def apply_to(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.shard(module, mesh, Shard(0))


class _TokenEmbedding(_OfVocabulary):
    """Style of a token embedding sharded by vocabulary."""

    def apply_to(self, module: nn.Module, mesh: DeviceMesh) -> None:
        super().apply_to(module, mesh)
        module.__class__ = _Embedding
        cast(Any, module).mesh = mesh


class _Column(nn.Linear):
    """Column-parallel linear layer: this rank's rows, or `rows` of a replicated weight."""

    rows: slice | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = local_part(self.weight), local_part(self.bias)
        if self.rows is not None:
            weight, bias = weight[self.rows], None if bias is None else bias[self.rows]
        return F.linear(x, weight, bias)


class _RowParallelLinear(nn.Linear):
    """Row-parallel linear layer: this rank's columns of the weight, and a sum over the ranks."""

    mesh: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        y = leave(F.linear(x, local_part(self.weight)), self.mesh)
        return y if self.bias is None else y + local_part(self.bias, summed=False).to(y.dtype)


class _Embedding(nn.Embedding):
    """Embedding sharded by rows; torch's own style materialises the gradient of all rows."""

    mesh: DeviceMesh

    def forward(self, tokens: Tensor) -> Tensor:
        weight = local_part(self.weight)
        # As F.embedding does on a device: no rank has such a row.
        known = (tokens >= 0) & (tokens < self.num_embeddings)
        torch._assert_async(known.all(), f"tokens must be in [0, {self.num_embeddings})")
        index = tokens - first_row(self.num_embeddings, self.mesh)
        here = (index >= 0) & (index < weight.shape[0])
        if not weight.shape[0]:
            return leave(weight.new_zeros(*tokens.shape, weight.shape[1]), self.mesh)
        x = F.embedding(torch.where(here, index, 0), weight)
        return leave(torch.where(here[..., None], x, 0.0), self.mesh)


def _enter(mesh: DeviceMesh, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sum the gradient of a layer's input over the ranks."""
    return (enter(args[0], mesh), *args[1:])


def _enter_memory(layer: CrossGQAttention, mesh: DeviceMesh) -> None:
    """Sum the gradient of a memory over the ranks, at any projection."""
    project = layer.project_memory

    def project_memory(memory: Tensor, *args: Any, **kwargs: Any) -> Any:
        return project(enter(memory, mesh), *args, **kwargs)

    setattr(layer, "project_memory", project_memory)  # noqa: B010


def _as_whole(mesh: DeviceMesh, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (DTensor.from_local(args[0], mesh, [Replicate()], run_check=False), *args[1:])


def _as_local(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
    return output.to_local()
