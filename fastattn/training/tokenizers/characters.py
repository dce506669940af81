"""Character tokenizer: one id a character, without dependencies or special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable

from .base import TokenDecoder, Tokenizer, TokenizerError

CHARACTER_FORMAT = "fastattn-characters"


class CharacterTokenizer(Tokenizer):
    """Tokenizer with an id for each character, in the order of code points.

    Args:
        characters: the vocabulary, in any order, with or without repetitions.

    Raises:
        TokenizerError: characters is empty.
    """

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = sorted(set(characters))
        if not self.characters:
            raise TokenizerError("a character tokenizer needs at least one character, got none")
        self._ids = {character: i for i, character in enumerate(self.characters)}

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> list[int]:
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            character = error.args[0]
            raise TokenizerError(
                f"character {character!r} (U+{ord(character):04X}) does not occur in the text that "
                f"the tokenizer was made from ({self.vocab_size} characters)"
            ) from None

    def decoder(self) -> TokenDecoder:
        return _CharacterDecoder(self)

    def to_json(self) -> str:
        return json.dumps({"format": CHARACTER_FORMAT, "characters": "".join(self.characters)})


class _CharacterDecoder(TokenDecoder):
    def __init__(self, tokenizer: CharacterTokenizer) -> None:
        self._tokenizer = tokenizer

    def feed(self, token: int) -> str:
        self._tokenizer.check_id(token)
        return self._tokenizer.characters[token]

    def finish(self) -> str:
        return ""
