"""Inputs by path, pattern and folder; whole lines whatever the compression; every damaged file is noticed."""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tridock.data.dataset.manifest import Input
from tridock.data.input import sources
from tridock.data.input.files import find_sources, kind_of_name
from tridock.data.input.sources import Chunk, Kind, Source, lines_of, read_again, read_chunks
from tridock.errors import ClusterError, RequestError
from tridock.extras import extras_explained, install_command

LINES = b"".join(b'{"text": "%d"}\n' % number for number in range(5000))
TODO = "copy or compress the file again, or keep what can be read with --on-error skip --rejects FILE"
FIND = "give files, folders or patterns that exist, or - for standard input"


def zstd(data: bytes) -> bytes:
    library = pytest.importorskip("zstandard")
    frames = [library.ZstdCompressor().compress(part) for part in (data[:1000], data[1000:])]
    return b"".join(frames)


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data[:1000]) + gzip.compress(data[1000:]),
    "bz2": lambda data: bz2.compress(data[:1000]) + bz2.compress(data[1000:]),
    "xz": lambda data: lzma.compress(data[:1000]) + lzma.compress(data[1000:]),
    "zstd": zstd,
}


def read(path: Path, size: int = 4096, kind: Kind = Kind.JSONL) -> list[Chunk]:
    source = Source(str(path), path, kind, path.stat().st_size)
    return list(read_chunks(0, source, ["text"], size))


def message(action: Callable[[], object]) -> str:
    with pytest.raises(RequestError) as caught:
        action()
    return str(caught.value)


@settings(max_examples=40)
@given(
    st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"")), max_size=20),
    st.integers(1, 99),
    st.booleans(),
)
def test_chunks_are_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], size: int, compressed: bool
) -> None:
    path = tmp_path_factory.mktemp("chunks") / "a"
    data = b"\n".join([b"[", *lines])  # no compression begins so
    stored = gzip.compress(data) if compressed else data
    path.write_bytes(stored)
    *chunks, last = read(path, size)
    assert b"".join(chunk.data for chunk in chunks) == data
    assert all(chunk.data.endswith(b"\n") for chunk in chunks[:-1])
    for chunk in chunks:
        start = chunk.offset - len(chunk.data)
        assert chunk.first_line == data[:start].count(b"\n") + 1
        assert chunk.lines == chunk.data.count(b"\n") + (not chunk.data.endswith(b"\n"))
        assert chunk.digest.result() == hashlib.sha256(data[: chunk.offset]).hexdigest()
        assert (chunk.plain is None) == compressed
        if chunk.plain is not None:
            assert lines_of(chunk) == (chunk.plain, start, len(chunk.data))
            assert read_again(chunk.source, *lines_of(chunk)) == chunk.data
    assert last.finished == Input(name="a", bytes=len(stored), sha256=hashlib.sha256(stored).hexdigest())


