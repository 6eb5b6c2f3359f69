"""What went wrong with a host, in words that name the fix. Pure."""

from __future__ import annotations

from tridock.command import Command
from tridock.errors import Problem

_LONGEST = 70


def shown(command: Command) -> str:
    """A command for a message: on one line, shortened, its secrets masked."""
    line = " ".join(str(command).split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def timed_out(where: str, command: Command, timeout: float) -> Problem:
    """A command that did not end in time; it was ended."""
    todo = "see what holds it up there, then try again"
    return Problem(where, f"`{shown(command)}` did not end within {timeout:g} s", "", todo)


def lost(where: str, doing: str, words: str) -> Problem:
    """A connection that was good and then broke."""
    return Problem(where, f"the connection was lost while {doing}", words, "see whether the host is up, then try again")


def no_session(where: str, words: str) -> Problem:
    """A login that was let in, and may run nothing."""
    return Problem(where, "its sshd opens no session", words.lower(), "raise MaxSessions in its sshd_config")


def killed(where: str, command: Command) -> Problem:
    """A command that a signal ended: nothing that ran to its end."""
    todo = "look for who ended it there (dmesg, if memory ran out), then try again"
    return Problem(where, f"`{shown(command)}` was ended by a signal", "", todo)


_REMEDIES: tuple[tuple[str, str], ...] = (
    ("no space left", "free some space there (docker system df shows Docker's share)"),
    ("disk quota", "free some space there (docker system df shows Docker's share)"),
    ("read-only file system", "choose another folder there (workdir in the settings)"),
    ("cannot connect to the docker daemon", "start Docker there (systemctl start docker)"),
    ("docker.sock", "add the ssh user to the docker group there"),
    ("permission denied", "give the ssh user the right to it there"),
    ("address already in use", "end what holds the port there, or choose another"),
    ("already in use", "remove what has that name there, or choose another"),
    ("did not arrive", "see whether the connection is sound, then try again"),
    ("arrived", "see whether the connection is sound, then try again"),
)


def remedy_of(exit_code: int, words: str) -> str:
    """What to do about a command that failed, from how it ended."""
    if exit_code == 127:
        return "install it there, or put it on the PATH that ssh commands have"
    low = words.lower()
    return next((todo for mark, todo in _REMEDIES if mark in low), "mend that there, then try again")
