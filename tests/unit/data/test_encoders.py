"""The encoders: the fast one against the reference over every character and much that is hard; their messages."""

import json
import random
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.data.tokenizers import SHAPES, of_shape
from tridock.data.tokenize import encoders
from tridock.data.tokenize.encoders import HARD_TEXTS, Encoder, Fast, Reference, check_ids_fit, fastest
from tridock.data.tokenize.tokenizer import END_OF_TEXT, BytePairTokenizer
from tridock.data.tokenize.words import Vocabulary
from tridock.errors import RequestError, TridockError
from tridock.extras import install_command

TEXTS = [
    *HARD_TEXTS,
    "def main() -> int:\n    return 0\n" * 40,
    "I'll don't we've " * 30,
    "žluťoučký kůň 🐎 中文\n" * 20,
]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(BytePairTokenizer.train(TEXTS, 700))


@pytest.fixture(scope="module")
def fast(reference: Reference) -> Fast:
    pytest.importorskip("gigatoken", reason="the fast library is not installed: locks/operator.txt has it")
    return Fast(reference)


def message(kind: type[TridockError], action: object) -> str:
    with pytest.raises(kind) as caught:
        action()  # type: ignore[operator]
    return str(caught.value)


def assert_same(fast: Fast, reference: Reference, texts: list[str]) -> None:
    found, expected = fast.encode(texts), reference.encode(texts)
    assert {ids.dtype for ids in (*found, *expected)} <= {np.dtype(np.uint32), np.dtype(np.uint16)}
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in expected]


def test_the_reference_gives_the_ids_of_each_text(reference: Reference) -> None:
    expected = [reference.tokenizer.encode(text) for text in TEXTS]
    assert [ids.tolist() for ids in reference.encode(["", *TEXTS])] == [[], *expected]
    assert reference.encode([]) == []


@pytest.mark.parametrize("form", ["tokenizer.json", "vocab.json and merges.txt"])
def test_special_tokens_in_texts_are_tokens_if_accepted(reference: Reference, tmp_path: Path, form: str) -> None:
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_str(reference.tokenizer.to_json())
    theirs.add_special_tokens(["<|end", "<|endoftext|>"])
    theirs.save(str(tmp_path / "tokenizer.json"))
    if form == "tokenizer.json":
        ours = BytePairTokenizer.load(tmp_path)
    else:
        reference.tokenizer.save(tmp_path)
        ours = BytePairTokenizer.from_gpt2(tmp_path / "vocab.json", tmp_path / "merges.txt")
        theirs = Tokenizer.from_str(reference.tokenizer.to_json())
    ours.accept_special()
    texts = [*TEXTS, END_OF_TEXT, f"a {END_OF_TEXT}{END_OF_TEXT} b", f"{END_OF_TEXT}\n\u088f", "<|endoftext", "<|end|>"]
    expected = [theirs.encode(text, add_special_tokens=False).ids for text in texts]
    assert [ids.tolist() for ids in Reference(ours).encode(texts)] == expected
    assert sum(ours.end_of_text in ids for ids in expected) == 4
    # A tokenizer is the same however it is used, and another one with a token more.
    assert (reference.sha256 == Reference(ours).sha256) == (form != "tokenizer.json")
    assert Reference(ours).sha256 == BytePairTokenizer.from_json(ours.to_json()).sha256
    pytest.importorskip("gigatoken", reason="the fast library is not installed: locks/operator.txt has it")
    assert [ids.tolist() for ids in Fast(Reference(ours)).encode(texts)] == expected


def test_fast_over_characters_of_every_kind(fast: Fast, reference: Reference) -> None:
    """Of the first planes one in 8; tests/distributed/test_every_character.py has all."""
    assert_same(fast, reference, beside_others(chr(code) for code in range(0, 0x20000, 8) if not surrogate(code)))


def surrogate(code: int) -> bool:
    """Whether the code point is half of a pair, and no character."""
    return 0xD800 <= code < 0xE000


def beside_others(characters: Iterable[str]) -> list[str]:
    """Each beside letters, digits, signs, spaces and itself: whatever class the split gives it, it shows."""
    return [f"a{c}1{c}!{c}  {c}{c} \n{c}'s" for c in characters]


def test_fast_over_hard_texts(fast: Fast, reference: Reference) -> None:
    chance = random.Random(1)
    alphabet = "ab 1\n\t'!é中🐎\u0301\u200d\u00a0\x1c\x85<|>\ufeff"
    mixed = ["".join(chance.choices([*alphabet, "'ll", END_OF_TEXT, "    "], k=50)) for _ in range(3000)]
    long = ["a" * 1_000_000, " " * 300_000, "\n" * 100_001 + "x", "ab1" * 100_000, "!?" * 200_000, "中" * 200_000]
    assert_same(fast, reference, [*TEXTS, "", *mixed, *long])


