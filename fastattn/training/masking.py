"""Masked-token pre-training: hide some tokens of a text, and learn to name them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .data import TextDataset, evaluation_batches, random_batch
from .padding import IGNORED
from .tasks import Batch, Split
from .tokenizer_base import Tokenizer

# Devlin et al. 2019, section 3.1 and appendix A.1.
_CHOSEN, _MASKED, _RANDOM = 0.15, 0.8, 0.1
_VALIDATION_SEED = 0


def mask_tokens(
    tokens: Tensor, *, mask: int, replacements: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Chooses 15 % of a row's tokens, at least one, to be named by the model.

    Of these 80 % become the mask token, 10 % a random token, and 10 % stay as they are (Devlin et
    al. 2019, arXiv 1810.04805), each by its own chance.

    Args:
        tokens: int64 [B, T], T >= 1.
        mask: id of the mask token.
        replacements: int64 [N], ids that a random token is drawn from.
        generator: the only source of randomness.

    Returns:
        inputs int64 [B, T], and targets int64 [B, T]: the tokens themselves where they were chosen,
        -100 elsewhere.
    """
    B, T = tokens.shape
    count = max(1, round(_CHOSEN * T))
    places = torch.rand(B, T, generator=generator).topk(count, dim=1).indices
    chosen = torch.zeros(B, T, dtype=torch.bool).scatter_(1, places, True)
    fate = torch.rand(B, T, generator=generator)
    drawn = replacements[torch.randint(len(replacements), (B, T), generator=generator)]
    inputs = tokens.clone()
    inputs[chosen & (fate < _MASKED)] = mask
    random = chosen & (fate >= _MASKED) & (fate < _MASKED + _RANDOM)
    inputs[random] = drawn[random]
    return inputs, tokens.masked_fill(~chosen, IGNORED)


class MaskedTask:
    """Naming of hidden tokens in windows of a text.

    Args:
        dataset: the text.
        tokenizer: of the text, with a mask token.
        context_length: tokens a window, T.

    Raises:
        TokenizerError: there is no mask token.
    """

    def __init__(self, dataset: TextDataset, tokenizer: Tokenizer, context_length: int) -> None:
        self._dataset, self._context_length = dataset, context_length
        self._mask = tokenizer.special_id("mask")
        ids = set(range(tokenizer.vocab_size)) - tokenizer.special_ids
        self._replacements = torch.tensor(sorted(ids))

    @property
    def fingerprint(self) -> str:
        return self._dataset.fingerprint

    @property
    def extent(self) -> str:
        train, validation = len(self._dataset.train), len(self._dataset.validation)
        return f"{train:,} training and {validation:,} validation tokens"

    def draw(self, split: Split, batch_size: int, generator: torch.Generator) -> Batch:
        """Windows of the split at random places, masked anew each time."""
        tokens: Tensor = getattr(self._dataset, split)
        context = min(self._context_length, len(tokens) - 1)
        windows, _ = random_batch(tokens, batch_size, context, generator)
        return self._masked(windows, generator)

    def validation(self, batch_size: int) -> Iterator[Batch]:
        """Adjoining windows, masked the same way every time."""
        generator = torch.Generator().manual_seed(_VALIDATION_SEED)
        tokens = self._dataset.validation
        for windows, _ in evaluation_batches(tokens, batch_size, self._context_length):
            yield self._masked(windows, generator)

    def scores(self, model: nn.Module, batch_size: int) -> dict[str, Any]:
        """Share of the hidden tokens that the model names."""
        device = next(model.parameters()).device
        right = total = 0
        for batch in self.validation(batch_size):
            batch = batch.to(device)
            named = model(*batch.inputs).argmax(-1)
            right += int((named == batch.targets).sum())
            total += batch.num_targets
        return {"accuracy": right / total}

    def _masked(self, windows: Tensor, generator: torch.Generator) -> Batch:
        inputs, targets = mask_tokens(
            windows, mask=self._mask, replacements=self._replacements, generator=generator
        )
        return Batch((inputs,), targets)
