"""Scores of tags (accuracy, F1) and of texts (BLEU, chrF, exact match)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...missing import import_extra


def confusion(expected: Tensor, got: Tensor, num_tags: int) -> Tensor:
    """Count the confusion matrix, int64 [K, K]: expected tags (rows), predicted tags (columns)."""
    both = expected * num_tags + got
    return torch.bincount(both, minlength=num_tags**2).view(num_tags, num_tags)


def tag_scores(counts: Tensor, tags: Sequence[str]) -> dict[str, Any]:
    """Compute the accuracy, the F1 of every tag, and the mean F1.

        F1 = 2 * right / (expected + got)

    Args:
        counts: int64 [K, K] from `confusion`, not all 0.
        tags: K names.

    Returns:
        "accuracy", "macro_f1", "majority" (the accuracy of always predicting the most frequent tag)
        and "f1" by tag, without tags that occur in neither.
    """
    right, expected, got = counts.diagonal(), counts.sum(1), counts.sum(0)
    f1 = {
        tag: 2 * int(right[i]) / int(expected[i] + got[i])
        for i, tag in enumerate(tags)
        if expected[i] + got[i] > 0
    }
    total = int(counts.sum())
    return {
        "accuracy": int(right.sum()) / total,
        "majority": int(expected.max()) / total,
        "macro_f1": sum(f1.values()) / len(f1),
        "f1": f1,
    }


def text_scores(got: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
    """Compute BLEU, chrF and exact match of texts.

    Args:
        got, expected: equally many, at least one; white space at the ends and its width are
            ignored.

    Returns:
        "bleu" and "chrf" over the whole corpus, 0 to 100, as `sacrebleu` computes them by default
        (Papineni et al. 2002; Popović 2015), and "exact_match", the share of equal texts.

    Raises:
        ModuleNotFoundError: `sacrebleu` is not installed.
    """
    sacrebleu = import_sacrebleu()
    got, expected = ([" ".join(text.split()) for text in texts] for texts in (got, expected))
    same = sum(one == other for one, other in zip(got, expected, strict=True))
    return {
        "bleu": float(sacrebleu.corpus_bleu(got, [expected]).score),
        "chrf": float(sacrebleu.corpus_chrf(got, [expected]).score),
        "exact_match": same / len(expected),
    }


def import_sacrebleu() -> Any:
    """Import `sacrebleu`."""
    return import_extra("sacrebleu", "the score of translations")
