"""Hugging Face tokenizers: a folder with ``tokenizer.json``, or that file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tridock.contracts.tokenizers import files_of, read_tokenizer, tokenizer_sha256
from tridock.data.tokenize.tokenizer import END_OF_TEXT
from tridock.errors import Problem, RequestError

if TYPE_CHECKING:
    from tridock.data.tokenize.encoders import Ids


class HuggingFaceTokenizer:
    """An encoder with transformers' ids, including special tokens in a text and those added around it.

    A document ends with the ``eos_token``, or with ``<|endoftext|>``, which also begins one if no token is declared.
    """

    name = "huggingface"
    always_closed = False
    accepts_special = True

    def __init__(self, path: Path, needs_end: bool = True, around: bool = True) -> None:
        """Without ``around`` no token is put around a text.

        Raises :class:`RequestError` if the tokenizer cannot be read. Without a token that ends a document, too, or else
        ``end_of_document`` is -1.
        """
        from tokenizers import Tokenizer

        files, file = read_tokenizer(path), str(files_of(path)[0])
        todo = "save the tokenizer again, with transformers' save_pretrained"
        try:
            made = Tokenizer.from_file(file) if files.alone else Tokenizer.from_str(json.dumps(files.description))
            self._tokenizer: Any = made
        except Exception as error:  # the library raises no narrower type
            raise RequestError(Problem(file, "is not a tokenizer", str(error), todo)) from None
        for token in files.description["added_tokens"]:
            if (other := self._tokenizer.token_to_id(token["content"])) != token["id"]:
                what = f"gives {json.dumps(token['content'])} the id {token['id']}, and Hugging Face's library another"
                raise RequestError(Problem(file, what, str(other), todo))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ends = {"eos_token": END_OF_TEXT}
        self.special = {**ends, **files.special} if files.special else {"bos_token": END_OF_TEXT, **ends}
        end = self._tokenizer.token_to_id(self.special["eos_token"])
        if end is None and needs_end:
            todo = f"name the token that ends a document in {files_of(path)[1]}, as eos_token"
            raise RequestError(Problem(file, f"has no token {END_OF_TEXT}, and no eos_token", "", todo))
        self.end_of_document: int = -1 if end is None else end
        self.begin: int | None = self._tokenizer.token_to_id(self.special.get("bos_token", ""))
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.largest_id: int = files.largest_id
        self._adds = around
        self.sha256 = tokenizer_sha256(files.description if around else {**files.description, "post_processor": None})

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=self._adds)
        return [np.array(each.ids, np.uint32) for each in found]

    def ids_of(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def to_json(self) -> str:
        text: str = self._tokenizer.to_str()
        return text

    def around(self) -> tuple[list[int], list[int]]:
        if not self._adds:
            return [], []
        whole, inner = self._tokenizer.encode("a").ids, self.ids_of("a")
        before = next(start for start in range(len(whole)) if whole[start : start + len(inner)] == inner)
        return whole[:before], whole[before + len(inner) :]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text without special tokens; the bytes of an incomplete character become U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text
