"""Hugging Face tokenizers: a folder with ``tokenizer.json``, or that file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tridock.data.tokenize.encoders import LONG_TEXT, Fast, can_be_cut, fast_or_reference, in_pieces
from tridock.data.tokenize.tokenizer import END_OF_TEXT, TOKENIZER
from tridock.errors import Problem, RequestError

if TYPE_CHECKING:
    from tridock.data.tokenize.encoders import Encoder, Ids

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

        file, config = files_of(path)
        todo = f"name a folder with {TOKENIZER}, as transformers' save_pretrained writes it"
        try:
            text = file.read_text(encoding="utf-8")
            self._tokenizer: Any = Tokenizer.from_str(text)
        except OSError as error:
            got = error.strerror or str(error)
            raise RequestError(Problem(str(file), "cannot be read as a tokenizer", got, todo)) from None
        except Exception as error:  # the library raises no narrower type
            raise RequestError(Problem(str(file), "is not a tokenizer", str(error), todo)) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        end = self._tokenizer.token_to_id(_end_of_document(config) or END_OF_TEXT)
        if end is None:
            todo = f"name the token that ends a document in {config}, as eos_token"
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

    def ids_of(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def to_json(self) -> str:
        text: str = self._tokenizer.to_str()
        return text

    def around(self) -> tuple[list[int], list[int]]:
        """Returns the tokens before and behind every text; they do not depend on it."""
        whole, inner = self._tokenizer.encode("a").ids, self.ids_of("a")
        before = next(start for start in range(len(whole)) if whole[start : start + len(inner)] == inner)
        return whole[:before], whole[before + len(inner) :]

    def _encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.array(each.ids, np.uint32) for each in self._tokenizer.encode_batch_fast(list(texts))]

    def _encode_long(self, text: str) -> Ids:
        ids = in_pieces(text, lambda piece: np.array(self.ids_of(piece), np.uint32), self.vocab_size)
        return _put_around(ids, *self.around())

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text without special tokens; the bytes of an incomplete character become U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


class _Fast(Fast):
    """The fast encoder, with the tokens that the model puts around every text."""

    def __init__(self, reference: HuggingFaceTokenizer, description: dict[str, Any], workers: int) -> None:
        super().__init__(reference, description, workers)
        self._before, self._behind = reference.around()

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        found = super().encode(texts)
        if not self._before and not self._behind:
            return found
        return [_put_around(ids, self._before, self._behind) for ids in found]


def fastest_of(path: Path, workers: int = 1) -> tuple[Encoder, str]:
    """Returns the encoder of a tokenizer like :func:`tridock.data.tokenize.encoders.fastest`."""
    reference = HuggingFaceTokenizer(path)
    return fast_or_reference(reference, lambda: _Fast(reference, json.loads(reference.to_json()), workers))


def _put_around(ids: Ids, before: Sequence[int], behind: Sequence[int]) -> Ids:
    return np.concatenate([before, ids, behind], dtype=ids.dtype, casting="unsafe")


def files_of(path: Path) -> list[Path]:
    """Returns the files that a tokenizer is read from; the second may be missing."""
    folder = path if path.is_dir() else path.parent
    return [path / TOKENIZER if path.is_dir() else path, folder / CONFIG]


def _end_of_document(path: Path) -> str | None:
    """Returns the ``eos_token`` of a ``tokenizer_config.json``; None without the file, or if it names none."""
    todo = "correct the file, or remove it"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RequestError(Problem(str(path), "cannot be read", error.strerror or str(error), todo)) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(Problem(str(path), "is not valid JSON", str(error), todo)) from None
    if not isinstance(config, dict):
        raise RequestError(Problem(str(path), "is not a JSON object", json.dumps(config), todo))
    token = config.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is None or isinstance(token, str):
        return token
    raise RequestError(Problem(str(path), "has an eos_token that is not a text", json.dumps(token), todo))
