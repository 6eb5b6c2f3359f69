"""`tridock data merge`: documents one after another, and every reason why they do not go together."""

import itertools
import json
import resource
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data.sets import END, INPUT, content, make
from tests.unit.data.test_indexed_dataset import COPY_OR_REBUILD, DOCUMENTS, write
from tridock.cli import main
from tridock.contracts.data_index import HEADER
from tridock.data.dataset import slices
from tridock.data.dataset.indexed_dataset import IndexedDataset
from tridock.data.dataset.manifest import read_manifest
from tridock.data.dataset.merge import merge
from tridock.data.dataset.slices import Output, Slice, write_outputs
from tridock.data.dataset.verify import verify
from tridock.errors import RequestError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["data", "merge", "--input", *arguments]) == 2
    return capsys.readouterr().err.splitlines()


def message(prefixes: list[Path], output: Path) -> str:
    with pytest.raises(RequestError) as caught:
        merge(prefixes, output)
    return str(caught.value)


@settings(max_examples=30)
@given(st.lists(DOCUMENTS, min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 5))
def test_the_same_bytes_as_of_all_documents_at_once(
    tmp_path_factory: pytest.TempPathFactory, sets: list[list[list[int]]], entries: int, size: int
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    prefixes = [write(folder / f"p{number}", documents) for number, documents in enumerate(sets)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tridock.data.dataset.indexed_dataset._BLOCK", entries)
        patched.setattr("tridock.data.dataset.slices._BLOCK", size * 2)
        patched.setattr("tridock.data.dataset.slices._ZEROS", bytes(size * 2))
        done, missing = merge(prefixes, folder / "out")
    everything = list(itertools.chain.from_iterable(sets))
    assert content(folder / "out") == content(write(folder / "expected", everything))
    assert missing == [folder / f"p{number}.json" for number in range(len(sets))]
    assert (done.documents, done.empty_documents) == (len(everything), everything.count([]))
    assert (done.sequences, done.tokens) == (len([d for d in everything if d]), sum(map(len, everything)))


def test_a_folder_and_its_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    make(Path("f/b"), [[3], []], json_key="body", rejected=2, versions={"tridock": "0.0.9", "numpy": "2"})
    make(Path("f/a"), [[1, 2]])
    make(Path("f/.hidden"), [[4]])
    make(Path("old/all"), [[1]] * 5)
    assert main(["data", "merge", "--input", "f", "--output-prefix", "new/all"]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (
        "new/all: 3 documents (1 empty), 2 sequences, 5 tokens, 0.0 MB, of 2 data sets\n",
        "",
    )
    assert IndexedDataset(Path("new/all")).tokens.tolist() == [1, 2, END, 3, END]
    manifest = read_manifest(Path("new/all"))
    assert manifest is not None
    assert manifest.model_dump(exclude={"bin_sha256", "idx_sha256"}) == {
        "vocab_size": 1000,
        "documents": 3,
        "tokens": 5,
        "tokenizer_sha256": "cd" * 32,
        "end_of_document": END,
        "inputs": (INPUT.model_dump(),),
        "json_key": "text, body",
        "sequences": 2,
        "rejected": 2,
        "versions": {"tridock": "0.1.0, 0.0.9", "numpy": "2"},
        "part": None,
    }
    found = verify(Path("new/all"))
    assert (found.problems, found.unchecked) == ([], [])
    # Over data that lies there, and again.
    shutil.copy("old/all.json", "new/all.json")
    assert main(["data", "merge", "--input", "f/a", "f/b", "--output-prefix", "new/all"]) == 0
    assert read_manifest(Path("new/all")) == manifest
    assert sorted(path.name for path in Path("new").iterdir()) == ["all.bin", "all.idx", "all.json"]


def test_without_all_manifests_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b", "c", "out"):
        make(Path(name), [[1]])
    Path("b.json").unlink()
    Path("c.json").unlink()
    assert main(["data", "merge", "--input", "a", "b", "c", "--output-prefix", "out"]) == 0
    assert capsys.readouterr().err == "out.json: not written; missing: b.json, c.json\n"
    # That of the earlier data is gone too.
    assert not Path("out.json").exists()


def test_what_does_not_go_together_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    make(Path("a"), [[1]])
    write(Path("b"), [[1]], vocab_size=None)
    make(Path("c"), [[1]], tokenizer_sha256="ef" * 32)
    make(Path("d"), [[1]], vocab_size=1001)
    make(Path("e"), [[1]], end_of_document=None)
    make(Path("f"), [[1]], end_of_document=998)
    one = "build them with one tokenizer"
    closing = "build all of them with --append-eod, or none"
    assert problems(capsys, *"abcdef", "--output-prefix", "out") == [
        f"b: has tokens of another type than a, which has uint16; got int32; {one}",
        f"c: has another tokenizer than a, whose sha256 is {'cd' * 32}; got {'ef' * 32}; {one}",
        f"d: has another vocabulary than a, which has 1000 tokens; got 1001; {one}",
        f"e: ends its documents differently from a, which ends them with token 999; got no token; {closing}",
        f"f: ends its documents differently from a, which ends them with token 999; got token 998; {closing}",
    ]
    assert not list(Path().glob("*out*"))


def test_inputs_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    make(Path("x/a"), [[1]])
    Path("l").symlink_to("x")
    twice = "is given twice; give it once"
    onto = "choose another, or leave it out of --input"
    assert problems(capsys, "x/a", "x", "--output-prefix", "l/a") == [
        f"x/a: {twice}",
        f"--output-prefix: is one of the inputs; got l/a; {onto}",
    ]
    todo = "give a folder and a name: data/all"
    for name in (".", "x/..", "/"):
        assert problems(capsys, "x", "--output-prefix", name) == [
            f"--output-prefix: names no file; got {Path(name)}; {todo}"
        ]
    make(Path("b"), [[1]], tokens=1)
    make(Path("c"), [[1], [2], [3]])
    with Path("c.idx").open("r+b") as file:
        file.seek(HEADER.size + 3 * 4 + 3 * 8 + 8)
        file.write(b"\3")
    assert problems(capsys, "b", "c", "none", "--output-prefix", "out") == [
        "b.json: belongs to other data: there are 1 documents of 2 tokens; got 1 documents of 1 tokens; "
        "copy all three files again",
        f"c.idx, document 2: begins before sequence 3, where document 1 does; got sequence 2; {COPY_OR_REBUILD}",
        "none: there is no indexed data set; got neither none.idx nor none.bin; "
        "build it with `tridock data preprocess`, or correct data.data_path",
    ]


def test_too_little_room_is_known_before(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file larger than the disk, with nothing in it."""
    free = shutil.disk_usage(folder).free
    length = 2**31 - 1
    count = free // (2 * length) + 2
    header = HEADER.pack(b"MMIDIDX\x00\x00", 1, 8, count, 2)
    offsets = b"".join((2 * length * number).to_bytes(8, "little") for number in range(count))
    Path("a.idx").write_bytes(
        header + length.to_bytes(4, "little") * count + offsets + bytes(8) + count.to_bytes(8, "little")
    )
    with Path("a.bin").open("wb") as file:
        file.truncate(2 * length * count)
    needed = 2 * length * count + HEADER.size + 12 * count + 16
    (line,) = problems(capsys, "a", "--output-prefix", "new/folder/out")
    start, _, rest = line.partition("; got ")
    assert start == f"{folder}: has not enough free space for {needed} bytes"
    assert int(rest.partition(" ")[0]) < needed
    assert rest.endswith(" bytes free; free some space there, or choose another --output-prefix")
    assert not Path("new").exists()


def test_a_disk_that_fills_up_leaves_what_was_there() -> None:
    make(Path("a"), [[5] * 90_000])
    make(Path("out"), [[1]])
    before = content(Path("out")), Path("out.json").read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        text = message([Path("a")], Path("out"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, previous)
    todo = "free some space there, or choose another --output-prefix"
    assert text == f"out: cannot be written; got File too large; {todo}"
    assert (content(Path("out")), Path("out.json").read_bytes()) == before
    assert not list(Path().glob(".*"))
    Path("file").write_bytes(b"")
    assert message([Path("a")], Path("file/out")) == f"file/out: cannot be written; got File exists; {todo}"


def test_an_interrupt_leaves_what_was_there() -> None:
    make(Path("a"), [[5]])
    make(Path("out"), [[1]])
    before = content(Path("out")), Path("out.json").read_bytes()

    def interrupt(done: int, total: int) -> None:
        assert (done, total) == (4, 4)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge([Path("a")], Path("out"), interrupt)
    assert (content(Path("out")), Path("out.json").read_bytes()) == before
    assert not list(Path().glob(".*"))


def test_what_killed_commands_left_of_this_output_is_removed() -> None:
    make(Path("a"), [[5]])
    for name in (".out.4242.0a1b2c3d.part", ".other.4242.0a1b2c3d.part"):
        Path(name).mkdir()
        Path(name, "lock").touch()
        Path(name, "new").mkdir()
        Path(name, "new/bin").write_bytes(b"half")
    merge([Path("a")], Path("out"))
    assert [path.name for path in Path().glob(".*")] == [".other.4242.0a1b2c3d.part"]


def test_an_input_that_shrinks_meanwhile() -> None:
    prefix = make(Path("a"), [[5]])
    part = Slice(IndexedDataset(prefix), 0, 1)
    Path("a.bin").write_bytes(b"\1")
    with pytest.raises(RequestError) as caught:
        write_outputs([Output(Path("out"), (part,), None)])
    assert str(caught.value) == f"a.bin: was truncated while it was read; got 1 bytes; {COPY_OR_REBUILD}"
    assert sorted(path.name for path in Path().iterdir()) == ["a.bin", "a.idx", "a.json"]


def test_holes_stay_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "_BLOCK", 1 << 20)
    monkeypatch.setattr(slices, "_ZEROS", bytes(1 << 20))
    with Path("a.bin").open("wb") as file:
        file.truncate(6 << 20)
    length = 3 << 20
    entries = [length.to_bytes(4, "little"), bytes(8), bytes(8), (1).to_bytes(8, "little")]
    Path("a.idx").write_bytes(HEADER.pack(b"MMIDIDX\x00\x00", 1, 8, 1, 2) + b"".join(entries))
    merge([Path("a")], Path("out"))
    assert content(Path("out")) == content(Path("a"))
    assert Path("out.bin").stat().st_blocks < 100


def test_json_of_an_earlier_tridock_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    prefix = make(Path("a"), [[1]])
    old = json.loads(prefix.with_suffix(".json").read_text())
    for name in ("part", "bin_sha256", "idx_sha256", "sequences"):
        del old[name]
    Path("a.json").write_text(json.dumps(old))
    assert main(["data", "merge", "--input", "a", "--output-prefix", "out"]) == 0
    manifest = read_manifest(Path("out"))
    assert manifest is not None
    assert manifest.sequences == 1
