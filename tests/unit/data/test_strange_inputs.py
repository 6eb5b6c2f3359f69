"""What people give as `--input` that is no JSON lines: what is said of it, and the remedy, which works."""

import gzip
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tridock.cli import main
from tridock.data.tokenize.tokenizer import BytePairTokenizer

SKIP = "or skip such lines with --on-error skip --rejects FILE"
LINE = '{"text": "one two"}\n'
DOWNLOAD = "download the file itself"
PAGE = f"is an HTML page; {DOWNLOAD} (of the hub: /resolve/, not /blob/), or extract its texts first"
POINTER = "is a pointer of Git LFS, not the file itself; got a pointer to 12,345 bytes; fetch it: "
POINTER += "git -C . lfs pull --include "
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
ARRAY = "write an object per line: jq -c '.[]' FILE > NEW.jsonl"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    BytePairTokenizer.train(["one two three " * 9], 280).save(tmp_path / "t")
    return tmp_path


def command(*more: str) -> list[str]:
    usual = ["--output-prefix", "o", "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "t", "--workers", "1"]
    return ["data", "preprocess", *usual, *more]


def tar() -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as file:
        file.addfile(tarfile.TarInfo("a"))
    return archive.getvalue()


STRANGE: dict[str, tuple[str, bytes, str]] = {
    "another key": (
        "a.jsonl",
        b'{"id": "7", "content": "one two", "n": 1}\n',
        "a.jsonl:1: has no key 'text'; got the keys content, id, n; name the key of the texts, such as "
        f"--json-keys content, {SKIP}",
    ),
    "UTF-16": (
        "a b.jsonl",
        LINE.encode("utf-16"),
        "a b.jsonl: is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 'a b.jsonl'",
    ),
    "UTF-16 without its mark": (
        "a.txt",
        LINE.encode("utf-16-le"),
        "a.txt: is UTF-16LE; convert it: iconv -f UTF-16LE ",
    ),
    "UTF-16BE without its mark": ("a", LINE.encode("utf-16-be"), "a: is UTF-16BE; convert it: iconv -f UTF-16BE "),
    "UTF-32": ("a", LINE.encode("utf-32"), "a: is UTF-32; convert it: iconv -f UTF-32 "),
    "a byte order mark": (
        "a.jsonl",
        LINE.encode("utf-8-sig"),
        "a.jsonl:1: begins with a byte order mark; got EF BB BF; remove it: sed 's/^\\xEF\\xBB\\xBF//' FILE > NEW, or",
    ),
    "Latin-1": (
        "a.jsonl",
        '{"text": "\xe9"}\n'.encode("latin-1"),
        "a.jsonl:1: is not UTF-8; got byte 0xe9 at column 11; convert the file, such as with iconv -f WINDOWS-1252 -t ",
    ),
    "an array in a line": (
        "a.json",
        b'[{"text": "a"}]',
        f'a.json:1: is not a JSON object; got [{{"text": "a"}}]; {ARRAY}',
    ),
    "an array": (
        "a.json",
        b'[\n  {"text": "a"}\n]\n',
        "a.json:1: is not valid JSON; got Expecting value: line 1 column ",
    ),
    "an object of several lines": (
        "a.json",
        json.dumps({"text": "a"}, indent=1).encode(),
        "a.json:1: is not valid JSON; got Expecting property name enclosed in double quotes: line 1 column 2 (char 1); "
        f"write an object per line: jq -c . FILE > NEW.jsonl, {SKIP}",
    ),
    "a pointer": ("a.jsonl", LFS, f"a.jsonl: {POINTER}a.jsonl"),
    "a pointer as text": ("a.txt", LFS, f"a.txt: {POINTER}a.txt"),
    "a pointer to Parquet": ("a.parquet", LFS, f"a.parquet: {POINTER}a.parquet"),
    "a page": ("a.jsonl", b"\n <!DOCTYPE HTML><html>", f"a.jsonl: {PAGE}"),
    "a compressed page": ("a.gz", gzip.compress(b"<HTML>"), f"a.gz: {PAGE}"),
    "a PDF": (
        "it's.pdf",
        b"%PDF-1.7\n%",
        "it's.pdf: is a PDF; extract its texts first: pdftotext 'it'\"'\"'s.pdf' NEW",
    ),
    "7z": ("a.jsonl.7z", b"7z\xbc\xaf\x27\x1c\0\4", "a.jsonl.7z: is an archive; unpack it, and give its files"),
    "RAR": ("a", b"Rar!\x1a\x07\1\0", "a: is an archive; unpack it, and give its files"),
    "zip": (
        "a.zip",
        b"PK\x03\x04\x14\0",
        "a.zip: is a zip archive; unpack it, and give its files, or its lines: unzip -p a.zip | tri",
    ),
    "tar": (
        "a.tar",
        tar(),
        "a.tar: is a tar archive; unpack it, and give its files, or its lines: tar -xOf a.tar | tri",
    ),
    "a compressed tar": (
        "a.tgz",
        gzip.compress(tar()),
        "a.tgz: is a tar archive; unpack it, and give its files, or its lines: tar -xOf FILE | tri",
    ),
    "lz4": ("a.lz4", b"\x04\x22\x4d\x18\x64", "a.lz4: is compressed with lz4; decompress it: lz4 -d a.lz4 NEW"),
    "a pickle": ("a.pkl", b"\x80\x04\x95", "a.pkl: is a pickle; write it as Parquet or JSON lines"),
}


@pytest.mark.parametrize("how", STRANGE)
def test_what_it_is_and_what_to_do(folder: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    name, content, message = STRANGE[how]
    Path(name).write_bytes(content)
    assert main(command("--input", name)) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(message)
    assert not list(folder.glob("*o*_text_document*")) + list(folder.glob(".o*"))


@pytest.mark.parametrize(
    "how", [how for how, (_, content, _) in STRANGE.items() if content[:3] in (b"%PD", b"\xff\xfe{")]
)
def test_standard_input_is_recognized_too(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    content = io.BufferedReader(io.BytesIO(STRANGE[how][1]))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=content))
    assert main(command("--input", "-")) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"standard input: {STRANGE[how][2].split(': ')[1]}: ")


