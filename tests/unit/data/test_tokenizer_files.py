"""Tokenizers as people have them: of the hub, Mistral and Llama 3; with a token before texts, or none behind."""

from __future__ import annotations

import base64
import json
from itertools import product
from pathlib import Path

import pytest

from tests.unit.data.tokenizers import TEXTS, sentencepiece_model, tiktoken_file
from tridock.cli import main
from tridock.contracts.tokenizers import sha256s_in
from tridock.data.dataset.indexed_dataset import IndexedDataset
from tridock.data.dataset.manifest import read_manifest
from tridock.data.tokenize.tokenizer import BytePairTokenizer

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""As in Meta's own tokenizer.py."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path


def preprocess(kind: str, *options: str) -> int:
    usual = ("--input", "a.jsonl", "--output-prefix", "o", "--workers", "1")
    return main(["data", "preprocess", *usual, "--tokenizer-type", kind, *options])


def documents() -> list[list[int]]:
    """The tokens of every document that has some."""
    dataset = IndexedDataset(Path("o_text_document"))
    return [dataset[number].tolist() for number in range(len(dataset.lengths))]


def ranks_file(folder: Path) -> Path:
    """As many ranks as Llama 3's, with the single bytes in another order, and pairs and triples of letters."""
    letters = [bytes([byte]) for byte in b"etaoinshrdlu 0123456789.,-'\n\t"]
    singles = sorted((bytes([byte]) for byte in range(256)), key=lambda byte: byte not in letters)
    pairs = [a + b for a, b in product(singles, singles)]
    triples = [a + b for a, b in product(pairs, singles[:1])]
    tokens = [*singles, *pairs, *triples][:128_000]
    path = folder / "tokenizer.model"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path


def test_the_ranks_of_llama_3(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    ranks = load_tiktoken_bpe(str(ranks_file(folder)))
    special = {"<|begin_of_text|>": 128_000, "<|end_of_text|>": 128_001}
    theirs = tiktoken.Encoding("llama", pat_str=LLAMA_3, mergeable_ranks=ranks, special_tokens=special)
    options = ("--tokenizer-model", "tokenizer.model", "--append-eod")
    assert preprocess("TikTokenizer", *options) == 0
    assert documents() == [[*theirs.encode(text, disallowed_special=()), 128_001] for text in TEXTS if text]
    manifest = read_manifest(Path("o_text_document"))
    assert manifest is not None
    assert (manifest.vocab_size, manifest.end_of_document) == (128_256, 128_001)
    assert preprocess("Llama2Tokenizer", *options) == 2
    said = "tokenizer.model: is not a model of SentencePiece; name a model of SentencePiece, as spm_train writes it "
    assert capsys.readouterr().err.endswith(f"{said}(Llama 3's is for --tokenizer-type TikTokenizer)\n")
    lines = (folder / "tokenizer.model").read_bytes().splitlines(keepends=True)
    for wrong in (lines[:-1], [*lines[:-1], lines[0]], [*lines[:-1], b"x\n"]):
        (folder / "tokenizer.model").write_bytes(b"".join(wrong))
        assert preprocess("TikTokenizer", *options) == 2
        assert "tokenizer.model: is not a tokenizer for tiktoken; name Megatron's JSON list" in capsys.readouterr().err


def test_tekken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import tiktoken

    entries = json.loads(tiktoken_file(folder).read_text())
    config = {"pattern": LLAMA_3, "default_vocab_size": 290, "default_num_special_tokens": 10, "version": "v3"}
    special = [
        {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(("<unk>", "</s>", "<s>"))
    ]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] + 10 for entry in entries[:280]}
    theirs = tiktoken.Encoding("tekken", pat_str=LLAMA_3, mergeable_ranks=ranks, special_tokens={})
    for more, end in ({"special_tokens": special}, 1), ({}, 2):
        Path("tekken.json").write_text(json.dumps({"config": config, "vocab": entries, **more}))
        assert preprocess("TikTokenizer", "--tokenizer-model", "tekken.json", "--append-eod") == 0
        assert documents() == [[*theirs.encode(text), end] for text in TEXTS if text]
        manifest = read_manifest(Path("o_text_document"))
        assert manifest is not None
        assert (manifest.vocab_size, manifest.end_of_document) == (290, end)
    assert preprocess("TikTokenizer", "--tokenizer-model", "tekken.json", "--tiktoken-pattern", "v1") == 2
    said = "--tiktoken-pattern: goes only with Megatron's JSON list of tokens; got tekken.json; leave it out\n"
    assert capsys.readouterr().err == said
    for wrong in ({"default_vocab_size": 999}, {"default_num_special_tokens": 0}, {"pattern": 1}):
        Path("tekken.json").write_text(json.dumps({"config": config | wrong, "vocab": entries}))
        assert preprocess("TikTokenizer", "--tokenizer-model", "tekken.json") == 2
        assert "tekken.json: is not a tokenizer for tiktoken; " in capsys.readouterr().err


