"""Megatron's tiktoken tokenizers: a JSON list of tokens, each with its rank and its bytes."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tridock.errors import Problem, RequestError

if TYPE_CHECKING:
    from tridock.data.tokenize.encoders import Ids

PATTERNS: Final = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Regular expressions that split texts into words, by ``--tiktoken-pattern``."""
SPECIAL_TOKENS: Final = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
"""Special tokens of every such tokenizer; they have the first ids."""
VOCAB_SIZE: Final = 1 << 17
SPECIAL_IDS: Final = 1000


class TikTokenizer:
    """An encoder with Megatron's ids: special tokens have the first ids, and are recognized in texts.

    It reads as many of the file's tokens as fit in ``vocab_size``. A document ends with ``</s>``.
    """

    name = "tiktoken"
    always_closed = False
    accepts_special = True

    def __init__(
        self,
        file: Path,
        pattern: str = "v2",
        special_tokens: Sequence[str] = SPECIAL_TOKENS,
        special_ids: int = SPECIAL_IDS,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        """``special_ids`` is the number of ids reserved for special tokens.

        Raises :class:`RequestError` if the file cannot be read, or has too few tokens.
        """
        import tiktoken

        self.vocab_size, self.largest_id = vocab_size, vocab_size - 1
        names = [*special_tokens, *(f"<SPECIAL_{number}>" for number in range(len(special_tokens), special_ids))]
        special = {name: number for number, name in enumerate(names)}
        tokens = _read(file)[: vocab_size - special_ids]
        if len(tokens) < vocab_size - special_ids:
            what, got = f"has too few tokens for --vocab-size {vocab_size}", f"{len(tokens)} and {special_ids} special"
            todo = f"give --vocab-size {len(tokens) + special_ids}"
            raise RequestError(Problem(str(file), what, got, todo))
        ranks = {token: special_ids + number for number, token in enumerate(tokens)}
        self._model: Any = tiktoken.Encoding(
            file.stem, pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens=special
        )
        self.end_of_document = special["</s>"]
        about = [pattern, names, [base64.b64encode(token).decode() for token in tokens]]
        self.sha256 = hashlib.sha256(json.dumps(about).encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.array(self._model.encode(text, allowed_special="all"), np.uint32) for text in texts]


def _read(file: Path) -> list[bytes]:
    """Returns the bytes of each token, by rank; the first 256 are the single bytes."""
    todo = "name a JSON list of {rank, token_bytes, token_str}; for other tokenizers give HuggingFaceTokenizer"
    try:
        found = json.loads(file.read_bytes())
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in found]
        ranks = [entry["rank"] for entry in found]
    except OSError as error:
        got = error.strerror or str(error)
        raise RequestError(Problem(str(file), "cannot be read as a tokenizer", got, todo)) from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RequestError(Problem(str(file), "is not a tokenizer of Megatron's for tiktoken", "", todo)) from None
    if (
        ranks != list(range(len(tokens)))
        or tokens[:256] != [bytes([byte]) for byte in range(256)]
        or len(set(tokens)) < len(tokens)
    ):
        what = "must have all bytes first, every token once, and ranks that count up"
        raise RequestError(Problem(str(file), what, f"{len(tokens)} tokens", "create it again"))
    return tokens
