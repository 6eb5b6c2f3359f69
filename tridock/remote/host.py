"""The operations on a host, independent of its transport, and the messages for its failures."""

import os
import signal
import subprocess
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from queue import Empty, Queue
from typing import Final, Self, TypeVar

from tridock.command import Command
from tridock.errors import ClusterError, Problem, RequestError
from tridock.remote import clock
from tridock.remote import files as files_
from tridock.remote.process import OverdueError, Process, Progress, Sink

_PARTS: Final = 16
"""The parts that wait for the reader; with more, the command waits."""


class Stream:
    """The output of a running command, stderr included. ``exit_code`` is set when the iteration has ended."""

    def __init__(self, start: Callable[[Sink], Process]) -> None:
        self.exit_code = -1
        self._parts: Queue[bytes | BaseException | None] = Queue(_PARTS)
        self._process = start(self._parts.put)
        threading.Thread(target=self._see_to_end, daemon=True).start()

    def _see_to_end(self) -> None:
        end: BaseException | None = None
        try:
            self.exit_code = self._process.wait()
        except BaseException as error:
            end = error
        self._parts.put(end)

    def part(self, timeout: float | None = None) -> bytes | None:
        """Returns the next part, None at the end. Raises what has ended it, and ``queue.Empty`` if none comes."""
        part = clock.take(self._parts, timeout)
        if isinstance(part, BaseException):
            raise part
        return part

    def __iter__(self) -> Iterator[bytes]:
        try:
            while (part := self.part()) is not None:
                yield part
        finally:
            self.close()

    def close(self) -> None:
        """Stops reading; background processes on the host keep running."""
        self._process.end()
        with suppress(Empty):  # what still waits for the reader
            while True:
                self._parts.get_nowait()


P = TypeVar("P", bound=Process)
_RSH: Final = 'line=$1; shift 2; eval "$line"'
"""Runs a line with the arguments that rsync adds, after the host's name."""
_LONGEST: Final = 70


