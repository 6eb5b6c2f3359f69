"""Texts to token ids: the reference (HF tokenizers), a fast library proven against it, a vocabulary of whole words.

The fast library is taken only for GPT-2's kind of tokenizer (byte-level BPE, GPT-2's split, nothing before or after):
for that its ids are compared with the reference's over every character (tests/unit/data/test_encoders.py). Every run
compares again: some hard texts before it begins, and a piece of each chunk.
"""

from __future__ import annotations

import hashlib
import json
import re
import resource
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from tridock.data.indexed_dataset import token_dtype
from tridock.data.malloc import trim
from tridock.data.tokenizer import END_OF_TEXT, BytePairTokenizer, read_vocabulary
from tridock.errors import Problem, RequestError, RunError

Ids = NDArray[Any]

UNKNOWN: Final = "<unk>"
_CHECKED_CHARACTERS: Final = 1024
"""Of a chunk: the reference takes a millisecond for as much, about a thirtieth of the chunk's time."""
_CACHE_BYTES: Final = 64 << 20
"""The fast library remembers every word that it met, without a bound: grown by so much, it is loaded anew."""
HARD_TEXTS: Final = (
    "I'll they've we're he's don't I'm she'd I'LL 'tis '' 's's",
    " \t\n\r\n  \n   x    y     \u00a0\u2003\u3000z\u200b\ufeff ",
    "a1b22c333 1234567890 \u0661\u0662\u0663 \u2167 \u00bd\u00b2 3.14 0x1F",
    "e\u0301 n\u0303o \u0915\u094d\u0937 \u0e01\u0e33 \u1100\u1161\u11a8 \u05e9\u05c1\u05dc\u05d5\u05b9\u05dd",
    "\U0001f44d\U0001f3fd \U0001f469\u200d\U0001f469\u200d\U0001f466 \U0001f1e8\U0001f1ff \u2764\ufe0f",
    "\u4e2d\u6587\u5b57\u7b26 \u65e5\u672c\u8a9e\u30ab\u30bf\u30ab\u30ca \ud55c\uad6d\uc5b4 \U00020000\U0002a6d6",
    "\x00\x01\x1c\x1d\x1e\x1f\x7f\x85\x9f \u2028\u2029 \ue000 \ufffd \U0010ffff",
    "def f(x: int) -> int:\n\treturn x ** 2  # \u2026\n\n\n    <|endoftext|> <|endoftext|>",
    " " * 300 + "a" * 300 + "\n" * 300 + "ab" * 300 + "!?" * 300 + "7" * 300,
)


# Characters that Unicode 17 brought. The fast library knows them as letters and digits, the reference does not yet, and
# the two split words at them differently: a text that holds one is the reference's.
_UNICODE_17: Final = re.compile(
    "[\u088f\u0c5c\u0cdc\ua7ce\ua7cf\ua7d2\ua7d4\ua7f1\U00010940-\U00010959\U00010ec5-\U00010ec7\U00011db0-\U00011ddb"
    "\U00011de0-\U00011de9\U00016ea0-\U00016eb8\U00016ebb-\U00016ed3\U00016ff2-\U00016ff6\U000187f8-\U000187ff"
    "\U00018d09-\U00018d1e\U00018d80-\U00018df2\U0001e6c0-\U0001e6ff\U0002b73a-\U0002b73f\U0002cea2-\U0002cead"
    "\U000323b0-\U00033479]"
)
_WORDS_END: Final = re.compile("(?<=[0-9A-Za-z.,;])(?=[ \n])")
_PIECE_CHARACTERS: Final = 2048
_THEIR_BYTES: Final = (
    0xE0A2,
    0xE0B1,
    0xE0B3,
    0xEA9F,
    *(0xF000 + second for second in b"\x90\x91\x96\x98\x9e\xab\xac\xb2\xb3"),
)
"""How they begin in UTF-8, two bytes: looked for first, in all texts at once, which is much quicker."""


