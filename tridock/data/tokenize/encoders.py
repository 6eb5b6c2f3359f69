"""Encoders of texts: the reference (Hugging Face's tokenizers), and a fast library.

The fast library is used for every tokenizer that it reads and gives the reference's ids for: some hard texts and the
tokenizer's own tokens decide before a run starts. Every run compares again, a piece of each chunk.
tests/unit/data/test_encoders.py compares every character with the splits of several models.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from tridock.data.dataset.indexed_dataset import token_dtype
from tridock.data.tokenize.memory import resident, trim
from tridock.data.tokenize.tokenizer import BytePairTokenizer
from tridock.errors import Problem, RequestError, RunError
from tridock.extras import install_command

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
    "XMLHttpRequest iPhone \u01c5A \u039f\u03a3/\u03bf\u03c2 a/b//\n/ \u30c6\u30b9abc\u4e2d1 _x_ --\u2014\u3002\u300c",
    "\U00010d27\U00010f46",  # marks in an order that the fast library's own NFC leaves as it is
    " " * 300 + "a" * 300 + "\n" * 300 + "ab" * 300 + "!?" * 300 + "7" * 300,
)

# New characters of Unicode 17. The fast library knows their kinds, the reference does not yet, so that they split words
# differently. The reference encodes the texts that contain one.
_UNICODE_17: Final = re.compile(
    "[\u088f\u0c5c\u0cdc\u1acf-\u1add\u1ae0-\u1aeb\u20c1\u2b96\ua7ce\ua7cf\ua7d2\ua7d4\ua7f1\ufbc3-\ufbd2\ufd90\ufd91"
    "\ufdc8-\ufdce\U00010940-\U00010959\U00010ec5-\U00010ec7\U00010ed0-\U00010ed8\U00010efa-\U00010efb"
    "\U00011b60-\U00011b67\U00011db0-\U00011ddb\U00011de0-\U00011de9\U00016ea0-\U00016eb8\U00016ebb-\U00016ed3"
    "\U00016ff2-\U00016ff6\U000187f8-\U000187ff\U00018d09-\U00018d1e\U00018d80-\U00018df2\U0001ccfa-\U0001ccfc"
    "\U0001ceba-\U0001ced0\U0001cee0-\U0001cef0\U0001e6c0-\U0001e6ff\U0001f6d8\U0001f777-\U0001f77a"
    "\U0001f8d0-\U0001f8d8\U0001fa54-\U0001fa57\U0001fa8a\U0001fa8e\U0001fac8\U0001facd\U0001faea\U0001faef\U0001fbfa"
    "\U0002b73a-\U0002b73f\U0002cea2-\U0002cead\U000323b0-\U00033479]"
)
_UNICODE_17_BYTES: Final = (
    (b"\xe0", (b"\xe0\xa2\x8f", b"\xe0\xb1\x9c", b"\xe0\xb3\x9c")),
    (b"\xe1", (b"\xe1\xab",)),
    (b"\xe2", (b"\xe2\x83\x81", b"\xe2\xae\x96")),
    (b"\xea", (b"\xea\x9f",)),
    (b"\xef", (b"\xef\xaf", b"\xef\xb6", b"\xef\xb7")),
    (b"\xf0", tuple(b"\xf0" + bytes([second]) for second in b"\x90\x91\x96\x98\x9c\x9e\xab\xac\xb2\xb3")),
    (b"\xf0\x9f", tuple(b"\xf0\x9f" + bytes([third]) for third in b"\x9b\x9d\xa3\xa9\xaa\xab\xaf")),
)
"""First bytes of these characters in UTF-8. A text without them needs no slow regular expression search."""
LONG_TEXT: Final = 1 << 18
"""Characters above which a text is read in pieces, by encoders that need many times its memory."""

_MAY_CHANGE_IN_NFC: Final = re.compile(
    "[^\\x00-\u02ff\u0400-\u0482\u048a-\u052f\u2002-\u2027\u2030-\u2052\u20a0-\u20bf\u2190-\u2199\u2500-\u25ff"
    "\u3001-\u3020\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3\uff01-\uff5e\U0001f300-\U0001f64f]"
)
"""A text without these characters is in NFC, in every version of Unicode."""


class Encoder(Protocol):
    """The interface of an encoder.

    ``always_closed``: the encoder itself ends every text with ``end_of_document``. ``accepts_special``: special tokens
    in a text are tokens, not characters. ``sha256`` is empty if the tokenizer is not known.
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

    def around(self) -> tuple[list[int], list[int]]:
        """Returns the tokens before and behind every text; they do not depend on it."""
        ...


