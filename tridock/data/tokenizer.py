"""Byte-level BPE, as GPT-2's: trained on text, kept as ``tokenizer.json`` and as ``vocab.json`` with ``merges.txt``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from tridock.errors import Problem, RequestError
from tridock.run_folder import write_atomic

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT: Final = "<|endoftext|>"
TOKENIZER: Final = "tokenizer.json"
SMALLEST_VOCABULARY: Final = 257
"""Every byte and the end of text."""


class BytePairTokenizer:
    """Text to token ids and back, without loss. Text that spells ``<|endoftext|>`` is text, never the end of one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, show_progress: bool = False) -> Self:
        """Learns the merges. The same texts give the same tokenizer, on any machine and any number of threads.

        Little text may give fewer tokens than asked for. Raises :class:`RequestError` for a vocabulary too small to
        hold every byte.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            what = f"must be at least {SMALLEST_VOCABULARY}: every byte and {END_OF_TEXT}"
            raise RequestError(Problem("vocab_size", what, str(vocab_size), "raise it"))
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=show_progress,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a ``tokenizer.json``, or the one in a folder."""
        from tokenizers import Tokenizer

        file = path / TOKENIZER if path.is_dir() else path
        todo = "give a tokenizer.json, or a folder that `save` wrote"
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            got = error.strerror if isinstance(error, OSError) and error.strerror else "not UTF-8"
            raise RequestError(Problem(str(file), "cannot be read as a tokenizer", got, todo)) from None
        try:
            tokenizer = cls(Tokenizer.from_str(text))
        except Exception as error:  # the library raises no narrower type
            raise RequestError(Problem(str(file), "is not a tokenizer", str(error), todo)) from None
        if tokenizer._tokenizer.token_to_id(END_OF_TEXT) is None:
            raise RequestError(Problem(str(file), f"has no token {END_OF_TEXT}", "", "use one that has it"))
        return tokenizer

    def save(self, folder: Path) -> None:
        """Writes ``tokenizer.json``; ``vocab.json`` and ``merges.txt`` as Megatron's GPT2BPETokenizer reads them."""
        text = self._tokenizer.to_str(pretty=True)
        model = json.loads(text)["model"]
        merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
        write_atomic(folder / "vocab.json", json.dumps(model["vocab"], ensure_ascii=False).encode())
        write_atomic(folder / "merges.txt", "\n".join(["#version: 0.2", *merges, ""]).encode())
        write_atomic(folder / TOKENIZER, text.encode())

    @property
    def vocab_size(self) -> int:
        """Tokens, the end of text included."""
        return self._tokenizer.get_vocab_size()

    @property
    def end_of_text(self) -> int:
        """The id that closes a document."""
        token = self._tokenizer.token_to_id(END_OF_TEXT)
        assert token is not None  # train() and load() see to it
        return token

    @property
    def sha256(self) -> str:
        """Names the tokenizer: of the vocabulary and the merges, not of how a file spells them."""
        return hashlib.sha256(self._tokenizer.to_str(pretty=False).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of one text; no end of text is added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` for many texts, on all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)
