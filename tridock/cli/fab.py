"""The command ``fab``: Fabric's tasks, of which each is the subcommand of ``tridock`` with the same name."""

if __name__ == "__main__":
    from tridock.cli.interrupts import end_at_once

    end_at_once()

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from fabric import Config, Executor
from fabric.main import Fab
from fabric.tasks import Task
from invoke.collection import Collection
from invoke.context import Context
from invoke.exceptions import Exit, ParseError

from tridock import __version__
from tridock.cli.program import build_parser, drop_output, main
from tridock.errors import RequestError

_SAME_NAME: Final = (
    *("up", "down", "keys", "check", "plan", "launch", "resume", "run", "logs", "cancel"),
    *("stop", "status", "runs", "triage", "fetch", "report", "reproduce", "watch"),
)
COMMANDS: Final = {**{name: (name,) for name in _SAME_NAME}, "data": ("data", "sync")}
"""Tasks, and the subcommand of each."""


def parser_of(task: str) -> tuple[argparse.ArgumentParser, str]:
    """The parser of a task's subcommand, named as the task, and the subcommand's summary."""
    parser, summary = build_parser("fab"), ""
    for word in COMMANDS[task]:
        (group,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        parser = group.choices[word]
        (summary,) = (choice.help or "" for choice in group._choices_actions if choice.dest == word)
    parser.prog = f"fab {task}"
    return parser, summary


def _task(name: str) -> Task:
    def body(_context: Context) -> None:
        raise Exit(None, main(COMMANDS[name], "fab"))

    _, body.__doc__ = parser_of(name)
    return Task(body, name=name)


def collection() -> Collection:
    return Collection(*map(_task, COMMANDS))


class Program(Fab):  # type: ignore[misc]
    """Fabric's program, with the options, exit codes, help and version of ``tridock``."""

    def parse_core(self, argv: list[str] | None) -> None:
        with _request_errors():
            super().parse_core(argv)

    def parse_tasks(self) -> None:
        """Passes what follows a task to its subcommand, as it is."""
        task, *words = self.core.unparsed or [""]
        if task not in COMMANDS:
            with _request_errors():
                super().parse_tasks()
            return
        parser, _ = parser_of(task)
        own = [] if self.args.hosts.value is None else [f"--hosts={self.args.hosts.value}"]
        if self.args.dry.value:
            if "--dry-run" not in parser._option_string_actions:
                raise Exit(f"--dry: {task} cannot run dry; leave it out", RequestError.exit_code)
            own.append("--dry-run")
        program = self.argv[self.argv.index("--") :] if self.core.remainder else ()
        raise Exit(None, main([*COMMANDS[task], *own, *words, *program], "fab"))

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

    program = Program(
        name="Fabric", binary="fab", binary_names=["fab"], version=version, executor_class=Executor, config_class=Config
    )
    try:
        program.run()
        sys.stdout.flush()
    except BrokenPipeError:  # of Fabric's own output
        sys.exit(drop_output())


if __name__ == "__main__":
    run()
