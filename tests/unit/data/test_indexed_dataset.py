"""Megatron's files: golden bytes, round trips and every message."""

import contextlib
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dataset_writer import IndexedDatasetWriter
from tridock.contracts.data_index import HEADER
from tridock.data.dataset.indexed_dataset import IndexedDataset, token_dtype
from tridock.errors import RequestError

DOCUMENTS = st.lists(st.lists(st.integers(0, 999), max_size=9), max_size=9)
COPY_OR_REBUILD = "copy both files again, or build them again with `tridock data preprocess`"


def write(prefix: Path, documents: list[list[int]], vocab_size: int | None = 1000) -> Path:
    with IndexedDatasetWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def message(prefix: Path) -> str:
    with pytest.raises(RequestError) as caught:
        IndexedDataset(prefix)
    return str(caught.value)


def test_golden_bytes(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[7, 8, 9], [], [65, 499]])
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<5H", 7, 8, 9, 65, 499)
    # magic, version, uint16, 2 sequences, 4 document entries; lengths; offsets; the empty document repeats an entry
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 4)
    expected += struct.pack("<2i", 3, 2) + struct.pack("<2q", 0, 6) + struct.pack("<4q", 0, 1, 1, 2)
    assert prefix.with_name("a.idx").read_bytes() == expected


@pytest.mark.parametrize(("vocab_size", "code", "width"), [(65499, 8, 2), (65500, 4, 4), (None, 4, 4)])
def test_the_token_type_follows_megatrons_rule(tmp_path: Path, vocab_size: int | None, code: int, width: int) -> None:
    write(tmp_path / "a", [[1]], vocab_size)
    assert (tmp_path / "a.idx").read_bytes()[17] == code
    assert (tmp_path / "a.bin").stat().st_size == width
    assert token_dtype(vocab_size).itemsize == width


@settings(max_examples=50)
@given(DOCUMENTS)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]) -> None:
    dataset = IndexedDataset(write(tmp_path_factory.mktemp("round") / "a", documents))
    assert [dataset[number].tolist() for number in range(len(dataset))] == [d for d in documents if d]
    assert dataset.documents == len(documents)
    for first in range(len(documents) + 1):
        for last in range(first, len(documents) + 1):
            start, end = dataset.token_bounds(first, last)
            assert dataset.tokens[start:end].tolist() == [token for d in documents[first:last] for token in d]


def test_an_exception_leaves_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2]])
    with contextlib.suppress(KeyboardInterrupt), IndexedDatasetWriter(tmp_path / "a", 10) as writer:
        writer.add_document([3])
        raise KeyboardInterrupt
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("ids", "vocab_size", "expected"),
    [
        ([3, 10], 10, "token ids 3 to 10 do not lie in 0 to 9"),
        ([-1], 10, "token ids -1 to -1 do not lie in 0 to 9"),
        ([2**31], None, "token ids 2147483648 to 2147483648 do not lie in 0 to 2147483647"),
    ],
)
def test_an_id_outside_the_vocabulary_is_refused(
    tmp_path: Path, ids: list[int], vocab_size: int | None, expected: str
) -> None:
    with pytest.raises(ValueError) as caught, IndexedDatasetWriter(tmp_path / "a", vocab_size) as writer:  # noqa: PT011
        writer.add_document(ids)
    assert str(caught.value) == expected


def test_missing_files(tmp_path: Path) -> None:
    prefix = tmp_path / "a"
    assert message(prefix) == (
        f"{prefix}: there is no indexed data set; got neither a.idx nor a.bin; "
        "build it with `tridock data preprocess`, or correct data.data_path"
    )
    write(prefix, [[1]])
    assert message(tmp_path / "a.bin") == (
        f"{tmp_path}/a.bin: there is no indexed data set; got neither a.bin.idx nor a.bin.bin; "
        f"give the prefix: {prefix}"
    )
    (tmp_path / "a.bin").rename(tmp_path / "b.bin")
    assert message(prefix) == f"{prefix}.bin: is missing; got only a.idx; {COPY_OR_REBUILD}"
    assert message(tmp_path / "b") == f"{tmp_path}/b.idx: is missing; got only b.bin; {COPY_OR_REBUILD}"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is not an index of Megatron; got b''"),
        (b"GARBAGE!!!" * 9, "is not an index of Megatron; got b'GARBAGE!!'"),
        (b"MMIDIDX\x00\x00" + bytes(3), "ends inside its header; got 12 bytes"),
        (
            HEADER.pack(b"MMIDIDX\x00\x00", 1, 8, 3, 4) + bytes(10),
            "promises 3 sequences and 4 document entries, which take 102 bytes; got 44 bytes",
        ),
        (
            HEADER.pack(b"MMIDIDX\x00\x00", 1, 8, 0, 0),
            "promises 0 sequences and 0 document entries, which take 34 bytes; got 34 bytes",
        ),
    ],
)
def test_a_foreign_or_cut_index(tmp_path: Path, content: bytes, expected: str) -> None:
    write(tmp_path / "a", [[1]])
    (tmp_path / "a.idx").write_bytes(content)
    assert message(tmp_path / "a") == f"{tmp_path}/a.idx: {expected}; {COPY_OR_REBUILD}"


@pytest.mark.parametrize(
    ("version", "code", "expected"),
    [(2, 8, "has a version other than 1; got 2"), (1, 6, "has an unknown token type; got code 6")],
)
def test_an_index_of_another_kind(tmp_path: Path, version: int, code: int, expected: str) -> None:
    write(tmp_path / "a", [[1]])
    (tmp_path / "a.idx").write_bytes(HEADER.pack(b"MMIDIDX\x00\x00", version, code, 0, 1) + bytes(8))
    assert message(tmp_path / "a") == (f"{tmp_path}/a.idx: {expected}; build it again with `tridock data preprocess`")


def test_sizes_that_disagree(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2], [3]])
    with (tmp_path / "a.bin").open("ab") as file:
        file.write(b"\x00")
    assert message(tmp_path / "a") == (
        f"{tmp_path}/a.bin: does not fit its index, which describes 6 bytes; got 7 bytes; {COPY_OR_REBUILD}"
    )
    (tmp_path / "a.bin").write_bytes(b"")
    assert message(tmp_path / "a") == (
        f"{tmp_path}/a.bin: does not fit its index, which describes 6 bytes; got 0 bytes; {COPY_OR_REBUILD}"
    )


def test_a_damaged_index(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2], [3]])
    content = bytearray((tmp_path / "a.idx").read_bytes())
    content[-8:] = struct.pack("<q", 9)
    (tmp_path / "a.idx").write_bytes(content)
    assert message(tmp_path / "a") == (
        f"{tmp_path}/a.idx: has offsets or documents that are out of order; got a damaged index; {COPY_OR_REBUILD}"
    )


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", [[1]])

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(np, "memmap", refuse)
    assert message(tmp_path / "a") == (
        f"{tmp_path}/a.idx: cannot be read; got Permission denied; make it readable for this user"
    )
