"""The help of `tridock`: every subcommand and option has one, in its users' terms."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tridock.cli import build_parser

PRIVATE = re.compile(
    r"\b(told|reckon\w*|look after|room|take on|course|flights?|made|crew|wish|stretch\w*|aside|vitals|beat|pulse|"
    r"goes? on|shared out|inquest|so many|lacking|anew|once more|even if the plan says|module|subcommand|parser)\b",
    re.IGNORECASE,
)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child)


ALL = {parser.prog: parser for parser in parsers(build_parser())}


def test_every_subcommand_is_walked() -> None:
    assert {"tridock train", "tridock launch", "tridock data sync", "tridock slurm supervise"} <= set(ALL)


@pytest.mark.parametrize("prog", [prog for prog in ALL if not ALL[prog].get_default("action")])
def test_a_subcommand_and_its_summary_are_on_one_line(prog: str) -> None:
    for action in ALL[prog]._actions:
        if isinstance(action, argparse._SubParsersAction):
            lines = [line.split() for line in ALL[prog].format_help().splitlines()]
            assert {child for child in action.choices if [child] in lines} == set()


@pytest.mark.parametrize("prog", [prog for prog in ALL if ALL[prog].get_default("action")])
def test_the_examples_of_a_subcommand_are_command_lines_that_it_takes(prog: str) -> None:
    lines = ALL[prog].format_help().partition("\nexamples:\n")[2].splitlines()
    assert lines
    for line in lines:
        command = shlex.split(line.partition(">")[0])
        assert command[: len(prog.split())] == prog.split()
        arguments = build_parser().parse_args(command[1:])
        assert arguments.action is ALL[prog].get_default("action")


@pytest.mark.parametrize("prog", ALL)
def test_descriptions_are_sentences(prog: str) -> None:
    text = " ".join((ALL[prog].description or "").split())
    assert re.fullmatch(r"[A-Z].*[^.]\.", text), text
    assert not PRIVATE.search(text), text


@pytest.mark.parametrize("prog", ALL)
def test_every_option_says_what_it_does(prog: str) -> None:
    for action in ALL[prog]._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {child.dest: child.help for child in action._choices_actions}
            assert set(texts) == set(action.choices)
        else:
            texts = {"/".join(action.option_strings) or action.dest: action.help}
        for name, text in texts.items():
            assert text and len(text.split()) > 1, f"{prog} {name} has no help"  # noqa: PT018
            # As argparse's own "show this help message and exit": a phrase, no sentence.
            assert not re.search(r"[.;:,]$", text), f"{prog} {name}: {text}"
            assert not re.match(r"(an?|the) ", text, re.IGNORECASE), f"{prog} {name}: {text}"
            assert not PRIVATE.search(text), f"{prog} {name}: {text}"
            default = action.default
            shown = default not in (None, [], "", False, argparse.SUPPRESS, Path()) and not action.required
            assert not shown or "(default: " in text, f"{prog} {name} hides its default, {default!r}"


def test_start_up_imports_no_heavy_package() -> None:
    """`tridock --version` answers in a tenth of a second."""
    program = (
        "import sys\nfrom tridock.cli import main\n"
        "try:\n    main(['data', 'preprocess', '--help'])\nexcept SystemExit:\n    pass\n"
        "print({name.partition('.')[0] for name in sys.modules} &"
        " {'torch', 'numpy', 'matplotlib', 'rich', 'pydantic', 'yaml', 'tokenizers', 'fabric'}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "set()\n")


def test_no_argument_replaces_the_programs_name() -> None:
    """``program`` is `tridock` or `fab`: messages name commands by it."""
    named = [parser.prog for parser in parsers(build_parser()) for it in parser._actions if it.dest == "program"]
    assert named == []
