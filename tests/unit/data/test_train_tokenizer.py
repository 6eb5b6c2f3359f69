"""`tridock data train-tokenizer`: lines as strictly as preprocess takes them, the same bytes each time."""

import gzip
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.patience import STEP_S
from tests.unit.data.test_preprocess_command import ROOT
from tridock.cli import main
from tridock.data.tokenize.learner import learn
from tridock.data.tokenize.tokenizer import END_OF_TEXT, BytePairTokenizer
from tridock.errors import RunError

TEXTS = ["def main() -> int:\n    return 0\n" * 40, "", "class A:\n    pass\n" * 30, "žluťoučký kůň 🐎\n" * 20]
FILES = ["merges.txt", "tokenizer.json", "vocab.json"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path


def train(*more: str, size: int = 300) -> list[str]:
    return ["data", "train-tokenizer", "--input", "a.jsonl", "--vocab-size", str(size), "--output", "t", *more]


def files(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def problems(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> list[str]:
    capsys.readouterr()
    assert main(arguments) == 2
    assert not Path("t").exists()
    return capsys.readouterr().err.splitlines()


def test_used_at_once_by_preprocess_and_megatron(capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import ByteLevelBPETokenizer

    assert main(train()) == 0
    size = Path("a.jsonl").stat().st_size / 1e6
    assert capsys.readouterr() == (
        f"t: 300 tokens, byte-level BPE of 4 documents, {size:.1f} MB; 0 rejected; "
        "tokenizer.json, vocab.json, merges.txt\n",
        "read 4 documents; training the tokenizer\n",
    )
    assert sorted(files("t")) == FILES
    tokenizer = BytePairTokenizer.load(Path("t"))
    assert tokenizer.sha256 == BytePairTokenizer.train(TEXTS, 300).sha256
    assert json.loads(Path("t/vocab.json").read_text())[END_OF_TEXT] == tokenizer.end_of_text
    gpt2 = BytePairTokenizer.from_gpt2(Path("t/vocab.json"), Path("t/merges.txt"))
    reference = ByteLevelBPETokenizer("t/vocab.json", "t/merges.txt")
    assert gpt2.encode_batch(TEXTS) == [reference.encode(text).ids for text in TEXTS] == tokenizer.encode_batch(TEXTS)
    preprocess = ["data", "preprocess", "--input", "a.jsonl", "--output-prefix", "o", "--tokenizer-type"]
    made = ["GPT2BPETokenizer", "--vocab-file", "t/vocab.json", "--merge-file", "t/merges.txt", "--workers", "1"]
    assert main([*preprocess, *made]) == 0
    capsys.readouterr()
    assert main(["data", "inspect", "o_text_document", "--vocab-file", "t/tokenizer.json"]) == 0
    assert "def main() -> int:\\n    return 0\\n" in (out := capsys.readouterr().out)
    assert "note" not in out


def test_into_the_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("t").mkdir()
    monkeypatch.chdir("t")
    assert main(train("--input", "../a.jsonl", "--output", ".")) == 0
    assert sorted(files(".")) == FILES


def test_the_same_bytes_each_time_however_the_texts_come(monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(train()) == 0
    first = files("t")
    lines = Path("a.jsonl").read_bytes().splitlines(keepends=True)
    Path("f").mkdir()
    Path("f/1.gz").write_bytes(gzip.compress(lines[0] + lines[1]))
    Path("f/2.jsonl").write_bytes(lines[2] + lines[3])
    monkeypatch.setattr("tridock.data.tokenize.train.CHUNK_BYTES", 100)
    assert main(train("--input", "f", "--output", "u")) == 0
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"".join(lines))))
    assert main(train("--input", "-", "--output", "v")) == 0
    assert first == files("u") == files("v")
    # Another process, on other threads.
    command = [sys.executable, "-m", "tridock.cli", *train("--output", "w")]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "RAYON_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    assert first == files("w")


def test_a_folder_that_is_there_keeps_what_else_it_has() -> None:
    Path("t").mkdir()
    Path("t/vocab.json").write_text("old")
    Path("t/mine").write_text("mine")
    assert main(train()) == 0
    assert sorted(files("t")) == sorted([*FILES, "mine"])
    BytePairTokenizer.from_gpt2(Path("t/vocab.json"), Path("t/merges.txt"))


def test_fewer_tokens_than_asked_for_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(train(size=5000)) == 0
    there = BytePairTokenizer.load(Path("t")).vocab_size
    assert 257 < there < 5000
    assert f"t: {there} tokens (5,000 requested: the texts have no more), " in capsys.readouterr().out


def test_other_keys_and_lines_of_text() -> None:
    Path("b.jsonl").write_text(json.dumps({"a": "one two " * 9, "b": ["three", "four " * 9]}) + "\n")
    assert main(train("--input", "b.jsonl", "--json-keys", "a", "b", size=290)) == 0
    expected = BytePairTokenizer.train(["one two " * 9, "three", "four " * 9], 290)
    assert BytePairTokenizer.load(Path("t")).sha256 == expected.sha256
    Path("c").write_text("one two one two\n")
    Path("c.txt").write_text("one two one two\n")
    assert main(train("--input", "c", "--input-format", "text", "--output", "u")) == 0
    assert main(train("--input", "c.txt", "--output", "v")) == 0
    assert files("u") == files("v")


def test_lines_that_are_no_documents(capsys: pytest.CaptureFixture[str]) -> None:
    good = Path("a.jsonl").read_bytes()
    Path("b.jsonl").write_bytes(good + b'{"text": null}\n\n\xff\n')
    todo = "correct or remove the line, or skip such lines with --on-error skip --rejects FILE"
    expected = f'b.jsonl:5: has no text under \'text\'; got null; {todo}; each is one object such as {{"text": "…"}}'
    assert problems(capsys, train("--input", "b.jsonl")) == [expected]
    cut = gzip.compress(good + b'{"text": "' + random.Random(0).randbytes(9000).hex().encode())[:-3000]
    Path("c.gz").write_bytes(cut)
    copy = "copy or compress the file again, or keep what can be read with --on-error skip --rejects FILE"
    assert problems(capsys, train("--input", "c.gz")) == [f"c.gz:5: the file ends inside its compressed data; {copy}"]
    assert not list(Path().glob(".*"))
    assert main(train("--input", "b.jsonl", "c.gz", "--on-error", "skip", "--rejects", "r")) == 0
    assert ", byte-level BPE of 8 documents, " in (out := capsys.readouterr().out)
    assert "; 4 rejected; " in out
    rejects = [json.loads(line) for line in Path("r").read_text().splitlines()]
    assert rejects[:3] == [
        {"file": "b.jsonl", "line": 5, "reason": "has no text under 'text'; got null", "text": '{"text": null}'},
        {"file": "b.jsonl", "line": 6, "reason": "is blank", "text": ""},
        {"file": "b.jsonl", "line": 7, "reason": "is not UTF-8; got byte 0xff at column 1", "base64": "/w=="},
    ]
    assert (rejects[3]["file"], rejects[3]["line"]) == ("c.gz", 5)
    assert BytePairTokenizer.load(Path("t")).sha256 == BytePairTokenizer.train([*TEXTS, *TEXTS], 300).sha256


def test_flags_that_cannot_be_done_are_told_all_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    wrong = ["--output", "file", "--on-error", "skip", "--input", "none"]
    assert problems(capsys, train(*wrong, size=256)) == [
        f"--vocab-size: must be at least 257: every byte and {END_OF_TEXT}; got 256; raise it",
        "--output: is not a folder; got file; name a folder",
        "--rejects: is required with --on-error skip; name a file for the skipped lines",
    ]
    assert problems(capsys, train(size=2**31)) == [
        "--vocab-size: must be at most 2147483647: token ids are int32; got 2147483648; lower it"
    ]
    todo = "give files, folders or patterns that exist, or - for standard input"
    assert problems(capsys, train("--input", "none", "b")) == [
        f"none: names no file; {todo}",
        f"b: names no file; {todo}",
    ]
    assert problems(capsys, train("--input", "file")) == ["--input: contains no document; give texts to train on"]


def test_a_full_disk_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        # Room for vocab.json and merges.txt, and not for tokenizer.json.
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limit[1]))
        found = problems(capsys, train())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, previous)
    todo = "free some space there, or choose another --output"
    assert found[-1] == f"t: cannot be written; got File too large; {todo}"
    assert [path.name for path in Path().iterdir()] == ["a.jsonl"]