@pytest.mark.parametrize(
    "how", ["UTF-16", "UTF-16 without its mark", "a byte order mark", "an array", "an array in a line"]
)
def test_the_remedy_works(folder: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    name, content, _ = STRANGE[how]
    Path(name).write_bytes(content)
    assert main(command("--input", name)) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    line = said.partition("; convert it: ")[2] or said.partition(f", {SKIP}")[0].rpartition(": ")[2]
    subprocess.run(line.replace("FILE", name).replace("NEW.jsonl", "NEW"), shell=True, check=True)
    assert main(command("--input", "NEW")) == 0
    assert " 1 documents in, 1 out (0 empty), 0 rejected; " in capsys.readouterr().out


def test_the_lines_of_a_tar_archive(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.jsonl").write_text(LINE)
    Path("b.jsonl").write_text(LINE)
    with tarfile.open("a b.tgz", "w:gz") as archive:
        archive.add("a.jsonl")
        archive.add("b.jsonl")
    assert main(command("--input", "a b.tgz")) == 2
    pipe = capsys.readouterr().err.partition("or its lines: ")[2].partition(" | ")[0].replace("FILE", "'a b.tgz'")
    lines = subprocess.run(pipe, shell=True, check=True, stdout=subprocess.PIPE).stdout
    assert lines == LINE.encode() * 2


def test_nothing_out_of_something_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skip = ["--on-error", "skip", "--rejects", "r"]
    bad = "--input: has too many invalid lines; got {} of {}, such as a.jsonl:{}: is blank; correct the input (leave "
    empty = "--input: gives no token; got 1 documents, 1 of them empty; name the key of the texts with --json-keys, or "
    for lines, more, message in (
        ("\n\n", [], bad.format(2, 2, 1)),
        ("\n\n", ["--max-rejects", "1"], bad.format(2, 2, 1)),
        (f"{LINE}\n\n", [], bad.format(2, 3, 2)),
        (f"{LINE}\n{LINE}{LINE}", ["--max-rejects", "0.2"], bad.format(1, 4, 2)),
        (f"{LINE}\n\n", ["--max-rejects", "0.7"], None),
        (f"{LINE}\n", [], None),
        ('{"text": ""}\n', [], empty),
        ("", [], None),
    ):
        Path("a.jsonl").write_text(lines)
        for file in folder.glob("o_text_document*"):
            file.unlink()
        assert main(command("--input", "a.jsonl", *skip, *more)) == (2 if message else 0)
        assert capsys.readouterr().err.splitlines()[-1:][0].startswith(message) if message else True
        assert Path("o_text_document.idx").exists() is not bool(message)
        assert not Path(".o.unfinished").exists()
        train = [
            "data",
            "train-tokenizer",
            "--input",
            "a.jsonl",
            "--vocab-size",
            "260",
            "--output",
            "new",
            *skip,
            *more,
        ]
        if message is not empty and lines:
            assert main(train) == (2 if message else 0)
            assert capsys.readouterr().err.splitlines()[-1].startswith(message or "")
    assert main(command("--input", "a.jsonl", "--max-rejects", "3")) == 2
    said = "--max-rejects: is not a share from 0 to 1; got 3.0; give 0.1 for a tenth of the lines\n"
    assert capsys.readouterr().err == said
