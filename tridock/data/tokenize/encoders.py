"""Encoders of texts: the reference (Hugging Face's tokenizers), and a fast library.

The fast library is used only for tokenizers like GPT-2's, Qwen's and Llama 3's: byte-level BPE, one of their splits, no
normalizer but NFC. tests/unit/data/test_encoders.py compares its ids with the reference for every character. Every run
compares again: some hard texts at its start, and a piece of each chunk.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from tridock.data.dataset.indexed_dataset import token_dtype
from tridock.data.tokenize.long_words import LongWords
from tridock.data.tokenize.memory import resident, trim
from tridock.data.tokenize.tokenizer import BytePairTokenizer
from tridock.errors import Problem, RequestError, RunError

Ids = NDArray[Any]

_CHECKED_CHARACTERS: Final = 256
"""Characters compared per chunk: the reference takes 0.125 ms for them, 1% of the chunk's time."""
_CACHE_BYTES: Final = 208 << 20
"""Growth of the fast library's cache, for all workers together, after which it is reloaded: the library caches every
word without a limit. A worker's share has a minimum, below which it would reload too often."""
_LEAST_CACHE_BYTES: Final = 64 << 20
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

# New characters of Unicode 17. The fast library treats them as letters and digits, the reference does not yet, so that
# they split words differently. The reference encodes the pieces that contain one.
_UNICODE_17: Final = re.compile(
    "[\u088f\u0c5c\u0cdc\ua7ce\ua7cf\ua7d2\ua7d4\ua7f1\U00010940-\U00010959\U00010ec5-\U00010ec7\U00011db0-\U00011ddb"
    "\U00011de0-\U00011de9\U00016ea0-\U00016eb8\U00016ebb-\U00016ed3\U00016ff2-\U00016ff6\U000187f8-\U000187ff"
    "\U00018d09-\U00018d1e\U00018d80-\U00018df2\U0001e6c0-\U0001e6ff\U0002b73a-\U0002b73f\U0002cea2-\U0002cead"
    "\U000323b0-\U00033479]"
)
_WORDS_END: Final = re.compile(
    "(?<=[0-9A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3])(?=[ \n\u3001\u3002\uff0c])"
)
"""A letter or digit followed by another kind of character: every split ends a word between the two."""
_PIECE_CHARACTERS: Final = 2048
LONG_TEXT: Final = 1 << 18
"""Characters above which a text is encoded in pieces, because the libraries need many times its memory."""
_UNICODE_17_BYTES: Final = (
    (b"\xe0", (b"\xe0\xa2\x8f", b"\xe0\xb1\x9c", b"\xe0\xb3\x9c")),
    (b"\xea", (b"\xea\x9f",)),
    (b"\xf0", tuple(b"\xf0" + bytes([second]) for second in b"\x90\x91\x96\x98\x9e\xab\xac\xb2\xb3")),
)
"""First bytes of these characters in UTF-8. A text without them needs no slow regular expression search."""

_CL100K: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Final = (_CL100K % r"\p{N}", _CL100K % r"\p{N}{1,3}")
"""The splits of Qwen, and of Llama 3 and GPT-4. The library has GPT-2's."""
_MAY_CHANGE_IN_NFC: Final = re.compile(
    "[^\\x00-\u02ff\u0400-\u0482\u048a-\u052f\u2002-\u2027\u2030-\u2052\u20a0-\u20bf\u2190-\u2199\u2500-\u25ff"
    "\u3001-\u3020\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3\uff01-\uff5e\U0001f300-\U0001f64f]"
)
"""A text without these characters is in NFC, in every version of Unicode."""