def used(pid: int, after: float = 0) -> tuple[bool, list[str]]:
    """Whether the process could go on, and the time that it has used."""
    time.sleep(after)
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return state != "S", fields[10:12]


@pytest.mark.parametrize("learning", [False, True])
def test_ctrl_c_ends_it_at_once(folder: Path, learning: bool) -> None:
    """While it waits for text, and while the library learns merges and hears nothing."""
    generator = random.Random(1)
    text = " ".join(generator.randbytes(4).hex() for _ in range(60_000))
    more = ["--input", "-", "--on-error", "skip", "--rejects", "r"]
    command = [sys.executable, "-m", "tridock.cli", *train(*more, size=200_000)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "stdout": subprocess.PIPE}
    # A terminal's Ctrl-C reaches all processes of the group.
    run = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, start_new_session=True, **pipes)
    try:
        assert run.stdin is not None
        assert run.stderr is not None
        run.stdin.write(json.dumps({"text": text}).encode() + b"\n")
        run.stdin.flush()
        if learning:
            run.stdin.close()
            assert run.stderr.readline() == b"read 1 documents; training the tokenizer\n"
        else:
            # At rest: a signal in the moment when the other process starts is only seen with the next one.
            while not list(folder.glob(".r.*")) or used(run.pid) != (False, used(run.pid, after=0.2)[1]):
                assert run.poll() is None
        os.killpg(run.pid, signal.SIGINT)
        run.wait(timeout=STEP_S)
        assert (run.returncode, run.stderr.read()) == (130, b"interrupted\n")
    finally:
        run.kill()
        run.wait()
    assert [path.name for path in folder.iterdir()] == ["a.jsonl"]


def test_a_learner_that_is_killed() -> None:
    """Before it has read all, and after."""
    text = random.Random(1).randbytes(300_000).hex()

    def texts(more: int) -> Iterator[str]:
        yield text
        (child,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        yield from [text] * more

    for more in (0, 3):
        with pytest.raises(RunError) as caught:
            learn(texts(more), 300)
        assert str(caught.value) == (
            "tokenizer training process: was killed; "
            "look for `Out of memory` in dmesg, then give less text or a smaller --vocab-size"
        )
