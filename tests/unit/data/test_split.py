"""`tridock data split`: train, valid and test, or equal parts; merged again they are the whole."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data.sets import END, INPUT, content, make
from tests.unit.data.test_indexed_dataset import DOCUMENTS, write
from tridock.cli import main
from tridock.data.dataset.indexed_dataset import IndexedDataset
from tridock.data.dataset.manifest import read_manifest
from tridock.data.dataset.merge import merge
from tridock.data.dataset.prefixes import find_prefixes
from tridock.data.dataset.split import split
from tridock.data.dataset.verify import verify


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["data", "split", *arguments]) == 2
    return capsys.readouterr().err.splitlines()


@settings(max_examples=30)
@given(DOCUMENTS.filter(bool), st.data())
def test_parts_merged_again_are_the_whole(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("split")
    whole = write(folder / "w", documents)
    parts = data.draw(st.integers(1, len(documents)))
    split(whole, None, parts, folder / "parts/w")
    found = find_prefixes([str(folder / "parts")])
    sizes = [IndexedDataset(prefix).documents for prefix in found]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    merge(found, folder / "again")
    assert content(folder / "again") == content(whole)
    assert not [problem for prefix in found for problem in verify(prefix).problems]


def test_train_valid_and_test(capsys: pytest.CaptureFixture[str]) -> None:
    make(Path("d"), [[number] * number for number in range(10)], rejected=3)
    assert main(["data", "split", "d", "--split", "7,2,1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "d_train: 7 documents (1 empty), 6 sequences, 27 tokens, 0.0 MB",
        "d_valid: 2 documents (0 empty), 2 sequences, 17 tokens, 0.0 MB",
        "d_test: 1 documents (0 empty), 1 sequences, 10 tokens, 0.0 MB",
    ]
    assert IndexedDataset(Path("d_test"))[0].tolist() == [9] * 9 + [END]
    manifest = read_manifest(Path("d_train"))
    assert manifest is not None
    assert manifest.model_dump(exclude={"bin_sha256", "idx_sha256", "versions"}) == {
        "vocab_size": 1000,
        "documents": 7,
        "tokens": 27,
        "tokenizer_sha256": "cd" * 32,
        "end_of_document": END,
        "inputs": (INPUT.model_dump(),),
        "json_key": "text",
        "sequences": 6,
        "rejected": 0,
        "part": "documents 0 to 6 of the 10 of d",
    }
    found = [verify(Path(f"d_{name}")) for name in ("train", "valid", "test")]
    assert [(one.problems, one.unchecked) for one in found] == [([], [])] * 3
    merge([Path("d_train"), Path("d_valid"), Path("d_test")], Path("again"))
    assert content(Path("again")) == content(Path("d"))
    again = read_manifest(Path("again"))
    assert again is not None
    assert (again.part, again.inputs) == (None, (INPUT,))


def test_shares_of_nothing_make_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("d"), [[1]] * 10)
    assert main(["data", "split", "d", "--split", "9,1", "--output-prefix", "o/e"]) == 0
    assert sorted(path.name for path in Path("o").iterdir()) == [
        f"e_{name}.{suffix}" for name in ("train", "valid") for suffix in ("bin", "idx")
    ]
    assert problems(capsys, "d", "--split", "1", "--output-prefix", "o/e") == [
        "o/e_valid: exists from another split, but is not part of this one; "
        "remove it, or choose another --output-prefix"
    ]
    # But other parts beside them are nobody's.
    assert main(["data", "split", "d", "--parts", "10", "--output-prefix", "o/e"]) == 0
    assert [IndexedDataset(Path(f"o/e_{number}")).documents for number in range(10)] == [1] * 10
    # Fewer of them would leave some, which a merge of the folder would take too.
    assert main(["data", "split", "d", "--parts", "10", "--output-prefix", "o/e"]) == 0
    assert problems(capsys, "d", "--parts", "8", "--output-prefix", "o/e") == [
        f"o/e_{number}: exists from another split, but is not part of this one; "
        "remove it, or choose another --output-prefix"
        for number in (8, 9)
    ]


def test_names_of_parts_sort_as_their_documents(capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("d"), [[number] for number in range(11)])
    assert main(["data", "split", "d", "--parts", "11", "--output-prefix", "o/e"]) == 0
    prefixes = find_prefixes(["o"])
    assert [prefix.name for prefix in prefixes] == [f"e_{number:02d}" for number in range(11)]
    assert [IndexedDataset(prefix)[0].tolist() for prefix in prefixes] == [[number] for number in range(11)]


def test_what_cannot_be_split(capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("d"), [[1]] * 10)
    shares = "give one to three shares of train, valid and test: 969,30,1"
    for text in ("", "a", "1,2,3,4", "0,0", "-1,2", "1;2"):
        expected = "--split: is not a list of shares; " + (f"got {text}; " if text else "") + shares
        assert problems(capsys, "d", f"--split={text}") == [expected]
    larger = "give it a larger share"
    assert problems(capsys, "d", "--split", "1000,1,1") == [
        f"--split: leaves {name} without a document; got 1000,1,1 of 10 documents; {larger}"
        for name in ("valid", "test")
    ]
    number = "--parts: must be from 1 to the number of documents, 10"
    assert problems(capsys, "d", "--parts", "11") == [f"{number}; got 11; give fewer"]
    assert problems(capsys, "d", "--parts", "0") == [f"{number}; got 0; give at least 1"]
    todo = "give a folder and a name: data/all"
    assert problems(capsys, "d", "--parts", "2", "--output-prefix", ".") == [
        f"--output-prefix: names no file; got .; {todo}"
    ]
    assert problems(capsys, ".", "--parts", "2") == [
        ".: there is no indexed data set; got neither .idx nor .bin; "
        "build it with `tridock data preprocess`, or correct data.data_path"
    ]
    write(Path("e_train"), [[1]] * 10)
    assert problems(capsys, "e_train", "--split", "1", "--output-prefix", "e") == [
        "e_train: would be overwritten by one of the parts; choose another --output-prefix"
    ]
    assert sorted(path.name for path in Path().iterdir()) == ["d.bin", "d.idx", "e_train.bin", "e_train.idx"]
    for wrong in (["d"], ["d", "--split", "1", "--parts", "2"]):
        with pytest.raises(SystemExit) as caught:
            main(["data", "split", *wrong])
        assert caught.value.code == 2


def test_all_parts_appear_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    write(Path("d"), [[1]] * 3)
    seen: list[int] = []

    def interrupt(done: int, total: int) -> None:
        seen.append(done)
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        split(Path("d"), None, 3, None, interrupt)
    assert seen == [2, 4, 6]
    assert sorted(path.name for path in Path().iterdir()) == ["d.bin", "d.idx"]