def test_what_the_fast_one_remembers_is_bounded(
    fast: Fast, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fast._fast
    rooms = [Fast(reference, workers=workers)._cache_bytes >> 20 for workers in (1, 2, 3, 9)]
    assert rooms == [208, 104, 69, 64]
    monkeypatch.setattr(fast, "_cache_bytes", -(1 << 40))
    assert_same(fast, reference, TEXTS)
    assert fast._fast is not before


def test_no_newer_character_is_overlooked() -> None:
    """Their bytes are looked for before they themselves are."""
    newer = encoders._UNICODE_17.findall("".join(chr(code) for code in range(0x110000) if not surrogate(code)))
    assert len(newer) > 4000
    assert all(encoders._may_be_newer(f"é{character}🐎".encode()) for character in newer)
    assert not encoders._may_be_newer("é“—中한ก🐎👍🏽".encode())


@given(texts=st.lists(st.text(max_size=40), max_size=6))
def test_fast_over_any_texts(fast: Fast, reference: Reference, texts: list[str]) -> None:
    assert_same(fast, reference, texts)


@given(texts=st.lists(st.text("ab1 .,'\n\t!\x1c\u00a0\u4e2d\ua7ce\U0001e6c0\u1ad0", max_size=60), max_size=4))
def test_texts_with_newer_characters_have_the_references_ids(
    fast: Fast, reference: Reference, texts: list[str]
) -> None:
    assert_same(fast, reference, texts)


@pytest.fixture(scope="module", params=SHAPES)
def other(request: pytest.FixtureRequest) -> Reference:
    return Reference(BytePairTokenizer.from_json(of_shape(request.param, TEXTS)))


@pytest.mark.parametrize("accepts_special", [False, True])
def test_fast_with_the_splits_of_other_models(other: Reference, accepts_special: bool) -> None:
    pytest.importorskip("gigatoken", reason="the fast library is not installed: locks/operator.txt has it")
    reference = Reference(BytePairTokenizer.from_json(other.tokenizer.to_json()))
    if accepts_special:
        reference.tokenizer.accept_special()
    fast, why = fastest(Reference(reference.tokenizer))
    assert (fast.name, why) == ("gigatoken", "")
    chance = random.Random(2)
    words = [
        *(
            "'s",
            "'RE",
            "'\u017f",
            " ",
            "  ",
            "\n",
            "\r\n",
            "\t",
            "\u00a0",
            "\u2028",
            "\x85",
            "a",
            "B",
            "\u01c5",
            "1",
            "333",
        ),
        *(
            "4444",
            "\u0663",
            "\u00bd",
            "!",
            "_",
            "...",
            "\u4e2d",
            "\u3042",
            "\ud55c",
            "\u1100\u1161",
            "e\u0301",
            "\u0338",
        ),
        *("\u0323\u0307", "\u088f", "\U000105d2\u0307", "\u212b", "\U0001f44d"),
        *(END_OF_TEXT, "<tool_call>", "<tool_", " qzxqzx"),
    ]
    assert_same(fast, reference, [*TEXTS, *["".join(chance.choices(words, k=12)) for _ in range(1500)]])
    assert_same(fast, reference, beside_others(chr(code) for code in range(0, 0x20000, 64) if not surrogate(code)))
    decomposed = (unicodedata.normalize("NFD", chr(code)) for code in range(0xC0, 0x3100))
    assert_same(fast, reference, [f"a{text}b" for text in decomposed if len(text) > 1])


def test_texts_that_are_known_to_be_in_nfc() -> None:
    """No character of theirs changes, combines with one before it, or is a mark."""
    from tokenizers import normalizers

    second = set()
    for code in range(0x20000):
        parts = unicodedata.decomposition(chr(code)).split()
        second |= {chr(int(parts[1], 16))} if len(parts) == 2 and not parts[0].startswith("<") else set()
    stable = [c for c in map(chr, range(0x20000)) if not encoders._MAY_CHANGE_IN_NFC.search(c)]
    assert len(stable) > 30_000
    assert encoders._MAY_CHANGE_IN_NFC.search("\U00020000")
    assert not second.intersection(stable)
    assert not any(unicodedata.combining(c) for c in stable)
    assert normalizers.NFC().normalize_str(" ".join(stable)) == " ".join(stable)


def test_the_reference_goes_on_where_the_fast_one_does_not_read_or_has_other_ids(
    fast: Fast, reference: Reference, tmp_path: Path
) -> None:
    assert fastest(reference)[1] == ""
    description = json.loads(reference.tokenizer.to_json())

    def token(text: str, **how: bool) -> dict[str, object]:
        usual = {"normalized": False, "single_word": False, "lstrip": False, "rstrip": False, "special": False}
        return {"id": reference.vocab_size, "content": text, **usual, **how}

    for change, why in (
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}}, r"'\U00010d27\U00010f46'"),
        ({"added_tokens": [token("zqz", rstrip=True)]}, None),
        ({"added_tokens": [token("zqz", single_word=True)]}, None),
        ({"added_tokens": [token("zq"), token("azqb", normalized=True) | {"id": reference.vocab_size + 1}]}, None),
        ({"added_tokens": [token("zq"), token("1z", normalized=True) | {"id": reference.vocab_size + 1}]}, "'1zq'"),
    ):
        encoder, note = fastest(Reference(BytePairTokenizer.from_json(json.dumps(description | change))))
        assert encoder.name == "tokenizers", change
        assert note.startswith("encoder: Hugging Face's tokenizers, about 30 times slower: ")
        assert note.endswith(f"gigatoken: other ids for the text {why}") or why is None, note


