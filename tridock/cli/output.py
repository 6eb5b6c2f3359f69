"""Output of the subcommands: text that can be copied, and tables whose cells are never truncated."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, Final

from tridock.contracts.codec import JSON_VERSION, as_json
from tridock.errors import TridockError, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNBOUNDED: Final = 10_000
_FOLDED: Final = 12


def say(text: str) -> None:
    """Prints lines of results to standard output, without control characters that a node may have sent."""
    # Not through Rich, which would highlight paths and interpret brackets.
    print(printable(text), flush=True)


def print_json(**fields: Any) -> None:
    """Prints the JSON object of a command with ``--json``; its ``problems`` are what refused it or is not shown."""
    document = {"version": JSON_VERSION, **fields}
    try:
        say(as_json(document))
    except ValueError:  # the loss of a run that diverged
        say(as_json(json.loads(json.dumps(document), parse_constant=lambda _: None)))


@contextmanager
def all_to_stderr(*, when: bool) -> Iterator[None]:
    """Has standard error take what is printed meanwhile, also by programs that are started: the one thing on standard
    output is then the JSON object that follows."""
    if not when:
        yield
        return
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(own, 1)
        os.close(own)


def problem_documents(failure: TridockError | None) -> list[dict[str, Any]]:
    """Returns the ``problems`` of a JSON object."""
    return [problem.document for problem in failure.problems] if failure is not None else []


def report_failure(failure: TridockError | None) -> int:
    """Prints what a command that shows state could not show, if anything; returns its exit code."""
    if failure is None:
        return 0
    print(failure, file=sys.stderr)
    return failure.exit_code


def console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def print_tables(*tables: Table) -> None:
    sys.stdout.write(_text_of(tables))
    sys.stdout.flush()


def redraw_tables(*tables: Table, note: str) -> None:
    """Replaces the terminal's content with the tables and a note, in one write to avoid flicker."""
    shown = console()
    with shown.capture() as captured:
        shown.clear()
    sys.stdout.write(captured.get() + _text_of(tables) + note)
    sys.stdout.flush()


def _text_of(tables: Iterable[Table]) -> str:
    from rich.cells import cell_len
    from rich.console import Console

    shown = console()
    # A pipe gets each row on one line. In a terminal texts wrap, at spaces alone in columns that do not fold.
    wide = Console(highlight=False, soft_wrap=True, width=shown.width if shown.is_terminal else _UNBOUNDED)
    with wide.capture() as captured:
        for table in tables:
            for column in table.columns:
                column._cells = [printable(cell) if isinstance(cell, str) else cell for cell in column.cells]
                if column.overflow != "fold":
                    words = " ".join(map(str, (column.header, *column.cells))).split()
                    column.min_width = max(map(cell_len, words), default=0)
            if sum(4 + (column.min_width or _FOLDED) for column in table.columns) > wide.width:
                table.box = None  # the frame takes what the texts need
            wide.print(table)
    return captured.get()