class Encoder(Protocol):
    """What a worker needs of a tokenizer.

    ``always_closed``: the encoder itself ends every text with ``end_of_document``.
    """

    name: str
    vocab_size: int
    largest_id: int
    sha256: str
    end_of_document: int
    always_closed: bool

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Ids]:
        """All ids one after another, and how many of them belong to each text: [tokens], int64[texts]."""
        ...


class Reference:
    """HF's tokenizers."""

    name = "tokenizers"
    always_closed = False

    def __init__(self, tokenizer: BytePairTokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocab_size, self.largest_id = tokenizer.vocab_size, tokenizer.largest_id
        self.sha256, self.end_of_document = tokenizer.sha256, tokenizer.end_of_text

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Ids]:
        ids = self.tokenizer.encode_batch(texts)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter(chain.from_iterable(ids), np.uint32, int(lengths.sum())), lengths


class Fast:
    """gigatoken, compared with the reference as it goes.

    Raises ImportError where it is not installed, ValueError for a tokenizer that it is not proven for, and
    :class:`RunError` where its ids are not the reference's.
    """

    name = "gigatoken"
    always_closed = False

    def __init__(self, reference: Reference) -> None:
        description = _proven(json.loads(reference.tokenizer.to_json()))
        import awkward
        import gigatoken

        self._arrays = awkward
        self._load: Callable[[], Any] = partial(gigatoken.Tokenizer.from_json, json.dumps(description))
        self._fast: Any = self._load()
        self._memory = _resident()
        self._reference = reference
        self.vocab_size, self.largest_id = reference.vocab_size, reference.largest_id
        self.sha256, self.end_of_document = reference.sha256, reference.end_of_document
        for text in HARD_TEXTS:
            self._compare(text, self._encode([text])[0])

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Ids]:
        newer = _with_newer_characters(texts)
        ids, lengths = self._encode_mixed(texts, newer) if newer else self._encode(texts)
        self._spot_check(texts, ids, lengths)
        return ids, lengths

    def _encode_mixed(self, texts: Sequence[str], newer: set[int]) -> tuple[Ids, Ids]:
        """Of the texts ``newer`` the reference gets the pieces that hold such characters, and no others."""
        cut = [_pieces(text) if number in newer else [text] for number, text in enumerate(texts)]
        pieces = [piece for own in cut for piece in own]
        others = {number for number, piece in enumerate(pieces) if _UNICODE_17.search(piece)}
        found = self._encode(["" if number in others else piece for number, piece in enumerate(pieces)])
        ids, lengths = _inserted(found, {n: self._reference.tokenizer.encode(pieces[n]) for n in others})
        return ids, np.add.reduceat(lengths, np.cumsum([0, *map(len, cut[:-1])]))

    def _encode(self, texts: Sequence[str]) -> tuple[Ids, Ids]:
        if not texts:
            return np.zeros(0, np.uint32), np.zeros(0, np.int64)
        if _resident() > self._memory + _CACHE_BYTES:
            self._fast = None
            trim()  # else the next one begins above what this one leaves
            self._fast = self._load()
            self._memory = _resident()
        found = self._fast.encode_batch(list(texts), parallel=False)
        ids = np.asarray(self._arrays.to_numpy(self._arrays.flatten(found)), dtype=np.uint32)
        return ids, np.asarray(self._arrays.to_numpy(self._arrays.num(found)), dtype=np.int64)

    def _spot_check(self, texts: Sequence[str], ids: Ids, lengths: Ids) -> None:
        """One text of the chunk, another each time and the same in every run; of a long one a piece."""
        if not texts:
            return
        place = hashlib.blake2b(str((len(texts), len(ids))).encode(), digest_size=4)
        chosen = int.from_bytes(place.digest(), "little") % len(texts)
        text = texts[chosen]
        if len(text) > _CHECKED_CHARACTERS:
            start = int.from_bytes(place.digest(), "big") % (len(text) - _CHECKED_CHARACTERS)
            piece = text[start : start + _CHECKED_CHARACTERS]
            if not _UNICODE_17.search(piece):
                self._compare(piece, self._encode([piece])[0])
        else:
            end = int(lengths[: chosen + 1].sum())
            self._compare(text, ids[end - int(lengths[chosen]) : end])

    def _compare(self, text: str, ids: Ids) -> None:
        expected = self._reference.tokenizer.encode(text)
        if ids.tolist() != expected:
            what = "gives other ids than the reference tokenizer"
            todo = "run again with --encoder reference, and report the text"
            raise RunError(Problem(self.name, what, f"for {text[:60]!a}", todo))


