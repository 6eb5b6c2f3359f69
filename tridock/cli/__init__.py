"""The command ``tridock``. Start-up stays fast: a subcommand imports what it runs inside its action."""

from __future__ import annotations

TYPE_CHECKING = False  # nothing is imported before __main__ handles Ctrl-C
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None, program: str = "tridock") -> int:
    from tridock.cli.program import main

    return main(argv, program)


def build_parser(program: str = "tridock") -> argparse.ArgumentParser:
    from tridock.cli.program import build_parser

    return build_parser(program)