def test_without_the_fast_library(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    encoder, why = fastest(reference)
    assert encoder.name == "tokenizers"
    assert why == (
        "encoder: Hugging Face's tokenizers, about 30 times slower: gigatoken is not installed "
        f"({install_command('gigatoken')})"
    )


class _Wrong:
    """A fast library that is right until ``after`` calls, and then gives one id more."""

    after = 0

    @classmethod
    def from_json(cls, text: str) -> "_Wrong":
        return cls(text)

    def __init__(self, text: str) -> None:
        from tokenizers import Tokenizer

        self._right = Tokenizer.from_str(text)
        self._calls = 0

    def encode(self, text: str | bytes) -> np.ndarray:
        self._calls += 1
        text = text if isinstance(text, str) else text.decode()
        return np.array(self._right.encode(text).ids + [0] * (self._calls > self.after), np.uint32)


@pytest.mark.parametrize("texts", [["some text"], ["some text " * 999]])
def test_other_ids_than_the_references_stop_the_run(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, texts: list[str]
) -> None:
    monkeypatch.setattr(_Wrong, "after", len(HARD_TEXTS))
    monkeypatch.setitem(sys.modules, "gigatoken", SimpleNamespace(Tokenizer=_Wrong))
    fast = Fast(reference)
    text = message(TridockError, lambda: fast.encode(texts))
    assert text.startswith("gigatoken: gives other ids than Hugging Face's tokenizers; got for ")
    assert text.endswith("; run again with --encoder reference, and report the text")
    assert "some text" in text or "ome text" in text


def test_a_text_that_the_fast_one_gives_other_ids_for_is_named(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Wrong, "after", 0)
    monkeypatch.setitem(sys.modules, "gigatoken", SimpleNamespace(Tokenizer=_Wrong))
    encoder, why = fastest(reference)
    assert encoder is reference
    assert why.endswith(f"30 times slower: gigatoken: other ids for the text {HARD_TEXTS[0][:60]!a}")


def test_words_of_a_vocabulary(tmp_path: Path) -> None:
    file = tmp_path / "vocab.json"
    file.write_text(json.dumps({"<unk>": 0, END_OF_TEXT: 1, "a": 2, "b": 7}))
    encoder: Encoder = Vocabulary(file)
    found = encoder.encode(["a  b\tc\n", "", f"{END_OF_TEXT} <unk> a"])
    assert [ids.tolist() for ids in found] == [[2, 7, 0, 1], [1], [1, 0, 2, 1]]
    assert (encoder.vocab_size, encoder.largest_id, encoder.end_of_document) == (4, 7, 1)
    file.write_text('{"a": 0}')
    assert message(RequestError, lambda: Vocabulary(file)) == (
        f"{file}: has no token <unk>; add it to the vocabulary\n"
        f"{file}: has no token {END_OF_TEXT}; add it to the vocabulary"
    )


def test_ids_that_do_not_fit_megatrons_type(tmp_path: Path) -> None:
    file = tmp_path / "vocab.json"
    file.write_text(json.dumps({"<unk>": 0, END_OF_TEXT: 65535}))
    check_ids_fit(Vocabulary(file), "x")
    file.write_text(json.dumps({"<unk>": 0, END_OF_TEXT: 65536}))
    assert message(RequestError, lambda: check_ids_fit(Vocabulary(file), "x")) == (
        "x: has 2 tokens, for which Megatron writes uint16, and an id that does not fit; got 65536; use consecutive ids"
    )
