"""Documents in, an indexed data set out: the same bytes however it is done, and nothing is lost silently."""

import dataclasses
import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dataset_writer import IndexedDatasetWriter
from tests.patience import STEP_S
from tridock.data import preprocess as module
from tridock.data.dataset.indexed_dataset import IndexedDataset
from tridock.data.dataset.manifest import read_manifest
from tridock.data.input.files import find_sources
from tridock.data.input.sources import Kind
from tridock.data.preprocess import Request, preprocess
from tridock.data.tokenize.blocks import Recipe
from tridock.data.tokenize.encoders import Reference
from tridock.data.tokenize.tokenizer import BytePairTokenizer
from tridock.errors import Problem, RequestError, RunError

TEXTS = ["one two three " * 9, "", "four", "line\nbreak"]
REMEDY = (
    "correct or remove the line, or skip such lines with --on-error skip --rejects FILE; "
    'each is one object such as {"text": "…"}'
)


@pytest.fixture(scope="module")
def tokenizer() -> BytePairTokenizer:
    return BytePairTokenizer.train(TEXTS, 280)


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def request(tokenizer: BytePairTokenizer, prefix: Path, *inputs: Path, eod: bool = False, **more: Any) -> Request:
    keys = more.pop("keys", ("text",))
    sources = find_sources([str(path) for path in inputs], Kind.JSONL)
    return Request(sources, prefix, Recipe(Reference(tokenizer), keys, eod), **more)


