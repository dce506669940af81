"""Character tokenizer, without dependencies or special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from .base import Tokenizer, TokenizerError, check_texts

CHARACTER_FORMAT = "fastattn-characters"


class CharacterTokenizer(Tokenizer):
    """Tokenizer with an id for each character, in the order of code points.

    Args:
        characters: the vocabulary, in any order, with or without repetitions.

    Raises:
        TokenizerError: characters is empty, or an item is no single character.
    """

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = sorted(set(characters))
        if not self.characters:
            raise TokenizerError("a character tokenizer needs at least one character, got none")
        if long := [x for x in self.characters if len(x) != 1]:
            raise TokenizerError(f"characters must be of one character each, got {long[0]!r}")
        self._ids = {character: i for i, character in enumerate(self.characters)}

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        try:
            return [[self._ids[character] for character in text] for text in check_texts(texts)]
        except KeyError as error:
            character = error.args[0]
            raise TokenizerError(
                f"character {character!r} (U+{ord(character):04X}) does not occur in the text that "
                f"the tokenizer was made from ({self.vocab_size} characters)"
            ) from None

    def text_of(self, tokens: Sequence[int]) -> str:
        return "".join([self.characters[token] for token in tokens])

    def to_json(self) -> str:
        return json.dumps({"format": CHARACTER_FORMAT, "characters": "".join(self.characters)})
