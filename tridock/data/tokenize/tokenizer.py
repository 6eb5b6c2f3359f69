"""Byte-level BPE like GPT-2's, stored in ``tokenizer.json`` and in ``vocab.json`` with ``merges.txt``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from tridock.contracts.git_lfs import refuse_pointer
from tridock.contracts.partials import partial_folder
from tridock.contracts.run_folder import write_atomic
from tridock.contracts.tokenizers import GPT2_FILES, TOKENIZER, gpt2_merges, tokenizer_sha256
from tridock.errors import Problem, RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT: Final = "<|endoftext|>"
TOKENIZER_FILES: Final = (*GPT2_FILES, TOKENIZER)
"""Files that ``BytePairTokenizer.save`` writes."""
SMALLEST_VOCABULARY: Final = 257
"""256 bytes and the end-of-text token."""


_LONGEST_WORD: Final = 1024
"""Maximum characters of a word in training: the library's time grows with the square of a word's length."""
_LONG_RUN: Final = re.compile(rf"(?<!\S)\S{{{_LONGEST_WORD},}}+|(?<!\s)\s{{{_LONGEST_WORD},}}+")
_LONG_WORD: Final = re.compile(
    "|".join(rf"(?<!{kind}){kind}{{{_LONGEST_WORD},}}+" for kind in (r"\s", r"\d", r"[^\W\d_]", r"[^\w\s]", "_"))
)


def _without_long_words(text: str) -> Iterator[str]:
    """Yields the pieces of a text, cut inside very long runs of letters, digits, punctuation or white space."""
    start = 0
    if _LONG_RUN.search(text):
        for word in _LONG_WORD.finditer(text):
            for cut in range(word.start() + _LONGEST_WORD, word.end(), _LONGEST_WORD):
                yield text[start:cut]
                start = cut
    yield text[start:]


class BytePairTokenizer:
    """A byte-level BPE tokenizer; decoding returns the encoded text.

    ``<|endoftext|>`` in a text is plain text. After ``accept_special`` it and the other special tokens are tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True
        # A model's tokenizer.json may set truncation and padding for batches. Data must have neither.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def accept_special(self) -> None:
        """Reads special tokens in texts as tokens, as today's Megatron does."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        if self.end_of_text >= 0 and END_OF_TEXT not in {token.content for token in added}:
            self._tokenizer.add_special_tokens([END_OF_TEXT])
        self._tokenizer.encode_special_tokens = False

    @property
    def accepts_special(self) -> bool:
        return not self._tokenizer.encode_special_tokens

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, show_progress: bool = False) -> Self:
        """Trains a tokenizer. The same texts give the same one, on any machine and any number of threads.

        Little text may give a smaller vocabulary than ``vocab_size``. Words are cut after 1024 characters. Raises
        :class:`RequestError` if ``vocab_size`` is too small for all bytes.
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
        tokenizer.train_from_iterator((part for text in texts for part in _without_long_words(text)), trainer)
        return cls(tokenizer)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads the output of ``to_json``."""
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_str(text))

    @classmethod
    def load(cls, path: Path, needs_end: bool = True) -> Self:
        """Reads a ``tokenizer.json``, or the one in a folder."""
        file = path / TOKENIZER if path.is_dir() else path
        todo = "give a tokenizer.json, or a folder that `save` wrote"
        text = _text_of(file, todo, "cannot be read as a tokenizer")
        try:
            tokenizer = cls.from_json(text)
        except Exception as error:  # the library raises no narrower type
            raise RequestError(Problem(str(file), "is not a tokenizer", str(error), todo)) from None
        if needs_end and tokenizer.end_of_text < 0:
            raise RequestError(Problem(str(file), f"has no token {END_OF_TEXT}", "", "use one that has it"))
        return tokenizer

    @classmethod
    def from_gpt2(cls, vocab_file: Path, merge_file: Path, needs_end: bool = True) -> Self:
        """Reads GPT-2's two files as Megatron's ``GPT2BPETokenizer`` does.

        Megatron ignores the first line of the merges, and everything after the last newline. Raises
        :class:`RequestError` if a byte has no token (Megatron would use id 0), or a merge is not in the vocabulary.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        vocab = read_vocabulary(vocab_file)
        missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(vocab))
        if missing:
            what = f"has no token for {len(missing)} of the 256 bytes"
            raise RequestError(
                Problem(str(vocab_file), what, f"none for {missing[0]!r}", "use a byte-level vocabulary")
            )
        if needs_end and END_OF_TEXT not in vocab:
            raise RequestError(Problem(str(vocab_file), f"has no token {END_OF_TEXT}", "", "use one that has it"))
        merges: list[Any] = [tuple(merge) for merge in gpt2_merges(_text_of(merge_file, "give GPT-2's merges.txt"))]
        wrong = [number for number, merge in enumerate(merges, start=2) if len(merge) != 2]
        if wrong:
            what, got = "is not two tokens", repr(" ".join(merges[wrong[0] - 2]))
            raise RequestError(Problem(f"{merge_file}:{wrong[0]}", what, got, "use the merges.txt of this vocabulary"))
        try:
            tokenizer = Tokenizer(models.BPE(vocab, merges))
        except Exception as error:  # the library raises no narrower type
            todo = "use the merges.txt of this vocabulary"
            raise RequestError(Problem(str(merge_file), "does not fit the vocabulary", str(error), todo)) from None
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return cls(tokenizer)

    def save(self, folder: Path) -> None:
        """Writes ``tokenizer.json``, and ``vocab.json`` and ``merges.txt`` for Megatron's GPT2BPETokenizer.

        None of them changes before all are written.
        """
        text = self._tokenizer.to_str(pretty=True)
        model = json.loads(text)["model"]
        merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
        # The folder may be the current one, and its parent may be read-only: stage the files inside it.
        place = folder if folder.exists() else folder.parent
        with partial_folder(place / folder.name) as partial:
            write_atomic(partial / "vocab.json", json.dumps(model["vocab"], ensure_ascii=False).encode())
            write_atomic(partial / "merges.txt", "\n".join(["#version: 0.2", *merges, ""]).encode())
            write_atomic(partial / TOKENIZER, text.encode())
            if folder.exists():
                for file in partial.iterdir():
                    file.replace(folder / file.name)
            else:
                partial.rename(folder)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary, including the end of text."""
        return self._tokenizer.get_vocab_size()

    @property
    def largest_id(self) -> int:
        """The largest id; not always one less than the vocabulary size."""
        return max(self._tokenizer.get_vocab().values())

    def to_json(self) -> str:
        return self._tokenizer.to_str(pretty=False)

    @property
    def end_of_text(self) -> int:
        """Id of the token that ends a document; -1 without one."""
        token = self._tokenizer.token_to_id(END_OF_TEXT)
        return -1 if token is None else token

    @property
    def sha256(self) -> str:
        """SHA-256 of everything that ids depend on: GPT-2's two files and an equivalent ``tokenizer.json`` agree."""
        return tokenizer_sha256({**json.loads(self.to_json()), "post_processor": None})  # no token is added to a text

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without an end-of-text token."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text; uses all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids; invalid UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def open_tokenizer(vocab_file: Path, merge_file: Path | None, needs_end: bool = True) -> BytePairTokenizer:
    """Opens GPT-2's two files, or a ``tokenizer.json`` given as ``vocab_file``, or a folder with either."""
    if merge_file is None and vocab_file.is_dir() and not (vocab_file / TOKENIZER).exists():
        vocab_file, merge_file = (vocab_file / name for name in GPT2_FILES)
    if merge_file is not None:
        return BytePairTokenizer.from_gpt2(vocab_file, merge_file, needs_end)
    if _is_tokenizer_json(vocab_file):
        return BytePairTokenizer.load(vocab_file, needs_end)
    todo = "give GPT-2's merges.txt, or a tokenizer.json as --vocab-file"
    raise RequestError(Problem("--merge-file", "is required with GPT2BPETokenizer", "", todo))


