"""Formats in which people have texts: each gives the same documents, and damage and bombs a clear error."""

from __future__ import annotations

import gzip
import json
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import csv, feather, ipc, parquet

from tests.patience import STEP_S
from tridock.cli import main
from tridock.data.dataset.indexed_dataset import IndexedDataset
from tridock.data.tokenize.tokenizer import BytePairTokenizer

TEXTS = ["one two", 'quoted "three",\tfour', "line\nbreak", "žluť \U0001f600"] + ["more words"] * 700
PLAIN = pyarrow.table({"id": range(len(TEXTS)), "text": TEXTS})
NESTED = pyarrow.table({"id": range(len(TEXTS)), "data": [{"n": 1, "text": text} for text in TEXTS]})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    BytePairTokenizer.train(TEXTS, 300).save(tmp_path / "t")
    return tmp_path


def command(*options: str) -> list[str]:
    usual = ["--output-prefix", "o", "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "t"]
    return ["data", "preprocess", *usual, *options]


def documents(key: str = "text") -> list[str]:
    dataset, tokenizer = IndexedDataset(Path(f"o_{key}_document")), BytePairTokenizer.load(Path("t"))
    return [tokenizer.decode(dataset[number].tolist()) for number in range(len(dataset.lengths))]


def jsonl(table: pyarrow.Table) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in table.to_pylist())


def stream(table: pyarrow.Table, path: Path) -> None:
    """As save_to_disk of `datasets` writes it."""
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)


def file(table: pyarrow.Table, path: Path) -> None:
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)


def binary(kind: pyarrow.DataType) -> pyarrow.Table:
    return pyarrow.table({"text": pyarrow.array([text.encode() for text in TEXTS], kind)})


FORMATS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "JSON lines": ("a.jsonl", lambda path: path.write_bytes(jsonl(PLAIN)), "text"),
    "nested JSON lines": ("a.jsonl", lambda path: path.write_bytes(jsonl(NESTED)), "data.text"),
    "a key with a dot": ("a.jsonl", lambda path: path.write_bytes(jsonl(PLAIN.rename_columns(["id", "a.b"]))), "a.b"),
    "CSV": ("a.csv", lambda path: csv.write_csv(PLAIN, path), "text"),
    "CSV of Excel": (
        "a.csv",
        lambda path: (csv.write_csv(PLAIN, path), path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())),
        "text",
    ),
    "compressed CSV": (
        "a.csv.gz",
        lambda path: (csv.write_csv(PLAIN, path), path.write_bytes(gzip.compress(path.read_bytes()))),
        "text",
    ),
    "TSV": ("a.tsv", lambda path: csv.write_csv(PLAIN, path, csv.WriteOptions(delimiter="\t")), "text"),
    "Arrow stream": ("a.arrow", lambda path: stream(PLAIN, path), "text"),
    "Arrow file": ("a", lambda path: file(PLAIN, path), "text"),
    "nested Arrow": ("a.arrow", lambda path: file(NESTED, path), "data.text"),
    "Feather": ("a.feather", lambda path: feather.write_feather(PLAIN, path), "text"),
    "nested Parquet": ("a.parquet", lambda path: parquet.write_table(NESTED, path), "data.text"),
    "binary Parquet": ("a.parquet", lambda path: parquet.write_table(binary(pyarrow.binary()), path), "text"),
    "large binary Arrow": ("a.arrow", lambda path: stream(binary(pyarrow.large_binary()), path), "text"),
    "categories": (
        "a.parquet",
        lambda path: parquet.write_table(pyarrow.table({"text": PLAIN["text"].dictionary_encode()}), path),
        "text",
    ),
}


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("how", FORMATS)
def test_the_same_documents(folder: Path, how: str, workers: str) -> None:
    name, write, key = FORMATS[how]
    write(Path(name))
    assert main(command("--input", name, "--json-keys", key, "--workers", workers)) == 0
    assert documents(key) == TEXTS


