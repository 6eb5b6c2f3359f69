"""Encoders without a tokenizer's library: a vocabulary of whole words, and texts that already are ids."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from tridock.data.tokenize.encoders import LONG_TEXT, Ids
from tridock.data.tokenize.tokenizer import END_OF_TEXT, read_vocabulary
from tridock.errors import Problem, RequestError

UNKNOWN: Final = "<unk>"


class Vocabulary:
    """Splits at white space and looks up words in a JSON vocabulary. Each text ends with ``<|endoftext|>``."""

    name = "vocab"
    always_closed = True
    accepts_special = True

    def __init__(self, vocab_file: Path) -> None:
        self._ids = read_vocabulary(vocab_file)
        missing = [token for token in (UNKNOWN, END_OF_TEXT) if token not in self._ids]
        if missing:
            todo = "add it to the vocabulary"
            raise RequestError([Problem(str(vocab_file), f"has no token {token}", "", todo) for token in missing])
        self.vocab_size, self.largest_id = len(self._ids), max(self._ids.values())
        self.sha256 = hashlib.sha256(json.dumps(self._ids, sort_keys=True).encode()).hexdigest()
        self.end_of_document = self._ids[END_OF_TEXT]
        self._unknown = self._ids[UNKNOWN]

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        known, unknown = self._ids, self._unknown
        return [
            np.array([*[known.get(word, unknown) for word in text.split()], self.end_of_document], np.uint32)
            for text in texts
        ]


class Null:
    """Reads texts that already are ids, separated by single spaces, like Megatron's NullTokenizer."""

    name = "null"
    always_closed = False
    accepts_special = False
    sha256 = ""

    def __init__(self, vocab_size: int, end_of_document: int | None = None) -> None:
        """``end_of_document`` defaults to the last id."""
        self.vocab_size, self.largest_id = vocab_size, vocab_size - 1
        self.end_of_document = self.largest_id if end_of_document is None else end_of_document

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [self._ids(text) for text in texts]

    def _ids(self, text: str) -> Ids:
        """Returns the ids of a text; raises :class:`RequestError` for a word that is not an id."""
        parts, start = [], 0
        while (end := text.find(" ", start + LONG_TEXT)) >= 0:
            parts.append(self._ids_of(text[start:end].split(" ")))
            start = end + 1
        return np.concatenate([*parts, self._ids_of(text[start:].split(" ") if text else [])])

    def _ids_of(self, words: list[str]) -> Ids:
        if (wrong := next((word for word in words if not self._is_id(word)), None)) is not None:
            what, todo = f"is not a token id below {self.vocab_size}", "raise --vocab-size, or correct the text"
            raise RequestError(Problem("--tokenizer-type NullTokenizer: a word", what, repr(wrong), todo))
        return np.array(list(map(int, words)), np.uint32)

    def _is_id(self, word: str) -> bool:
        return word.isascii() and word.isdigit() and len(word) < 11 and int(word) < self.vocab_size
