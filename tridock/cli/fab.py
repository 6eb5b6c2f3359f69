"""The command ``fab``: Fabric's tasks, of which each is the subcommand of ``tridock`` with the same name."""

from __future__ import annotations

if __name__ == "__main__":
    from tridock.cli.interrupts import end_at_once

    end_at_once()

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise, takewhile
from typing import Any, Final

from fabric import Config, Connection, Executor
from fabric.main import Fab
from fabric.tasks import Task
from invoke.collection import Collection
from invoke.context import Context
from invoke.exceptions import Exit, ParseError
from invoke.parser.argument import Argument

from tridock import __version__
from tridock.cli.program import build_parser, main
from tridock.errors import RequestError

_SAME_NAME: Final = (
    *("up", "down", "keys", "check", "plan", "launch", "run", "logs", "cancel"),
    *("stop", "status", "runs", "triage", "fetch", "report", "reproduce", "watch"),
)
COMMANDS: Final = {**{name: (name,) for name in _SAME_NAME}, "data": ("data", "sync")}
"""Tasks, and the subcommand of each."""

_NEGATIVE_NUMBER: Final = re.compile(r"-\d+|-\d*\.\d+")

_tree = cache(build_parser)


def parser_of(task: str) -> tuple[argparse.ArgumentParser, str]:
    """The parser of a task's subcommand, named as the task, and the subcommand's summary."""
    parser, summary = _tree("fab"), ""
    for word in COMMANDS[task]:
        (group,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        parser = group.choices[word]
        (summary,) = (choice.help or "" for choice in group._choices_actions if choice.dest == word)
    parser.prog = f"fab {task}"
    return parser, summary


class CommandTask(Task):  # type: ignore[misc]
    """A task that has the options of a subcommand and calls it."""

    program: Sequence[str] = ()
    """The command line after ``--``, for ``fab run``."""

    def __init__(self, name: str) -> None:
        def body(context: Context, **values: Any) -> None:
            if code := main([*COMMANDS[name], *self._argv(context, values)], "fab"):
                raise Exit(None, code)

        parser, body.__doc__ = parser_of(name)
        super().__init__(body, name=name, positional=(), auto_shortflags=False)
        self._options = [one for one in parser._actions if one.option_strings and one.dest != "help"]

    def get_arguments(self, ignore_unknown_help: bool | None = None) -> list[Argument]:  # noqa: ARG002
        return [
            Argument(
                names=[option.lstrip("-") for option in sorted(_spellings(action), key=len, reverse=True)],
                kind=bool if action.nargs == 0 else list if isinstance(action.default, list) else str,
                default=action.default if isinstance(action, argparse.BooleanOptionalAction) else None,
                help=action.help,
                attr_name=action.dest if "_" in action.dest else None,
            )
            for action in self._options
        ]

    def _argv(self, context: Context, values: dict[str, Any]) -> Iterator[str]:
        if isinstance(context, Connection) and values.get("hosts") is None:
            values["hosts"] = context.original_host  # `fab --hosts hostfile launch`
        if context.config.run.dry:  # `fab --dry launch`
            if "dry_run" not in values:
                raise Exit(f"--dry: {self.name} cannot run dry; leave it out", RequestError.exit_code)
            values["dry_run"] = True
        for action in self._options:
            option, value = max(_spellings(action), key=len), values.get(action.dest)
            if isinstance(action, argparse.BooleanOptionalAction):
                yield option if value else f"--no-{option.removeprefix('--')}"
            elif isinstance(value, bool) or value is None:
                yield from [option] if value else []
            else:
                yield from (f"{option}={one}" for one in (value if isinstance(value, list) else [value]))
        if self.program:
            yield from ("--", *self.program)


def _spellings(action: argparse.Action) -> Sequence[str]:
    negative = isinstance(action, argparse.BooleanOptionalAction)
    return [option for option in action.option_strings if not (negative and option.startswith("--no-"))]


def _options_with_a_value() -> set[str]:
    actions = (action for name in COMMANDS for action in parser_of(name)[0]._actions)
    return {option for action in actions if action.nargs != 0 for option in action.option_strings}


def _is_option(word: str) -> bool:
    """Whether argparse takes a word after an option for another option, and not for the option's value."""
    return len(word) > 1 and word[0] == "-" and " " not in word and not _NEGATIVE_NUMBER.fullmatch(word)


def collection() -> Collection:
    """All tasks, for fabfile.py."""
    return Collection(*(CommandTask(name) for name in COMMANDS))


class Program(Fab):  # type: ignore[misc]
    """Fabric's program, with the exit codes, help and version of ``tridock``."""

    def parse_core(self, argv: list[str] | None) -> None:
        with _request_errors():
            super().parse_core(argv)

    def parse_tasks(self) -> None:
        with_a_value = _options_with_a_value()
        own = takewhile(lambda word: word != "--", self.argv)  # what follows is a program with options of its own
        for option, value in pairwise([*own, "--"]):
            if option in with_a_value and _is_option(value):  # Fabric would leave it out, or take it for the value
                raise Exit(f"fab: {option} needs a value; see fab --list, and fab --help TASK", RequestError.exit_code)
        with _request_errors():
            super().parse_tasks()
        if self.core.remainder and any(context.name == "run" for context in self.tasks):
            # Fabric would run it as a shell's command on every host. fabfile.py has imported this module once more.
            type(self.collection["run"]).program = self.argv[self.argv.index("--") + 1 :]
            self.core.remainder = ""

    def parse_cleanup(self) -> None:
        with _request_errors():
            super().parse_cleanup()

    def print_version(self) -> None:
        print(f"tridock {__version__}")
        super().print_version()

    def print_task_help(self, name: str) -> None:
        if name in COMMANDS:
            parser_of(name)[0].print_help()
        else:
            super().print_task_help(name)

    def no_tasks_given(self) -> None:
        if not self._remainder_only:
            self.list_tasks()
            raise Exit("fab: a task is missing; give one of those above, as in fab launch --hosts hostfile", 2)


@contextmanager
def _request_errors() -> Iterator[None]:
    try:
        yield
    except ParseError as error:
        raise Exit(f"fab: {error}; see fab --list, and fab --help TASK", RequestError.exit_code) from None


def run() -> None:
    from fabric import __version__ as version

    Program(
        name="Fabric", binary="fab", binary_names=["fab"], version=version, executor_class=Executor, config_class=Config
    ).run()


if __name__ == "__main__":
    run()
