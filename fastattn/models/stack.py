"""Token embedding, positions, layers and final norm, shared by every model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import tracing
from ..cache.dense import KVCache
from ..checks import check_count, check_input, kind, type_name
from ..functional.sharded import is_dtensor
from ..modules.checks import check_layer_cache
from ..modules.cross_attention import ProjectedMemory
from ..modules.self_attention import LayerCache
from ..modules.sharded import factory_options, plain_weight
from ..rotary import RotaryPositions
from .layers import make_block, make_norm
from .model_config import TransformerConfig
from .positions import LearnedPositions, SinusoidalPositions


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Run models in evaluation mode, without dropout; restore their modules' modes afterwards.

    Threads may share a model: its mode is restored after the last of them.
    """
    with _one_at_a_time:
        modules = [x for y in models if y.training or y in _users for x in y.modules()]
        changed = [x for x in modules if x.training or x in _users]
        for module in changed:
            _users[module] = _users.get(module, 0) + 1
            module.training = False
    try:
        yield
    finally:
        with _one_at_a_time:
            for module in changed:
                _users[module] -= 1
                if not _users[module]:
                    del _users[module]
                    module.training = True


_one_at_a_time = Lock()
# Times that a module in training mode is being evaluated.
_users: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model on the meta device, of any size."""
    with torch.device("meta"), _Uninitialised():
        return build()


class _Uninitialised(TorchFunctionMode):
    """Skips random initialisation, whose first use on the meta device takes seconds."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.normal_, Tensor.uniform_):
            return args[0]
        return func(*args, **(kwargs or {}))


# GPT-2's initialisation: every weight matrix is normal with this standard deviation.
_INIT_STD = 0.02
# Layers that write to the residual stream.
_WRITERS = ("out_proj.weight", "o_proj.weight", "down_proj.weight")
# Parameters initialised by their own modules.
_KEPT = ("score_weight", "score_vector")


