"""A long word that is encoded in pieces has the ids of the whole word, in every split that is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from tests.unit.data.test_encoders import LLAMA_3, QWEN
from tridock.data.tokenize import encoders, long_words
from tridock.data.tokenize.encoders import Fast, Reference
from tridock.data.tokenize.long_words import LongWords
from tridock.data.tokenize.tokenizer import END_OF_TEXT, BytePairTokenizer

SIZE = 100
ONE_WORD = ("a", "ab", "abcdefgh", "\n", " ", "!", "-=", "+'\".,", "中", "中文字かナ한")
ONE_WORD += ("жшщ", "αβω", "שלם", "مرحبا", "😀😁🙏")
DIGITS = ("1234567890", "123")
SEVERAL_WORDS = ("中a", "é", "a\n", "9é")
WORDS = (*ONE_WORD, *DIGITS, *SEVERAL_WORDS)
UNKNOWN = "丁丂七丄丅丆万丈三上"
"""Characters of three tokens each."""
AROUND = (("", ""), ("x 1", "\n abc"), (" ", "z"), ("don'", "'s  "), ("\n", "\n"), ("文", " 中"), ("!", "a"))


@pytest.fixture(scope="module", params=["GPT-2", "Qwen", "Llama 3"])
def reference(request: pytest.FixtureRequest) -> Reference:
    """A tokenizer with tokens of at most 12 bytes, of which many merges compete."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=request.param == "Llama 3"))
    if request.param == "GPT-2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(QWEN if request.param == "Qwen" else LLAMA_3), "isolated", False)
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, last])
    if request.param == "Qwen":
        tokenizer.normalizer = normalizers.NFC()
    chance = random.Random(3)
    texts = ["".join(chance.choices(chance.choice(WORDS), k=chance.randrange(1, 30))) for _ in range(3000)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=alphabet,
        max_token_length=12,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Reference(BytePairTokenizer.from_json(tokenizer.to_str()))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_words, "_OVERLAP", 14)
    monkeypatch.setattr(long_words, "_SEEN", 56)
    monkeypatch.setattr(encoders, "LONG_TEXT", SIZE)


def model_of(reference: Reference) -> dict[str, Any]:
    model: dict[str, Any] = json.loads(reference.to_json())["model"]
    return model


@pytest.mark.parametrize("characters", [*WORDS, UNKNOWN])
def test_pieces_of_a_long_word_have_its_ids(reference: Reference, characters: str) -> None:
    description, chance = json.loads(reference.to_json()), random.Random(4)
    words = encoders.long_words_of(description, False)
    in_threes = characters in DIGITS and "{1,3}" in str(description["pre_tokenizer"])
    assert words is not None
    for before, after in AROUND:
        text = before + "".join(chance.choices(characters, k=chance.randrange(700, 800))) + after
        text += "".join(chance.choices(chance.choice(WORDS), k=300))
        sizes = []

        def encode(piece: str, sizes: list[int] = sizes) -> Any:
            sizes.append(len(piece))
            return np.array(reference.ids_of(piece), np.uint32)

        parts = list(words.encode(text, encode, SIZE))
        assert np.concatenate(parts).tolist() == reference.ids_of(text)
        if characters not in SEVERAL_WORDS and not in_threes:
            assert len(parts) >= 5
            assert sizes[0] <= 2 * SIZE


def test_tokens_are_the_same_by_place_and_id() -> None:
    words = LongWords({letter: number for number, letter in enumerate(["a", "b", "aa", "bbb"])})
    same = words._same_token
    assert same(np.array([2, 0, 1, 3]), np.array([0, 1, 0, 1, 3]), 1) == (1, 2)
    assert same(np.array([2, 1, 3, 0]), np.array([0, 0, 0, 3, 0]), 1) == (2, 3)
    assert same(np.array([2, 1, 3, 0]), np.array([0, 0, 0, 3, 0]), 3) == (2, 3)
    assert same(np.array([2, 0, 3]), np.array([0, 2, 3]), 2) is None


def test_a_word_whose_pieces_have_no_token_in_common_is_encoded_as_a_whole() -> None:
    words = LongWords({"a": 0, "aa": 1})

    def encode(text: str) -> Any:
        """Pairs from the end, which no tokenizer does."""
        return np.array([0] * (len(text) % 2) + [1] * (len(text) // 2), np.uint32)

    text = "a" * 2001
    assert [ids.tolist() for ids in words.encode(text, encode, SIZE + 1)] == [encode(text).tolist()]


def test_an_encoder_cuts_long_words(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(5)
    texts = ["".join(chance.choices(characters, k=1000)) for characters in (*ONE_WORD, UNKNOWN)]
    expected = [reference.ids_of(text) for text in texts]
    cut: list[str] = []
    whole = LongWords.encode
    monkeypatch.setattr(LongWords, "encode", lambda self, text, *more: cut.append(text) or whole(self, text, *more))
    assert [ids.tolist() for ids in Reference(reference.tokenizer).encode(texts)] == expected
    assert cut == texts
    pytest.importorskip("gigatoken", reason="the fast library is not installed: locks/operator.txt has it")
    fast = Fast(Reference(reference.tokenizer))
    cut.clear()
    assert [ids.tolist() for ids in fast.encode(texts)] == expected
    assert cut[: len(texts)] == texts  # a part of one is compared with the reference


@pytest.mark.parametrize("change", [{"type": "Unigram"}, {"dropout": 0.1}, {"unk_token": "<unk>"}, "no byte", "long"])
def test_words_of_other_tokenizers_are_not_cut(reference: Reference, change: Any) -> None:
    model = model_of(reference)
    if change == "no byte":
        del model["vocab"]["Ā"]
    elif change == "long":
        model["vocab"]["a" * 14] = len(model["vocab"])
    else:
        model |= change
    assert LongWords.of(model) is None


def test_a_tokenizer_with_tokens_in_words_is_not_cut(reference: Reference) -> None:
    description = json.loads(reference.to_json())
    assert encoders.long_words_of(description, False) is not None
    assert encoders.long_words_of(description, True) is None
