"""Ids of ``tridock data preprocess`` beside those of megatron-core's own tokenizers, for texts of every character."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.data.tokenizers import CHARACTERS, HARD, sentencepiece_model, tiktoken_file
from tridock.data.tokenize.sentencepiece import SentencePieceTokenizer
from tridock.data.tokenize.tiktoken import TikTokenizer
from tridock.data.tokenize.words import Null

libraries = pytest.importorskip("megatron.core.tokenizers.text.libraries")
STEP = 256


def texts() -> list[str]:
    blocks = (CHARACTERS[start : start + STEP] for start in range(0, len(CHARACTERS), STEP))
    return [*HARD, *("".join(block) for block in blocks)]


def test_sentencepiece(tmp_path: Path) -> None:
    model = sentencepiece_model(tmp_path)
    own, theirs = SentencePieceTokenizer(model), libraries.SentencePieceTokenizer(str(model))
    assert [ids.tolist() for ids in own.encode(texts())] == [theirs.text_to_ids(text) for text in texts()]
    assert (own.end_of_document, own.vocab_size) == (theirs.eos_id, theirs.vocab_size)


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_tiktoken(pattern: str, tmp_path: Path) -> None:
    model = tiktoken_file(tmp_path)
    own = TikTokenizer(model, pattern, special_ids=10, vocab_size=290)
    theirs = libraries.TikTokenTokenizer(str(model), num_special_tokens=10, pattern=pattern, vocab_size=290)
    assert [ids.tolist() for ids in own.encode(texts())] == [theirs.text_to_ids(text) for text in texts()]
    assert (own.end_of_document, own.vocab_size) == (theirs.eod, theirs.vocab_size)


def test_ids_as_text() -> None:
    own, theirs = Null(11), libraries.NullTokenizer(11)
    assert [ids.tolist() for ids in own.encode(["1 2 3", "9", "0 10"])] == [
        theirs.text_to_ids(text) for text in ("1 2 3", "9", "0 10")
    ]
