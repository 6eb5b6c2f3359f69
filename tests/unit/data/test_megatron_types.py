"""Tokenizers that Megatron names: SentencePiece's, tiktoken's, and ids as text. Ids: tests/unit/compat."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.data.tokenizers import HARD, LINES, TEXTS, sentencepiece_model, tiktoken_file
from tridock.cli import main
from tridock.data.dataset.indexed_dataset import IndexedDataset
from tridock.data.dataset.manifest import read_manifest
from tridock.data.tokenize import encoders, sentencepiece
from tridock.data.tokenize.encoders import Encoder
from tridock.data.tokenize.sentencepiece import SentencePieceTokenizer
from tridock.data.tokenize.tiktoken import TikTokenizer
from tridock.data.tokenize.words import Null
from tridock.errors import RequestError

NUMBERS = ["1 2 3", "9", "", "0 10"]


def preprocess(folder: Path, texts: list[str], *options: str) -> int:
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    files = ["--input", str(folder / "a.jsonl"), "--output-prefix", str(folder / "out"), "--workers", "2"]
    return main(["data", "preprocess", *files, "--append-eod", *options])


def assert_is_that_of(folder: Path, encoder: Encoder, texts: list[str], library: str) -> None:
    wanted = [[*ids.tolist(), encoder.end_of_document] for ids in encoder.encode(texts) if len(ids)]
    prefix = folder / "out_text_document"
    dataset = IndexedDataset(prefix)
    assert dataset.tokens.tolist() == [token for document in wanted for token in document]
    manifest = read_manifest(prefix)
    assert manifest is not None
    assert (manifest.vocab_size, manifest.end_of_document) == (encoder.vocab_size, encoder.end_of_document)
    assert library in manifest.versions


@pytest.mark.parametrize("name", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_a_data_set_of_sentencepieces(name: str, tmp_path: Path) -> None:
    model = sentencepiece_model(tmp_path)
    assert preprocess(tmp_path, TEXTS, "--tokenizer-type", name, "--tokenizer-model", str(model)) == 0
    assert_is_that_of(tmp_path, SentencePieceTokenizer(model), TEXTS, "sentencepiece")


# As Llama 2 and Gemma were made, and the library's own defaults.
_LLAMA: dict[str, object] = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
_KINDS: dict[str, dict[str, object]] = {
    "defaults": {},
    "llama": {**_LLAMA, "allow_whitespace_only_pieces": True},
    "gemma": {**_LLAMA, "add_dummy_prefix": False, "user_defined_symbols": ["<start>", "\n\n"]},
}


@pytest.mark.parametrize("kind", _KINDS)
def test_long_texts_of_sentencepieces_are_encoded_in_pieces(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = SentencePieceTokenizer(sentencepiece_model(tmp_path, **_KINDS[kind]))
    texts = [*HARD, " ".join(LINES * 9), "  ".join(LINES * 9), "\n".join(LINES * 9), "a" * 99, " one", "one <start> 2"]
    wanted = [ids.tolist() for ids in encoder.encode(texts)]
    monkeypatch.setattr(sentencepiece, "LONG_TEXT", 5)
    calls: list[str] = []
    encode_one = encoder._encode_one
    monkeypatch.setattr(encoder, "_encode_one", lambda piece: (calls.append(piece), encode_one(piece))[1])
    assert [ids.tolist() for ids in encoder.encode(texts)] == wanted
    assert len(calls) > len(texts) + 50


_WHOLE: dict[str, dict[str, object]] = {
    "unigram": {"model_type": "unigram", "hard_vocab_limit": False},
    "tokens of several words": {"split_by_whitespace": False},
    "spaces behind words": {"treat_whitespace_as_suffix": True},
}


@pytest.mark.parametrize("kind", _WHOLE)
def test_texts_of_other_sentencepieces_stay_whole(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = SentencePieceTokenizer(sentencepiece_model(tmp_path, **_WHOLE[kind]))
    texts = [*HARD, " ".join(LINES * 9)]
    wanted = [ids.tolist() for ids in encoder.encode(texts)]
    monkeypatch.setattr(sentencepiece, "LONG_TEXT", 5)
    monkeypatch.setattr(encoder, "_encode_one", pytest.fail)
    assert [ids.tolist() for ids in encoder.encode(texts)] == wanted


def test_a_data_set_of_tiktokens(tmp_path: Path) -> None:
    model = tiktoken_file(tmp_path)
    options = ("--vocab-size", "280", "--tiktoken-num-special-tokens", "10", "--tiktoken-pattern", "v1")
    assert (
        preprocess(tmp_path, TEXTS, "--tokenizer-type", "TikTokenizer", "--tokenizer-model", str(model), *options) == 0
    )
    assert_is_that_of(tmp_path, TikTokenizer(model, "v1", special_ids=10, vocab_size=280), TEXTS, "tiktoken")


@pytest.mark.parametrize(("options", "end"), [((), 10), (("--null-tokenizer-eod-id", "0"), 0)])
def test_a_data_set_of_ids(options: tuple[str, ...], end: int, tmp_path: Path) -> None:
    assert preprocess(tmp_path, NUMBERS, "--tokenizer-type", "NullTokenizer", "--vocab-size", "11", *options) == 0
    assert_is_that_of(tmp_path, Null(11, end), NUMBERS, "numpy")
    assert IndexedDataset(tmp_path / "out_text_document").tokens.tolist() == [1, 2, 3, end, 9, end, 0, 10, end]


@pytest.mark.parametrize("text", ["1 11", "1  2", "a", "-1", "\u0663", "1e3", " 1"])
def test_what_is_no_id_ends_the_run(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preprocess(tmp_path, ["1", text], "--tokenizer-type", "NullTokenizer", "--vocab-size", "11") == 2
    wrong = next(word for word in text.split(" ") if word not in ("1", "2"))
    assert capsys.readouterr().err.splitlines()[0] == (
        f"--tokenizer-type NullTokenizer: a word: is not a token id below 11; got {wrong!r}; "
        "raise --vocab-size, or correct the text"
    )


def test_options_that_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preprocess(tmp_path, [], "--tokenizer-type", "NullTokenizer", "--tokenizer-model", "m") == 2
    assert capsys.readouterr().err.splitlines() == [
        "--vocab-size: is required with --tokenizer-type NullTokenizer; name the tokenizer",
        "--tokenizer-model: does not go with --tokenizer-type NullTokenizer; got m; "
        "leave it out, and give --vocab-size",
    ]
    special = ("--tokenizer-special-tokens", "<unk>", "<s>", "--tiktoken-num-special-tokens", "0")
    assert preprocess(tmp_path, [], "--tokenizer-type", "TikTokenizer", "--tokenizer-model", "m", *special) == 2
    assert capsys.readouterr().err.splitlines() == [
        "--tiktoken-num-special-tokens: must be at least 2, the special tokens, and below the vocabulary's 131072; "
        "got 0; change it",
        "--tokenizer-special-tokens: must be <unk>, <s>, </s>, <mask>, <pad>, <cls>, <sep>, and then your own, "
        "each once; got <unk> <s>; name them all",
    ]
    options = ("--vocab-size", "5", "--null-tokenizer-eod-id", "5")
    assert preprocess(tmp_path, [], "--tokenizer-type", "NullTokenizer", *options) == 2
    assert capsys.readouterr().err == (
        "--null-tokenizer-eod-id: must be an id below 5; got 5; change it, or leave it out\n"
    )


def test_files_that_are_no_tokenizers(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("[1]")
    with pytest.raises(RequestError, match="is not a model of SentencePiece; name a model of SentencePiece"):
        SentencePieceTokenizer(wrong)
    with pytest.raises(RequestError, match="is not a tokenizer for tiktoken; name Megatron's JSON list of"):
        TikTokenizer(wrong)
    for kind in (SentencePieceTokenizer, TikTokenizer):
        with pytest.raises(RequestError, match="cannot be read as a tokenizer; got No such file or directory"):
            kind(tmp_path / "none")
    few = tiktoken_file(tmp_path)
    with pytest.raises(RequestError, match="too few tokens for --vocab-size 131072; got 286 and 1000 special; give"):
        TikTokenizer(few)
    entries = json.loads(few.read_text())
    entries[300 - 1 - 20]["token_bytes"] = base64.b64encode(b"a").decode()
    few.write_text(json.dumps(entries))
    with pytest.raises(RequestError, match="must have all bytes first, every token once"):
        TikTokenizer(few, special_ids=10, vocab_size=290)


def test_a_model_without_an_end_of_sentence_is_refused(tmp_path: Path) -> None:
    model = sentencepiece_model(tmp_path, eos_id=-1)
    with pytest.raises(RequestError, match="has no end of sentence token; train it with one: spm_train --eos_id=2"):
        SentencePieceTokenizer(model)


@given(words=st.lists(st.sampled_from(["1", "7", "10", "12", ""]), max_size=9), size=st.integers(1, 6))
def test_long_texts_of_ids_are_read_in_pieces(words: list[str], size: int) -> None:
    text = " ".join(words)
    expected = [int(word) for word in words] if set(words) <= {"1", "7", "10"} else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoders, "LONG_TEXT", size)
        if expected is None and text:
            with pytest.raises(RequestError):
                Null(11).encode([text])
        else:
            assert Null(11).encode([text])[0].tolist() == (expected or [])
