"""Small tokenizers of SentencePiece's and of Megatron's for tiktoken."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

from tridock.data.tokenize.encoders import HARD_TEXTS

LINES = ["the other one and the other line", "another line: a hundred words, and more", "Über Straßen, 12 345 mal"]
TEXTS = [*LINES, "one </s> two <unk>", "  two  spaces ", "\n\na\tb\r\n", "\U0001f600\u4e2d\u6587 e\u0301", ""]


def sentencepiece_model(folder: Path, **options: object) -> Path:
    import sentencepiece

    model = io.BytesIO()
    usual = {"vocab_size": 320, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2}
    lines = iter(LINES * 20)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **(usual | options))
    path = folder / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


def tiktoken_file(folder: Path) -> Path:
    """The 256 bytes, and 30 tokens that are made of one another."""
    words = ["th", "he", "the", " t", " th", " the", "er", "on", "one", " on", " one", "an", "and", " an", " and"]
    words += ["in", "li", "lin", "line", " l", " li", "ot", "oth", "  ", "   ", "\n\n", "12", "re", "or", "ore"]
    tokens = [*(bytes([byte]) for byte in range(256)), *map(str.encode, words)]
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for rank, token in enumerate(tokens)
    ]
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(entries))
    return path


CHARACTERS = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
"""Every character there is, but for halves of surrogate pairs."""
HARD = [*TEXTS, *HARD_TEXTS]