def without_end(folder: Path) -> None:
    """A tokenizer in all forms, whose ``<|endoftext|>`` has another name."""
    BytePairTokenizer.train(TEXTS * 9, 280).save(folder / "t")
    for file in (folder / "t").iterdir():
        file.write_text(file.read_text().replace("<|endoftext|>", "<|other|>"))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("GPT2BPETokenizer", ("--vocab-file", "t/tokenizer.json")),
        ("GPT2BPETokenizer", ("--vocab-file", "t/tokenizer.json", "--allow-special")),
        ("GPT2BPETokenizer", ("--vocab-file", "t/vocab.json", "--merge-file", "t/merges.txt")),
        ("HuggingFaceTokenizer", ("--tokenizer-model", "t")),
        ("SentencePieceTokenizer", ("--tokenizer-model", "tokenizer.model")),
    ],
)
def test_an_end_of_document_is_needed_only_if_it_is_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str], kind: str, options: tuple[str, ...]
) -> None:
    without_end(folder)
    sentencepiece_model(folder, eos_id=-1)
    assert preprocess(kind, *options, "--append-eod") == 2
    assert ": has no " in capsys.readouterr().err.splitlines()[-1]
    assert not list(folder.glob("o_*"))
    assert preprocess(kind, *options) == 0
    manifest = read_manifest(Path("o_text_document"))
    assert manifest is not None
    assert (len(documents()), manifest.end_of_document) == (sum(map(bool, TEXTS)), None)


def test_no_token_before_texts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import tokenizers

    BytePairTokenizer.train(TEXTS * 9, 280).save(folder / "t")
    file = folder / "t" / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["<s>"])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    tokenizer.save(str(file))
    plain = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    options, none = ("--tokenizer-model", "t"), "--tokenizer-hf-no-include-special-tokens"
    for more in ((), ("--encoder", "reference")):
        assert preprocess("HuggingFaceTokenizer", *options, *more) == 0
        assert documents() == [[begin, *ids] for ids in plain]
        assert preprocess("HuggingFaceTokenizer", *options, none, *more) == 0
        assert documents() == [ids for ids in plain if ids]
        manifest = read_manifest(Path("o_text_document"))
        assert manifest is not None
        assert manifest.tokenizer_sha256 in sha256s_in(Path("t"))
    capsys.readouterr()
    assert preprocess("NullTokenizer", "--vocab-size", "9", none) == 2
    said = f"{none}: does not go with --tokenizer-type NullTokenizer; leave it out, and give --vocab-size\n"
    assert capsys.readouterr().err == said


def test_a_folder_with_gpt2s_two_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BytePairTokenizer.train(TEXTS * 9, 280).save(folder / "t x")
    assert preprocess("GPT2BPETokenizer", "--vocab-file", "t x") == 0
    before = documents()
    (folder / "t x" / "tokenizer.json").unlink()
    assert preprocess("GPT2BPETokenizer", "--vocab-file", "t x") == 0
    assert documents() == before
    capsys.readouterr()
    assert preprocess("HuggingFaceTokenizer", "--tokenizer-model", "t x") == 2
    said = capsys.readouterr().err
    assert said.startswith("t x: has no tokenizer.json; save it with transformers: AutoTokenizer.from_pretrained(DIR)")
    assert "GPT2BPETokenizer with --vocab-file vocab.json and --merge-file merges.txt" in said
    assert "SentencePieceTokenizer or TikTokenizer with --tokenizer-model tokenizer.model" in said


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "gpt2"])
def test_a_name_on_the_hub_says_how_to_download_it(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert preprocess("HuggingFaceTokenizer", "--tokenizer-model", name) == 2
    assert capsys.readouterr().err == (
        f"--tokenizer-model: is not here, and nothing is downloaded; got {name}; hf download {name} --include '*token*'"
        f" vocab.json merges.txt --local-dir {name.rpartition('/')[2]}, and name that folder\n"
    )


def test_todays_options_of_megatron_are_accepted_or_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accepted = "--lang en --padded-vocab-size 9 --workers-to-check 1 2 --max-documents 9 --performance-dir p"
    usual = ("NullTokenizer", "--vocab-size", "20")
    Path("a.jsonl").write_text('{"text": "1 2"}\n')
    assert preprocess(*usual, *accepted.split(), "--legacy-tokenizer") == 0
    notes = capsys.readouterr().err.splitlines()
    assert [note.partition(": has no effect: ")[0] for note in notes] == [
        *("--lang", "--workers-to-check", "--max-documents", "--performance-dir", "--legacy-tokenizer"),
        "--padded-vocab-size",
    ]
    refused = "--find-optimal-num-workers --trust-remote-code --tokenizer-hf-no-use-fast --force-system-message"
    values = "--tokenizer-metadata m --vocab-extra-ids 1 --tokenizer-prompt-format x --image-tag-type x"
    assert preprocess(*usual, *refused.split(), *values.split(), "--tokenizer-sentencepiece-legacy") == 2
    said = capsys.readouterr().err
    assert all(f"{word}: is not supported: " in said for word in f"{refused} {values}".split() if word[:2] == "--")
    assert "--find-optimal-num-workers: is not supported: --workers is all cores by default; leave it out\n" in said
