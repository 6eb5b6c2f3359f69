"""Small tokenizers: of SentencePiece's, of Megatron's for tiktoken, and of published models' shapes."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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

CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+".replace('\\"', '"')
    + "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
SPLITS = {
    "Qwen": (CL100K % r"\p{N}",),
    "Llama 3": (CL100K % r"\p{N}{1,3}",),
    "GPT-4o": (O200K % (CONTRACTIONS, CONTRACTIONS, r"\p{N}{1,3}"),),
    "tekken": (O200K % ("", "", r"\p{N}"),),
    "DeepSeek V3": DEEPSEEK,
}
"""The regular expressions that split a text, one after the other, by model."""
SHAPES = (*SPLITS, "Gemma 3", "Llama 2")


def of_shape(shape: str, texts: Iterable[str]) -> str:
    """A small ``tokenizer.json`` with the normalizer, the split, the kind of model and of tokens of a published one."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE(ignore_merges=shape in ("Llama 3", "tekken")))
    alphabet: list[str] = []
    if shape in SPLITS:
        parts: list[Any] = [pre_tokenizers.Split(Regex(regex), "isolated", False) for regex in SPLITS[shape]]
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.normalizer = {"Qwen": normalizers.NFC(), "DeepSeek V3": normalizers.Sequence([])}.get(shape)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        spaces = normalizers.Replace(" ", "\u2581")
        prepend = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])
        tokenizer.normalizer = spaces if shape == "Gemma 3" else prepend
        tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")  # in training only
    bytes_ = [] if shape in SPLITS else ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=bytes_, show_progress=False, limit_alphabet=300
    )
    tokenizer.train_from_iterator([*texts, "123 4567 don't DON'T"], trainer)
    description = json.loads(tokenizer.to_str())
    if shape == "Llama 3":  # a word that no merge leads to
        description["model"]["vocab"]["\u0120qzxqzx"] = len(description["model"]["vocab"])
    if shape not in SPLITS:
        description["added_tokens"] = []
        description["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
        split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
        description["pre_tokenizer"] = split if shape == "Gemma 3" else None
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", normalized=False)])
    later = shape == "DeepSeek V3"
    tokenizer.add_tokens([AddedToken(token, normalized=later) for token in ("<tool_call>", "<tool", "\n\n\n")])
    text: str = tokenizer.to_str()
    return text