def _resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _with_newer_characters(texts: Sequence[str]) -> set[int]:
    """The numbers of the texts that the fast library may split otherwise than the reference."""
    foreign = [number for number, text in enumerate(texts) if not text.isascii()]
    data = np.frombuffer("".join([texts[number] for number in foreign]).encode(), np.uint8)
    leads = np.flatnonzero(data >= 0xE0)
    if not np.isin(data[leads].astype(np.uint16) << 8 | data[leads + 1], _THEIR_BYTES).any():
        return set()
    return {number for number in foreign if _UNICODE_17.search(texts[number])}


def _pieces(text: str) -> list[str]:
    """The text cut where GPT-2's split ends a word in any case; the ids of the pieces are those of the text."""
    pieces, start = [], 0
    while found := _WORDS_END.search(text, start + _PIECE_CHARACTERS):
        pieces.append(text[start : found.start()])
        start = found.start()
    return [*pieces, text[start:]]


def _inserted(encoded: tuple[Ids, Ids], others: dict[int, list[int]]) -> tuple[Ids, Ids]:
    """The ids of texts that were left empty, in their places."""
    ids, lengths = encoded
    parts = np.split(ids, np.cumsum(lengths)[:-1])
    for number, own in others.items():
        parts[number] = np.array(own, np.uint32)
        lengths[number] = len(own)
    return np.concatenate(parts), lengths


def _proven(description: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer without its special tokens (text that spells one is text), if it is of GPT-2's kind."""
    model, split = description["model"], description["pre_tokenizer"] or {}
    plain = {
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "byte_fallback",
        "ignore_merges",
    }
    gpt2 = (
        model["type"] == "BPE"
        and not any(model.get(name) for name in plain)
        and (split.get("type"), split.get("add_prefix_space"), split.get("use_regex")) == ("ByteLevel", False, True)
        and description["normalizer"] is None
        and all(token["special"] for token in description["added_tokens"])
        and all(token["content"] in model["vocab"] for token in description["added_tokens"])
    )
    if not gpt2:
        raise ValueError("the tokenizer is not of GPT-2's kind")
    return description | {"added_tokens": [], "post_processor": None}


class Vocabulary:
    """Words between white space through a JSON vocabulary; each text ends with ``<|endoftext|>``."""

    name = "vocab"
    always_closed = True

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

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Ids]:
        ids: list[int] = []
        lengths: list[int] = []
        for text in texts:
            words = text.split()
            ids += [self._ids.get(word, self._unknown) for word in words]
            ids.append(self.end_of_document)
            lengths.append(len(words) + 1)
        return np.array(ids, np.uint32), np.array(lengths, np.int64)


def fastest(tokenizer: BytePairTokenizer) -> tuple[Encoder, str]:
    """The fast encoder where it is proven, else the reference; and why, for the user ("" for the fast one)."""
    reference = Reference(tokenizer)
    try:
        return Fast(reference), ""
    except ImportError as error:
        why = f"{error.name} is not installed (pip install gigatoken)"
    except RunError:
        raise
    except Exception as error:  # what it raises for a tokenizer that it cannot load has no narrower type
        why = str(error)
    return reference, f"encoder: the reference, about 30 times slower: {why}"


def check_ids_fit(encoder: Encoder, where: str) -> None:
    """Raises :class:`RequestError` where ids would not fit the type that Megatron chooses by the number of tokens."""
    dtype = token_dtype(encoder.vocab_size)
    if encoder.largest_id > np.iinfo(dtype).max:
        what = f"has {encoder.vocab_size} tokens, for which Megatron writes {dtype.name}, and an id that does not fit"
        raise RequestError(Problem(where, what, str(encoder.largest_id), "number the tokens without gaps"))