@pytest.mark.parametrize("how", COMPRESSORS)
def test_compressed_by_content_and_not_by_name(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(COMPRESSORS[how](LINES))
    chunks = read(path)
    assert b"".join(chunk.data for chunk in chunks) == LINES
    assert sum(chunk.lines for chunk in chunks) == 5000
    assert chunks[-1].finished is not None
    assert chunks[-1].finished.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("how", COMPRESSORS)
def test_a_file_that_was_cut_short(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a.gz"
    whole = COMPRESSORS[how](LINES)
    path.write_bytes(whole[: len(whole) - 9])
    broken = [chunk for chunk in read(path) if chunk.broken is not None]
    assert len(broken) == 1
    line = broken[0].first_line
    assert str(broken[0].broken) == f"{path}:{line}: the file ends inside its compressed data; {TODO}"
    assert b"".join(chunk.data for chunk in read(path)) == LINES[: sum(len(chunk.data) for chunk in read(path))]


@pytest.mark.parametrize("how", ["bz2", "xz"])
def test_streams_after_zeros_are_read(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a"
    compress = {"bz2": bz2.compress, "xz": lzma.compress}[how]
    path.write_bytes(compress(LINES[:1000]) + b"\0" * 8 + compress(LINES[1000:]) + b"\0" * 4)
    assert b"".join(chunk.data for chunk in read(path)) == LINES


@pytest.mark.parametrize("how", COMPRESSORS)
def test_a_later_stream_with_a_damaged_header(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a"
    first, second = (COMPRESSORS[how](part)[:] for part in (LINES, b"last\n"))
    path.write_bytes(first + bytes([second[0] ^ 1]) + second[1:])
    chunks = read(path)
    (broken,) = [chunk.broken for chunk in chunks if chunk.broken is not None]
    assert str(broken).startswith(f"{path}:5001: the rest of the file cannot be read; got ")
    assert b"".join(chunk.data for chunk in chunks) == LINES


def test_zstd_with_a_large_window_after_a_skippable_frame(tmp_path: Path) -> None:
    library = pytest.importorskip("zstandard")
    parameters = library.ZstdCompressionParameters.from_level(1, window_log=28)
    long = library.ZstdCompressor(compression_params=parameters).compressobj()
    path = tmp_path / "a"
    skipped = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    path.write_bytes(skipped + long.compress(LINES) + long.flush() + skipped)
    assert b"".join(chunk.data for chunk in read(path)) == LINES


def test_a_file_with_a_damaged_place(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    whole = bytearray(gzip.compress(LINES))
    whole[-6] ^= 1  # its checksum
    path.write_bytes(whole)
    broken = [chunk for chunk in read(path) if chunk.broken is not None]
    assert len(broken) == 1
    text = str(broken[0].broken)
    assert text.startswith(f"{path}:5001: the rest of the file cannot be read; got CRC check failed ")
    assert text.endswith(f"; {TODO}")


def test_folders_patterns_and_files_in_order(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "b/1.txt.gz", "b/.hidden", "b/.git/x", "c*.jsonl", "cc.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    names = [str(tmp_path / "cc.jsonl"), str(tmp_path / "b"), str(tmp_path / "**/2.*")]
    found = find_sources(names, default=Kind.JSONL)
    assert [(source.name.removeprefix(f"{tmp_path}/"), str(source.kind)) for source in found] == [
        ("cc.jsonl", "jsonl"),
        ("b/1.txt.gz", "text"),
        ("b/2.jsonl", "jsonl"),
        ("b/2.jsonl", "jsonl"),
    ]
    assert [source.path for source in find_sources([str(tmp_path / "c*.jsonl")], Kind.JSONL)] == [tmp_path / "c*.jsonl"]


def test_a_folder_leaves_nothing_out_silently(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "f"
    for name in ("elsewhere/1.jsonl", "f/2.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"x")
    (folder / "1").symlink_to(elsewhere)
    (folder / "3.jsonl").symlink_to(folder / "2.jsonl")
    names = [str(source.path) for source in find_sources([str(folder)])]
    assert names == [f"{folder}/{name}" for name in ("1/1.jsonl", "2.jsonl", "3.jsonl")]
    (folder / "gone.jsonl").symlink_to("nowhere")
    (elsewhere / "again").symlink_to(folder)
    os.mkfifo(folder / "pipe")
    gone = f"{folder}/gone.jsonl: is a link to a missing file; got nowhere; remove the link, or restore its file"
    assert message(lambda: find_sources([str(folder)])).splitlines() == [
        f"{folder}/1/again: is a link to a folder that it is in; remove the link",
        gone,
        f"{folder}/pipe: is neither a file nor a folder; remove it, or name the other files as --input",
    ]
    assert message(lambda: find_sources([f"{folder}/gone*", f"{folder}/gone.jsonl"])) == f"{gone}\n{gone}"
    assert message(lambda: find_sources([""])) == f"--input: is empty; {FIND}"


def test_a_pattern_leaves_nothing_out_silently(tmp_path: Path) -> None:
    for name in ("a/1.jsonl", "a/b/2.jsonl", "a/b/c.jsonl/3", "a/.h/4.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")

    def found(pattern: str) -> list[str]:
        return [str(source.path).removeprefix(f"{tmp_path}/") for source in find_sources([f"{tmp_path}/{pattern}"])]

    every = ["a/1.jsonl", "a/b/2.jsonl", "a/b/c.jsonl/3"]
    # A folder is what it is where a shell has expanded the pattern.
    for pattern in ("*", "a*", "a/*", "**", "a/**", "**/*", "**/**/*"):
        assert found(pattern) == every
    for pattern in ("**/*.jsonl", "a/**/*.jsonl"):
        assert found(pattern) == every
    assert found("*/*/[12].*") == ["a/b/2.jsonl"]
    assert found("a/.*") == ["a/.h/4.jsonl"]
    (tmp_path / "a/b/again").symlink_to(tmp_path / "a")
    loop = f"{tmp_path}/a/b/again: is a link to a folder that it is in; remove the link"
    for pattern in ("a/**/1.*", "a/**", "**/*.jsonl"):
        assert message(lambda: find_sources([f"{tmp_path}/{pattern}"])) == loop  # noqa: B023
    (tmp_path / "a/b/again").unlink()
    (tmp_path / "a/part").symlink_to("nowhere")
    gone = f"{tmp_path}/a/part: is a link to a missing file; got nowhere; remove the link, or restore its file"
    for pattern in ("a/**/*.jsonl", "*/*/*.jsonl", "a/**", "a/p*"):
        assert message(lambda: find_sources([f"{tmp_path}/{pattern}"])) == gone  # noqa: B023


def test_parts_of_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_bytes(b"x")
    real = Path.iterdir

    def refuse(self: Path) -> Iterator[Path]:
        if self.name == "a":
            raise PermissionError(13, "Permission denied")
        return real(self)

    monkeypatch.setattr(Path, "iterdir", refuse)
    expected = f"{tmp_path}/a: cannot be read; got Permission denied; {FIND}"
    for where in (tmp_path, tmp_path / "*", tmp_path / "**/b", tmp_path / "*/b*"):
        assert message(lambda: find_sources([str(where)])) == expected  # noqa: B023


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"a\xff")
    path.write_bytes(b"x\n")
    (source,) = find_sources([str(path)])
    assert source.name == f"{tmp_path}/a\\xff"
    last = list(read_chunks(0, source, ["text"], 9))[-1]
    assert last.finished is not None
    assert json.loads(last.finished.model_dump_json())["name"] == "a\\xff"


def test_kinds() -> None:
    names = ["a.TXT", "a.text.zst", "a.json.bz2", "a.ndjson", "a", "a.gz"]
    assert [kind_of_name(name, Kind.TEXT).value for name in names] == ["text", "text", "jsonl", "jsonl", "text", "text"]


def test_inputs_that_are_not_there_are_told_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    none, empty = str(tmp_path / "none*"), str(tmp_path / "empty")
    assert message(lambda: find_sources([none, "-", empty, "-"], Kind.JSONL)) == (
        f"{none}: names no file; {FIND}\n{empty}: names no file; {FIND}\n"
        "--input: names standard input more than once; give - once"
    )


def test_inputs_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    expected = f"{path}: cannot be read; got Permission denied; {FIND}"
    assert message(lambda: find_sources([str(path)], Kind.JSONL)) == expected
    source = Source(str(path), path, Kind.JSONL, 1)
    assert message(lambda: list(read_chunks(0, source, ["text"], 9))) == expected


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    data = gzip.compress(LINES)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    (source,) = find_sources(["-"], Kind.JSONL)
    chunks = list(read_chunks(0, source, ["text"], 4096))
    assert b"".join(chunk.data for chunk in chunks) == LINES
    assert chunks[-1].finished == Input(name="standard input", bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(sys, "stdin", None)
    closed = "standard input: is closed; give it lines, or name files as --input"
    assert message(lambda: list(read_chunks(0, source, ["text"], 9))) == closed
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"PAR1....PAR1")))
    assert message(lambda: list(read_chunks(0, source, ["text"], 9))) == (
        "standard input: is parquet; give the file's path: parquet cannot be read from a pipe"
    )


def test_the_package_that_reads_parquet_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "a"
    path.write_bytes(b"PAR1....PAR1")
    (source,) = find_sources([str(path)], Kind.JSONL)
    with pytest.raises(ClusterError) as caught, extras_explained():
        list(read_chunks(0, source, ["text"], 9))
    assert str(caught.value) == f"pyarrow: is not installed; {install_command('pyarrow')}"


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a"
    columns = {"text": ["a", None, "ž"], "n": [1, 2, 3], "l": [["x"], [], ["y", "z"]], "b": [b"x", b"", b"y"]}
    parquet.write_table(pyarrow.table(columns), path)
    (source,) = find_sources([str(path)], Kind.JSONL)
    assert source.kind is Kind.PARQUET
    *chunks, last = read_chunks(0, source, ["text", "l"], 9)
    assert b"".join(chunk.data for chunk in chunks).decode() == (
        '{"text": "a", "l": ["x"]}\n{"text": null, "l": []}\n{"text": "\\u017e", "l": ["y", "z"]}\n'
    )
    data = path.read_bytes()
    assert last.finished == Input(name="a", bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    assert last.position == len(data)
    assert message(lambda: list(read_chunks(0, source, ["body"], 9))) == (
        f"{path}: has no column 'body'; got the columns text, n, l, b; name columns of text with --json-keys"
    )
    chunks = list(read_chunks(0, source, ["b"], 9))
    assert b"".join(chunk.data for chunk in chunks).splitlines()[0] == b'{"b": "x"}'
    strings = pyarrow.array([b"a", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": strings}), path)
    (broken,) = [chunk.broken for chunk in read(path, kind=Kind.PARQUET) if chunk.broken is not None]
    assert str(broken) == (
        f"{path}:1: the rest of the file cannot be read; got 'utf-8' codec can't decode byte 0xff in position 0: "
        f"invalid start byte; {TODO}"
    )
    chunks = read_chunks(0, find_sources([str(path)])[0], ["text"], 9)
    path.rename(tmp_path / "old")
    path.write_bytes(data)
    replaced = f"{path}: changed while it was read; stop all writers, and start from the beginning"
    assert message(lambda: list(chunks)) == replaced
    path.write_bytes(data[:-20])
    text = message(lambda: list(read_chunks(0, source, ["text"], 9)))
    assert text.startswith(f"{path}: is not valid Parquet; got Parquet magic bytes not found in footer.")
    assert text.endswith("; copy the file again")


@pytest.mark.parametrize("name", ["plain", *COMPRESSORS])
def test_a_line_that_memory_may_not_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sources, "_LONGEST_LINE", 1 << 20)
    path = tmp_path / "a.jsonl"
    data = b"1\n2\n3\n" + b"x" * (3 << 20) + b"\n4\n"
    path.write_bytes(data if name == "plain" else COMPRESSORS[name](data))
    with pytest.raises(RequestError) as caught:
        list(read_chunks(0, Source("a.jsonl", path, Kind.JSONL), ["text"], 100_000))
    assert str(caught.value).startswith("a.jsonl:4: is longer than 1 MiB; put each document on a line of its own: ")


def test_a_small_file_of_zstd_that_is_gigabytes_takes_little_memory(tmp_path: Path) -> None:
    library = pytest.importorskip("zstandard")
    stream, size, block = library.ZstdCompressor().compressobj(), 256, b"x" * (1 << 20) + b"\n"
    path = tmp_path / "a.txt"
    path.write_bytes(b"".join([*(stream.compress(block) for _ in range(size)), stream.flush()]))
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    try:
        lines = sum(chunk.lines for chunk in read_chunks(0, Source("a", path, Kind.TEXT), ["text"], 1 << 21))
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
    assert lines == size
