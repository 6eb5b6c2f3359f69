"""`tridock data verify`: accepts sound data, and names the place of each kind of damage."""

import hashlib
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data.sets import END, make
from tests.unit.data.test_indexed_dataset import COPY_OR_REBUILD, write
from tridock.cli import main
from tridock.contracts.data_index import HEADER

DOCUMENTS = [[7, 8, 9], [], [65, 499], [3]]
COPY_ALL = "copy all three files again, or build them again with `tridock data preprocess`"
VOCABULARY = "give the size of the tokenizer of the data, or build it again with `tridock data preprocess`"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def patch(path: Path, position: int, form: str, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(struct.pack(form, value))


class Command:
    """Runs the command where the data lies."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def out(self, *arguments: object) -> str:
        assert main(["data", "verify", *map(str, arguments)]) == 0
        out, err = self._capsys.readouterr()
        assert err == ""
        return out

    def problems(self, *arguments: object) -> list[str]:
        assert main(["data", "verify", *map(str, arguments)]) == 2
        return self._capsys.readouterr().err.splitlines()


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(tmp_path)
    return Command(capsys)


@pytest.fixture
def whole(command: Command) -> Path:
    prefix = make(Path("d"), DOCUMENTS)
    return make(prefix, DOCUMENTS, bin_sha256=sha256(Path("d.bin")), idx_sha256=sha256(Path("d.idx")))


# Where the index of DOCUMENTS has its 3 lengths, 3 offsets and 5 entries.
LENGTHS = HEADER.size
OFFSETS = LENGTHS + 3 * 4
ENTRIES = OFFSETS + 3 * 8


def test_what_is_whole(command: Command, whole: Path) -> None:
    assert command.out(whole) == (
        "d: 4 documents, 3 sequences, 9 tokens of uint16; checked: structure, counts, tokens below 1000, "
        "token 999 at the end of every document, checksum of .bin, checksum of .idx\n"
    )


def test_what_could_not_be_checked_is_said(command: Command) -> None:
    write(Path("m"), [[1, 2], []], vocab_size=None)
    assert command.out("m") == (
        "m: 2 documents, 1 sequences, 2 tokens of int32; checked: structure; not checked: counts, checksums, ends of "
        "documents (m.json is missing), upper bound of the tokens (no --vocab-size)\n"
    )
    assert command.out("m", "--vocab-size", 3).endswith(
        "; checked: structure, tokens below 3; not checked: counts, checksums, ends of documents (m.json is missing)\n"
    )
    make(Path("e"), DOCUMENTS, end_of_document=None)
    assert command.out("e") == (
        "e: 4 documents, 3 sequences, 9 tokens of uint16; checked: structure, counts, tokens below 1000; "
        "not checked: checksum of .bin (the manifest has none), checksum of .idx (the manifest has none)\n"
    )
    write(Path("empty"), [[], []])
    assert command.out("empty").startswith("empty: 2 documents, 0 sequences, 0 tokens of uint16; checked: structure; ")


def test_folders_and_several(command: Command, whole: Path) -> None:
    make(Path("f/b"), [[1]])
    make(Path("f/a"), [[1]])
    assert [line.partition(":")[0] for line in command.out("f", whole).splitlines()] == ["f/a", "f/b", "d"]
    Path("g").mkdir()
    todo = "give prefixes of data sets, or folders that contain some"
    assert command.problems("g", "d") == [f"g: contains no data set; got no .bin and .idx; {todo}"]
    assert command.problems("") == ["the prefix: is empty; give prefixes of data sets, or folders"]
    Path("f/b.idx").unlink()
    patch(Path("f/a.bin"), 0, "<H", 1000)
    assert command.problems(".", "f") == [
        f"f/a.bin, document 0, sequence 0, byte 0: is outside the vocabulary of 1000 tokens; got 1000; {VOCABULARY}",
        f"f/b.idx: is missing; got only b.bin; {COPY_OR_REBUILD}",
    ]
    assert command.problems("none") == [
        "none: there is no indexed data set; got neither none.idx nor none.bin; "
        "build it with `tridock data preprocess`, or correct data.data_path"
    ]


def test_tokens_outside_the_vocabulary(command: Command, whole: Path) -> None:
    assert command.problems(whole, "--vocab-size", 66) == [
        *(
            f"d.bin, document {document}, sequence {sequence}, byte {byte}: is outside the vocabulary of 66 tokens; "
            f"got {token}; {VOCABULARY}"
            for document, sequence, byte, token in ((0, 0, 6, END), (2, 1, 10, 499), (2, 1, 12, END), (3, 2, 16, END))
        )
    ]
    assert command.problems(whole, "--vocab-size", 3)[-1] == f"d.bin: has more such tokens; got 4 more; {VOCABULARY}"
    write(Path("n"), [[5], [6]], vocab_size=None)
    patch(Path("n.bin"), 4, "<i", -2)
    assert command.problems("n") == [
        f"n.bin, document 1, sequence 1, byte 4: is below 0; got -2; {VOCABULARY}",
    ]


def test_documents_that_are_not_closed(command: Command, whole: Path) -> None:
    make(whole, DOCUMENTS)
    patch(Path("d.bin"), 12, "<H", 5)
    assert command.problems(whole) == [
        "d.bin, document 2, sequence 1, byte 12: ends its document instead of 999, "
        f"the end of document in the manifest; got 5; {COPY_OR_REBUILD}"
    ]
    make(Path("many"), [[n] for n in range(9)], end_of_document=998)
    assert command.problems("many")[5:] == [
        f"many.bin: has more documents that do not end with 998; got 4 more; {COPY_OR_REBUILD}"
    ]


def test_one_flipped_bit_is_found_by_the_checksums(command: Command, whole: Path) -> None:
    expected = sha256(Path("d.bin"))
    patch(Path("d.bin"), 0, "<H", 6)
    assert command.problems(whole) == [
        f"d.bin: does not have the sha256 {expected} of d.json; got {sha256(Path('d.bin'))}; {COPY_ALL}"
    ]
    make(whole, DOCUMENTS, idx_sha256="ef" * 32)
    assert command.problems(whole) == [
        f"d.idx: does not have the sha256 {'ef' * 32} of d.json; got {sha256(Path('d.idx'))}; {COPY_ALL}"
    ]


def test_counts_that_are_not_the_manifests(command: Command) -> None:
    make(Path("d"), DOCUMENTS, documents=5, sequences=4, tokens=8)
    assert command.problems("d") == [
        f"d.json: counts 5 documents; got 4 in the files; {COPY_ALL}",
        f"d.json: counts 4 sequences; got 3 in the files; {COPY_ALL}",
        f"d.json: counts 8 tokens; got 9 in the files; {COPY_ALL}",
    ]
    Path("d.json").write_text("{")
    assert command.problems("d")[0].startswith("d.json: is not a data set's manifest; got the file: Invalid JSON")


@pytest.mark.parametrize(
    ("position", "form", "value", "expected"),
    [
        (
            LENGTHS + 4,
            "<i",
            -3,
            [
                "d.idx, sequence 1: has a negative length; got -3",
                "d.idx, sequence 2: does not begin where sequence 1 ends, at byte 2; got byte 14",
                "d.bin: does not fit its index, which describes 6 bytes; got 18 bytes",
            ],
        ),
        (
            OFFSETS,
            "<q",
            2,
            [
                "d.idx, sequence 0: does not begin at byte 0; got byte 2",
                "d.idx, sequence 1: does not begin where sequence 0 ends, at byte 10; got byte 8",
            ],
        ),
        (
            OFFSETS + 8,
            "<q",
            -(2**31),  # what a 32-bit sum makes of a large one
            [
                "d.idx, sequence 1: does not begin where sequence 0 ends, at byte 8; got byte -2147483648",
                "d.idx, sequence 2: does not begin where sequence 1 ends, at byte -2147483642; got byte 14",
            ],
        ),
        (ENTRIES, "<q", 1, ["d.idx, document 0: does not begin at sequence 0; got 1"]),
        (ENTRIES, "<q", -1, ["d.idx, document 0: begins before sequence 0; got sequence -1"]),
        (
            ENTRIES + 8,
            "<q",
            7,
            ["d.idx, document 2: begins before sequence 7, where document 1 does; got sequence 1"],
        ),
        (ENTRIES + 32, "<q", 9, ["d.idx, the document index: ends at another sequence than the last of 3; got 9"]),
    ],
)
def test_a_damaged_index(
    command: Command, whole: Path, position: int, form: str, value: int, expected: list[str]
) -> None:
    make(whole, DOCUMENTS)
    patch(Path("d.idx"), position, form, value)
    found = [line for line in command.problems(whole) if line.startswith(("d.idx", "d.bin: does"))]
    assert found == [f"{line}; {COPY_OR_REBUILD}" for line in expected]


def test_many_places_are_counted(command: Command) -> None:
    write(Path("d"), [[1]] * 20)
    for sequence in range(20):
        patch(Path("d.idx"), HEADER.size + 4 * 20 + 8 * sequence, "<q", 1 + 7 * sequence)
        patch(Path("d.idx"), HEADER.size + 4 * sequence, "<i", -1)
    for document in range(1, 21):
        patch(Path("d.idx"), HEADER.size + 12 * 20 + 8 * document, "<q", 20 - document)
    found = [line for line in command.problems("d") if " more" in line]
    assert found == [
        f"d.idx: has more negative lengths; got 15 more; {COPY_OR_REBUILD}",
        f"d.idx: has more sequences that do not begin where the one before them ends; got 15 more; {COPY_OR_REBUILD}",
        f"d.idx: has more documents that begin before the previous one; got 14 more; {COPY_OR_REBUILD}",
    ]


def test_all_problems_at_once_where_the_index_says_no_places(command: Command, whole: Path) -> None:
    expected = sha256(Path("d.bin"))
    with Path("d.bin").open("ab") as file:
        file.write(struct.pack("<HB", 2000, 1))
    assert command.problems(whole) == [
        f"d.bin: does not fit its index, which describes 18 bytes; got 21 bytes; {COPY_OR_REBUILD}",
        f"d.json: counts 9 tokens; got 10 in the files; {COPY_ALL}",
        f"d.bin, byte 18: is outside the vocabulary of 1000 tokens; got 2000; {VOCABULARY}",
        f"d.bin: does not have the sha256 {expected} of d.json; got {sha256(Path('d.bin'))}; {COPY_ALL}",
    ]
    Path("d.idx").write_bytes(b"x")
    assert command.problems(whole) == [f"d.idx: is not an index of Megatron; got b'x'; {COPY_OR_REBUILD}"]


def test_blocks_of_any_size_find_the_same(command: Command, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = command.out(whole), command.problems(whole, "--vocab-size", 66)
    for tokens, entries in ((1, 1), (2, 1), (3, 2)):
        monkeypatch.setattr("tridock.data.dataset.verify._BLOCK", tokens * 2)
        monkeypatch.setattr("tridock.data.dataset.indexed_dataset._BLOCK", entries)
        assert (command.out(whole), command.problems(whole, "--vocab-size", 66)) == before
        make(Path("e"), DOCUMENTS)
        patch(Path("e.bin"), 6, "<H", 5)
        (line,) = command.problems("e")
        assert line.startswith("e.bin, document 0, sequence 0, byte 6: ends its document")


def test_blocks_of_any_size_find_the_same_damage(
    command: Command, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for position, form, value in ((LENGTHS + 8, "<i", -1), (OFFSETS + 16, "<q", 1), (ENTRIES + 24, "<q", 0)):
        patch(Path("d.idx"), position, form, value)
    before = command.problems(whole)
    assert [line.partition(":")[0] for line in before[:3]] == [
        "d.idx, sequence 2",
        "d.idx, sequence 2",
        "d.idx, document 3",
    ]
    for entries in (1, 2):
        monkeypatch.setattr("tridock.data.dataset.indexed_dataset._BLOCK", entries)
        assert command.problems(whole) == before


def test_a_sequence_without_tokens_is_no_damage(command: Command) -> None:
    write(Path("d"), [[4, END], [5, END]])
    header = HEADER.pack(b"MMIDIDX\x00\x00", 1, 8, 3, 4)
    body = struct.pack("<3i", 2, 0, 2) + struct.pack("<3q", 0, 4, 4) + struct.pack("<4q", 0, 1, 2, 3)
    Path("d.idx").write_bytes(header + body)
    make(Path("e"), [[4], [5]])
    counted = Path("e.json").read_text().replace('"documents": 2', '"documents": 3')
    Path("d.json").write_text(counted.replace('"sequences": 2', '"sequences": 3'))
    assert "token 999 at the end of every document" in command.out("d")
    # Nor is a document of such ones alone, after one that is not closed, a second that is not.
    patch(Path("d.bin"), 2, "<H", 5)
    assert [line.partition(":")[0] for line in command.problems("d")] == ["d.bin, document 0, sequence 0, byte 2"]


def test_flags_and_files_that_cannot_be(command: Command, whole: Path) -> None:
    expected = "--vocab-size: must be at least 1; got 0; give the size of the vocabulary"
    assert command.problems(whole, "--vocab-size", 0) == [expected]
    Path("d.json").unlink()
    Path("d.json").mkdir()
    assert command.problems(whole) == [
        "d.json: cannot be read; got Is a directory; "
        "make it readable for this user, or delete it and set model.vocab_size"
    ]


def test_a_disk_that_cannot_be_read(command: Command) -> None:
    write(Path("d"), [[]])
    Path("d.bin").unlink()
    Path("d.bin").symlink_to("/proc/self/mem")  # whose first page nobody has
    todo = "make it readable for this user, or copy it again"
    assert command.problems("d") == [f"d: cannot be read; got Input/output error; {todo}"]


def test_an_index_map_that_is_no_array_is_named_and_not_read(command: Command, whole: Path, tmp_path: Path) -> None:
    """Its name is what Megatron-LM v1.1.5 looks for beside the data."""

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "done"),)

    first, second, other = (Path(f"{name}_train_indexmap_8ns_4sl_1s_doc_idx.npy") for name in ("d", "d_x", "e"))
    np.save(first, np.arange(8))
    second.touch()
    other.write_bytes(pickle.dumps(Evil()))
    command.out(whole)
    first.write_bytes(pickle.dumps(Evil()))
    second.unlink()
    second.mkdir()
    assert command.problems(whole) == [
        f"{name}: is no array of NumPy, as every index map is; remove it: a run makes its index maps itself"
        for name in (first, second)
    ]
    assert not (tmp_path / "done").exists()
