"""The operator's own machine as a host, for the twin, whose nodes run on the local Docker engine."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import IO

from tridock.command import Command
from tridock.errors import ClusterError
from tridock.remote.host import CHUNK, Completed, Host, Progress, Sink, Stream, completed, timed_out

_NOT_FOUND = 127
_GRACE_S = 2.0


class LocalHost(Host):
    """Runs commands as local processes, each in its own session, so that only the caller receives Ctrl-C."""

    def __init__(self, name: str = "this machine") -> None:
        self.name = name
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()

    def _carry_out(
        self,
        command: Command,
        chunks: Iterable[bytes],
        progress: Progress | None,
        sink: Sink,
        timeout: float | None,
        keep: float = 0,  # noqa: ARG002 - it costs nothing to start another shell here
    ) -> Completed:
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            process = _started(command, stderr=subprocess.PIPE)
        except FileNotFoundError as error:
            return completed(command, _NOT_FOUND, _not_found(error))
        with self._lock:
            self._running.add(process)
        errors = list[bytes]()
        readers = [_Reader(process, process.stdout, sink), _Reader(process, process.stderr, errors.append)]
        sender = _Sender(process, chunks, progress)
        try:
            process.wait(timeout)
            # Background processes of the command may hold the pipes open: the time limit covers them too.
            for reader in readers:
                reader.finish(deadline)
        except subprocess.TimeoutExpired:
            assert timeout is not None
            raise ClusterError(timed_out(self.name, command, timeout)) from None
        finally:
            _end(process)
            with self._lock:
                self._running.discard(process)
        sender.join()
        for failure in (readers[0].failure, sender.failure):
            if failure is not None:
                raise failure
        return completed(command, _code(process), b"".join(errors))

    def stream(self, command: Command) -> Stream:
        return _LocalStream(command)

    def close(self) -> None:
        with self._lock:
            running = tuple(self._running)
        for process in running:
            _end(process)


class _Reader(threading.Thread):
    """Reads a pipe to its end in a thread, so that reader and writer do not block each other. Keeps a sink's error."""

    def __init__(self, process: subprocess.Popen[bytes], source: IO[bytes] | None, sink: Sink) -> None:
        super().__init__(daemon=True)
        assert source is not None
        self._process, self._source, self._sink = process, source, sink
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            while part := os.read(self._source.fileno(), CHUNK):
                self._sink(part)
        except BaseException as error:
            self.failure = error
            _end(self._process)  # nothing reads its further output

    def finish(self, deadline: float | None) -> None:
        self.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if self.is_alive():
            raise subprocess.TimeoutExpired("", 0)
        self._source.close()


class _Sender(threading.Thread):
    """Writes the chunks; keeps an error of their source for the caller."""

    def __init__(self, process: subprocess.Popen[bytes], chunks: Iterable[bytes], progress: Progress | None) -> None:
        super().__init__(daemon=True)
        self._process, self._chunks, self._progress = process, chunks, progress
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        sink = self._process.stdin
        assert sink is not None
        try:
            for chunk in self._chunks:
                try:
                    sink.write(chunk)
                    sink.flush()
                except (BrokenPipeError, ValueError):
                    return  # the command has ended early: its exit code and stderr say why
                if self._progress is not None:
                    self._progress(len(chunk))
        except BaseException as error:
            self.failure = error
            _end(self._process)  # before its input closes: it must not mistake a part for the whole
        finally:
            with suppress(BrokenPipeError):
                sink.close()


class _LocalStream:
    def __init__(self, command: Command) -> None:
        self.exit_code = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._message = b""
        try:
            self._process = _started(command, stderr=subprocess.STDOUT)
        except FileNotFoundError as error:
            self.exit_code, self._message = _NOT_FOUND, _not_found(error)
            return
        assert self._process.stdin is not None
        self._process.stdin.close()

    def __iter__(self) -> Iterator[bytes]:
        if self._process is None:
            yield self._message
            return
        assert self._process.stdout is not None
        try:
            while part := os.read(self._process.stdout.fileno(), CHUNK):
                yield part
            self._process.wait()
            self.exit_code = _code(self._process)
        finally:
            self.close()

    def close(self) -> None:
        if self._process is not None:
            _end(self._process)
            assert self._process.stdout is not None
            self._process.stdout.close()


def _started(command: Command, stderr: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command.argv,
        env={**os.environ, **command.env},
        cwd=command.cwd,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
    )


def _not_found(error: FileNotFoundError) -> bytes:
    return f"{error.filename}: {(error.strerror or 'not found').lower()}\n".encode()


def _code(process: subprocess.Popen[bytes]) -> int:
    # As a shell reports it: 128 plus the signal number.
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that still runs, and everything it started in its session."""
    if process.poll() is not None:
        return
    for number, patience in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            return
