"""Work that is interrupted: the same bytes when it is resumed, and no output that only looks whole."""

import dataclasses
import errno
import gzip
import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.data.test_preprocess import TEXTS, files, lines, message, request
from tridock.data import preprocess as module
from tridock.data.preprocess import Preprocessed, preprocess
from tridock.data.resumable_build import Finished, ResumableBuild
from tridock.data.tokenize.tokenizer import BytePairTokenizer


@pytest.fixture(scope="module")
def tokenizer() -> BytePairTokenizer:
    return BytePairTokenizer.train(TEXTS, 280)


def test_an_output_folder_that_is_removed_in_the_middle(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    source, folder = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_bytes(lines(*["four"] * 100))
    renamed = tmp_path / "renamed"

    def remove(_: module.Done) -> None:
        if folder.exists():
            shutil.rmtree(folder)

    def rename(_: module.Done) -> None:
        if folder.exists():
            folder.rename(renamed)

    lost = "was removed during the run; start from the beginning, and leave the folder alone until the run is done"
    for how in (remove, rename):
        wanted = request(tokenizer, folder / "o", source, chunk_bytes=50)
        assert message(lambda: preprocess(wanted, how)) == f"{folder}/.o.unfinished: {lost}"  # noqa: B023
        assert not folder.exists()


def test_a_part_of_the_work_that_was_removed(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    """A resumed run does not fill it with zeros."""
    source, part = tmp_path / "a.jsonl", tmp_path / ".o.unfinished" / "0.lengths"
    source.write_bytes(lines(*["four"] * 100))
    lost = "was removed during the run; start from the beginning, and leave the folder alone until the run is done"

    def stop(done: module.Done) -> None:
        if done.documents == 50:
            part.unlink()

    wanted = request(tokenizer, tmp_path / "o", source, chunk_bytes=50, journal_seconds=0)
    assert message(lambda: preprocess(wanted, stop)) == f"{part}: {lost}"
    assert message(lambda: preprocess(dataclasses.replace(wanted, resume=True))) == f"{part}: {lost}"
    assert files(tmp_path) == {}


def work(tmp_path: Path, count: int = 400) -> list[Path]:
    chance = random.Random(3)
    texts = [" ".join(chance.choices(["one", "two", "žluť", ""], k=30)) for _ in range(count)]
    sources = [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"]
    sources[0].write_bytes(lines(*texts[: count // 2]) + b"{\n")
    sources[1].write_bytes(gzip.compress(b"[]\n" + lines(*texts[count // 2 :]))[:-20])
    return sources


def test_resumed_after_every_chunk(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    """Killed after each chunk in turn, with another chunk size each time: the bytes do not change."""
    sources = work(tmp_path)
    rejects = tmp_path / "r"
    preprocess(request(tokenizer, tmp_path / "w", *sources, rejects=rejects))
    expected = {**files(tmp_path), "r": rejects.read_bytes()}
    manifest = (tmp_path / "w_text_document.json").read_bytes()
    for path in [*tmp_path.glob("w*"), rejects]:
        path.unlink()

    class Killed(BaseException):
        pass

    def run(size: int, chunks: int) -> None:
        left = chunks

        def progress(_: module.Done) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed

        wanted = request(
            tokenizer, tmp_path / "w", *sources, rejects=rejects, resume=True, chunk_bytes=size, journal_seconds=0
        )
        preprocess(wanted, progress)

    for attempt in range(200):
        try:
            run(1000 + 370 * (attempt % 5), 1 + attempt % 3)
            break
        except Killed:
            assert files(tmp_path) == {}
    else:
        pytest.fail("never done")
    assert {**files(tmp_path), "r": rejects.read_bytes()} == expected
    assert (tmp_path / "w_text_document.json").read_bytes() == manifest
    assert not list(tmp_path.glob(".*"))


def test_publishing_may_be_interrupted_anywhere(
    tokenizer: BytePairTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b"".join(b'{"a": "one", "b": "two three"}\n' for _ in range(9)))
    more = {"keys": ("a", "b"), "resume": True}
    preprocess(request(tokenizer, tmp_path / "w", source, **more))
    expected = files(tmp_path)
    for path in tmp_path.glob("w*"):
        path.unlink()
    real = os.replace
    for step in range(1, 12):
        left = step

        def replace(source: Path, target: Path, **given: int | None) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise KeyboardInterrupt
            real(source, target, **given)

        monkeypatch.setattr(os, "replace", replace)
        try:
            preprocess(request(tokenizer, tmp_path / "w", source, **more))
        except KeyboardInterrupt:
            monkeypatch.setattr(os, "replace", real)
            assert all(
                (tmp_path / f"w_{k}_document.bin").exists() for k in "ab" if (tmp_path / f"w_{k}_document.idx").exists()
            )
            preprocess(request(tokenizer, tmp_path / "w", source, **more))
        else:
            break
        assert files(tmp_path) == expected
        assert not list(tmp_path.glob(".*"))
        for path in tmp_path.glob("w*"):
            path.unlink()
    assert step > 5


def test_a_full_disk_leaves_nothing_that_looks_whole(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(lines(*(f"{number} four " * 20 for number in range(2000))))
    preprocess(request(tokenizer, tmp_path / "expected", source))
    wanted = request(tokenizer, tmp_path / "w", source, chunk_bytes=9000, journal_seconds=0, resume=True)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        text = message(lambda: preprocess(wanted))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, previous)
    assert text == (
        f"{tmp_path / 'w'}: cannot be written; got {os.strerror(errno.EFBIG)}; "
        "free some space there or choose another --output-prefix, and continue with --resume"
    )
    assert [path.name for path in tmp_path.glob("w*")] == []
    preprocess(wanted)
    for suffix in ("bin", "idx"):
        name = f"_text_document.{suffix}"
        assert (tmp_path / f"w{name}").read_bytes() == (tmp_path / f"expected{name}").read_bytes()


def test_rejects_that_cannot_be_written_leave_no_copy(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    source, rejects = tmp_path / "a.jsonl", tmp_path / "r"
    source.write_bytes(lines("four") + b"{\n")
    wanted = request(tokenizer, tmp_path / "w", source, rejects=rejects)
    assert "w: cannot be written; got Is a directory; " in message(
        lambda: preprocess(wanted, lambda _: rejects.mkdir(exist_ok=True))
    )
    assert sorted(path.name for path in tmp_path.glob(".*")) == [".w.unfinished"]


def test_what_cannot_be_resumed(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(lines(*["four"] * 50))

    def stop(done: module.Done) -> None:
        if done.documents > 20:
            raise KeyboardInterrupt

    def begin() -> None:
        with pytest.raises(KeyboardInterrupt):
            preprocess(request(tokenizer, tmp_path / "w", source, chunk_bytes=99, journal_seconds=0), stop)

    begin()
    todo = "resume with the same inputs and options, or leave --resume out and start from the beginning"
    other = request(tokenizer, tmp_path / "w", source, eod=True, resume=True, rejects=tmp_path / "r")
    assert message(lambda: preprocess(other)) == (
        f"--resume: the run was started with append-eod False; got True; {todo}\n"
        f"--resume: the run was started with on-error stop; got skip; {todo}"
    )
    again = request(tokenizer, tmp_path / "w", source, resume=True)
    source.write_bytes(lines("ruof", *["four"] * 49))
    changed = f"{source}: has changed since the run started; leave --resume out and start from the beginning"
    assert message(lambda: preprocess(again)) == changed
    source.write_bytes(lines("four"))
    assert message(lambda: preprocess(again)) == changed
    journal = tmp_path / ".w.unfinished" / "journal.json"
    journal.write_text("{}")
    assert message(lambda: preprocess(again)) == (
        f"{journal}: is not a journal of this version; leave --resume out and start from the beginning"
    )
    with ResumableBuild(tmp_path / "w", 1, {}, False):
        assert message(lambda: preprocess(again)) == (
            f"{tmp_path / '.w.unfinished'}: is in use by another run; wait for it, or choose another --output-prefix"
        )
    done: Preprocessed = preprocess(again)
    assert done.documents_out == 1


@pytest.mark.parametrize("compressed", [False, True])
def test_a_finished_input_that_has_changed(tokenizer: BytePairTokenizer, tmp_path: Path, compressed: bool) -> None:
    def store(path: Path, text: str) -> None:
        path.write_bytes(gzip.compress(lines(text), mtime=0) if compressed else lines(text))

    sources = [tmp_path / name for name in "ab"]
    for source in sources:
        store(source, "four")
    seen = 0

    def stop(done: module.Done) -> None:
        nonlocal seen
        seen += 1
        if seen == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preprocess(request(tokenizer, tmp_path / "w", *sources, journal_seconds=0), stop)
    again = request(tokenizer, tmp_path / "w", *sources, resume=True)
    status = sources[0].stat()
    store(sources[0], "ruof")
    os.utime(sources[0], ns=(status.st_atime_ns, status.st_mtime_ns))  # as `rsync --times` and `cp --preserve` do
    changed = f"{sources[0]}: has changed since the run started; leave --resume out and start from the beginning"
    assert message(lambda: preprocess(again)) == changed
    store(sources[0], "four")  # the same content, written later
    assert preprocess(again).documents_out == 2


def test_the_journal_does_not_grow_with_the_inputs(tokenizer: BytePairTokenizer, tmp_path: Path) -> None:
    """It is written every few seconds; of the inputs only what is new."""
    sources = [tmp_path / f"{number:04d}.jsonl" for number in range(120)]
    for number, source in enumerate(sources):
        source.write_bytes(lines(f"one {number}"))

    def stop(done: module.Done) -> None:
        if done.documents > 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preprocess(request(tokenizer, tmp_path / "o", *sources, journal_seconds=0), stop)
    folder = tmp_path / ".o.unfinished"
    assert (folder / "journal.json").stat().st_size < 2000
    assert len((folder / "finished").read_bytes().splitlines()) == 100
    fewer = request(tokenizer, tmp_path / "o", *sources[1:], resume=True)
    assert len(refused := message(lambda: preprocess(fewer))) < 400
    assert refused.startswith("--resume: the run was started with inputs 120 files (SHA-256 of names, formats and")
    # What a killed run has written after its last journal counts for nothing.
    with (folder / "finished").open("ab") as file:
        file.write(b'{"name": "torn')
    done = preprocess(request(tokenizer, tmp_path / "o", *sources, resume=True))
    assert done.documents_out == 120
    manifest = json.loads((tmp_path / "o_text_document.json").read_text())
    assert [it["name"] for it in manifest["inputs"]] == [source.name for source in sources]


def test_the_time_of_many_inputs_does_not_grow_as_their_square(
    tokenizer: BytePairTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = 0

    class Counted(list[Finished]):
        def __iter__(self) -> Iterator[Finished]:
            nonlocal passes
            passes += 1
            return super().__iter__()

    monkeypatch.setattr(ResumableBuild, "_load_finished", lambda _: Counted())
    sources = [tmp_path / f"{number:04d}.jsonl" for number in range(50)]
    for source in sources:
        source.write_bytes(lines("one"))
    done = preprocess(request(tokenizer, tmp_path / "o", *sources, journal_seconds=0), lambda _: None)
    assert done.bytes == 50 * len(lines("one"))
    assert passes <= 2, "once before all, and once for the manifest"


def test_a_second_ctrl_c_while_the_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = shutil.rmtree

    def interrupted(path: Path) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt), ResumableBuild(tmp_path / "o", 1, {}, resume=False):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
