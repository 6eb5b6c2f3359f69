"""Hugging Face tokenizers: a folder with ``tokenizer.json``, or that file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tridock.data.tokenize.encoders import LONG_TEXT, can_be_cut, in_pieces
from tridock.data.tokenize.tokenizer import END_OF_TEXT, TOKENIZER
from tridock.errors import Problem, RequestError

if TYPE_CHECKING:
    from tridock.data.tokenize.encoders import Ids

CONFIG: Final = "tokenizer_config.json"


class HuggingFaceTokenizer:
    """An encoder with transformers' ids, including special tokens in a text and those added around it.

    A document ends with the ``eos_token`` of ``tokenizer_config.json``, or with ``<|endoftext|>``.
    """

    name = "huggingface"
    always_closed = False
    accepts_special = True

    def __init__(self, path: Path) -> None:
        """Raises :class:`RequestError` if the tokenizer cannot be read, or defines no token that ends a document."""
        from tokenizers import Tokenizer

        folder = path if path.is_dir() else path.parent
        file = path / TOKENIZER if path.is_dir() else path
        todo = f"name a folder with {TOKENIZER}, as transformers' save_pretrained writes it"
        try:
            text = file.read_text()
            self._tokenizer: Any = Tokenizer.from_str(text)
        except OSError as error:
            got = error.strerror or str(error)
            raise RequestError(Problem(str(file), "cannot be read as a tokenizer", got, todo)) from None
        except Exception as error:  # the library raises no narrower type
            raise RequestError(Problem(str(file), "is not a tokenizer", str(error), todo)) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        end = self._tokenizer.token_to_id(_end_of_document(folder) or END_OF_TEXT)
        if end is None:
            todo = f"name the token that ends a document in {folder / CONFIG}, as eos_token"
            raise RequestError(Problem(str(file), f"has no token {END_OF_TEXT}, and no eos_token", "", todo))
        self.end_of_document: int = end
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.largest_id: int = max(self._tokenizer.get_vocab().values())
        self.sha256 = hashlib.sha256(f"{json.dumps(json.loads(text), sort_keys=True)} {end}".encode()).hexdigest()

        self._cuts = can_be_cut(json.loads(self._tokenizer.to_str()), True)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        if self._cuts and any(len(text) > LONG_TEXT for text in texts):
            return [self._encode_long(text) if len(text) > LONG_TEXT else self._encode([text])[0] for text in texts]
        return self._encode(texts)

    def _encode(self, texts: Sequence[str], around: bool = True) -> list[Ids]:
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=around)
        return [np.array(each.ids, np.uint32) for each in found]

    def _encode_long(self, text: str) -> Ids:
        # The tokens added around a text do not depend on it.
        (whole,), (inner,) = self._encode(["a"]), self._encode(["a"], around=False)
        before = next(
            start for start in range(len(whole)) if whole[start : start + len(inner)].tolist() == inner.tolist()
        )
        ids = in_pieces(text, lambda piece: self._encode([piece], around=False)[0], self.vocab_size)
        return np.concatenate([whole[:before], ids, whole[before + len(inner) :]], dtype=ids.dtype, casting="unsafe")

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text without special tokens; the bytes of an incomplete character become U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def _end_of_document(folder: Path) -> str | None:
    try:
        token = json.loads((folder / CONFIG).read_bytes()).get("eos_token")
    except (OSError, ValueError):
        return None
    return token.get("content") if isinstance(token, dict) else token
