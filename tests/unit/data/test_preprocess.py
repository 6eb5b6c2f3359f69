"""JSON lines in, an indexed data set out; nothing is lost silently."""

import hashlib
import json
from pathlib import Path

import pytest

from tridock.data.indexed_dataset import IndexedDataset
from tridock.data.manifest import read_manifest
from tridock.data.preprocess import preprocess
from tridock.data.tokenizer import BytePairTokenizer
from tridock.errors import RequestError

TEXTS = ["one two three " * 9, "", "four", "line\nbreak"]
JSON = "is not valid JSON; got"
TODO = 'mend or remove the line; each is one object such as {"text": "…"}'


@pytest.fixture(scope="module")
def tokenizer() -> BytePairTokenizer:
    return BytePairTokenizer.train(TEXTS, 280)


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def test_documents_in_are_documents_out(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(lines(*TEXTS))
    seen: list[tuple[int, int]] = []
    done = preprocess(source, tmp_path / "out", tokenizer, append_eod=True, progress=lambda *at: seen.append(at))
    dataset = IndexedDataset(tmp_path / "out_text_document")
    expected = [[*tokenizer.encode(text), tokenizer.end_of_text] for text in TEXTS if text]
    assert [dataset[number].tolist() for number in range(len(dataset))] == expected
    assert (done.documents_in, done.documents_out, dataset.documents) == (4, 4, 4)
    assert seen[-1] == (source.stat().st_size, source.stat().st_size)
    manifest = read_manifest(done.prefix)
    assert manifest is not None
    assert manifest.model_dump() == {
        "vocab_size": tokenizer.vocab_size,
        "documents": 4,
        "tokens": sum(map(len, expected)),
        "tokenizer_sha256": tokenizer.sha256,
        "end_of_document": tokenizer.end_of_text,
        "inputs": (
            {
                "name": "a.jsonl",
                "bytes": source.stat().st_size,
                "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
            },
        ),
    }
    assert str(done).startswith(f"{done.prefix}: 4 documents in, 4 out, {done.tokens} tokens, 0.0 MB in ")


def test_without_end_of_document_and_with_another_key(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"body": "four", "text": 1}')
    done = preprocess(source, tmp_path / "out", tokenizer, json_key="body")
    assert done.prefix.name == "out_body_document"
    assert IndexedDataset(done.prefix)[0].tolist() == tokenizer.encode("four")
    manifest = read_manifest(done.prefix)
    assert manifest is not None
    assert manifest.end_of_document is None


def test_many_batches(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    texts = [f"{number} " + "word " * 400 for number in range(1200)]
    source.write_bytes(lines(*texts))
    done = preprocess(source, tmp_path / "out", tokenizer)
    dataset = IndexedDataset(done.prefix)
    assert done.documents_out == dataset.documents == 1200
    assert dataset[1199].tolist() == tokenizer.encode(texts[-1])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"{broken", f"{JSON} Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b"", f"{JSON} Expecting value: line 2 column 1 (char 1)"),
        (
            b'\xef\xbb\xbf{"text": "a"}',
            f"{JSON} Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)",
        ),
        (b'{"text": "a\xff"}', "is not UTF-8; got byte 0xff at column 12"),
        (b"[1]", "is not a JSON object; got [1]"),
        (b'{"body": "a", "aa": 1}', "has no key 'text'; got the keys aa, body"),
        (b"{}", "has no key 'text'; got the keys (none)"),
        (b'{"text": null}', "has no text under 'text'; got null"),
        (b'{"text": ["' + b"a" * 99 + b'"]}', "has no text under 'text'; got [\"" + "a" * 55 + "..."),
        (b'{"text": "a\\ud800"}', "holds half of a surrogate pair, which is no character; got U+D800 at character 2"),
    ],
)
def test_a_bad_line_stops_before_any_output(
    tokenizer: BytePairTokenizer, tmp_path: Path, line: bytes, expected: str
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(lines("fine") + line + b"\n" + lines("never reached"))
    with pytest.raises(RequestError) as caught:
        preprocess(source, tmp_path / "out", tokenizer)
    assert str(caught.value) == f"{source}:2: {expected}; {TODO}"
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_source_that_cannot_be_read(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    for source, got in ((tmp_path / "none", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(RequestError) as caught:
            preprocess(source, tmp_path / "out", tokenizer)
        assert str(caught.value) == f"{source}: cannot be read; got {got}; give a file of JSON lines"
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_manifest(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"vocab_size": 0}')
    with pytest.raises(RequestError) as caught:
        read_manifest(tmp_path / "a")
    assert str(caught.value) == (
        f"{path}: is not a data set's manifest; got vocab_size: Input should be greater than 0; "
        "make the data again with `tridock data preprocess`, or delete this file and set model.vocab_size"
    )
    assert read_manifest(tmp_path / "b") is None
