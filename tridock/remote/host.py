"""What can be done on a host, whichever way it is reached; and the operator's own machine as a host."""

from __future__ import annotations

import io
import os
import posixpath
import secrets
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Protocol

from tridock.command import Command
from tridock.errors import ClusterError, Problem

CHUNK = 1 << 15


@dataclass(frozen=True, slots=True)
class Completed:
    """How a command ended, with all that it printed."""

    exit_code: int
    stdout: bytes
    stderr: bytes

    def checked(self, where: str) -> Completed:
        """This result, or a :class:`ClusterError` with the command's own last words where it failed."""
        if self.exit_code == 0:
            return self
        words = (self.stderr.strip() or self.stdout.strip()).decode(errors="replace")
        last = " | ".join(words.splitlines()[-3:]) or f"exit code {self.exit_code}"
        raise ClusterError(Problem(where, "a command failed there", last, remedy_of(words)))


class Stream(Protocol):
    """A command's output as it comes. ``exit_code`` is known once the iteration has ended."""

    exit_code: int

    def __iter__(self) -> Iterator[bytes]: ...


class Host(Protocol):
    """A machine that commands run on. All of it may be called from several threads."""

    def run(self, command: Command, timeout: float | None = None) -> Completed:
        """Runs to the end; raises :class:`ClusterError` where the host cannot be reached or time runs out."""

    def stream(self, command: Command) -> Stream:
        """Starts a command whose output is read as it comes; Ctrl-C in the reader ends the reading at once."""

    def pipe(
        self, chunks: Iterable[bytes], command: Command, progress: Callable[[int], object] | None = None
    ) -> Completed:
        """Runs a command on input too large for memory; ``progress`` is told the bytes of each chunk sent."""

    def put_tree(self, files: Mapping[str, bytes], folder: str, mode: int) -> None:
        """Puts files into a folder (made with 0700 where files are private), each whole or not at all."""


def put_tree_command(files: Mapping[str, bytes], folder: str, mode: int) -> Command:
    """One round trip: a tar on standard input, unpacked beside its place, then renamed file by file."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    # Private files make a private folder; anything else follows the common habit.
    umask = "077" if mode & 0o077 == 0 else "022"
    part = f".put.{secrets.token_hex(6)}"
    script = (
        'set -e; umask "$2"; mkdir -p "$1"; cd "$1"; mkdir "$PART"; trap \'rm -rf "$PART"\' EXIT; '
        'tar -xf - -C "$PART" --no-same-owner -p; shift 2; for f; do d=$(dirname "$f"); '
        '[ "$d" = . ] || mkdir -p "$d"; mv -f "$PART/$f" "$f"; done'
    )
    for name in files:
        if posixpath.isabs(name) or ".." in name.split("/"):
            raise ValueError(f"not a path inside the folder: {name}")
    return Command(("sh", "-c", script, "put", folder, umask, *files), env={"PART": part}, stdin=packed.getvalue())


class LocalHost:
    """The operator's own machine."""

    def run(self, command: Command, timeout: float | None = None) -> Completed:
        try:
            done = subprocess.run(
                command.argv, env=_environment(command), cwd=command.cwd, timeout=timeout, check=False,
                capture_output=True, input=command.stdin or b"",
            )  # fmt: skip
        except FileNotFoundError:
            todo = f"install {command.argv[0]}, or put it on PATH"
            raise ClusterError(Problem("this machine", f"has no {command.argv[0]}", "", todo)) from None
        except subprocess.TimeoutExpired:
            raise ClusterError(timed_out("this machine", command, timeout)) from None
        return Completed(done.returncode, done.stdout, done.stderr)

    def stream(self, command: Command) -> Stream:
        return _LocalStream(command)

    def pipe(
        self, chunks: Iterable[bytes], command: Command, progress: Callable[[int], object] | None = None
    ) -> Completed:
        with subprocess.Popen(
            command.argv, env=_environment(command), cwd=command.cwd,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            readers = [Reader(process.stdout), Reader(process.stderr)]
            try:
                for chunk in chunks:
                    process.stdin.write(chunk)
                    if progress is not None:
                        progress(len(chunk))
                process.stdin.close()
            except BrokenPipeError:
                pass  # the command has ended early: its exit code and words say why
            out, err = (reader.text() for reader in readers)
            return Completed(process.wait(), out, err)

    def put_tree(self, files: Mapping[str, bytes], folder: str, mode: int) -> None:
        self.run(put_tree_command(files, folder, mode), timeout=60.0).checked(folder)


class Reader(threading.Thread):
    """Reads a pipe to its end beside the thread that writes: neither side blocks the other."""

    def __init__(self, source: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self._source, self._parts = source, list[bytes]()
        self.start()

    def run(self) -> None:
        while part := self._source.read(CHUNK):
            self._parts.append(part)

    def text(self) -> bytes:
        """All that was read; waits for the end."""
        self.join()
        return b"".join(self._parts)


class _LocalStream:
    def __init__(self, command: Command) -> None:
        self.exit_code = -1
        # A session of its own: Ctrl-C at the terminal is the reader's, not the command's.
        self._process = subprocess.Popen(
            command.argv, env=_environment(command), cwd=command.cwd, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def __iter__(self) -> Iterator[bytes]:
        out = self._process.stdout
        assert out is not None
        try:
            while part := os.read(out.fileno(), CHUNK):
                yield part
            self.exit_code = self._process.wait()
        finally:
            if self._process.poll() is None:
                self._process.terminate()
            out.close()
            self._process.wait()


def _environment(command: Command) -> dict[str, str]:
    return {**os.environ, **command.env}


def timed_out(where: str, command: Command, timeout: float | None) -> Problem:
    """The problem of a command that did not end in time."""
    return Problem(where, f"did not answer within {timeout:g} s", str(command)[:120], "see whether that machine hangs")


def remedy_of(words: str) -> str:
    """What to do about a failed command, from its own words."""
    low = words.lower()
    if "no space left" in low or "disk quota" in low:
        return "free some space there (docker system df shows Docker's share)"
    if "permission denied" in low:
        return "give the user the right to it there"
    if "cannot connect to the docker daemon" in low:
        return "start Docker there (systemctl start docker)"
    if "already in use" in low or "address already" in low:
        return "end what holds it there, or choose another"
    return "mend it there and run this again"