def shortened(command: Command) -> str:
    """Returns a command for a message: on one line, shortened, with secrets masked."""
    line = " ".join(str(command).split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def timed_out(where: str, command: Command, timeout: float) -> Problem:
    """Returns the problem of a command that exceeded its time limit and was ended."""
    todo = "see what delays it there, then try again"
    return Problem(where, f"`{shortened(command)}` did not end within {timeout:g} s", "", todo)


_REMEDIES: tuple[tuple[str, str], ...] = (
    ("no space left", "free some space there (docker system df shows Docker's share; df -i the inodes)"),
    ("read-only file system", "choose another folder there (workdir in the settings)"),
    ("cannot connect to the docker daemon", "start Docker there (systemctl start docker)"),
    ("docker.sock", "add the ssh user to the docker group there"),
    ("permission denied", "give the ssh user the right to it there"),
    ("already in use", "end or remove what has it there, or choose another"),
    ("arrive", "see whether the connection is sound, then try again"),
)


def remedy_of(exit_code: int, text: str) -> str:
    """Returns the remedy for a failed command, derived from how it ended."""
    if exit_code == 127:
        return "install it there, or put it on the PATH that ssh commands have"
    if exit_code == 128 + signal.SIGKILL:
        return "look for what killed it there (dmesg, if memory ran out), then try again"
    low = text.lower()
    return next((todo for mark, todo in _REMEDIES if mark in low), "fix that there, then try again")


FILES_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Completed:
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


class Host(ABC):
    """A machine that runs commands. All methods are thread-safe.

    Transport failures (as opposed to failures of the command) raise a :class:`ClusterError` that names the host. Files
    are written and read by commands, so the host needs no SFTP subsystem.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._running = weakref.WeakSet[Process]()

    @abstractmethod
    def start(
        self,
        command: Command,
        sink: Sink,
        timeout: float | None = None,
        *,
        has_input: bool = True,
        merged: bool = False,
    ) -> Process:
        """Starts a command whose output goes to ``sink``, ``merged`` with stderr. The caller waits for its end.

        ``timeout`` ends it on the host even if this side is gone by then. Without input it reads an empty file.
        """

    @abstractmethod
    def rsh(self, command: Command) -> str:
        """Returns a line of this machine's sh that runs ``command`` with ``"$@"`` appended, on a binary stream."""

    @abstractmethod
    def at_terminal(self, command: Command) -> int:
        """Runs a command at this process's terminal; returns its exit code."""

    def close(self) -> None:
        """Aborts running commands, from any thread. The next use reconnects."""
        with self._lock:
            running = tuple(self._running)
        for process in running:
            process.end()

    def forget(self) -> None:  # noqa: B027 - only a host over ssh keeps a login
        """Has the next command log in anew. Call it where the user has to change what a login has, such as groups."""

    def _keep(self, process: P) -> P:
        """Has :meth:`close` end the process."""
        with self._lock:
            self._running.add(process)
        return process

    @abstractmethod
    def forwarded(self, port: int) -> AbstractContextManager[int]:
        """Yields a port of the host's loopback that leads to ``port`` of this machine's, while the block runs.

        One block at a time for a host and a port.
        """

    def run(self, command: Command, timeout: float | None = None) -> Completed:
        """Runs a command to its end with ``command.stdin`` as input. Ends it after ``timeout`` seconds."""
        return self.pipe(None, command, timeout=timeout)

    def pipe(
        self,
        chunks: Iterable[bytes] | None,
        command: Command,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> Completed:
        """Runs a command on input too large for memory. ``progress`` is called with the size of each chunk sent."""
        out = bytearray()
        return replace(self.read_into(out.extend, command, timeout, chunks, progress), stdout=bytes(out))

    def read_into(
        self,
        sink: Sink,
        command: Command,
        timeout: float | None = None,
        chunks: Iterable[bytes] | None = None,
        progress: Progress | None = None,
    ) -> Completed:
        """As :meth:`pipe`; calls ``sink`` with each piece of output as it arrives, while ``chunks`` are still sent.

        The result has an empty ``stdout``. If the sink raises, the command is ended and the error propagates.
        """
        if chunks is None:
            chunks = (command.stdin,) if command.stdin else ()
        with self.start(command, sink, timeout, has_input=chunks != ()) as process:
            # The time limit covers the command; connecting has its own.
            deadline = None if timeout is None else clock.now() + timeout
            process.send(chunks, progress)
            try:
                code = process.wait(deadline)
            except OverdueError:
                assert timeout is not None
                raise ClusterError(timed_out(self.name, command, timeout)) from None
            return Completed(code, b"", process.stderr, shortened(command))

    def stream(self, command: Command) -> Stream:
        """Starts a command and returns its output, stderr included. Ctrl-C in the reader ends the iteration at once."""
        return Stream(lambda sink: self.start(command, sink, has_input=False, merged=True))

    def rsync(self, command: Command, *arguments: str, names: Iterable[str], sink: Sink) -> Completed:
        """Runs this machine's rsync on files by name; calls ``sink`` with what it prints.

        ``command``, extended by the server's arguments, runs on the host, which is ``host:`` in ``arguments``.
        """
        words = ("sh", "-c", _RSH, "rsh", self.rsh(command))
        rsh = " ".join("'" + word.replace("'", "''") + "'" for word in words)  # rsync's own way to quote
        argv = ("rsync", f"--rsh={rsh}", "--files-from=-", "--from0", *arguments)
        try:
            process = self._keep(Process(argv, sink, env={"LC_ALL": "C", "SSH_ASKPASS_REQUIRE": "never"}))
        except FileNotFoundError:
            todo = "install it (the package rsync)"
            raise RequestError(Problem("this machine", "has no rsync", "no rsync on PATH", todo)) from None
        with process:
            # With ./ a # at the beginning is no comment.
            process.send(("".join(f"./{name}\0" for name in names).encode(errors="surrogateescape"),))
            return Completed(process.wait(), b"", process.stderr, "rsync")

    def put_tree(self, files: Mapping[str, bytes], folder: str, mode: int = 0o644) -> None:
        """Writes files (keyed by their paths inside ``folder``) in one round trip, each atomically.

        Expands ``~`` to the remote user's home and creates missing folders.
        """
        # A message shows the purpose of the script, not its text.
        done = self.run(files_.put_tree_command(files, folder, mode), timeout=FILES_TIMEOUT_S)
        replace(done, command=f"write into {folder}").checked(self.name)


class LocalHost(Host):
    def __init__(self, name: str = "this machine") -> None:
        super().__init__(name)

    def start(
        self,
        command: Command,
        sink: Sink,
        timeout: float | None = None,  # noqa: ARG002 - the caller's own limit ends a local process
        *,
        has_input: bool = True,
        merged: bool = False,
    ) -> Process:
        # A program that is missing has a shell's exit code and words, as on another host.
        argv = ("sh", "-c", 'exec "$@"', "sh", *command.argv)
        return self._keep(Process(argv, sink, env=command.env, cwd=command.cwd, has_input=has_input, merged=merged))

    def at_terminal(self, command: Command) -> int:
        return subprocess.call(command.argv, env={**os.environ, **command.env}, cwd=command.cwd)

    def rsh(self, command: Command) -> str:
        return f'exec {command.render()} "$@"'

    def forwarded(self, port: int) -> AbstractContextManager[int]:
        """As :meth:`Host.forwarded`: it is the same loopback."""
        return nullcontext(port)
