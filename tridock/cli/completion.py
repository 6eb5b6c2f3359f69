"""``tridock completion``: the shell completes subcommands, options and file names, by argcomplete."""

from __future__ import annotations

import argparse
import os

from tridock.cli.options import Commands, add_command
from tridock.errors import Problem, RequestError


def add(commands: Commands) -> None:
    examples = (
        "bash >~/.local/share/bash-completion/completions/tridock",
        "fish >~/.config/fish/completions/tridock.fish",
    )
    parser = add_command(commands, "completion", _completion, "print a completion script for your shell", *examples)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="your shell")


def complete(parser: argparse.ArgumentParser) -> None:
    """Answers the shell and ends the process, if the shell asks for completions."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)


def _completion(arguments: argparse.Namespace) -> int:
    """Print the script that makes your shell complete tridock's commands and options. For bash and zsh,
    eval "$(tridock completion bash)" in the shell's start-up file works too.
    """
    try:
        from argcomplete.shell_integration import shellcode
    except ModuleNotFoundError as missing:
        todo = "run it where tridock is installed for use at a terminal, not in a container of a run"
        raise RequestError(Problem("completion", "needs the package argcomplete", str(missing), todo)) from None
    print(shellcode(["tridock"], True, arguments.shell))
    return 0
