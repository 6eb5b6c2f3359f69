"""The demo's data: real text, the same on every call, quick where it lies ready."""

import json
import shutil
from pathlib import Path

import pytest

from tridock.data import corpus
from tridock.data.dataset.indexed_dataset import IndexedDataset
from tridock.data.tokenize.tokenizer import BytePairTokenizer
from tridock.errors import RequestError

SMALL = 100_000


def prepare(folder: Path, vocab_size: int, said: list[str] | None = None) -> corpus.DemoData:
    return corpus.prepare_demo(folder, vocab_size, [].append if said is None else said.append, SMALL)


def test_the_standard_library_is_large_and_in_a_fixed_order() -> None:
    sources = list(corpus.standard_library_sources())
    assert [name for name, _ in sources] == [name for name, _ in corpus.standard_library_sources()]
    assert sum(len(text) for _, text in sources) > 3_000_000
    assert {"argparse.py", "email/message.py"} <= {name for name, _ in sources}
    assert not [name for name, _ in sources if "test" in Path(name).parts[:-1] or "site-packages" in name]


def test_files_that_do_not_count(tmp_path: Path) -> None:
    files = {
        "a.py": b"x = 1\n",
        "b.py": b"\xff",
        "c.py": b"  \n",
        "d.txt": b"no",
        "test/e.py": b"no",
        "sub/f.py": b"y = 2\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert dict(corpus.standard_library_sources(tmp_path)) == {"a.py": "x = 1\n", "sub/f.py": "y = 2\n"}


def test_an_interpreter_without_sources(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        corpus.collect_corpus(folder=tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: contains no Python sources to train on; "
        "use a Python that has its standard library as source files"
    )


def test_made_once_then_ready(tmp_path: Path) -> None:
    said: list[str] = []
    made = prepare(tmp_path, 512, said)
    assert made.made
    assert [line.split(":")[0] for line in said] == ["corpus", "tokenizer", "data"]
    dataset = IndexedDataset(made.prefix)
    assert (made.documents, made.tokens, made.vocab_size) == (dataset.documents, len(dataset.tokens), 512)
    tokenizer = BytePairTokenizer.load(made.tokenizer)
    first = dataset[0].tolist()
    assert first[-1] == tokenizer.end_of_text
    assert tokenizer.decode(first[:-1]) == next(corpus.standard_library_sources())[1]

    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    again = prepare(tmp_path, 512, said)
    assert not again.made
    assert (again.prefix, again.tokens, again.documents) == (made.prefix, made.tokens, made.documents)
    assert said[-1] == f"data: {made.tokens:,} tokens of {made.documents:,} documents are already in {tmp_path}"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 300 tokens, for copying."""
    folder = tmp_path_factory.mktemp("made")
    prepare(folder, 300)
    return folder


@pytest.mark.parametrize("damage", ["stdlib_text_document.bin", "stdlib_text_document.idx", "demo.json"])
def test_what_is_damaged_is_made_anew_and_the_same(made: Path, tmp_path: Path, damage: str) -> None:
    folder = shutil.copytree(made, tmp_path / "copy")
    (folder / damage).unlink()
    assert prepare(folder, 300).made
    content = [{path.name: path.read_bytes() for path in it.iterdir() if path.is_file()} for it in (made, folder)]
    assert content[0] == content[1]


def test_what_another_python_has_made_serves_as_well(made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made, tmp_path / "copy")
    before = prepare(folder, 300)
    receipt = json.loads((folder / "demo.json").read_text())
    (folder / "demo.json").write_text(json.dumps(receipt | {"python": "3.99.0"}))
    assert not before.made
    assert prepare(folder, 300) == before


def test_another_vocabulary_is_other_data(made: Path, tmp_path: Path) -> None:
    assert prepare(shutil.copytree(made, tmp_path / "copy"), 310).vocab_size == 310
