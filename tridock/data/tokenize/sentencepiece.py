"""SentencePiece tokenizers: a ``tokenizer.model``, as of Llama 2, Gemma or T5."""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tridock.contracts.git_lfs import refuse_pointer
from tridock.data.dataset.indexed_dataset import token_dtype
from tridock.data.tokenize.encoders import LONG_TEXT
from tridock.errors import Problem, RequestError, reason_of

if TYPE_CHECKING:
    from tridock.data.tokenize.encoders import Ids

_SPACE: Final = "\u2581"
"""The character that stands for a space in the library's pieces."""
_BETWEEN_WORDS: Final = re.compile("(?<=[0-9A-Za-z]) (?=[0-9A-Za-z])")


class SentencePieceTokenizer:
    """An encoder with Megatron's ids: the library's own, without a token at the beginning of a text.

    A document ends with the model's end of sentence token. Control tokens spelled out in a text are plain text.
    """

    name = "sentencepiece"
    always_closed = False
    accepts_special = False

    def __init__(self, file: Path, needs_end: bool = True) -> None:
        """Raises :class:`RequestError` if the file cannot be read, or lacks an end of sentence token that is needed."""
        from sentencepiece import SentencePieceProcessor

        todo = "name a model of SentencePiece, as spm_train writes it (Llama 3's is for --tokenizer-type TikTokenizer)"
        try:
            content = file.read_bytes()
            refuse_pointer(file, content)
            self._model: Any = SentencePieceProcessor(model_proto=content)
        except OSError as error:
            raise RequestError(Problem(str(file), "cannot be read as a tokenizer", reason_of(error), todo)) from None
        except RuntimeError:  # its message names a line of the library's source
            raise RequestError(Problem(str(file), "is not a model of SentencePiece", "", todo)) from None
        self.end_of_document: int = self._model.eos_id()
        if self.end_of_document < 0 and needs_end:
            todo = "train it with one: spm_train --eos_id=2"
            raise RequestError(Problem(str(file), "has no end of sentence token", "", todo))
        self.vocab_size: int = self._model.get_piece_size()
        self.largest_id = self.vocab_size - 1
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._space_at_cut = self._find_space_at_cut()

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        if self._space_at_cut is not None and any(len(text) > LONG_TEXT for text in texts):
            return [np.concatenate([*map(self._encode_one, self._pieces(text))]) for text in texts]
        # By default each worker would start as many threads as the machine has cores.
        return [np.array(ids, np.uint32) for ids in self._model.encode(list(texts), out_type=int, num_threads=1)]

    def _encode_one(self, piece: str) -> Ids:
        return np.array(self._model.encode(piece, out_type=int), token_dtype(self.vocab_size))

    def _pieces(self, text: str) -> Iterator[str]:
        """Cuts a long text between two words."""
        start = 0
        while found := _BETWEEN_WORDS.search(text, start + LONG_TEXT):
            yield text[start : found.start()]
            start = found.end() - len(self._space_at_cut or "")
        yield text[start:]

    def _find_space_at_cut(self) -> str | None:
        """Returns what the second part of a cut text begins with: the space between the two words, or nothing.

        None if the ids of the parts may differ from those of the text: if a token can span two words, or for a unigram
        model, whose scores are fractions: their sums are rounded, and so depend on all of the text before.
        """
        ids, space = range(self.vocab_size), self._model.piece_to_id(_SPACE)
        whole_numbers = all(self._model.get_score(number).is_integer() for number in ids)
        spans = any(_SPACE in self._model.id_to_piece(number).lstrip(_SPACE) for number in ids)
        if not whole_numbers or spans or space == self._model.unk_id():
            return None
        first, *others = tuple(string.ascii_letters + string.digits)
        text = self._model.encode(" ".join((first, *others)))
        for begin in ("", " "):
            parts = self._model.encode([first, *(begin + word for word in others)])
            if text == list(chain.from_iterable(parts)):
                return begin
        return None