def _is_tokenizer_json(path: Path) -> bool:
    try:
        if path.is_dir():
            return True
        content = path.read_bytes()
        refuse_pointer(path, content)
        return "model" in json.loads(content) and path.name != "vocab.json"
    except (OSError, ValueError, TypeError):
        return False


def read_vocabulary(path: Path) -> dict[str, int]:
    """Reads a ``vocab.json``, an object from token to id. Raises :class:`RequestError` for anything else."""
    todo = 'give a vocab.json: {"token": id, …}, each id once'
    with RequestError.in_place_of(ValueError, path, "is not valid JSON", todo):
        vocab = json.loads(_text_of(path, todo))
    ids = list(vocab.values()) if isinstance(vocab, dict) else [None]
    wrong = next((value for value in ids if type(value) is not int or not 0 <= value < 2**31), None)
    if not isinstance(vocab, dict) or wrong is not None:
        raise RequestError(Problem(str(path), "is not a vocabulary", json.dumps(wrong), todo))
    if len(set(ids)) != len(ids):
        raise RequestError(Problem(str(path), "has two tokens of one id", f"{len(ids) - len(set(ids))} times", todo))
    return vocab


def _text_of(path: Path, todo: str, what: str = "cannot be read") -> str:
    try:
        text = path.read_text(encoding="utf-8")
        refuse_pointer(path, text[:1024].encode())
        return text
    except (OSError, UnicodeDecodeError) as error:
        got = error.strerror if isinstance(error, OSError) and error.strerror else "not UTF-8"
        raise RequestError(Problem(str(path), what, got, todo)) from None
