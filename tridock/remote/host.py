"""The operations on a host, independent of its transport, and the messages for its failures."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from tridock.command import Command
from tridock.errors import ClusterError, Problem
from tridock.remote import files as files_
from tridock.remote.kept import KEPT

_LONGEST = 70


def shortened(command: Command) -> str:
    """Returns a command for a message: on one line, shortened, with secrets masked."""
    line = " ".join(str(command).split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def timed_out(where: str, command: Command, timeout: float) -> Problem:
    """Returns the problem of a command that exceeded its time limit and was ended."""
    todo = "see what delays it there, then try again"
    return Problem(where, f"`{shortened(command)}` did not end within {timeout:g} s", "", todo)


def lost(where: str, doing: str, text: str) -> Problem:
    """Returns the problem of a connection that was lost after it had been established."""
    return Problem(
        where, f"the connection was lost while {doing}", text, "check whether the host is up, then try again"
    )


def no_session(where: str) -> Problem:
    """Returns the problem of a login that succeeds but may not run commands."""
    return Problem(where, "its sshd opens no session", "", "raise MaxSessions in its sshd_config")


def killed(where: str, command: Command) -> Problem:
    """Returns the problem of a command that was ended by a signal."""
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
    """Returns the remedy for a failed command, derived from how it ended."""
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
    """The result of a command: exit code and output."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    command: str = field(default="a command", compare=False)

    def checked(self, where: str) -> Self:
        """Returns this result, or raises a :class:`ClusterError` with the last line of output if the command failed."""
        if self.exit_code == 0:
            return self
        output = (self.stderr.strip() or self.stdout.strip()).decode(errors="replace")
        last = " | ".join(line.strip() for line in output.splitlines()[-3:] if line.strip()) or "no output"
        what = f"`{self.command}` failed with exit code {self.exit_code}"
        raise ClusterError(Problem(where, what, last, remedy_of(self.exit_code, output)))


class Stream(Protocol):
    """The output of a running command, stderr included. ``exit_code`` is set when the iteration has ended."""

    exit_code: int

    def __iter__(self) -> Iterator[bytes]: ...

    def close(self) -> None:
        """Stops reading; background processes on the host keep running."""


class Host(ABC):
    """A machine that runs commands. All methods are thread-safe.

    Transport failures (as opposed to failures of the command) raise a :class:`ClusterError` that names the host. Files
    are written and read by commands, so the host needs no SFTP subsystem.
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
        keep: float = 0,
    ) -> Completed:
        """Runs a command with the chunks as input and its output passed to the sink; returns exit code and stderr.

        ``keep`` is as in :meth:`run`; a host may ignore it. The sink also gets :data:`~tridock.remote.kept.KEPT`.
        """

    @abstractmethod
    def stream(self, command: Command) -> Stream:
        """Starts a command and returns its output as a stream. Ctrl-C in the reader ends the iteration at once."""

    @abstractmethod
    def close(self) -> None:
        """Aborts running commands and closes the connection, from any thread. The next use reconnects."""

    def run(self, command: Command, timeout: float | None = None, keep: float = 0) -> Completed:
        """Runs a command to its end with ``command.stdin`` as input. Ends it after ``timeout`` seconds.

        With ``keep``, its shell then waits that many seconds for the host's next command that has a time limit within
        them. The first such command must end in :data:`~tridock.remote.kept.KEEP`.
        """
        out = bytearray()
        done = self._carry_out(command, _input_of(command), None, out.extend, timeout, keep)
        return replace(done, stdout=KEPT.sub(b"", bytes(out)))

    def pipe(
        self,
        chunks: Iterable[bytes],
        command: Command,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> Completed:
        """Runs a command on input too large for memory. ``progress`` is called with the size of each chunk sent."""
        out = bytearray()
        done = self._carry_out(command, chunks, progress, out.extend, timeout)
        return replace(done, stdout=bytes(out))

    def read_into(self, sink: Sink, command: Command, timeout: float | None = None, keep: float = 0) -> Completed:
        """Runs a command whose output is too large for memory; calls ``sink`` with each piece as it arrives.

        The result has an empty ``stdout``. If the sink raises, the command is ended and the error propagates.
        ``keep`` is as in :meth:`run`.
        """
        return self._carry_out(command, _input_of(command), None, sink, timeout, keep)

    def exchange(self, chunks: Iterable[bytes], sink: Sink, command: Command) -> Completed:
        """Runs a command and feeds it input while it runs; calls ``sink`` with each piece of its output.

        If the sink raises, the command is ended and the error propagates.
        """
        return self._carry_out(command, chunks, None, sink, None)

    def put(self, content: bytes, path: str, mode: int = 0o644) -> None:
        """Writes a file atomically. Expands ``~`` to the remote user's home and creates missing folders."""
        self._script(files_.put_command(content, path, mode), f"write {path}")

    def put_tree(self, files: Mapping[str, bytes], folder: str, mode: int = 0o644) -> None:
        """Writes files (keyed by their paths inside ``folder``) in one round trip, each atomically."""
        self._script(files_.put_tree_command(files, folder, mode), f"write into {folder}")

    def get(self, path: str) -> bytes:
        """Returns the content of a file. Expands ``~`` to the remote user's home."""
        return self._script(files_.get_command(path), f"read {path}").stdout

    def _script(self, command: Command, meaning: str) -> Completed:
        # A message shows the purpose of a script, not its text.
        done = self.run(command, timeout=FILES_TIMEOUT_S)
        return replace(done, command=meaning).checked(self.name)


def _input_of(command: Command) -> Iterable[bytes]:
    return (command.stdin,) if command.stdin else ()


def completed(command: Command, exit_code: int, errors: bytes) -> Completed:
    """Returns the result of a command whose output was consumed elsewhere; messages name the command."""
    return Completed(exit_code, b"", errors, shortened(command))