class Encoder(Protocol):
    """The interface of an encoder.

    ``always_closed``: the encoder itself ends every text with ``end_of_document``. ``accepts_special``: special tokens
    in a text are tokens, not characters.
    """

    name: str
    vocab_size: int
    largest_id: int
    sha256: str
    end_of_document: int
    always_closed: bool
    accepts_special: bool

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Returns the ids of each text, uint32[tokens] or the type of the data set."""
        ...


class Comparable(Encoder, Protocol):
    """An encoder of Hugging Face's library, which the fast one is compared with."""

    def ids_of(self, text: str) -> list[int]:
        """Returns the ids of a text, without tokens around it."""
        ...

    def to_json(self) -> str:
        """Returns the tokenizer as ``tokenizer.json``."""
        ...


class Reference:
    """Hugging Face's tokenizers, whose ids every other encoder must have."""

    name = "tokenizers"
    always_closed = False

    def __init__(self, tokenizer: BytePairTokenizer, description: dict[str, Any] | None = None) -> None:
        """``description`` is ``tokenizer.describe()``, if known."""
        self.tokenizer = tokenizer
        description = description or tokenizer.describe()
        self.vocab_size, self.largest_id = tokenizer.vocab_size, tokenizer.largest_id
        self.sha256 = tokenizer.sha256_of(description)
        self.end_of_document = tokenizer.end_of_text
        self.accepts_special = tokenizer.accepts_special
        self._cuts = can_be_cut(description, self.accepts_special)
        self._long_words = long_words_of(description, self.accepts_special)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        if self._cuts and any(len(text) > LONG_TEXT for text in texts):
            return [in_pieces(text, self._encode, self.vocab_size, self._long_words) for text in texts]
        return [np.array(ids, np.uint32) for ids in self.tokenizer.encode_batch(texts)]

    def ids_of(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def to_json(self) -> str:
        return self.tokenizer.to_json()

    def _encode(self, text: str) -> Ids:
        return np.array(self.ids_of(text), np.uint32)


class Fast:
    """gigatoken, compared with the reference during the run.

    Raises ImportError if it is not installed, ValueError for an unsupported tokenizer, and :class:`RunError` if its
    ids differ from the reference.
    """

    name = "gigatoken"
    always_closed = False

    def __init__(self, reference: Comparable, description: dict[str, Any] | None = None, workers: int = 1) -> None:
        """``workers`` is the number of processes that have an encoder each."""
        description = description or json.loads(reference.to_json())
        plain = _supported(description)
        self.accepts_special = reference.accepts_special
        added = _tokens_of_texts(description, self.accepts_special)
        normalizes = description["normalizer"] is not None
        if any(_strips(token) or (normalizes and token["normalized"]) for token in added):
            raise ValueError("a token of texts takes white space, is a whole word only, or is normalized")
        self._tokens: dict[str, int] = {token["content"]: token["id"] for token in added}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._token = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._long_words = _long_words(description)  # parts of texts have no added tokens
        self._normalized: Callable[[str], str] | None = _nfc() if description["normalizer"] is not None else None
        import gigatoken

        # For a large vocabulary the library's JSON is faster than ours.
        text = reference.to_json() if plain == description else json.dumps(plain)
        self._load: Callable[[], Any] = partial(gigatoken.Tokenizer.from_json, text)
        self._fast: Any = None
        self._cache_bytes = max(_CACHE_BYTES // workers, _LEAST_CACHE_BYTES)
        self._memory = 0
        self._reload()
        self._reference = reference
        self.vocab_size, self.largest_id = reference.vocab_size, reference.largest_id
        self.sha256, self.end_of_document = reference.sha256, reference.end_of_document
        for text in HARD_TEXTS:
            self._compare(text, self._encode(text))

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        self._limit_cache()
        # Encodes one by one: the library's batches import a package, which takes longer than 200,000 calls.
        found = [self._encode(text) for text in texts]
        self._spot_check(texts, found)
        return found

    def _limit_cache(self) -> None:
        if resident() > self._memory + self._cache_bytes:
            self._reload()

    def _reload(self) -> None:
        self._fast = None
        trim()  # otherwise the next one is allocated above this one's memory
        self._fast = self._load()
        trim()  # reading a vocabulary needs more memory than keeping it
        self._memory = resident()

    def _encode(self, text: str) -> Ids:
        if self._tokens and self._token.search(text):
            return np.concatenate([self._encode_part(part) for part in self._token.split(text) if part])
        return self._encode_plain(text)

    def _encode_part(self, part: str) -> Ids:
        return np.array([self._tokens[part]], np.uint32) if part in self._tokens else self._encode_plain(part)

    def _encode_plain(self, text: str) -> Ids:
        if len(text) > LONG_TEXT:
            return in_pieces(text, self._encode_long, self.vocab_size, self._long_words)
        return self._encode_words(text)

    def _encode_long(self, piece: str) -> Ids:
        self._limit_cache()
        return self._encode_words(piece)

    def _encode_words(self, text: str) -> Ids:
        if text.isascii():
            return cast(Ids, self._fast.encode(text))
        if self._normalized is not None and _MAY_CHANGE_IN_NFC.search(text):
            text = self._normalized(text)
        data = text.encode()
        if _may_be_newer(data) and _UNICODE_17.search(text):
            return np.concatenate([self._encode_piece(piece) for piece in _pieces(text, _PIECE_CHARACTERS)])
        return cast(Ids, self._fast.encode(data))

    def _encode_piece(self, piece: str) -> Ids:
        if _UNICODE_17.search(piece):
            return np.array(self._reference.ids_of(piece), np.uint32)
        return cast(Ids, self._fast.encode(piece))

    def _spot_check(self, texts: Sequence[str], found: list[Ids]) -> None:
        """Compares one text of the chunk, or a piece of a long one, with the reference; the same one in every run."""
        if not texts:
            return
        place = hashlib.blake2b(str((len(texts), sum(map(len, found)))).encode(), digest_size=4)
        chosen = int.from_bytes(place.digest(), "little") % len(texts)
        text = texts[chosen]
        if len(text) > _CHECKED_CHARACTERS:
            start = int.from_bytes(place.digest(), "big") % (len(text) - _CHECKED_CHARACTERS)
            piece = text[start : start + _CHECKED_CHARACTERS]
            if not _UNICODE_17.search(piece):
                self._compare(piece, self._encode(piece))
        else:
            self._compare(text, found[chosen])

    def _compare(self, text: str, ids: Ids) -> None:
        expected = self._reference.ids_of(text)
        if ids.tolist() != expected:
            what = "gives other ids than Hugging Face's tokenizers"
            todo = "run again with --encoder reference, and report the text"
            raise RunError(Problem(self.name, what, f"for {text[:60]!a}", todo))


def _may_be_newer(data: bytes) -> bool:
    """Whether a text in UTF-8 may contain a character that the two libraries treat differently."""
    return any(first in data and any(begin in data for begin in begins) for first, begins in _UNICODE_17_BYTES)


def _pieces(text: str, size: int) -> Iterator[str]:
    """Cuts a text where every split of ``_SPLITS`` ends a word, so that the ids of the pieces are those of the text."""
    start = 0
    while found := _WORDS_END.search(text, start + size):
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def in_pieces(text: str, encode: Callable[[str], Ids], vocab_size: int, long_words: LongWords | None = None) -> Ids:
    """Encodes a long text in pieces that end at the end of a word, or inside of a long word, if possible.

    Returns its ids, [tokens].
    """
    return joined(_ids_of_pieces(text, encode, long_words), vocab_size)


def _ids_of_pieces(text: str, encode: Callable[[str], Ids], long_words: LongWords | None) -> Iterator[Ids]:
    for piece in _pieces(text, LONG_TEXT):
        if long_words is not None and len(piece) > 2 * LONG_TEXT:
            yield from long_words.encode(piece, encode, LONG_TEXT)
        else:
            yield encode(piece)


def joined(parts: Iterable[Ids], vocab_size: int) -> Ids:
    """Returns the ids of a text from those of its parts, at least one, in the type of the data set."""
    dtype = token_dtype(vocab_size)
    ids = [part.astype(dtype) for part in parts]
    return ids[0] if len(ids) == 1 else np.concatenate(ids)


def _nfc() -> Callable[[str], str]:
    """Returns the reference's NFC normalization: Python's may have another version of Unicode."""
    from tokenizers import normalizers

    return normalizers.NFC().normalize_str


def _tokens_of_texts(description: dict[str, Any], accepts_special: bool) -> list[dict[str, Any]]:
    """Returns the added tokens that may occur in a text."""
    return [token for token in description["added_tokens"] if accepts_special or not token["special"]]


def can_be_cut(description: dict[str, Any], accepts_special: bool) -> bool:
    """Whether ``in_pieces`` gives the same ids as the whole text: no token crosses the end of a word."""
    tokens = _tokens_of_texts(description, accepts_special)
    return (
        description["normalizer"] in (None, {"type": "NFC"})
        and _is_known_split(description["pre_tokenizer"])
        and not any(_strips(token) or _WORDS_END.search(token["content"]) for token in tokens)
    )


def long_words_of(description: dict[str, Any], accepts_special: bool) -> LongWords | None:
    """Returns None for a tokenizer with added tokens that may occur in a text, also within a word."""
    return None if _tokens_of_texts(description, accepts_special) else _long_words(description)


def _long_words(description: dict[str, Any]) -> LongWords | None:
    groups_digits = _pattern_of(description["pre_tokenizer"]) == _SPLITS[1]
    return LongWords.of(description["model"], digits=not groups_digits)


def _strips(token: dict[str, Any]) -> bool:
    return any(token[rule] for rule in ("lstrip", "rstrip", "single_word"))


def _supported(description: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a description that the fast library reads: without added tokens and normalizer.

    Raises ValueError if its ids were not compared for this kind of tokenizer.
    """
    model, normalizer = description["model"], description["normalizer"]
    unsupported = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    known = model["type"] == "BPE" and not any(model.get(name) for name in unsupported)
    if not known or normalizer not in (None, {"type": "NFC"}) or not _is_known_split(description["pre_tokenizer"]):
        raise ValueError("the tokenizer is not like GPT-2's, Qwen's or Llama 3's")
    return description | {"added_tokens": [], "post_processor": None, "normalizer": None}


def _is_known_split(split: object) -> bool:
    match split:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return True
    return _pattern_of(split) in _SPLITS


def _pattern_of(split: object) -> str | None:
    """Returns the regular expression of a split like Qwen's; None for another kind."""
    match split:
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return cast(str, pattern)
    return None


def fastest(tokenizer: BytePairTokenizer, workers: int = 1) -> tuple[Encoder, str]:
    """Returns the fast encoder and "", or the reference and the reason for it, as a text for the user.

    ``workers`` is the number of processes that will encode.
    """
    description = tokenizer.describe()
    reference = Reference(tokenizer, description)
    return fast_or_reference(reference, lambda: Fast(reference, description, workers))


def fast_or_reference(reference: Encoder, make_fast: Callable[[], Encoder]) -> tuple[Encoder, str]:
    """Returns like :func:`fastest`."""
    try:
        return make_fast(), ""
    except ImportError as error:
        why = f"{error.name} is not installed (pip install 'tridock[data]')"
    except RunError:
        raise
    except Exception as error:  # the library raises no narrower type
        why = str(error)
    return reference, f"encoder: Hugging Face's tokenizers, about 30 times slower: {why}"


def check_ids_fit(encoder: Encoder, where: str) -> None:
    """Raises :class:`RequestError` if ids do not fit the type that Megatron chooses by the vocabulary size."""
    dtype = token_dtype(encoder.vocab_size)
    if encoder.largest_id > np.iinfo(dtype).max:
        what = f"has {encoder.vocab_size} tokens, for which Megatron writes {dtype.name}, and an id that does not fit"
        raise RequestError(Problem(where, what, str(encoder.largest_id), "use consecutive ids"))
