"""``--tokenizer-type HuggingFaceTokenizer``: transformers' ids, special tokens included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tridock.cli import main
from tridock.data.dataset.indexed_dataset import IndexedDataset
from tridock.data.tokenize import encoders, huggingface
from tridock.data.tokenize.encoders import HARD_TEXTS
from tridock.data.tokenize.huggingface import HuggingFaceTokenizer, fastest_of
from tridock.errors import RequestError

TEXTS = ["one line", "another <end> line", "ümlaut \U0001f600 \U0001d518", ""]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama-like tokenizer: bytes, a token before every text, and another end of the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<begin>", "<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["one line and another line"] * 9, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 0)])
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": {"content": "<end>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_ids_are_those_of_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    own = HuggingFaceTokenizer(folder)
    assert [ids.tolist() for ids in own.encode(TEXTS)] == [theirs(text).input_ids for text in TEXTS]
    assert (own.end_of_document, own.vocab_size) == (1, len(theirs))
    assert own.decode(own.encode(TEXTS[2:3])[0].tolist()) == TEXTS[2]


def test_the_fast_encoder_has_the_same_ids(folder: Path) -> None:
    pytest.importorskip("gigatoken", reason="the fast library is not installed: locks/operator.txt has it")
    reference = HuggingFaceTokenizer(folder)
    encoder, why = fastest_of(folder)
    assert (encoder.name, why) == ("gigatoken", "")
    for name in ("vocab_size", "largest_id", "sha256", "end_of_document", "accepts_special"):
        assert getattr(encoder, name) == getattr(reference, name)
    texts = [*TEXTS, *HARD_TEXTS, "<begin>", "a<end><end> b"]
    assert [ids.tolist() for ids in encoder.encode(texts)] == [ids.tolist() for ids in reference.encode(texts)]


def test_other_models_take_hugging_faces_encoder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    description = json.loads((folder / "tokenizer.json").read_text())
    description["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(description))
    (tmp_path / "a.txt").write_text("One LINE\n")
    options = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder), "--workers", "1"]
    argv = ["data", "preprocess", "--input", str(tmp_path / "a.txt"), "--output-prefix", str(tmp_path / "o"), *options]
    assert main(argv) == 0
    assert capsys.readouterr().err == (
        "encoder: Hugging Face's tokenizers, about 30 times slower: the tokenizer is not like GPT-2's, Qwen's or"
        " Llama 3's\n"
    )
    tokens = IndexedDataset(tmp_path / "o_text_document").tokens.tolist()
    assert tokens == HuggingFaceTokenizer(folder).encode(["one line"])[0].tolist()
    assert main([*argv, "--encoder", "reference"]) == 0
    assert capsys.readouterr().err == ""


def test_a_data_set_has_them_and_ends_documents_with_the_eos_token(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:3]))
    options = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder), "--append-eod"]
    output = tmp_path / "out"
    argv = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(output), "--workers", "2", *options]
    assert main(["data", "preprocess", *argv]) == 0
    wanted = [[*ids.tolist(), 1] for ids in HuggingFaceTokenizer(folder / "tokenizer.json").encode(TEXTS[:3])]
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert dataset.tokens.tolist() == [token for document in wanted for token in document]


def test_what_is_wrong_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["data", "preprocess", "--input", "a", "--output-prefix", "o", "--tokenizer-type", "HuggingFaceTokenizer"]
    assert main([*argv, "--vocab-file", "v.json"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "--tokenizer-model: is required with --tokenizer-type HuggingFaceTokenizer; name the tokenizer",
        "--vocab-file: does not go with --tokenizer-type HuggingFaceTokenizer; got v.json;"
        " leave it out, and give --tokenizer-model",
    ]
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(RequestError, match=r"has no token <\|endoftext\|>, and no eos_token; name the token"):
        HuggingFaceTokenizer(folder)
    with pytest.raises(
        RequestError, match="cannot be read as a tokenizer; got No such file or directory; name a folder"
    ):
        HuggingFaceTokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not valid JSON; got Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[" * 100_000, "is not valid JSON; got maximum recursion depth exceeded "),
        ("[]", "is not a JSON object; got []"),
        ('{"eos_token": 1}', "has an eos_token that is not a text; got 1"),
        ('{"eos_token": {"content": ["a"]}}', 'has an eos_token that is not a text; got ["a"]'),
    ],
)
def test_a_configuration_that_cannot_be_read_does_not_change_the_end(folder: Path, content: str, says: str) -> None:
    config = folder / "tokenizer_config.json"
    config.write_text(content)
    with pytest.raises(RequestError) as caught:
        HuggingFaceTokenizer(folder)
    assert str(caught.value).startswith(f"{config}: {says}")
    assert str(caught.value).endswith("; correct the file, or remove it")


def test_a_long_text_has_the_ids_of_the_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["one line and<end> another line, 12  lines\n\n and  one", "one", "", "o" * 40]
    encoder = HuggingFaceTokenizer(folder)
    whole = [ids.tolist() for ids in encoder.encode(texts)]
    assert all(ids[0] == 0 for ids in whole)
    monkeypatch.setattr(huggingface, "LONG_TEXT", 3)
    monkeypatch.setattr(encoders, "LONG_TEXT", 3)
    calls = []
    ids_of = encoder.ids_of
    monkeypatch.setattr(encoder, "ids_of", lambda text: (calls.append(text), ids_of(text))[1])
    assert [ids.tolist() for ids in encoder.encode(texts)] == whole
    assert len(calls) == 10
