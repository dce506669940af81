"""Attention maps of a trained model: weights by layer and head, as a picture."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..files.replace import replacing
from ..missing import import_extra
from ..modules.cross_attention import CrossGQAttention
from ..modules.latent_attention import MultiheadLatentAttention
from ..modules.self_attention import GQAttention
from ..modules.weights import (
    cross_attention_weights,
    latent_attention_weights,
    self_attention_weights,
)
from .checkpoint import Trained
from .data.tagged_text import split_words
from .data.text import DataError
from .tasks.tagging import cut_rows
from .tasks.translation import encode_texts, translate_ids

_LABELLED = 48  # tokens up to which a picture names them
_INCHES = 2.2  # a head's square


@dataclass(frozen=True)
class Map:
    """Attention weights [H, T_q, T_k] of one layer, and its queries and keys as text.

    name: of the attention module. Rows of weights add up to 1, with sinks to less.
    """

    name: str
    weights: Tensor
    queries: Sequence[str]
    keys: Sequence[str]


def attention_maps(trained: Trained, text: str, *, target: str | None = None) -> list[Map]:
    """Compute the attention weights of every layer of a model on a text.

    Args:
        trained: the model.
        text: the input; the source of an encoder-decoder.
        target: decoder input of an encoder-decoder; None = its own greedy translation.

    Returns:
        One map per layer, in call order.

    Raises:
        DataError: a text is empty or too long for the model, or the model takes no target.
    """
    tokenizer = trained.tokenizer
    if trained.kind.name == "seq2seq":
        limit = trained.config.source_length
        read = encode_texts([(text, "--text")], tokenizer, limit)
        if target is None:
            written = translate_ids(trained.model, tokenizer, read)[0]
        else:
            limit = trained.config.target_length
            (ids,) = encode_texts([(target, "--target")], tokenizer, limit, side="target")
            written = list(ids)
        rows = [list(read[0]), [tokenizer.special_id("begin"), *written]]
        # The decoder reads at most this many tokens, without the last one of a long translation.
        rows[1] = rows[1][: trained.config.target_length]
    elif target is not None:
        raise DataError(f"--target is for an encoder-decoder, not {trained.kind.title}")
    else:
        rows = [_tokens(trained, text)]
    calls = _record(trained.model, rows)
    # Text of each token, with white space escaped as in Python.
    texts = [[tokenizer.decode([token]) for token in row] for row in rows]
    labels = [[repr(x)[1:-1] if x != " " else "␣" for x in row] for row in texts]
    return [_map(name, weights, labels) for name, weights in calls]


def _tokens(trained: Trained, text: str) -> list[int]:
    """Encode a text in the form of the model's training data."""
    limit = trained.config.context_length
    if trained.kind.name == "tagger":
        words = [
            word
            for line in split_words(text, "--text", python=trained.data["python"])
            for word in line
        ]
        rows = cut_rows(words, trained.tokenizer, limit) if words else []
        tokens = [token for row in rows for token in row.tokens]
    else:
        tokens = trained.tokenizer.encode(text)
    if not tokens:
        raise DataError("--text has no token")
    if len(tokens) > limit:
        raise DataError(f"--text has {len(tokens)} tokens, the model reads at most {limit}")
    return tokens


def _record(model: nn.Module, rows: Sequence[Sequence[int]]) -> list[tuple[str, Tensor]]:
    """Compute name and weights [H, T_q, T_k] of every attention module, from its inputs."""
    calls: list[tuple[str, Tensor]] = []
    names = {layer: name for name, layer in model.named_modules()}
    kinds: dict[type[nn.Module], Callable[..., Tensor]] = {
        GQAttention: self_attention_weights, CrossGQAttention: cross_attention_weights,
        MultiheadLatentAttention: latent_attention_weights,
    }  # fmt: skip

    def hear(layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        keywords = {key: value for key, value in keywords.items() if key != "cache"}
        weigh = next(weigh for kind, weigh in kinds.items() if isinstance(layer, kind))
        calls.append((names[layer], weigh(layer, *args, **keywords)[0].float().cpu()))

    layers = [x for x in model.modules() if isinstance(x, tuple(kinds))]
    hooks = [layer.register_forward_pre_hook(hear, with_kwargs=True) for layer in layers]
    device = next(model.parameters()).device
    try:
        with torch.no_grad():
            model(*(torch.tensor([list(row)], device=device) for row in rows))
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _map(name: str, weights: Tensor, labels: Sequence[Sequence[str]]) -> Map:
    """Make a map with its tokens; of two sequences the second is the decoder's."""
    queries, keys = labels[-1], labels[0]
    if len(labels) > 1 and not name.endswith(".cross"):
        queries = keys = labels[0] if name.startswith("encoder") else labels[1]
    return Map(name, weights, queries, keys)


def draw_maps(maps: Sequence[Map], path: str | Path) -> None:
    """Draw maps as a PNG file: one row per layer, one column per head, one colour bar.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written, or is there and is no PNG file but a link or another.
    """
    path = Path(path)
    if path.is_symlink() or (path.exists() and not _is_png(path)):
        raise OSError(f"cannot write {path}: it is there and is no PNG file")
    figure_module = import_extra("matplotlib.figure", "a picture of attention")
    columns = max(len(one.weights) for one in maps)
    longest = max(max(one.weights.shape[1:]) for one in maps)
    inches = _INCHES * (1 if longest > _LABELLED else max(1.0, longest / 16))
    size = (inches * columns + 1.3, (inches + 0.4) * len(maps) + 0.5)
    figure = figure_module.Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(maps), columns, squeeze=False)
    for row, one in zip(grid, maps, strict=True):
        # "decoder.blocks.1.cross" is "decoder layer 1 cross".
        title = one.name.replace("blocks.", "layer ").removesuffix(".attention").replace(".", " ")
        for axes in row[len(one.weights) :]:
            axes.set_axis_off()
        for head, weights in enumerate(one.weights):
            image = row[head].imshow(weights.numpy(), vmin=0, vmax=1, cmap="Blues", aspect="auto")
            row[head].set_title(f"{title}, head {head}", fontsize=8, parse_math=False)
            _name_tokens(row[head], one, first=head == 0)
    # All heads share one colour scale.
    middle = grid[(len(maps) - 1) // 2]
    bar = figure.colorbar(image, ax=middle[-1], label="attention weight", fraction=0.08)
    bar.ax.tick_params(labelsize=7)
    picture = io.BytesIO()
    with warnings.catch_warnings():
        # A character that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
        figure.savefig(picture, format="png", dpi=110)
    try:
        with replacing(path, "wb") as file:
            file.write(picture.getvalue())
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}") from None


def _is_png(path: Path) -> bool:
    return path.is_file() and path.read_bytes().startswith(b"\x89PNG")


def _name_tokens(axes: Any, one: Map, *, first: bool) -> None:
    """Label keys below a head, and queries left of a layer's first head, where there are few."""
    sides = ((axes.set_xticks, one.keys, 90), (axes.set_yticks, one.queries if first else [], 0))
    for set_ticks, tokens, rotation in sides:
        if len(tokens) > _LABELLED:
            tokens = []
        style = {"rotation": rotation, "fontsize": 6, "parse_math": False} if tokens else {}
        set_ticks(range(len(tokens)), tokens, **style)
