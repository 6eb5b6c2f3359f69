"""A local process with threads that write its input and read its output."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import IO, Final, Self

from tridock.remote import clock

Progress = Callable[[int], object]
Sink = Callable[[bytes], object]

_CHUNK: Final = 1 << 16
_GRACE_S: Final = 2.0


class OverdueError(Exception):
    """A process exceeded its time limit."""


class Process:
    """A process in its own session, so that only the caller receives Ctrl-C. Leaving the context ends it.

    An error of the sink, or of the source of its input, ends it too; :meth:`wait` raises that error.
    """

    def __init__(
        self,
        argv: Iterable[str],
        sink: Sink,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        has_input: bool = True,
        merged: bool = False,
    ) -> None:
        """Starts it; raises FileNotFoundError if there is no such program."""
        self._errors = bytearray()
        self._failures: list[BaseException] = []
        self._popen = subprocess.Popen(
            list(argv),
            env={**os.environ, **(env or {})},
            cwd=cwd,
            stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            start_new_session=True,
        )
        pipes = ((self._popen.stdout, sink), (self._popen.stderr, self._errors.extend))
        self._readers = [_started(self._read, pipe, sink) for pipe, sink in pipes if pipe is not None]
        self._sender: threading.Thread | None = None
        self._is_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        self.end()

    @property
    def stderr(self) -> bytes:
        return bytes(self._errors)

    def send(self, chunks: Iterable[bytes], progress: Progress | None = None) -> None:
        """Writes the chunks to its input as fast as it reads them, in a thread, then closes the input."""
        if self._popen.stdin is not None:
            self._sender = _started(self._write, self._popen.stdin, chunks, progress)

    def wait(self, deadline: float | None = None) -> int:
        """Returns its exit code, 128 plus the signal's number as in a shell, once all output has reached the sink.

        Raises :class:`OverdueError` after ``deadline``, a time of ``clock.now()``. Processes that it leaves in the
        background, and a command on a host whose ssh has ended, may hold the pipes open: the deadline covers them too,
        and nothing waits for them after :meth:`end`.
        """
        try:
            clock.wait(self._popen, deadline)
        except subprocess.TimeoutExpired:
            raise OverdueError from None
        for reader in self._readers:
            while reader.is_alive() and not self._is_ended:
                if deadline is not None and clock.now() >= deadline:
                    raise OverdueError
                reader.join(clock.turn(deadline))
        if self._sender is not None:
            self._sender.join()
        if self._failures:
            raise self._failures[0]
        code = self._popen.returncode
        return code if code >= 0 else 128 - code

    def end(self) -> None:
        """Ends it and everything it started in its session, if it still runs. From any thread."""
        self._is_ended = True
        for number, patience in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
            if self._popen.poll() is not None:
                return
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(patience)

    def _read(self, pipe: IO[bytes], sink: Sink) -> None:
        try:
            with pipe:
                while part := os.read(pipe.fileno(), _CHUNK):
                    sink(part)
        except BaseException as error:
            self._fail(error)  # nothing reads its further output

    def _write(self, pipe: IO[bytes], chunks: Iterable[bytes], progress: Progress | None) -> None:
        try:
            for chunk in chunks:
                try:
                    pipe.write(chunk)
                    pipe.flush()
                except (BrokenPipeError, ValueError):
                    return  # the process has ended early: its exit code and stderr say why
                if progress is not None:
                    progress(len(chunk))
        except BaseException as error:
            self._fail(error)  # before its input closes: it must not mistake a part for the whole
        finally:
            with suppress(BrokenPipeError):
                pipe.close()

    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def abort(self) -> None:
        """Ends it after an error of the sink or the source."""
        self.end()

    def _fail(self, error: BaseException) -> None:
        self._failures.append(error)
        self.abort()


def _started(work: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread
