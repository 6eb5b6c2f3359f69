"""Progress of long work: the same bar everywhere in a terminal, lines in a pipe, nothing with quiet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tridock import progress
from tridock.cli import main
from tridock.data.progress import Done, progress_bar


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_pipe_gets_a_line_every_ten_seconds(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress.bars() as begin:
        bar, other = begin("send to host-a", 4_000_000_000), begin("look at host-b", None)
        for second in range(1, 26):
            clock[0] = 100.0 + second
            bar(100_000_000, f"{second}/9 layers")
        other(5_000_000)
        bar.end()
    assert capsys.readouterr() == (
        "",
        "send to host-a: 1.0 GB of 4.0 GB after 10 s, 10/9 layers\n"
        "send to host-a: 2.0 GB of 4.0 GB after 20 s, 20/9 layers\n"
        "look at host-b: 5.0 MB after 25 s\n",
    )


def test_work_that_is_counted_has_its_unit(
    clock: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress.bars() as begin:
        bar = begin("search", None, unit="layouts")
        clock[0] += 10
        bar.set(1200, 34_000)
    assert capsys.readouterr().err == "search: 1,200 of 34,000 layouts after 10 s\n"
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with progress.bars() as begin:
        begin("search", None, unit="layouts").set(1200, 34_000)
    assert "1,200/34,000 layouts" in terminal.text


def test_quiet_and_short_work_print_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress.bars(quiet=True) as begin:
        bar = begin("send", 100)
        clock[0] += 60
        bar(50)
        bar.set(60, 100, "more")
    with progress.bars() as begin:
        begin("send", 100)(100)
    assert capsys.readouterr() == ("", "")


class Terminal:
    """Standard error as a terminal."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with progress.bars() as begin:
        bar = begin("send to host-a", 2_000_000)
        bar(1_000_000, "1/2 layers")
    assert "send to host-a" in terminal.text
    assert "1.0/2.0 MB" in terminal.text
    assert "1/2 layers" in terminal.text


def test_data_has_the_same_lines_and_with_an_interval_megatrons(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar("tokenizing") as report:
        clock[0] += 10
        report(Done(3_000_000, 9_000_000, 5, 20_000))
    assert capsys.readouterr().err == "tokenizing: 3.0 MB of 9.0 MB after 10 s, 2,000 tokens/s\n"
    with progress_bar("tokenizing", 5) as report:
        clock[0] += 10
        report(Done(3_000_000, 9_000_000, 5, 20_000))
    assert capsys.readouterr().err == "Processed 5 documents (0.5 docs/s, 0.3 MB/s, 2000 tokens/s).\n".replace(
        "2000", "2,000"
    )


@pytest.mark.parametrize("quiet", [False, True])
def test_work_on_data_is_quiet_where_that_is_wanted(
    quiet: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    (tmp_path / "a.jsonl").write_text('{"text": "1 2 3"}\n' * 50)
    prefix, null = tmp_path / "a", ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--workers", "1"]
    tokens = tmp_path / "a_text_document"
    commands: list[list[str | Path]] = [
        ["preprocess", "--input", tmp_path / "a.jsonl", "--output-prefix", prefix, *null, "--log-interval", "10"],
        ["verify", tokens],
        ["split", tokens, "--parts", "2"],
        ["merge", "--input", tokens, "--output-prefix", tmp_path / "both"],
        ["train-tokenizer", "--input", tmp_path / "a.jsonl", "--vocab-size", "258", "--output", tmp_path / "t"],
    ]
    for command in commands:
        assert main(["data", *map(str, command), *["--quiet"] * quiet]) == 0, capsys.readouterr()
        assert (capsys.readouterr().err == "") is quiet, command
