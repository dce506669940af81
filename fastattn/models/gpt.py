"""Decoder-only language model: nanoGPT by default, GPT-2 and Llama as presets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ..cache.latent import LatentQuantize, PagedLatentCache
from ..cache.paged import PagedKVCache
from ..checks import check_count, check_is, check_tensor
from ..modules.self_attention import LayerCache
from ..modules.sharded import factory_options
from . import stack
from .model_config import TextConfig
from .sampling import Sampling, check_finite
from .stack import DecoderStack

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class GPTConfig(TextConfig):
    """The shape of a `GPT`.

    Args:
        vocab_size: number of distinct tokens V.
        context_length: longest sequence the model reads, in tokens.
        head_bias: add a trained bias [vocab_size] to the logits, initially 0; `GPT.head_bias`.

    Other fields: see `TransformerConfig`.

    Presets: "gpt2-small" (Radford et al. 2019, 124 million parameters) and "tinyllama" (Zhang et
    al. 2024, arXiv 2401.02385: Llama's layers, 1.1 billion parameters).

    Raises:
        ValueError: a field is of a wrong type or out of range, or fields disagree.
    """

    head_bias: bool = field(default=False, kw_only=True)

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "gpt2-small": {
            "vocab_size": 50257,
            "context_length": 1024,
            "num_layers": 12,
            "num_heads": 12,
            "embed_dim": 768,
            "bias": True,
            "activation": "gelu_tanh",
            "dropout": 0.1,
            "attention_dropout": 0.1,
        },
        "tinyllama": {
            "vocab_size": 32000,
            "context_length": 2048,
            "num_layers": 22,
            "num_heads": 32,
            "num_kv_heads": 4,
            "embed_dim": 2048,
            "hidden_dim": 5632,
            "positions": "rotary",
            "norm": "rmsnorm",
            "activation": "swiglu",
            "tie_weights": False,
        },
    }


class GPT(DecoderStack):
    """Decoder-only transformer; by default pre-LN layers with GELU.

    Initialised as GPT-2: normal with standard deviation 0.02, biases 0, and layers that write to
    the residual stream scaled by 1 / sqrt(2 * num_layers), so that its variance does not grow with
    depth.
    """

    config: GPTConfig
    length_field = "context_length"

    def __init__(self, config: GPTConfig) -> None:
        check_is("config", config, GPTConfig)
        super().__init__(config, config.vocab_size, config.context_length)
        untied = not config.tie_weights
        self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=False) if untied else None
        bias = torch.zeros(config.vocab_size) if config.head_bias else None
        self.head_bias = None if bias is None else nn.Parameter(bias)
        self.initialise_weights()

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        cache: Sequence[LayerCache] | None = None,
        key_lengths: Tensor | None = None,
        documents: Tensor | None = None,
        last_only: bool = False,
        rows: Tensor | None = None,
        target_count: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the logits of the next token at each position, and the loss.

        Args:
            tokens: [B, T] integers in [0, vocab_size), T <= context_length.
            targets: [B, T] int64, the next token at each position; -100 excludes a position from
                the loss.
            cache: from `new_cache`, or another `LayerCache` per layer; tokens continue its
                sequences and are appended.
            key_lengths: [B] int32 or int64, number of real tokens of a row; the others are padding
                at its end, masked and not cached.
            documents: int32 or int64 ids [B, T] of packed texts: a token sees only its own
                document; a negative id is padding. Positions count through the row. Not with a
                cache.
            last_only: return logits of each row's last real token only, for generation.
            rows: int64 [N]: return logits of these rows only. Not with targets.
            target_count: divisor of the loss, if these targets are a part of a batch; default: the
                number of targets that are not -100.

        Returns:
            (logits, loss), always both: [B, T, V] ([B, 1, V] with last_only, [N, T, V] with rows),
            and the mean cross-entropy in nats, None without targets. If the vocabulary is sharded
            over ranks, logits beside a loss are a DTensor, not gathered.

        Raises:
            TypeError: cache is no sequence of caches.
            TypeError: targets are not int64.
            ValueError: tokens or targets have another shape, or, on a CPU, an id out of range; T is
                over context_length, tokens do not fit the cache, or last_only is True although
                targets are given.
        """
        config = self.config
        stack.check_tokens(
            "tokens", tokens, "context_length", config.context_length, config.vocab_size
        )
        stack.check_targets(targets, "tokens", tokens)
        if targets is not None and (last_only or rows is not None):
            raise ValueError("last_only and rows select tokens, and targets need all")
        stack.check_cache("tokens", tokens, cache, len(self.blocks))
        x = self.hidden_states(
            tokens,
            key_lengths=key_lengths,
            cache=cache,
            documents=documents,
            last_only=last_only,
        )
        if rows is not None:
            x = x[rows]
        logits = stack.token_logits(x, self.head, self.token_embedding, self.head_bias)
        return stack.scored(self, logits, targets, target_count)

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        *,
        epsilon_cutoff: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue rows of tokens, as nanoGPT's `generate`.

        The rows grow together, with a key/value cache. Past the context each step recomputes
        `idx[:, -context_length:]`; `fastattn.generation` is faster there, and supports rows of
        different lengths and end tokens. The model runs in evaluation mode.

        Args:
            idx: [B, T] integers in [0, vocab_size), T >= 1.
            max_new_tokens: tokens to append to each row.
            temperature, top_k, top_p, epsilon_cutoff: as for `fastattn.generation.Sampling`.
            generator: for `torch.multinomial`, on idx's device; None = torch's own.

        Returns:
            int64 [B, T + max_new_tokens], which begins with idx.

        Raises:
            TypeError: idx is no tensor, or max_new_tokens or a setting has a wrong type.
            ValueError: idx is not [B, T] with B, T >= 1, max_new_tokens is negative, or a setting
                is out of range.
            FloatingPointError: the model's scores are not finite.
        """
        sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, epsilon_cutoff=epsilon_cutoff
        )
        if check_tensor("idx", idx).dim() != 2 or not idx.numel() or idx.dtype not in _INTEGERS:
            raise ValueError(
                f"idx must be integers of shape [B, T], got {idx.dtype} {tuple(idx.shape)}"
            )
        max_new_tokens = check_count("max_new_tokens", max_new_tokens, 0)
        idx, context = idx.long(), self.config.context_length
        cache = self.new_cache(idx.shape[0], min(idx.shape[1] + max_new_tokens, context))
        read = 0
        for _ in range(max_new_tokens):
            # Past the context every token moves to another position, so the cache is useless.
            fits = idx.shape[1] <= context
            tokens = idx[:, read:] if fits else idx[:, -context:]
            with stack.evaluating(self):
                logits = self(tokens, cache=cache if fits else None, last_only=True)[0][:, -1]
            read = idx.shape[1]
            check_finite(logits)
            chosen = torch.multinomial(sampling.probabilities(logits), 1, generator=generator)
            idx = torch.cat([idx, chosen], dim=1)
        return idx

    def new_paged_cache(
        self,
        num_pages: int,
        page_size: int = 16,
        *,
        max_rows: int = 64,
        quantize: LatentQuantize | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> PagedKVCache:
        """Make an empty paged cache for all layers.

        Args:
            num_pages, page_size, max_rows, quantize: as for `PagedKVCache`; a row holds up to
                context_length tokens.
            device, dtype: of the stored keys and values; default the parameters'.

        Returns:
            With kv_latent_dim a `PagedLatentCache`.
        """
        layer = cast(Any, self.blocks[0]).attention
        options: dict[str, Any] = {
            "num_layers": len(self.blocks),
            "max_rows": max_rows,
            "max_pages_per_row": -(-self.config.context_length // page_size),
            "quantize": quantize,
        } | factory_options(device, dtype, self.token_embedding, self)
        if self.config.kv_latent_dim is not None:
            widths = self.config.kv_latent_dim, layer.rope_dim
            return PagedLatentCache(num_pages, page_size, *widths, **options)
        return PagedKVCache(
            num_pages, page_size, layer.num_kv_heads, self.config.head_dim,
            value_dim=self.config.v_head_dim, **options,
        )  # fmt: skip

    def num_parameters(self) -> int:
        """Count the trained scalars, tied weights once."""
        return sum(parameter.numel() for parameter in self.parameters())
