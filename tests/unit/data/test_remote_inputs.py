"""Inputs at URLs, through fsspec: in memory and on loopback; what a missing library and a broken connection say."""

from __future__ import annotations

import functools
import gzip
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from tridock.cli import main
from tridock.data.dataset.indexed_dataset import IndexedDataset
from tridock.data.dataset.manifest import read_manifest
from tridock.data.digest import sha256_of
from tridock.data.input.remote import url_name
from tridock.data.tokenize.tokenizer import BytePairTokenizer
from tridock.extras import install_command


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fsspec.AbstractFileSystem]:
    monkeypatch.chdir(tmp_path)
    BytePairTokenizer.train(["one two three"], 280).save(tmp_path / "t")
    system = fsspec.filesystem("memory")
    Path("a.parquet").touch()
    parquet.write_table(pyarrow.table({"text": ["three"]}), "a.parquet")
    for name, content in {
        "c/1.jsonl": b'{"text": "one"}\n',
        "c/2.txt.gz": gzip.compress(b"two\n"),
        "c/.hidden": b"x",
        "c/SHA256SUMS": b"x",
        "t/README.md": b"# x",
        "t/a.parquet": Path("a.parquet").read_bytes(),
        "page": b"<html>",
    }.items():
        system.pipe_file(f"/{name}", content)
    yield system
    system.rm("/", recursive=True)


def run(*inputs: str, more: tuple[str, ...] = ()) -> int:
    usual = [
        "--output-prefix",
        "o",
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--vocab-file",
        "t",
        "--encoder",
        "reference",
    ]
    return main(["data", "preprocess", "--input", *inputs, *usual, *more])


def documents() -> list[str]:
    dataset, tokenizer = IndexedDataset(Path("o_text_document")), BytePairTokenizer.load(Path("t"))
    return [tokenizer.decode(dataset[number].tolist()) for number in range(len(dataset.lengths))]


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("given", "expected", "note"),
    [
        ("memory://c/1.jsonl", ["one"], ""),
        ("memory://c", ["one", "two"], ""),
        ("memory://c/*", ["one", "two"], ""),
        ("memory://c/*.gz", ["two"], ""),
        ("memory://t/a.parquet", ["three"], ""),
    ],
)
def test_files_folders_and_patterns(
    memory: object, capsys: pytest.CaptureFixture[str], given: str, expected: list[str], note: str, workers: str
) -> None:
    assert run(given, more=("--workers", workers)) == 0
    assert documents() == expected
    assert capsys.readouterr().err == note


def test_what_was_read_is_in_the_manifest(memory: object) -> None:
    assert run("memory://t/a.parquet", "memory://c/2.txt.gz") == 0
    manifest = read_manifest(Path("o_text_document"))
    assert manifest is not None
    table, text = manifest.inputs
    assert (table.name, table.sha256) == ("a.parquet", sha256_of(Path("a.parquet")))
    assert (text.name, text.bytes) == ("2.txt.gz", len(gzip.compress(b"two\n")))


def test_what_cannot_be_read(
    memory: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, message in (
        ("memory://none", "memory://none: names no file; correct the URL"),
        ("memory://c/*.csv", "memory://c/*.csv: names no file; correct the URL"),
        ("memory://page", "memory://page: is an HTML page; "),
        ("gopher://host/a", "gopher://host/a: cannot be read; got Protocol not known: gopher; check the URL, "),
    ):
        assert run(given) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(message)
    assert run("memory://c", more=("--resume",)) == 2
    said = "--resume: cannot continue with standard input or a URL; leave --resume out and start from the beginning\n"
    assert capsys.readouterr().err == said

    def fails(*_: object) -> bytes:
        raise RuntimeError("connection lost")

    skip = ("--on-error", "skip", "--rejects", "r")
    monkeypatch.setattr(fsspec.implementations.memory.MemoryFile, "read", fails)
    assert run("memory://c/1.jsonl", more=skip) == 2
    assert "memory://c/1.jsonl: cannot be read; got connection lost; check the URL" in capsys.readouterr().err
    assert not list(Path().glob("o_*")) + list(Path().glob(".o*"))


@pytest.mark.parametrize(
    ("url", "module", "pipe"),
    [
        ("s3://bucket/a.jsonl", "s3fs", "aws s3 cp s3://bucket/a.jsonl -"),
        ("gs://bucket/a.jsonl", "gcsfs", "gcloud storage cat gs://bucket/a.jsonl"),
        ("https://host.example/a.jsonl", "aiohttp", "curl -fL https://host.example/a.jsonl"),
    ],
)
def test_a_missing_library_names_the_extra_and_the_pipe(
    memory: object,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    module: str,
    pipe: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for name in [name for name in sys.modules if name.startswith("fsspec.implementations.http")]:
        monkeypatch.delitem(sys.modules, name)
    sys.modules["fsspec.registry"]._registry.pop(url.partition(":")[0], None)
    assert run(url) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{url}: needs a library that is not installed; got ")
    assert f"give it through a pipe: {pipe} | tridock data preprocess --input - …\n" in said
    assert said.count(f"; {install_command(module)}, or give it") == 1 if module == "aiohttp" else "; give it" in said


@pytest.mark.optional
def test_a_web_server(memory: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="needs aiohttp (make remote)")
    Path("w").mkdir()
    Path("w/a.jsonl").write_bytes(b'{"text": "one"}\n' * 500_000)
    Path("a.parquet").rename("w/a.parquet")
    handler = functools.partial(SimpleHTTPRequestHandler, directory="w")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        try:
            assert run(f"{place}/a.jsonl?token=secret", f"{place}/a.parquet") == 0
            assert documents() == [*["one"] * 500_000, "three"]
            manifest = read_manifest(Path("o_text_document"))
            assert manifest is not None
            assert [(it.name, it.sha256) for it in manifest.inputs] == [
                (name, sha256_of(Path("w", name))) for name in ("a.jsonl", "a.parquet")
            ]
            capsys.readouterr()
            assert run(f"{place}/none?token=secret") == 2
            assert capsys.readouterr().err.splitlines()[-1] == f"{place}/none: names no file; correct the URL"
            monkeypatch.setattr(SimpleHTTPRequestHandler, "do_GET", lambda handler: handler.send_error(403))
            assert run(f"{place}/a.jsonl?token=secret") == 2
            said = capsys.readouterr().err.splitlines()[-1]
            assert said.startswith(f"{place}/a.jsonl: cannot be read; got 403, message='Forbidden', ")
            assert "secret" not in said
        finally:
            server.shutdown()
    assert run(f"{place}/a.jsonl?token=secret") == 2
    said = capsys.readouterr().err
    assert f"{place}/a.jsonl: cannot be read; got " in said
    assert "secret" not in said


def test_a_name_shows_no_secret() -> None:
    url = "https://me:secret@host.example:8/a.jsonl?X-Amz-Signature=secret#x"
    assert url_name(url) == "https://host.example:8/a.jsonl"
