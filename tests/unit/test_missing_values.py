"""An option without its value starts nothing, whichever option of whichever command it is."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fabric import Config, Executor

from tests.unit.test_help import ALL
from tridock.cli import fab, main
from tridock.cli.options import UsageError

COMMANDS = [prog for prog in ALL if ALL[prog].get_default("action")]
FILES = [prog for prog in COMMANDS if any("--run-id-file" in one.option_strings for one in ALL[prog]._actions)]


def options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str]]]:
    """Every option that needs a value, and what a command line may have in the place of the value: nothing, a flag,
    another option with its value, a wrong word, a request for help."""
    actions = [action for action in parser._actions if action.option_strings]
    needs = [action for action in actions if action.nargs not in (0, "*")]
    flags = [action.option_strings[0] for action in actions if action.nargs == 0]
    for action in needs:
        other = [word for one in needs if one is not action for word in (one.option_strings[0], "x")][:2]
        for option in action.option_strings:
            for words in ([], flags[:1], flags[-1:], other, ["--no-such-option"], ["--help"]):
                yield option, words


@pytest.mark.parametrize("prog", COMMANDS)
def test_tridock_refuses_an_option_without_its_value(prog: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option, words in options(ALL[prog]):
        with pytest.raises(UsageError):
            ALL[prog].parse_args([option, *words])
        said = capsys.readouterr()
        assert said.out == ""
        assert re.search(f"argument [-/a-z, ]*{option}[-/a-z, ]*: expected (one|at least one) argument$", said.err)


@pytest.mark.parametrize("task", fab.COMMANDS)
def test_fab_refuses_an_option_without_its_value(task: str, capfd: pytest.CaptureFixture[str]) -> None:
    program = fab.Program(namespace=fab.collection(), executor_class=Executor, config_class=Config)
    for option, words in options(fab.parser_of(task)[0]):
        with pytest.raises(SystemExit, match="2"):
            program.run(["fab", task, option, *words])
        said = capfd.readouterr()
        assert said.out == "" or "--json" in words  # which asks for the refusal as JSON
        assert re.search(f"argument [-/a-z, ]*{option}[-/a-z, ]*: expected (one|at least one) argument$", said.err)


def test_fab_passes_the_words_after_a_task_to_its_subcommand(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(fab, "main", lambda argv, _: called.append(argv) or 0)
    program = fab.Program(namespace=fab.collection(), executor_class=Executor, config_class=Config)
    program.run(["fab", "plan", "--tokens", "-1", "--calibration", "-", "--plot", "-a b"], exit=False)
    program.run(["fab", "run", "--name", "a", "--", "train", "--set", "--hosts"], exit=False)
    program.run(["fab", "--dry", "-H", "lab", "data", "--path", "a"], exit=False)
    assert called == [
        ["plan", "--tokens", "-1", "--calibration", "-", "--plot", "-a b"],
        ["run", "--name", "a", "--", "train", "--set", "--hosts"],
        ["data", "sync", "--hosts=lab", "--dry-run", "--path", "a"],
    ]


@pytest.mark.parametrize("prog", FILES)
def test_a_run_id_is_not_written_to_a_folder(prog: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*prog.split()[1:], "--run-id-file", str(tmp_path)])
    assert f"argument --run-id-file: '{tmp_path}' is a folder; give a file\n" in capsys.readouterr().err
