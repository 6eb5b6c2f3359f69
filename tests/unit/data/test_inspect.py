"""`tridock data inspect`: counts, lengths, samples; for people and for programs."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data.sets import END, make
from tests.unit.data.test_indexed_dataset import DOCUMENTS, write
from tridock.cli import main
from tridock.contracts.data_index import HEADER
from tridock.data.dataset.inspect import inspect
from tridock.data.tokenize.tokenizer import BytePairTokenizer


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    make(Path("d"), [[], [1, 2], [3] * 70], rejected=4)
    assert main(["data", "inspect", "d"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "d",
        "  documents  3 (1 empty) in 2 sequences",
        "  tokens     74 of uint16",
        "  files      .bin 148 bytes, .idx 90 bytes",
        "  vocabulary 1,000 tokens, tokenizer cdcdcdcdcdcd",
        "  ends       token 999 ends every document",
        "  inputs     1 (a.jsonl), 7 bytes, key 'text'; 4 rejected",
        "  made with  tridock 0.1.0",
        "  tokens        min    p5    median    mean    p95    max",
        "  a document      0     0         3    24.7     71     71",
        "            0  ████████████████████████████████████████  1",
        "            1                                            0",
        "       2 to 3  ████████████████████████████████████████  1",
        "       4 to 7                                            0",
        "      8 to 15                                            0",
        "     16 to 31                                            0",
        "     32 to 63                                            0",
        "    64 to 127  ████████████████████████████████████████  1",
        "  document 0 (0 tokens):",
        "  document 1 (3 tokens): 1 2 999",
        f"  document 2 (71 tokens): {'3 ' * 64}…",
    ]


def test_megatrons_own_without_a_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    """Documents of several sequences, as from lists of texts."""
    tokens = struct.pack("<5i", 1, 2, 3, 4, 5)
    Path("d.bin").write_bytes(tokens)
    body = struct.pack("<3i", 1, 1, 3) + struct.pack("<3q", 0, 4, 8) + struct.pack("<3q", 0, 2, 3)
    Path("d.idx").write_bytes(HEADER.pack(b"MMIDIDX\x00\x00", 1, 4, 3, 3) + body)
    assert main(["data", "inspect", "d", "--samples", "1"]) == 0
    out = capsys.readouterr().out
    assert "  manifest   none: vocabulary, end of document and inputs are unknown\n" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["a", "document", "2", "2", "2", "2.5", "3", "3"] in lines
    assert ["a", "sequence", "1", "1", "1", "1.7", "3", "3"] in lines
    assert out.endswith("  document 0 (2 tokens): 1 2\n")


def test_texts_of_the_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = BytePairTokenizer.train(["one two " * 20], 280)
    tokenizer.save(Path("t"))
    text = "one\n[red]two\x1b[2J\x9b"
    write(Path("d"), [tokenizer.encode(text), [999]])
    gpt2 = ["--vocab-file", "t/vocab.json", "--merge-file", "t/merges.txt"]
    for flags in (["--vocab-file", "t"], ["--vocab-file", "t/tokenizer.json"], gpt2):
        assert main(["data", "inspect", "d", *flags]) == 0
        out = capsys.readouterr().out
        # Nothing of a text reaches the terminal as a command; ids that no token has are shown as they are.
        assert "): one\\n[red]two\\x1b[2J\\x9b\n" in out
        assert "document 1 (1 tokens): 999\n" in out
    assert "note" not in out
    make(Path("e"), [[1]])
    assert main(["data", "inspect", "e", "--vocab-file", "t"]) == 0
    assert "  note: this is not the tokenizer of the data: the texts may be wrong\n" in capsys.readouterr().out


def test_a_manifest_of_other_data_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    make(Path("d"), [[1]], tokens=7, part="documents 0 to 0 of the 9 of x", end_of_document=None)
    assert main(["data", "inspect", "d"]) == 0
    out = capsys.readouterr().out
    assert "  note: d.json belongs to other data: it counts 1 documents and 7 tokens\n" in out
    assert "  part       documents 0 to 0 of the 9 of x\n" in out
    assert "  ends       no token ends a document\n" in out


def test_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    make(Path("f/d"), [[], [1, 2]])
    write(Path("f/e"), [])
    assert main(["data", "inspect", "f", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    (first, second), version = shown["data_sets"], shown["version"]
    assert version == 1
    manifest = json.loads(Path("f/d.json").read_text())
    lengths = {"min": 0, "p5": 0, "median": 0, "p95": 3, "mean": 1.5, "max": 3}
    bars = [(0, 0, 1), (1, 1, 0), (2, 3, 1)]
    assert first == {
        "prefix": "f/d",
        "documents": 2,
        "empty_documents": 1,
        "sequences": 1,
        "tokens": 3,
        "dtype": "uint16",
        "bin_bytes": 6,
        "idx_bytes": 70,
        "document_lengths": lengths
        | {"histogram": [dict(zip(("first", "last", "count"), bar, strict=True)) for bar in bars]},
        "sequence_lengths": {"min": 3, "p5": 3, "median": 3, "p95": 3, "mean": 3.0, "max": 3}
        | {"histogram": [{"first": 2, "last": 3, "count": 1}]},
        "manifest": manifest,
        "samples": [
            {"document": 0, "tokens": 0, "ids": [], "text": None},
            {"document": 1, "tokens": 3, "ids": [1, 2, END], "text": None},
        ],
        "notes": [],
    }
    assert (second["documents"], second["document_lengths"]["histogram"], second["samples"]) == (0, [], [])


@settings(max_examples=30)
@given(DOCUMENTS, st.integers(1, 3))
def test_counts_are_those_of_the_documents(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], entries: int
) -> None:
    prefix = write(tmp_path_factory.mktemp("inspect") / "d", documents)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tridock.data.dataset.indexed_dataset._BLOCK", entries)
        found = inspect(prefix, 9, None)
    lengths = np.array([len(document) for document in documents], np.int64)
    assert (found.documents.count, found.documents.total) == (len(documents), int(lengths.sum()))
    assert found.empty_documents == int((lengths == 0).sum())
    assert [sum(bar.count for bar in found.documents.bars() if bar.first <= n <= bar.last) for n in (0, 1)] == [
        int((lengths == n).sum()) for n in (0, 1)
    ]
    assert [list(sample.ids) for sample in found.samples] == documents
    assert not found.several_sequences


def test_samples_lie_all_over() -> None:
    prefix = write(Path("d"), [[number] for number in range(101)])
    assert [sample.document for sample in inspect(prefix, 5, None).samples] == [0, 25, 50, 75, 100]
    assert [sample.document for sample in inspect(prefix, 1, None).samples] == [0]


def test_what_cannot_be_inspected(capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("d"), [[1]])
    for arguments, expected in (
        (
            ["d", "--samples", "-1", "--merge-file", "m"],
            "--samples: must be at least 0; got -1; give a number of documents\n"
            "--vocab-file: is required with --merge-file; add the vocab.json of these merges",
        ),
        (
            ["d", "--vocab-file", "vocab.json"],
            "--merge-file: is required with GPT2BPETokenizer; "
            "give GPT-2's merges.txt, or a tokenizer.json as --vocab-file",
        ),
        (
            ["none", "d", "none"],
            "none: there is no indexed data set; got neither none.idx nor none.bin; "
            "build it with `tridock data preprocess`, or correct data.data_path\n"
            "none: there is no indexed data set; got neither none.idx nor none.bin; "
            "build it with `tridock data preprocess`, or correct data.data_path",
        ),
    ):
        assert main(["data", "inspect", *arguments]) == 2
        out, err = capsys.readouterr()
        assert err == expected + "\n"
        # What can be is still shown.
        assert out.startswith("d\n") == ("none" in arguments)


def test_a_damaged_index(capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("d"), [[1], [2, 3], [4]])
    index = bytearray(Path("d.idx").read_bytes())
    index[-16:-8] = struct.pack("<q", -245)  # the third document
    Path("d.idx").write_bytes(index)
    assert main(["data", "inspect", "d"]) == 2
    assert capsys.readouterr().err == (
        "d.idx, document 2: begins before sequence 1, where document 1 does; got sequence -245; copy both files again, "
        "or build them again with `tridock data preprocess`\n"
    )
