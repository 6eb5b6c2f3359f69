"""Encodes words of millions of characters in overlapping pieces: the libraries need 25 times the memory of a word.

Byte-level BPE gives two adjacent tokens again if it encodes only their text: its merges inside the two were the same,
and none crossed the border. The other way round, a sequence in which this holds for all adjacent tokens is the encoding
of its text: the first merge across a border would also happen in the text of the two tokens alone. So where two
overlapping pieces of a word have the same token in the same place, the tokens of the first up to there and of the
second from there on are the tokens of both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[Any]

_OVERLAP: Final = 1024
"""Characters that two pieces have in common, at least; more than the longest token."""
_SEEN: Final = 4 * _OVERLAP
"""Characters before a cut that must be of its kind."""
_Kinds = tuple[tuple[int, re.Pattern[str]], ...]
_KINDS: Final = (
    (1, re.compile(r"[A-Za-z]+|\n+| +|[!-/:-@\[-`{-~]+")),
    (2, re.compile("[\u03b1-\u03c9\u0430-\u044f\u05d0-\u05ea\u0627-\u063a\u0641-\u064a]+")),
    (3, re.compile("[\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3]+")),
    (4, re.compile("[\U0001f300-\U0001f64f]+")),
)
"""Characters that are one word if they repeat, in every split that is cut, and that NFC leaves alone; with their bytes
in UTF-8. Of two bytes: Greek, Cyrillic, Hebrew and Arabic letters."""
_DIGITS: Final = (1, re.compile("[0-9]+"))


class LongWords:
    """Cuts the long words of a tokenizer without added tokens."""

    def __init__(self, vocabulary: Mapping[str, int], digits: bool = True) -> None:
        """``vocabulary`` has the tokens in the alphabet of byte-level BPE: a character for each byte.

        ``digits``: cut runs of digits too. Not with Llama 3's split, which makes words of three digits, counted
        from the first one.
        """
        self._kinds: _Kinds = (*_KINDS, _DIGITS) if digits else _KINDS
        self._bytes = np.zeros(max(vocabulary.values()) + 1, np.int64)
        self._bytes[list(vocabulary.values())] = list(map(len, vocabulary))

    @classmethod
    def of(cls, model: Mapping[str, Any], digits: bool = True) -> LongWords | None:
        """Returns None for a ``model`` of tokenizer.json that may encode a word in another way, or drop bytes of it."""
        from tokenizers.pre_tokenizers import ByteLevel

        others = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
        if model["type"] != "BPE" or any(model.get(name) for name in others):
            return None
        vocabulary = model["vocab"]
        complete = all(byte in vocabulary for byte in ByteLevel.alphabet())
        return cls(vocabulary, digits) if complete and max(map(len, vocabulary)) < _OVERLAP else None

    def encode(self, text: str, encode: Callable[[str], Ids], size: int) -> Iterator[Ids]:
        """Yields the ids of a text in parts, from pieces of about ``size`` characters, if it can be cut there."""
        start, (end, width) = 0, self._cut(text, 0, size)
        ids = encode(text[:end])
        while end < len(text):
            if (border := self._border(ids, width)) is None:
                break
            count, overlap = border
            begin = end - overlap // width
            after, following = self._cut(text, begin, size)
            more = encode(text[begin:after])
            if (same := self._same_token(ids[count:], more, width)) is None:
                break
            yield ids[: count + same[0]]
            start, ids = begin + int(self._bytes[more[: same[1]]].sum()) // width, more[same[1] :]
            end, width = after, following
        yield ids if end == len(text) else encode(text[start:])

    def _border(self, ids: Ids, width: int) -> tuple[int, int] | None:
        """Returns the number of tokens before the overlap, and its bytes; None if tokens end within characters only."""
        last_first = ids[-_SEEN * width :][::-1]
        bytes_behind = np.cumsum(self._bytes[last_first])
        possible = (bytes_behind % width == 0) & (bytes_behind >= _OVERLAP * width)
        tokens = int(possible.argmax()) + 1
        overlap = int(bytes_behind[tokens - 1])
        if not possible.any() or overlap > (_SEEN - _OVERLAP) * width:
            return None
        return len(ids) - tokens, overlap

    def _same_token(self, one: Ids, other: Ids, width: int) -> tuple[int, int] | None:
        """Returns the numbers of a token that two encodings, which start in the same place, have in the same place."""
        other = other[: int(self._bytes[one].sum())]
        places, others = (np.cumsum(self._bytes[ids]) - self._bytes[ids] for ids in (one, other))
        common, in_one, in_other = np.intersect1d(places, others, assume_unique=True, return_indices=True)
        same = np.flatnonzero((common % width == 0) & (one[in_one] == other[in_other]))
        return (int(in_one[same[0]]), int(in_other[same[0]])) if len(same) else None

    def _cut(self, text: str, begin: int, size: int) -> tuple[int, int]:
        """Returns a place inside of a long word, and the bytes of each of its characters there.

        The place is at least ``size`` characters behind ``begin``, or the end of the text if no word is that long.
        """
        step = max(size, _SEEN)
        for place in range(begin + step, len(text) - 2, step):
            for width, kind in self._kinds:
                if kind.fullmatch(text, place - _SEEN, place + 2):
                    return place, width
        return len(text), 1