class Reference:
    """Hugging Face's tokenizers, whose ids every other encoder must have."""

    name = "tokenizers"
    always_closed = False

    def __init__(self, tokenizer: BytePairTokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocab_size, self.largest_id = tokenizer.vocab_size, tokenizer.largest_id
        self.sha256 = tokenizer.sha256
        self.end_of_document = tokenizer.end_of_text
        self.accepts_special = tokenizer.accepts_special

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.array(ids, np.uint32) for ids in self.tokenizer.encode_batch(texts)]

    def ids_of(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def to_json(self) -> str:
        return self.tokenizer.to_json()

    def around(self) -> tuple[list[int], list[int]]:
        return [], []


class Fast:
    """gigatoken, compared with the reference before and during the run.

    Raises ImportError if it is not installed, ValueError for a tokenizer that it does not read or has other ids for,
    and :class:`RunError` if its ids differ from the reference during the run.
    """

    name = "gigatoken"
    always_closed = False

    def __init__(self, reference: Comparable, workers: int = 1) -> None:
        """``workers`` is the number of processes that have an encoder each."""
        import gigatoken

        # The model, which comes last, is not parsed: that takes a second for a large vocabulary.
        head, model = reference.to_json().split(',"model":', 1)
        description = json.loads(head + "}")
        self.accepts_special = reference.accepts_special
        tokens = [token for token in description["added_tokens"] if self.accepts_special or not token["special"]]
        if any(token[rule] for token in tokens for rule in ("lstrip", "rstrip", "single_word")):
            raise ValueError("a token of texts takes white space, or is a whole word only")
        self._tokens: list[str] = [token["content"] for token in tokens]
        self._nfc = _nfc() if description["normalizer"] == {"type": "NFC"} else None
        own = {"added_tokens": tokens, "normalizer": None if self._nfc else description["normalizer"]}
        text = json.dumps(description | own)[:-1] + ',"model":' + model
        self._load: Callable[[], Any] = partial(gigatoken.Tokenizer.from_json, text)
        self._fast: Any = None
        self._cache_bytes = max(_CACHE_BYTES // workers, _LEAST_CACHE_BYTES)
        self._memory = 0
        self._reload()
        self._reference = reference
        self.vocab_size, self.largest_id = reference.vocab_size, reference.largest_id
        self.sha256, self.end_of_document = reference.sha256, reference.end_of_document
        self._before, self._behind = reference.around()
        for text in (*HARD_TEXTS, *_texts_with(tokens)):
            if self._encode(text).tolist() != reference.ids_of(text):
                raise ValueError(f"other ids for the text {text[:60]!a}")

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        self._limit_cache()
        # Encodes one by one: the library's batches import a package, which takes longer than 200,000 calls.
        found = [self._encode(text) for text in texts]
        self._spot_check(texts, found)
        if not self._before and not self._behind:
            return found
        before, behind = self._before, self._behind
        return [np.concatenate([before, ids, behind], dtype=ids.dtype, casting="unsafe") for ids in found]

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
        if text.isascii():
            return cast(Ids, self._fast.encode(text))
        if self._nfc is not None and _MAY_CHANGE_IN_NFC.search(text):
            normal = self._nfc(text)
            # The reference looks for tokens first, and normalizes what they leave over.
            if normal != text and any(token in text or token in normal for token in self._tokens):
                return self._of_reference(text)
            text = normal
        data = text.encode()
        if _may_be_newer(data) and _UNICODE_17.search(text):
            return self._of_reference(text)
        return cast(Ids, self._fast.encode(data))

    def _of_reference(self, text: str) -> Ids:
        return np.array(self._reference.ids_of(text), np.uint32)

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
            self._compare(piece, self._encode(piece))
        else:
            self._compare(text, found[chosen])

    def _compare(self, text: str, ids: Ids) -> None:
        expected = self._reference.ids_of(text)
        if ids.tolist() != expected:
            what = "gives other ids than Hugging Face's tokenizers"
            todo = "run again with --encoder reference, and report the text"
            raise RunError(Problem(self.name, what, f"for {text[:60]!a}", todo))


def _texts_with(tokens: list[dict[str, Any]]) -> Iterator[str]:
    """Yields texts with added tokens, and where one that the reference looks for first overlaps another."""
    kinds = [[token["content"] for token in tokens if token["normalized"] is kind] for kind in (False, True)]
    for token in (*kinds[0], *kinds[1]):
        yield f"{token} {token}a{token}\n{token[:-1]}"
    for one, other in (*product(*kinds), *product(*reversed(kinds))):
        yield from (one + other[size:] for size in range(1, len(other)) if one.endswith(other[:size]))


def _may_be_newer(data: bytes) -> bool:
    """Whether a text in UTF-8 may contain a character that the two libraries treat differently."""
    return any(first in data and any(begin in data for begin in begins) for first, begins in _UNICODE_17_BYTES)


def _nfc() -> Callable[[str], str]:
    """Returns the reference's NFC normalization: Python's may have another version of Unicode."""
    from tokenizers import normalizers

    return normalizers.NFC().normalize_str


def fastest(reference: Comparable, workers: int = 1) -> tuple[Encoder, str]:
    """Returns the fast encoder and "", or the reference and the reason for it, as a text for the user.

    ``workers`` is the number of processes that will encode.
    """
    try:
        return Fast(reference, workers), ""
    except ImportError as error:
        why = f"{error.name} is not installed ({install_command('gigatoken')})"
    except Exception as error:  # the library raises no narrower type
        why = f"{Fast.name}: " + str(error).partition("\n")[0]
    return reference, f"encoder: Hugging Face's tokenizers, about 30 times slower: {why}"


def check_ids_fit(encoder: Encoder, where: str) -> None:
    """Raises :class:`RequestError` if ids do not fit the type that Megatron chooses by the vocabulary size."""
    dtype = token_dtype(encoder.vocab_size)
    if encoder.largest_id > np.iinfo(dtype).max:
        what = f"has {encoder.vocab_size} tokens, for which Megatron writes {dtype.name}, and an id that does not fit"
        raise RequestError(Problem(where, what, str(encoder.largest_id), "use consecutive ids"))
