"""What can be done on a host, however it is reached, and how its failures read."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from tridock.command import Command
from tridock.errors import ClusterError, Problem
from tridock.remote import files as files_

_LONGEST = 70


def shortened(command: Command) -> str:
    """A command for a message: on one line, shortened, its secrets masked."""
    line = " ".join(str(command).split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def timed_out(where: str, command: Command, timeout: float) -> Problem:
    """A command that did not end in time; it was ended."""
    todo = "see what holds it up there, then try again"
    return Problem(where, f"`{shortened(command)}` did not end within {timeout:g} s", "", todo)


def lost(where: str, doing: str, text: str) -> Problem:
    """A connection that was good and then broke."""
    return Problem(
        where, f"the connection was lost while {doing}", text, "check whether the host is up, then try again"
    )


def no_session(where: str) -> Problem:
    """A login that was let in, and may run nothing."""
    return Problem(where, "its sshd opens no session", "", "raise MaxSessions in its sshd_config")


def killed(where: str, command: Command) -> Problem:
    """A command that a signal ended: nothing that ran to its end."""
    todo = "look for who ended it there (dmesg, if memory ran out), then try again"
    return Problem(where, f"`{shortened(command)}` was ended by a signal", "", todo)


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


def remedy_of(exit_code: int, text: str) -> str:
    """What to do about a command that failed, from how it ended."""
    if exit_code == 127:
        return "install it there, or put it on the PATH that ssh commands have"
    low = text.lower()
    return next((todo for mark, todo in _REMEDIES if mark in low), "fix that there, then try again")


Progress = Callable[[int], object]
Sink = Callable[[bytes], object]

CHUNK = 1 << 16
FILES_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Completed:
    """How a command ended, with all that it printed."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    command: str = field(default="a command", compare=False)

    def checked(self, where: str) -> Self:
        """This result, or a :class:`ClusterError` with the command's last line of output where it failed."""
        if self.exit_code == 0:
            return self
        output = (self.stderr.strip() or self.stdout.strip()).decode(errors="replace")
        last = " | ".join(line.strip() for line in output.splitlines()[-3:] if line.strip()) or "no output"
        what = f"`{self.command}` failed with exit code {self.exit_code}"
        raise ClusterError(Problem(where, what, last, remedy_of(self.exit_code, output)))


class Stream(Protocol):
    """A command's output, errors included, as it comes. ``exit_code`` is known once the iteration has ended."""

    exit_code: int

    def __iter__(self) -> Iterator[bytes]: ...

    def close(self) -> None:
        """Stops reading; background processes on the host keep running."""


class Host(ABC):
    """A machine that commands run on. All of it may be used from several threads at once.

    Whatever goes wrong on the way (not a command's own failure) is a :class:`ClusterError` that names the host. Files
    are written and read by commands: the host needs no SFTP subsystem.
    """

    name: str

    @abstractmethod
    def _carry_out(
        self,
        command: Command,
        chunks: Iterable[bytes],
        progress: Progress | None,
        sink: Sink,
        timeout: float | None,
    ) -> Completed:
        """Runs a command on the chunks, its output into the sink; the result holds its exit code and its errors."""

    @abstractmethod
    def stream(self, command: Command) -> Stream:
        """Starts a command whose output is read as it comes; Ctrl-C in the reader ends the reading at once."""

    @abstractmethod
    def close(self) -> None:
        """Ends what is under way and the connection, from any thread; the next use opens it again."""

    def run(self, command: Command, timeout: float | None = None) -> Completed:
        """Runs to the end, with ``command.stdin`` as its input; ends it where it takes over ``timeout`` seconds."""
        return self.pipe(_input_of(command), command, timeout=timeout)

    def pipe(
        self,
        chunks: Iterable[bytes],
        command: Command,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> Completed:
        """Runs a command on input too large for memory; ``progress`` gets the size of each chunk once it is sent."""
        out = bytearray()
        done = self._carry_out(command, chunks, progress, out.extend, timeout)
        return replace(done, stdout=bytes(out))

    def read_into(self, sink: Sink, command: Command, timeout: float | None = None) -> Completed:
        """Runs a command whose output is too large for memory: ``sink`` is called with each piece as it comes.

        The result has an empty ``stdout``. Where the sink raises, the command is ended and the error is the caller's.
        """
        return self._carry_out(command, _input_of(command), None, sink, timeout)

    def exchange(self, chunks: Iterable[bytes], sink: Sink, command: Command) -> Completed:
        """Runs a command that is given input while it runs; ``sink`` is called with each piece of its output.

        Where the sink raises, the command is ended and the error is the caller's.
        """
        return self._carry_out(command, chunks, None, sink, None)

    def put(self, content: bytes, path: str, mode: int = 0o644) -> None:
        """Writes a file that appears whole or not at all; ``~`` is the user's home there, missing folders are made."""
        self._script(files_.put_command(content, path, mode), f"write {path}")

    def put_tree(self, files: Mapping[str, bytes], folder: str, mode: int = 0o644) -> None:
        """Writes files (by their paths inside ``folder``) in one round trip, each whole or not at all."""
        self._script(files_.put_tree_command(files, folder, mode), f"write into {folder}")

    def get(self, path: str) -> bytes:
        """The content of a file; ``~`` is the user's home there."""
        return self._script(files_.get_command(path), f"read {path}").stdout

    def _script(self, command: Command, meaning: str) -> Completed:
        # In a message the script's text would say less than what it is for.
        done = self.run(command, timeout=FILES_TIMEOUT_S)
        return replace(done, command=meaning).checked(self.name)


def _input_of(command: Command) -> Iterable[bytes]:
    return (command.stdin,) if command.stdin else ()


def completed(command: Command, exit_code: int, errors: bytes) -> Completed:
    """The result of a command whose output went elsewhere; it names the command in its messages."""
    return Completed(exit_code, b"", errors, shortened(command))