def files(folder: Path) -> dict[str, bytes]:
    """What a reader sees, manifests aside."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".bin", ".idx")}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def message(action: Callable[[], object], kind: type[Exception] = RequestError) -> str:
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


def test_documents_in_are_documents_out(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(lines(*TEXTS))
    seen: list[module.Done] = []
    done = preprocess(request(tokenizer, tmp_path / "out", source, eod=True), seen.append)
    dataset = IndexedDataset(tmp_path / "out_text_document")
    expected = [[*tokenizer.encode(text), tokenizer.end_of_text] for text in TEXTS if text]
    assert [dataset[number].tolist() for number in range(len(dataset))] == expected
    assert dataset.document_index.tolist() == [0, 1, 1, 2, 3]
    size = source.stat().st_size
    assert seen[-1] == module.Done(size, size, 4, done.tokens)
    manifest = read_manifest(done.prefix)
    assert manifest is not None
    assert manifest.versions.keys() == {"tridock", "python", "numpy", "tokenizers"}
    assert manifest.model_dump(exclude={"versions"}) == {
        "vocab_size": tokenizer.vocab_size,
        "documents": 4,
        "tokens": sum(map(len, expected)),
        "tokenizer_sha256": tokenizer.sha256,
        "end_of_document": tokenizer.end_of_text,
        "inputs": ({"name": "a.jsonl", "bytes": size, "sha256": hashlib.sha256(source.read_bytes()).hexdigest()},),
        "json_key": "text",
        "sequences": 3,
        "rejected": 0,
        "part": None,
        **{f"{s}_sha256": sha256(tmp_path / f"out_text_document.{s}") for s in ("bin", "idx")},
    }
    assert str(done).startswith(
        f"{done.prefix}: 4 documents in, 4 out (1 empty), 0 rejected; {done.tokens} tokens, 0.0 MB in "
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.jsonl",
        *(f"out_text_document.{s}" for s in ("bin", "idx", "json")),
    ]


def test_several_keys_are_several_data_sets(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"body": "four", "title": ["one", "two"]}\n{"body": "", "title": "x"}')
    done = preprocess(request(tokenizer, tmp_path / "o", source, keys=("title", "body"), eod=True))
    title, body = (IndexedDataset(prefix) for prefix in done.prefixes)
    assert [prefix.name for prefix in done.prefixes] == ["o_title_document", "o_body_document"]
    end = tokenizer.end_of_text
    assert [title[n].tolist() for n in range(3)] == [
        tokenizer.encode("one"), [*tokenizer.encode("two"), end], [*tokenizer.encode("x"), end]
    ]  # fmt: skip
    assert (title.document_index.tolist(), body.document_index.tolist()) == ([0, 2, 3], [0, 1, 1])
    assert (done.documents_in, done.documents_out, done.empty) == (2, 2, 1)
    assert str(done).startswith(f"{done.prefixes[0]}, {done.prefixes[1]}: 2 documents in, 2 out (1 empty), ")


def test_two_workers_write_the_same_bytes_of_two_keys(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    texts = b"".join(lines("word " * (n * 37 % 90), "") for n in range(60))
    source.write_bytes(texts.replace(b'"}', b'", "b": "x y"}'))
    for workers in (1, 2):
        (tmp_path / f"{workers}").mkdir()
        wanted = request(tokenizer, tmp_path / f"{workers}" / "o", source, keys=("text", "b"), eod=True)
        preprocess(dataclasses.replace(wanted, workers=workers, chunk_bytes=400))
    assert files(tmp_path / "1") == files(tmp_path / "2")
    assert len(files(tmp_path / "1")) == 4


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_stops_before_any_output(tokenizer: BytePairTokenizer, tmp_path: Path, workers: int) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(lines("fine") + b'{"text": null}\n' + lines("never reached") + b"{\n")
    wanted = request(tokenizer, tmp_path / "out", source, workers=workers, chunk_bytes=20)
    assert message(lambda: preprocess(wanted)) == f"{source}:2: has no text under 'text'; got null; {REMEDY}"
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_input_that_somebody_writes_to(tokenizer: BytePairTokenizer, tmp_path: Path, workers: int) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(lines(*["four"] * 100))

    def append(_: module.Done) -> None:
        with source.open("ab") as file:
            file.write(lines("more"))

    wanted = request(tokenizer, tmp_path / "out", source, workers=workers, chunk_bytes=50)
    changed = f"{source}: changed while it was read; stop all writers, and start from the beginning"
    assert message(lambda: preprocess(wanted, append)) == changed
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_input_that_is_replaced(
    tokenizer: BytePairTokenizer, tmp_path: Path, workers: int, compressed: bool
) -> None:
    def content(text: str) -> bytes:
        return gzip.compress(lines(*[text] * 10_000)) if compressed else lines(*[text] * 10_000)

    source = tmp_path / "a.jsonl"
    source.write_bytes(content("four"))
    status = source.stat()

    def replace(_: module.Done) -> None:
        other = tmp_path / "other"
        other.write_bytes(content("ruof"))
        os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
        other.replace(source)

    wanted = request(tokenizer, tmp_path / "out", source, workers=workers, chunk_bytes=20_000)
    changed = f"{source}: changed while it was read; stop all writers, and start from the beginning"
    assert message(lambda: preprocess(wanted, replace)) == changed
    assert message(lambda: preprocess(wanted, lambda _: source.unlink(missing_ok=True))) == changed


def test_a_file_cut_short_stops_too(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl.gz"
    source.write_bytes(gzip.compress(lines("fine"))[:-3])
    assert message(lambda: preprocess(request(tokenizer, tmp_path / "out", source))) == (
        f"{source}:2: the file ends inside its compressed data; copy or compress the file again, or keep what can be "
        "read with --on-error skip --rejects FILE"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl.gz"]


@pytest.mark.parametrize("workers", [1, 2])
def test_rejects_hold_every_line_and_its_reason(tokenizer: BytePairTokenizer, tmp_path: Path, workers: int) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    first.write_bytes(lines("fine") + b'{"text": 1}\n\xff\n' + lines("four"))
    chance = random.Random(5)
    noise = ["".join(chance.choices("abcdefgh", k=60)) for _ in range(4000)]
    second.write_bytes(gzip.compress(lines(*noise))[:-2000])
    rejects = tmp_path / "rejects.jsonl"
    wanted = request(tokenizer, tmp_path / "o", first, second, rejects=rejects, workers=workers, chunk_bytes=5000)
    done = preprocess(wanted)
    records = [json.loads(line) for line in rejects.read_text().splitlines()]
    assert records[:2] == [
        {"file": str(first), "line": 2, "reason": "has no text under 'text'; got 1", "text": '{"text": 1}'},
        {"file": str(first), "line": 3, "reason": "is not UTF-8; got byte 0xff at column 1", "base64": "/w=="},
    ]
    (last,) = records[2:]
    assert (last["file"], last["reason"]) == (str(second), "the file ends inside its compressed data")
    kept = last["line"] - 1
    assert (lines(*noise).splitlines()[kept].decode() + "\n").startswith(last["text"])
    assert (done.documents_in, done.documents_out, done.rejected) == (kept + 5, kept + 2, 3)
    dataset = IndexedDataset(done.prefix)
    assert dataset[dataset.documents - 1].tolist() == tokenizer.encode(noise[kept - 1])


def test_no_worker_outlives_the_run() -> None:
    program = (
        "import os, sys, time; from pathlib import Path; from tests.unit.data.test_preprocess import *\n"
        "def chunks():\n"
        "    from tridock.data.input.sources import Chunk, Source\n"
        "    source = Source('x', None, Kind.JSONL)\n"
        "    for n in range(20):\n"
        '        yield Chunk(source, 0, 1, b\'{"text": "a"}\\n\', 1, 0, 0, 0)\n'
        "    time.sleep(9999)\n"
        "from tridock.data.tokenize.workers import encode_in_order\n"
        "recipe = Recipe(Reference(BytePairTokenizer.train(TEXTS, 280)), ('text',), False)\n"
        "for n, _ in enumerate(encode_in_order(recipe, chunks(), 2)):\n"
        "    if n == 4: print(*Path(f'/proc/self/task/{os.getpid()}/children').read_text().split(), flush=True)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    )
    assert run.stdout is not None
    children = run.stdout.readline().split()
    run.kill()
    run.wait()
    run.stdout.close()
    assert len(children) == 2
    deadline = time.monotonic() + STEP_S
    while any(_runs(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_workers_error_comes_with_its_message(
    tokenizer: BytePairTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(lines("one"))

    def fail(*_: object) -> None:
        raise RunError(Problem("a", "is wrong", "b", "correct it"))

    monkeypatch.setattr(Recipe, "encode", fail)
    expected = "a: is wrong; got b; correct it"
    assert message(lambda: preprocess(request(tokenizer, tmp_path / "o", source, workers=2)), RunError) == expected


def test_a_killed_worker_is_reported(
    tokenizer: BytePairTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(lines(*["one"] * 10_000))

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Recipe, "encode", die)
    assert message(lambda: preprocess(request(tokenizer, tmp_path / "o", source, workers=2)), RunError) == (
        "a worker: was killed; look for `Out of memory` in dmesg, then continue with --resume and fewer --workers"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_the_index_of_many_documents_is_written_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tridock.data.dataset import indexed_dataset

    for block in (1 << 18, 7):
        monkeypatch.setattr(indexed_dataset, "_BLOCK", block)
        with IndexedDatasetWriter(tmp_path / f"b{block}", 10) as writer:
            for number in range(100):
                writer.add_document([1] * (number % 4))
    assert (tmp_path / "b7.idx").read_bytes() == (tmp_path / f"b{1 << 18}.idx").read_bytes()


def test_a_file_that_is_no_manifest(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"vocab_size": 0}')
    with pytest.raises(RequestError) as caught:
        read_manifest(tmp_path / "a")
    assert str(caught.value) == (
        f"{path}: is not a data set's manifest; got vocab_size: Input should be greater than 0; "
        "build the data again with `tridock data preprocess`, or delete this file and set model.vocab_size"
    )
    assert read_manifest(tmp_path / "b") is None
