"""Tables as a terminal and a pipe show them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.markup import escape
from rich.table import Column, Table

from tridock.cli.output import all_to_stderr, print_json, print_tables, redraw_tables, say
from tridock.contracts.node_answers import Evidence
from tridock.errors import Problem
from tridock.ops.runs.triage import RunFailedError, failure_text
from tridock.triage import facts_of

RUN = "gpt2-20261122-110613-14b7"
LONG = f"pretraining-on-openwebtext-with-another-seed-and-lr-{RUN}"
TEXT = "data/a/path/that/is/longer/than/the/column/and/has/no/space/in/it"


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COLUMNS": "80", "TERM": "xterm", "FORCE_COLOR": "1", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)


def printed(capsys: pytest.CaptureFixture[str], run: str = RUN, seen: str = "12,346 tokens/s") -> list[str]:
    table = Table("run", "state", "step", "loss", Column("seen", overflow="fold"), "last step")
    table.add_row(run, "preempted", "1200/50000", "2.3457", seen, "2 h 10 min ago")
    print_tables(table)
    # Rich styles bold text even without colours.
    return [
        line.replace("\x1b[1m", "").replace("\x1b[0m", "").rstrip() for line in capsys.readouterr().out.splitlines()
    ]


CONTROL = "\x1b[2J\x07\x9b\u202e"
ESCAPED = r"\x1b[2J\x07\x9b\u202e"


def test_what_a_node_says_does_not_reach_the_terminal_as_commands(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"one\n\t{CONTROL}two")
    assert capsys.readouterr().out == f"one\n\t{ESCAPED}two\n"
    table = Table("said")
    table.add_row(escape(CONTROL))
    print_tables(table)
    assert ESCAPED in capsys.readouterr().out
    event = {"event": "node_lost", "node": CONTROL, "time": CONTROL, "reason": CONTROL}
    facts = facts_of({"a": Evidence(events=json.dumps(event), launcher=CONTROL)}, "a", 1)
    shown = str(RunFailedError(Problem("run", "the run failed", failure_text(facts), CONTROL), facts))
    assert not re.search(r"[^\n -~…]", shown), shown


def test_only_the_object_is_on_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    with all_to_stderr(when=True):
        say("progress")
        subprocess.run(["echo", "of a program"], check=True)
    print_json(runs=[])
    out, err = capfd.readouterr()
    assert json.loads(out) == {"version": 1, "runs": []}
    assert err.splitlines() == ["progress", "of a program"]


def test_a_narrow_terminal_wraps_texts_and_breaks_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys)
    assert max(map(len, shown)) <= 90
    assert any(line.split()[:3] == [RUN, "preempted", "1200/50000"] for line in shown)


def test_a_text_without_spaces_is_folded(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(Column("seen", overflow="fold"), "state")
    table.add_row(TEXT + TEXT, "ok")
    print_tables(table)
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert max(map(len, lines)) == 80
    assert "".join(line.split("│")[1].strip() for line in lines) == TEXT + TEXT


def test_a_word_longer_than_the_terminal_stays_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert any(line.split()[:2] == [LONG, "preempted"] for line in printed(capsys, LONG))


def test_a_pipe_gets_each_row_on_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR")
    rows = [line for line in printed(capsys, LONG, TEXT * 4) if "│" in line]
    assert [[cell.strip() for cell in row.strip("│").split("│")] for row in rows] == [
        [LONG, "preempted", "1200/50000", "2.3457", TEXT * 4, "2 h 10 min ago"]
    ]


def test_a_redraw_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[str] = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=writes.append, flush=lambda: None, isatty=lambda: True))
    table = Table("node")
    table.add_row("host-a")
    redraw_tables(table, table, note="host-b: does not answer\n")
    (shown,) = filter(None, writes)  # Rich writes what is empty, too
    assert shown.startswith("\x1b[2J\x1b[H")
    assert shown.count("host-a") == 2
    assert shown.endswith("host-b: does not answer\n")


def test_a_full_disk_that_the_output_goes_to_is_named() -> None:
    argv = [sys.executable, "-m", "tridock.cli", "completion", "bash"]
    for errors in (subprocess.PIPE, None):
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(argv, stdout=full, stderr=errors or full, text=True, check=False)
        assert done.returncode == 2
        assert not errors or done.stderr == (
            "standard output: cannot be written; got No space left on device; "
            "free some space there, and run the command again\n"
        )