def test_whole_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, text in enumerate(TEXTS[:4]):
        Path("d").mkdir(exist_ok=True)
        Path(f"d/{number}.md").write_text(text)
    Path("d/4.html.gz").write_bytes(gzip.compress(b"<html>\nfive"))
    assert main(command("--input", "d", "--documents", "file")) == 0
    assert documents() == [*TEXTS[:4], "<html>\nfive"]
    assert main(command("--input", "d", "--documents", "file", "--input-format", "text")) == 2
    said = "--documents file: does not go with --input-format; got text; leave one of them out\n"
    assert capsys.readouterr().err == said
    Path("d/5.md").write_bytes(b"caf\xe9")
    assert main(command("--input", "d", "--documents", "file")) == 2
    said = 'd/5.md:1: has no text under \'text\'; got {"not UTF-8": "byte 0xe9 at 4"}; '
    assert said in capsys.readouterr().err
    skip = ("--on-error", "skip", "--rejects", "r")
    assert main(command("--input", "d", "--documents", "file", *skip)) == 0
    assert len(documents()) == 5
    assert main(command("--input", "d", "--documents", "file", "--json-keys", "a", "b")) == 2
    assert "--json-keys: names 2 keys, but d/0.md is text" in capsys.readouterr().err


def test_a_downloaded_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of `hf download` and of save_to_disk: descriptions lie beside the tables."""
    Path("d/data").mkdir(parents=True)
    parquet.write_table(PLAIN, "d/data/train-0.parquet")
    Path("d/README.md").write_text("# Corpus\n")
    Path("d/dataset_info.json").write_text("{}")
    for given, note in (
        ("d", "d: 1 tables are read, and not README.md and 1 more beside them\n"),
        ("d/data", ""),
        ("d/data/*", ""),
    ):
        assert main(command("--input", given, "--encoder", "reference")) == 0
        assert documents() == TEXTS
        assert capsys.readouterr().err == note
    Path("d/more.jsonl").write_text('{"text": "more"}\n')
    assert main(command("--input", "d")) == 0
    assert documents() == [*TEXTS, "more"]
    assert main(command("--input", "d/README.md", "d/data")) == 2


WRONG: dict[str, tuple[str, bytes | Callable[[Path], object], str]] = {
    "a row of more fields": (
        "a.csv",
        b"id,text\n1,one\n2,two, three\n",
        'a.csv:2: has no text under \'text\'; got {"fields": 3, "columns": 2}',
    ),
    "an open quote": (
        "a.csv",
        b'text\n"one\ntwo\n',
        "a.csv:1: the rest of the file cannot be read; got row 3: unexpected end",
    ),
    "CSV in Latin-1": (
        "a.csv",
        b"text\none\ncaf\xe9\n",
        'a.csv:2: has no text under \'text\'; got {"not UTF-8": "byte 0xe9 at 4"}',
    ),
    "no such column": (
        "a.csv",
        b"id,body\n1,one\n",
        "a.csv: has no column 'text'; got the columns id, body; name columns of",
    ),
    "two columns of one name": (
        "a.csv",
        b"text,text\n1,one\n",
        "a.csv: has no column 'text'; got the columns text, text; ",
    ),
    "no such nested key": (
        "a.jsonl",
        b'{"data": {"body": "one"}}\n',
        "a.jsonl:1: has no key 'text'; got the keys data; name the key of the texts, such as --json-keys data.body, or",
    ),
    "no such Arrow column": (
        "a.arrow",
        lambda path: stream(NESTED, path),
        "a.arrow: has no column 'text'; got the columns id, data;",
    ),
    "bytes that are no text": (
        "a.parquet",
        lambda path: parquet.write_table(pyarrow.table({"text": [b"\xff"]}), path),
        'a.parquet:1: has no text under \'text\'; got {"not UTF-8": "byte 0xff at 1"}',
    ),
    "half an Arrow file": (
        "a.arrow",
        lambda path: (file(PLAIN, path), path.write_bytes(path.read_bytes()[:2000])),
        "a.arrow: is not valid Arrow; got ",
    ),
    "half an Arrow stream": (
        "a.arrow",
        lambda path: (stream(PLAIN, path), path.write_bytes(path.read_bytes()[:3000])),
        "a.arrow:101: the rest of the file cannot be read; got ",
    ),
    "Feather 1": ("a.feather", b"FEA1\0\0\0\0", "a.feather: is Avro, HDF5, SQLite or Feather 1; write it as Parquet"),
}


@pytest.mark.parametrize("how", WRONG)
def test_what_is_wrong_is_named(folder: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    name, content, message = WRONG[how]
    Path(name).write_bytes(content) if isinstance(content, bytes) else content(Path(name))
    assert main(command("--input", name, "--workers", "1")) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(message)
    assert not list(folder.glob("o_*")) + list(folder.glob(".o*"))


@pytest.mark.parametrize("offset", [7, 1 << 20, -1])
def test_a_damaged_offset_is_noticed(folder: Path, capsys: pytest.CaptureFixture[str], offset: int) -> None:
    """Without a check texts would be read from elsewhere in memory."""
    stream(pyarrow.table({"text": ["one"] * 100}), Path("a.arrow"))
    data = bytearray(Path("a.arrow").read_bytes())
    offsets = data.index(struct.pack("<4i", 0, 3, 6, 9))
    data[offsets + 200 : offsets + 204] = struct.pack("<i", offset)
    Path("a.arrow").write_bytes(data)
    assert main(command("--input", "a.arrow", "--workers", "1")) == 2
    assert "a.arrow:1: the rest of the file cannot be read; got " in capsys.readouterr().err


def _lying_arrow(path: Path) -> None:
    """A compressed buffer that claims to hold 2**40 bytes."""
    options = ipc.IpcWriteOptions(compression="zstd")
    with ipc.new_stream(path, PLAIN.schema, options=options) as writer:
        writer.write_table(PLAIN)
    data, frame = bytearray(path.read_bytes()), b"\x28\xb5\x2f\xfd"
    start = data.rindex(frame)
    data[start - 8 : start] = (1 << 40).to_bytes(8, "little")
    path.write_bytes(data)


def _repeated(path: Path) -> None:
    """64 MB once in the file, and 100,000 times in memory."""
    column = pyarrow.DictionaryArray.from_arrays([0] * 100_000, ["a" * (64 << 20)])
    parquet.write_table(pyarrow.table({"text": column}), path, store_schema=False)


def _zstd(path: Path, first: bytes, block: bytes, count: int, last: bytes = b"") -> None:
    import zstandard

    with zstandard.open(path, "wb") as compressed:
        compressed.write(first)
        for _ in range(count):
            compressed.write(block)
        compressed.write(last)


BOMBS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a text that is repeated": ("a.parquet", _repeated, "a.parquet: needs more than 2 GiB at once; got "),
    "a buffer that lies": ("a.arrow", _lying_arrow, "a.arrow: needs more than 2 GiB at once; got "),
    "a line of gigabytes": (
        "a.jsonl.zst",
        lambda path: _zstd(path, b'{"text": "', b"a" * (1 << 24), 200),
        "a.jsonl.zst:1: is longer than 256 MiB; ",
    ),
    "a field of gigabytes": (
        "a.csv.zst",
        lambda path: _zstd(path, b'text\n"', (b"a" * 1023 + b"\n") * (1 << 14), 200),
        "a.csv.zst:",
    ),
    "a file of gigabytes": (
        "a.txt.zst",
        lambda path: _zstd(path, b"", b"a\n" * (1 << 23), 200),
        "a.txt.zst:1: is longer than",
    ),
}


SLOW = ("a field of gigabytes", "a file of gigabytes")


@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.full] * (how in SLOW)) for how in BOMBS])
def test_a_bomb_ends_before_memory_does(folder: Path, how: str) -> None:
    name, write, message = BOMBS[how]
    write(Path(name))
    assert Path(name).stat().st_size < 4 << 20
    more = ["--documents", "file"] if name.endswith(".txt.zst") else []
    argv = [sys.executable, "-m", "tridock.cli", *command("--input", name, "--workers", "1", *more)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    done = subprocess.run(argv, capture_output=True, text=True, timeout=STEP_S, env={"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(message)
    assert max(before, 3 << 20) >= resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # KiB
