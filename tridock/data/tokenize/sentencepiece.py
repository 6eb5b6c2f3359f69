"""SentencePiece tokenizers: a ``tokenizer.model``, as of Llama 2, Gemma or T5."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tridock.errors import Problem, RequestError

if TYPE_CHECKING:
    from tridock.data.tokenize.encoders import Ids


class SentencePieceTokenizer:
    """An encoder with Megatron's ids: the library's own, without a token at the beginning of a text.

    A document ends with the model's end of sentence token. Control tokens spelled out in a text are plain text.
    """

    name = "sentencepiece"
    always_closed = False
    accepts_special = False

    def __init__(self, file: Path) -> None:
        """Raises :class:`RequestError` if the file cannot be read, or has no end of sentence token."""
        from sentencepiece import SentencePieceProcessor

        todo = "name a model of SentencePiece, as spm_train writes it"
        try:
            content = file.read_bytes()
            self._model: Any = SentencePieceProcessor(model_proto=content)
        except OSError as error:
            got = error.strerror or str(error)
            raise RequestError(Problem(str(file), "cannot be read as a tokenizer", got, todo)) from None
        except RuntimeError:  # its message names a line of the library's source
            raise RequestError(Problem(str(file), "is not a model of SentencePiece", "", todo)) from None
        self.end_of_document: int = self._model.eos_id()
        if self.end_of_document < 0:
            todo = "train it with one: spm_train --eos_id=2"
            raise RequestError(Problem(str(file), "has no end of sentence token", "", todo))
        self.vocab_size: int = self._model.get_piece_size()
        self.largest_id = self.vocab_size - 1
        self.sha256 = hashlib.sha256(content).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        # By default each worker would start as many threads as the machine has cores.
        return [np.array(ids, np.uint32) for ids in self._model.encode(list(texts), out_type=int, num_threads=1)]