class TokenStack(nn.Module):
    """Token embedding, positions, transformer layers, and the final norm.

    length: longest sequence, in tokens. cross: layers have cross-attention.

    Parameters:
        token_embedding.weight: [V, C].
        position_embedding.weight: [length, C], with learned positions.
        embedding_norm.weight: [C], if the configuration has it.
        blocks: the layers; see `fastattn.models.layers.Block`.
        norm.weight: [C]; none in post-LN models, whose layers end with a norm.
    """

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        length: int,
        *,
        causal: bool = True,
        cross: bool = False,
        num_layers: int | None = None,
    ) -> None:
        super().__init__()
        self.config, self.length = config, length
        C = config.embed_dim
        count = config.num_layers if num_layers is None else num_layers
        self.token_embedding = nn.Embedding(vocab_size, C)
        self.position_embedding: LearnedPositions | SinusoidalPositions | None = None
        if config.positions == "learned":
            self.position_embedding = LearnedPositions(length, C)
        elif config.positions == "sinusoidal":
            self.position_embedding = SinusoidalPositions(C)
        # Shared by all layers.
        self.rotary_positions = (
            RotaryPositions(config.rotary_dim, base=config.rotary_base)
            if config.positions == "rotary"
            else None
        )
        self.embedding_norm = self._make_norm() if config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            make_block(config, i, causal=causal, cross=cross) for i in range(count)
        )
        self.norm = None if config.block == "post" else self._make_norm()

    def _make_norm(self) -> nn.Module:
        config = self.config
        return make_norm(config.norm, config.embed_dim, eps=config.norm_eps, bias=config.bias)

    def hidden_states(
        self,
        tokens: Tensor,
        *,
        key_lengths: Tensor | None = None,
        cache: Sequence[LayerCache] | None = None,
        memory: Sequence[ProjectedMemory] | None = None,
        documents: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Map tokens [B, T] to [B, T, C]; with last_only each row's last real token, [B, 1, C]."""
        x = self.dropout(self._embed(tokens, cache))
        tables: RotaryPositions | tuple[Tensor, Tensor] | None = self.rotary_positions
        if isinstance(tables, RotaryPositions) and cache is None:
            # Same rows in every layer.
            T = tokens.shape[1]
            tables = tables.at(0, T, T, x.device)
        for i, block in enumerate(self.blocks):
            x = block(
                x,
                key_lengths=key_lengths,
                rotary_tables=tables,
                cache=None if cache is None else cache[i],
                memory=None if memory is None else memory[i],
                documents=documents,
            )
        if last_only:
            x = _last_tokens(x, key_lengths)
        return x if self.norm is None else self.norm(x)

    def _embed(self, tokens: Tensor, cache: Sequence[LayerCache] | None) -> Tensor:
        """Add token and position embeddings, normalised if configured: [B, T, C]."""
        x = self.token_embedding(tokens)
        positions = self.position_embedding
        if positions is not None:
            if isinstance(positions, SinusoidalPositions):
                # Section 3.4 of the paper, as sinusoids have amplitude 1.
                x = x * math.sqrt(self.config.embed_dim)
            first: int | Tensor = 0
            if cache is not None:  # one number, or one a row
                n = cache[0].uniform_length
                first = cache[0].lengths if n is None else n
            at = positions.at(first, tokens.shape[1], x.device)
            x = x + at.to(x.dtype)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def initialise_weights(self) -> None:
        """Initialise weights as GPT-2: see `GPT`."""
        parts = 2 if self.blocks[0].cross is None else 3
        residual_std = _INIT_STD / math.sqrt(parts * len(self.blocks))
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2 and not name.endswith(_KEPT):
                std = residual_std if name.endswith(_WRITERS) else _INIT_STD
                nn.init.normal_(parameter, std=std)


class DecoderStack(TokenStack):
    """A causal `TokenStack` with caches."""

    # The configuration's field with the longest sequence.
    length_field: ClassVar[str]

    def new_cache(
        self,
        batch_size: int,
        max_length: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> list[KVCache]:
        """Make empty KV caches, one per layer.

        Args:
            batch_size: rows B.
            max_length: tokens per row; default and, with learned positions, at most context_length
                (target_length in an encoder-decoder).
            device, dtype: of the stored keys and values; default the parameters'.

        Raises:
            ValueError: max_length exceeds the learned positions.
        """
        max_length = self.length if max_length is None else check_count("max_length", max_length, 1)
        if isinstance(self.position_embedding, LearnedPositions) and max_length > self.length:
            raise ValueError(
                f"max_length must be at most {self.length_field}={self.length} with learned "
                f"positions, got {max_length}"
            )
        caches = []
        for layer in (cast(Any, block).attention for block in self.blocks):
            output = getattr(layer, "out_proj", None) or layer.o_proj
            options = factory_options(device, dtype, output, layer, self)
            caches.append(layer.new_cache(batch_size, max_length, **options))
        return caches


def check_tokens(name: str, tokens: Tensor, length_name: str, length: int, count: int) -> None:
    """Check that tokens are integers [B, T] in [0, count), and not too many."""
    check_input(name, tokens, "integer", "B T", tokens, {})
    _check_ids(name, tokens, count)
    if tokens.shape[1] > length:
        raise ValueError(
            f"{name} must be at most {length_name}={length} long, got T={tokens.shape[1]}"
        )


def check_targets(targets: Tensor | None, name: str, tokens: Tensor) -> None:
    """Check that targets are int64, with the shape of the tokens, named `name`."""
    if targets is None:
        return
    if kind(targets) != torch.int64:
        raise TypeError(f"targets must be int64, got {kind(targets)}")
    if targets.shape != tokens.shape:
        raise ValueError(
            f"targets must have {name}' shape {tuple(tokens.shape)}, got {tuple(targets.shape)}"
        )


def _check_ids(name: str, ids: Tensor, count: int, *others: int) -> None:
    """Check, where the host knows ids, that they are in [0, count) or one of the others."""
    if not tracing.host_knows(ids):
        return
    wrong = (ids < 0) | (ids >= count)
    for other in others:
        wrong &= ids != other
    if wrong.any():
        allowed = " or ".join([f"in [0, {count})", *map(str, others)])
        raise ValueError(f"{name} must be {allowed}, got {int(ids[wrong][0])}")


def check_cache(
    name: str, tokens: Tensor, cache: Sequence[LayerCache] | None, num_layers: int
) -> None:
    """Check that there is a cache per layer, with room for the tokens if known."""
    if cache is None:
        return
    expected = f"cache must hold one KVCache per layer ({num_layers})"
    if not isinstance(cache, Sequence):
        raise TypeError(f"{expected}, got {type_name(cache)}")
    if len(cache) != num_layers:
        raise ValueError(f"{expected}, got {len(cache)}")
    for layer, one in enumerate(cache):
        check_layer_cache(f"cache[{layer}]", one)
    n = cache[0].uniform_length
    if n is not None and n + tokens.shape[1] > cache[0].max_length:
        raise ValueError(
            f"{name} must fit the cache: it holds {n} of {cache[0].max_length} tokens per row, "
            f"got T={tokens.shape[1]} more"
        )


def token_loss(
    logits: Tensor, targets: Tensor, smoothing: float = 0.0, *, count: int | None = None
) -> Tensor:
    """Compute the mean cross-entropy in nats of logits [B, T, V], targets [B, T], -100 excluded.

    logits: also from `token_logits`. count: divisor, if these targets are a part of a batch; the
    result is their share of the mean.
    """
    logits, targets = logits.flatten(0, 1), targets.flatten()
    if is_dtensor(logits):
        from ..modules.vocabulary import sharded_cross_entropy

        return sharded_cross_entropy(cast(Any, logits), targets, smoothing, count=count)
    if count is None:
        return F.cross_entropy(logits, targets, label_smoothing=smoothing)
    return F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="sum") / count


def token_logits(
    x: Tensor, head: nn.Module | None, embedding: nn.Module, bias: Tensor | None = None
) -> Tensor:
    """Compute logits [B, T, V] of x [B, T, C]; a DTensor sharded by V if the weight is.

    head: a linear layer, or an adapter of one; None = tied to the embedding.
    """
    weight = cast(Any, embedding).weight if head is None else plain_weight(head)
    if weight is None:
        logits: Tensor = cast(Any, head)(x)
        return logits if bias is None else logits + bias
    if not is_dtensor(weight):
        return F.linear(x, weight, bias)
    from ..modules.vocabulary import sharded_linear

    return sharded_linear(x, cast(Any, weight), cast(Any, bias))


def scored(
    model: nn.Module, logits: Tensor, targets: Tensor | None, count: int | None
) -> tuple[Tensor, Tensor | None]:
    """Make a model's (logits, loss) from `token_logits`; without targets, gathered, with loss None.

    Always a pair, as nanoGPT's.
    """
    if targets is None:
        return whole_logits(logits), None
    _check_ids("targets", targets, logits.shape[-1], -100)
    smoothing = cast(Any, model.config).label_smoothing if model.training else 0.0
    return logits, token_loss(logits, targets, smoothing, count=count)


def whole_logits(logits: Tensor) -> Tensor:
    """Gather sharded logits on every rank."""
    return cast(Any, logits).full_tensor() if is_dtensor(logits) else logits


def _last_tokens(x: Tensor, key_lengths: Tensor | None) -> Tensor:
    """Select each row's last real token: [B, T, C] -> [B, 1, C]."""
    if key_lengths is None:
        return x[:, -1:]
    index = (key_lengths.long() - 1).clamp(0, x.shape[1] - 1)
    return x[torch.arange(x.shape[0], device=x.device), index].unsqueeze(1)
