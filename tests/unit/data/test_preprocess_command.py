"""`tridock data preprocess`: Megatron's flags, what is said of them, exit codes; the seed's way."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.patience import STEP_S
from tridock.cli import main
from tridock.data.dataset.indexed_dataset import IndexedDataset
from tridock.data.dataset.manifest import read_manifest
from tridock.data.resumable_build import ResumableBuild
from tridock.data.tokenize.tokenizer import END_OF_TEXT, BytePairTokenizer

ROOT = Path(__file__).parents[3]
TEXTS = ["one two three " * 9, "", "four"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    BytePairTokenizer.train(TEXTS, 280).save(tmp_path / "t")
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path


PREPROCESS = ["data", "preprocess", "--input", "a.jsonl", "--tokenizer-type", "GPT2BPETokenizer", "--workers", "1"]


def gpt2(*more: str) -> list[str]:
    return [*PREPROCESS, "--output-prefix", "o", "--vocab-file", "t/vocab.json", "--merge-file", "t/merges.txt", *more]


def test_an_old_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = gpt2(
        "--json-keys",
        "text",
        "--append-eod",
        "--dataset-impl",
        "mmap",
        "--log-interval",
        "2",
        "--keep-newlines",
        "--partitions",
        "2",
        "--keep-sequential-samples",
        "--use-gigatoken",
    )
    assert main(old) == 0
    out, err = capsys.readouterr()
    assert out.startswith("o_text_document: 3 documents in, 3 out (1 empty), 0 rejected; ")
    assert (
        "--keep-newlines: has no effect: texts are not split into sentences\n"
        "--partitions: has no effect: --workers sets the number of processes\n"
        "--keep-sequential-samples: has no effect: documents always keep their order\n"
    ) in err
    assert "Processed 3 documents (" in err
    tokenizer = BytePairTokenizer.load(Path("t"))
    dataset = IndexedDataset(Path("o_text_document"))
    end = tokenizer.end_of_text
    assert [dataset[n].tolist() for n in range(2)] == [[*tokenizer.encode(t), end] for t in TEXTS if t]
    whole = [Path(f"o_text_document.{suffix}").read_bytes() for suffix in ("bin", "idx")]
    # A tokenizer.json gives the same, and so does the reference.
    reference = ["--encoder", "reference", "--vocab-file", "t/vocab.json", "--merge-file", "t/merges.txt"]
    for more in (["--vocab-file", "t/tokenizer.json"], ["--vocab-file", "t"], reference):
        assert main([*PREPROCESS, "--output-prefix", "p", "--append-eod", *more]) == 0
        assert [Path(f"p_text_document.{suffix}").read_bytes() for suffix in ("bin", "idx")] == whole


def test_flags_that_cannot_be_done_are_told_all_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["--split-sentences", "--dataset-impl", "lazy", "--log-interval", "0", "--on-error", "skip", "--resume"]
    more = ["--input", "-", "b", "--tokenizer-type", "BertWordPieceCase", "--workers", "0"]
    assert main(gpt2(*wrong, *more)) == 2
    assert capsys.readouterr().err.splitlines() == [
        "--split-sentences: is not supported: texts are not split into sentences; leave it out (GPT needs none), or "
        "use Megatron's tools/preprocess_data.py",
        "--tokenizer-type: must be GPT2BPETokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, "
        "GPTSentencePieceTokenizer, Llama2Tokenizer, TikTokenizer, NullTokenizer or vocab; got BertWordPieceCase; "
        "give one of them",
        "--dataset-impl: must be mmap; got lazy; leave it out: the engines read mmap",
        "--workers: must be at least 1; got 0; raise it, or leave it out",
        "--log-interval: must be at least 1; got 0; raise it, or leave it out",
        "--rejects: is required with --on-error skip; name a file for the skipped lines",
        "--resume: cannot continue with standard input or a URL; leave --resume out and start from the beginning",
    ]
    assert main(gpt2("--rejects", "r")) == 2
    assert capsys.readouterr().err == "--rejects: has no effect without --on-error skip; got r; add it\n"
    assert main(gpt2("--on-error", "skip", "--rejects", "none/r")) == 2
    assert capsys.readouterr().err == ("--rejects: is in a folder that does not exist; got none/r; create the folder\n")
    for file in ("t/vocab.json", "none"):
        assert main([*PREPROCESS, "--output-prefix", "p", "--vocab-file", file]) == 2
        assert capsys.readouterr().err == (
            "--merge-file: is required with GPT2BPETokenizer; "
            "give GPT-2's merges.txt, or a tokenizer.json as --vocab-file\n"
        )


def test_outputs_replace_no_input_and_no_device(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skip = ["--on-error", "skip", "--rejects"]
    Path("link").symlink_to("a.jsonl")
    Path("hard").hardlink_to("a.jsonl")  # as two mounts of one folder: another name of the same file
    os.mkfifo(".pipe")
    (folder / "o_text_document.json").write_text("{}")
    lines = Path("a.jsonl").read_bytes()
    (folder / "redirected").touch()
    # As /dev/stdout where the output goes to a file: the link must not be replaced, and neither must the file.
    opened = os.open("redirected", os.O_RDWR)
    fd = f"/dev/fd/{opened}"
    for more, problem in (
        ([*skip, "./a.jsonl"], "--rejects: would overwrite an input; got a.jsonl"),
        ([*skip, "link"], "--rejects: would overwrite an input; got link"),
        ([*skip, "hard"], "--rejects: would overwrite an input; got hard"),
        ([*skip, "t/merges.txt"], "--rejects: would overwrite an input; got t/merges.txt"),
        ([*skip, "o_text_document.bin"], "--rejects: would overwrite another output; got o_text_document.bin"),
        ([*skip, ".pipe"], "--rejects: is a folder, device or pipe, not a file; got .pipe"),
        ([*skip, fd], f"--rejects: is a folder, device or pipe, not a file; got {fd}"),
        ([*skip, ".o.unfinished"], "--rejects: is in the folder of the run's unfinished work; got .o.unfinished"),
        (["--input", "."], "--output-prefix: would overwrite an input; got o_text_document.json"),
    ):
        assert main(gpt2(*more)) == 2
        assert capsys.readouterr().err.splitlines()[-1] == f"{problem}; name another file"
    train = ["data", "train-tokenizer", "--input", "a.jsonl", "--vocab-size", "300", "--output", "t", *skip]
    os.close(opened)
    assert main([*train, "t/vocab.json"]) == 2
    expected = "--rejects: would overwrite another output; got t/vocab.json; name another file\n"
    assert capsys.readouterr().err == expected
    assert Path("a.jsonl").read_bytes() == lines


def test_the_tokenizer_of_a_folder_is_not_replaced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--output-prefix", "o", "--vocab-file", "t", "--on-error", "skip", "--rejects", "t/tokenizer.json"]
    assert main([*PREPROCESS, *more]) == 2
    expected = "--rejects: would overwrite an input; got t/tokenizer.json; name another file\n"
    assert capsys.readouterr().err.endswith(expected)
    config = Path("t/tokenizer_config.json")
    config.write_text(json.dumps({"eos_token": END_OF_TEXT}))
    more = ["--output-prefix", "o", "--on-error", "skip", "--rejects", str(config)]
    for model in ("t", "t/tokenizer.json"):
        assert main([*PREPROCESS, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", model, *more]) == 2
        expected = f"--rejects: would overwrite an input; got {config}; name another file\n"
        assert capsys.readouterr().err.endswith(expected)


def test_names_that_lead_nowhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(gpt2("--output-prefix", "d/..", "--json-keys", "a/b")) == 2
    assert capsys.readouterr().err.splitlines() == [
        "--output-prefix: names no file; got d/..; give a folder and a name: data/all",
        "--json-keys: contains a /, which a file name cannot have; got a/b; rename the key",
    ]
    for option in ("--output-prefix", "--vocab-file", "--rejects"):
        with pytest.raises(SystemExit, match="2"):
            main(gpt2(option, ""))
        assert f"error: argument {option}: the name is empty\n" in capsys.readouterr().err


def test_closed_outputs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(gpt2("--encoder", "reference")) == 0
    assert main(gpt2("--input", "")) == 2


def test_text_has_no_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.txt").write_text("one\n")
    assert main(gpt2("--input", "x.txt", "--json-keys", "a", "b")) == 2
    assert capsys.readouterr().err == (
        "--json-keys: names 2 keys, but x.txt is text; got a b; name one, or add --input-format jsonl\n"
    )
    Path("b.txt").write_text(f"\n \n{Path('a.jsonl').read_text()}")
    assert main(gpt2("--input", "x.txt", "b.txt", "--encoder", "reference")) == 0
    assert capsys.readouterr().err == (
        "b.txt: is read as text, but begins with a JSON object; for JSON lines add --input-format jsonl\n"
    )


def test_files_that_are_read_twice_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("b.jsonl", "d.jsonl"):
        Path(name).symlink_to("a.jsonl")
    Path("c.jsonl").hardlink_to("a.jsonl")
    twice = "b.jsonl: is read twice: it is the same file as a.jsonl"
    for inputs, printed in (["b.jsonl"], ""), (["a.jsonl", "b.jsonl"], twice), (["*.jsonl"], f"{twice} (2 more"):
        assert main(gpt2("--input", *inputs, "--encoder", "reference")) == 0
        out, err = capsys.readouterr()
        assert err == (f"{printed} inputs are repeated too)\n" if "(" in printed else printed and f"{printed}\n")
        assert f" {3 * (4 if '*.jsonl' in inputs else len(inputs))} documents in" in out


def test_special_tokens_in_texts(folder: Path) -> None:
    Path("a.jsonl").write_text(json.dumps({"text": f"one{END_OF_TEXT}two"}) + "\n")
    end = BytePairTokenizer.load(Path("t")).end_of_text
    for more, count in (([], 0), (["--allow-special"], 1)):
        assert main(gpt2(*more, "--encoder", "reference")) == 0
        assert IndexedDataset(Path("o_text_document"))[0].tolist().count(end) == count


def test_the_seeds_way(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("v.json").write_text(json.dumps({END_OF_TEXT: 3, "<unk>": 0, "a": 1, "b": 2}))
    Path("c").write_text("a  b\tc\n\nb\n")
    assert main(gpt2("--input", "c", "--tokenizer-type", "vocab", "--vocab-file", "v.json")) == 0
    assert capsys.readouterr().out.startswith("o_text_sentence: 3 documents in, 3 out (0 empty), 0 rejected; 7 tokens")
    dataset = IndexedDataset(Path("o_text_sentence"))
    assert [dataset[n].tolist() for n in range(3)] == [[1, 2, 0, 3], [3], [2, 3]]
    manifest = read_manifest(Path("o_text_sentence"))
    assert manifest is not None
    assert (manifest.vocab_size, manifest.end_of_document) == (4, 3)


def test_rejects_and_standard_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b'{"text": "one"}\n{}\n')))
    assert main(gpt2("--input", "-", "--on-error", "skip", "--rejects", "r")) == 0
    assert capsys.readouterr().out.startswith("o_text_document: 2 documents in, 1 out (0 empty), 1 rejected; ")
    assert json.loads(Path("r").read_text()) == {
        "file": "standard input",
        "line": 2,
        "reason": "has no key 'text'; got the keys (none)",
        "text": "{}",
    }


def test_lines_of_text_by_name_or_by_flag(folder: Path) -> None:
    for name, more in (("x.txt", []), ("x", ["--input-format", "text"])):
        Path(name).write_text("one\ntwo three\n")
        assert main(gpt2("--input", name, *more)) == 0
        assert IndexedDataset(Path("o_text_document")).documents == 2


def test_what_is_kept_for_resuming_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(KeyboardInterrupt), ResumableBuild(Path("o"), 1, {"keys": "body"}, resume=False) as work:
        work.save()
        raise KeyboardInterrupt
    assert main(gpt2("--resume", "--encoder", "reference")) == 2
    assert capsys.readouterr().err.splitlines() == [
        ".o.unfinished: holds the work so far; continue it with --resume",
        "--resume: the run was started with keys body; got text; "
        "resume with the same inputs and options, or leave --resume out and start from the beginning",
    ]
    assert main(gpt2("--encoder", "reference")) == 0
    assert not Path(".o.unfinished").exists()


@pytest.mark.parametrize("pause", [None, 0.0, 0.02], ids=["once", "twice at once", "twice"])
def test_ctrl_c_leaves_nothing(folder: Path, pause: float | None) -> None:
    os.mkfifo("f.jsonl")
    pipe = os.open("f.jsonl", os.O_RDWR)  # opened for both, it waits for no reader
    command = [sys.executable, "-m", "tridock.cli", *gpt2("--input", "f.jsonl", "--workers", "2")]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path}
    run = subprocess.Popen(command, stderr=subprocess.PIPE, env=env, start_new_session=True)
    try:
        os.write(pipe, b'{"text": "one"}\n' * 10)
        while not list(folder.glob(".o.unfinished/*.bin")):
            assert run.poll() is None
            time.sleep(0.02)
        os.killpg(run.pid, signal.SIGINT)  # as a terminal: the workers get it too
        if pause is not None:
            time.sleep(pause)
            os.killpg(run.pid, signal.SIGINT)
        _, err = run.communicate(timeout=STEP_S)
    finally:
        os.close(pipe)
        run.kill()
    # The second may end Python while it exits: a shell calls that 130, too.
    assert run.returncode in (130, *([-signal.SIGINT] if pause is not None else []))
    assert b"Traceback" not in err
    assert not [path.name for path in folder.iterdir() if path.name.startswith(("o", "."))]
