"""Tokenizers for tiktoken: Megatron's JSON list of tokens, Mistral's ``tekken.json``, and the ranks of Llama 3."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tridock.contracts.git_lfs import refuse_pointer
from tridock.errors import Problem, RequestError, reason_of

if TYPE_CHECKING:
    from tridock.data.tokenize.encoders import Ids

PATTERNS: Final = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Regular expressions that split texts into words, by ``--tiktoken-pattern``."""
_LLAMA_3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS: Final = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
"""Special tokens of every such tokenizer; they have the first ids."""
VOCAB_SIZE: Final = 1 << 17
SPECIAL_IDS: Final = 1000


_LLAMA_3_RANKS: Final = 128_000
_LLAMA_3_SPECIAL: Final = 256
"""Special tokens of Llama 3, which follow the others; the second, ``<|end_of_text|>``, ends a document."""


@dataclass(frozen=True, slots=True)
class _Contents:
    """What a file says: the ``tokens`` by rank, whose ids begin at ``first``, and the pattern that splits texts.

    ``special`` are the tokens that texts may spell, by id. ``end`` ends a document.
    """

    tokens: Sequence[bytes]
    first: int
    split: str
    special: Sequence[str]
    vocab_size: int
    end: int
    about: Sequence[object]


class TikTokenizer:
    """An encoder with Megatron's ids, or for ``tekken.json`` and Llama 3's ranks those of their own libraries.

    In Megatron's list special tokens have the first ids, and are recognized in texts; as many of the file's tokens are
    read as fit in ``vocab_size``. In the other files they are text. A document ends with ``</s>``, or Llama 3's
    ``<|end_of_text|>``.
    """

    name = "tiktoken"
    always_closed = False

    def __init__(
        self,
        file: Path,
        pattern: str = "v2",
        special_tokens: Sequence[str] = SPECIAL_TOKENS,
        special_ids: int = SPECIAL_IDS,
        vocab_size: int = VOCAB_SIZE,
        given: Sequence[str] = (),
    ) -> None:
        """``special_ids`` is the number of ids reserved for special tokens; ``given`` are options for Megatron's list.

        Raises :class:`RequestError` if the file cannot be read, has too few tokens, or is of a kind without options.
        """
        import tiktoken

        try:
            content = file.read_bytes()
            refuse_pointer(file, content)
            if given and not content.startswith(b"["):
                what = "goes only with Megatron's JSON list of tokens"
                raise RequestError([Problem(option, what, str(file), "leave it out") for option in given])
            if content.startswith(b"["):
                found = _of_megatron(file, content, pattern, special_tokens, special_ids, vocab_size)
            else:
                found = _of_tekken(content) if content.startswith(b"{") else _of_llama_3(content)
        except OSError as error:
            raise RequestError(Problem(str(file), "cannot be read as a tokenizer", reason_of(error), _TODO)) from None
        except (ValueError, TypeError, KeyError, RecursionError):
            raise RequestError(Problem(str(file), "is not a tokenizer for tiktoken", "", _TODO)) from None
        if len(set(found.tokens)) < len(found.tokens) or {bytes([byte]) for byte in range(256)} != {
            *found.tokens[:256]
        }:
            what = "must have all bytes first, every token once, and ranks that count up"
            raise RequestError(Problem(str(file), what, f"{len(found.tokens)} tokens", "create it again"))
        self._model: Any = tiktoken.Encoding(
            file.stem,
            pat_str=found.split,
            mergeable_ranks={token: found.first + rank for rank, token in enumerate(found.tokens)},
            special_tokens={name: number for number, name in enumerate(found.special)},
        )
        self.accepts_special = bool(found.special)
        self.vocab_size, self.largest_id, self.end_of_document = found.vocab_size, found.vocab_size - 1, found.end
        about = [*found.about, [base64.b64encode(token).decode() for token in found.tokens]]
        self.sha256 = hashlib.sha256(json.dumps(about).encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.array(self._model.encode(text, allowed_special="all"), np.uint32) for text in texts]


_TODO: Final = (
    "name Megatron's JSON list of {rank, token_bytes, token_str}, tekken.json, or Llama 3's original tokenizer.model; "
    "for other tokenizers give HuggingFaceTokenizer"
)


def _of_megatron(
    file: Path, content: bytes, pattern: str, special_tokens: Sequence[str], special_ids: int, vocab_size: int
) -> _Contents:
    names = [*special_tokens, *(f"<SPECIAL_{number}>" for number in range(len(special_tokens), special_ids))]
    tokens = _by_rank(json.loads(content))
    if len(tokens) < vocab_size - special_ids:
        what, got = f"has too few tokens for --vocab-size {vocab_size}", f"{len(tokens)} and {special_ids} special"
        todo = f"give --vocab-size {len(tokens) + special_ids}"
        raise RequestError(Problem(str(file), what, got, todo))
    kept = tokens[: vocab_size - special_ids]
    return _Contents(kept, special_ids, PATTERNS[pattern], names, vocab_size, names.index("</s>"), (pattern, names))


def _of_tekken(content: bytes) -> _Contents:
    """Reads Mistral's file, in which texts do not spell special tokens. Raises ValueError and the like."""
    found = json.loads(content)
    config = found["config"]
    split, first, size = config["pattern"], config["default_num_special_tokens"], config["default_vocab_size"]
    names = {token["token_str"]: token["rank"] for token in found.get("special_tokens") or ()}
    tokens = _by_rank(found["vocab"])[: size - first]
    if not (isinstance(split, str) and 2 < first < size == first + len(tokens)):
        raise ValueError(config)
    return _Contents(tokens, first, split, (), size, names.get("</s>", 2), ("tekken", split, first))


def _of_llama_3(content: bytes) -> _Contents:
    """Reads lines of a token in base64 and its rank, as many as Llama 3's. Raises ValueError."""
    pairs = [line.split(b" ") for line in content.splitlines()]
    tokens = [base64.b64decode(token, validate=True) for token, _ in pairs]
    if [int(rank) for _, rank in pairs] != list(range(_LLAMA_3_RANKS)):
        raise ValueError(len(pairs))
    size = _LLAMA_3_RANKS + _LLAMA_3_SPECIAL
    return _Contents(tokens, 0, _LLAMA_3, (), size, _LLAMA_3_RANKS + 1, ("llama-3",))


def _by_rank(entries: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Returns the bytes of each token. Raises ValueError if ranks do not count up."""
    tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
    if [entry["rank"] for entry in entries] != list(range(len(tokens))):
        raise ValueError("ranks")
    return tokens
