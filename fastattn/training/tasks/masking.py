"""Masked-language modelling (BERT): hide some tokens of a text, and predict them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..data.rows import IGNORED
from ..data.text import TextDataset
from ..tokenizers.base import Tokenizer
from .task import Batch, LanguageTask

# Devlin et al. 2019, section 3.1 and appendix A.1.
_CHOSEN, _MASKED, _RANDOM = 0.15, 0.8, 0.1


def mask_tokens(
    tokens: Tensor, *, mask: int, replacements: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Choose 15 % of a row's tokens, at least one, as targets.

    Each target becomes the mask token with probability 80 %, a random token with 10 %, and stays
    with 10 % (Devlin et al. 2019, arXiv 1810.04805).

    Args:
        tokens: int64 [B, T], T >= 1.
        mask: id of the mask token.
        replacements: int64 [N], ids of random tokens.
        generator: the only source of randomness.

    Returns:
        inputs int64 [B, T], and targets int64 [B, T]: the chosen tokens, -100 elsewhere.
    """
    B, T = tokens.shape
    count = max(1, round(_CHOSEN * T))
    places = torch.rand(B, T, generator=generator, device="cpu").topk(count, dim=1).indices
    chosen = torch.zeros(B, T, dtype=torch.bool, device="cpu").scatter_(1, places, True)
    fate = torch.rand(B, T, generator=generator, device="cpu")
    drawn = replacements[
        torch.randint(len(replacements), (B, T), generator=generator, device="cpu")
    ]
    inputs = tokens.clone()
    inputs[chosen & (fate < _MASKED)] = mask
    random = chosen & (fate >= _MASKED) & (fate < _MASKED + _RANDOM)
    inputs[random] = drawn[random]
    return inputs, tokens.masked_fill(~chosen, IGNORED)


class MaskedTask(LanguageTask):
    """Masked-language modelling on windows of a text; the tokenizer needs a mask token."""

    def __init__(self, dataset: TextDataset, tokenizer: Tokenizer, context_length: int) -> None:
        super().__init__(dataset, context_length)
        self._mask = tokenizer.special_id("mask")
        ids = set(range(tokenizer.vocab_size)) - tokenizer.special_ids
        self._replacements = torch.tensor(sorted(ids), device="cpu")

    def scores(self, model: nn.Module, batch_size: int) -> dict[str, Any]:
        """Compute the accuracy over the masked tokens."""
        device = next(model.parameters()).device
        right = total = 0
        for batch in self.validation(batch_size):
            batch = batch.to(device)
            named = model(*batch.inputs)[0].argmax(-1)
            right += int((named == batch.targets).sum())
            total += batch.num_targets
        return {"accuracy": right / total}

    def _batch(self, windows: Batch, generator: torch.Generator) -> Batch:
        """Mask windows."""
        inputs, targets = mask_tokens(
            *windows.inputs,
            mask=self._mask,
            replacements=self._replacements,
            generator=generator,
        )
        return Batch((inputs,), targets)
