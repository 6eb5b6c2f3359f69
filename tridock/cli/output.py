"""What the subcommands print: text that can be copied as it is, and tables that a pipe does not cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDE: Final = 160


def say(text: str) -> None:
    # Not through Rich, which would highlight paths and interpret brackets.
    print(text, flush=True)


def console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def print_tables(*tables: Table) -> None:
    from rich.console import Console

    shown = console()
    # Rich assumes 80 columns for a pipe, and would cut what scripts read.
    (shown if shown.is_terminal else Console(highlight=False, soft_wrap=True, width=_WIDE)).print(*tables, sep="\n")
