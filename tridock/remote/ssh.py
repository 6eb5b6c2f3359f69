"""A host over ssh: one Fabric connection, opened at first use, with one channel per command.

If the sshd's MaxSessions limit is reached, more connections are opened.

Commands run on paramiko's channels, because Invoke's runner would forward Ctrl-C to the remote side.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Generic, TypeVar, cast

import paramiko
from fabric import Connection
from paramiko.common import cMSG_CHANNEL_REQUEST

from tridock.command import Command
from tridock.errors import ClusterError
from tridock.remote import ssh_connection
from tridock.remote.host import (
    CHUNK,
    Completed,
    Host,
    Progress,
    Sink,
    Stream,
    completed,
    killed,
    lost,
    no_session,
    shortened,
    timed_out,
)
from tridock.remote.kept import KEPT, KEPT_BYTES, next_script
from tridock.remote.ssh_config import Target, Wanted, resolve

T = TypeVar("T")
_GRACE_S: Final = 2.0


class _Task(threading.Thread, Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return cast(T, self._value)


def run_in_thread(work: Callable[[], T], give_up: Callable[[], object] | None = None) -> T:
    """Returns or raises what ``work`` does; runs it in a separate thread if this is the main thread.

    Ctrl-C then interrupts the thread that waits, never one that holds a lock. Python raises KeyboardInterrupt between
    any two bytecodes of the main thread, and paramiko acquires its locks without context managers. On Ctrl-C
    ``give_up`` is called, also in a thread; the work has two seconds to end and is then abandoned.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    task = _Task(work)
    task.start()
    try:
        task.join()
    except BaseException:
        if give_up is not None:
            closing = _Task(give_up)
            closing.start()
            closing.join(_GRACE_S)
            task.join(_GRACE_S)
        raise
    return task.result()


_TICK_S: Final = 0.2
_MARGIN_S: Final = 2
_GONE: Final = (EOFError, OSError, paramiko.SSHException)


class OverdueError(Exception):
    """A command exceeded its time limit."""


class Sender(threading.Thread):
    """Sends the chunks as fast as the remote side reads them; keeps an error of their source for the caller.

    Then it closes the channel's input, unless that is kept ``open``.
    """

    def __init__(self, channel: Any, chunks: Iterable[bytes], progress: Progress | None, *, open: bool) -> None:
        super().__init__(daemon=True)
        self._channel, self._chunks, self._progress, self._open = channel, chunks, progress, open
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            for chunk in self._chunks:
                try:
                    # In pieces: paramiko copies the rest of its argument for every packet.
                    for start in range(0, len(chunk), CHUNK):
                        self._channel.sendall(chunk[start : start + CHUNK])
                except _GONE:
                    return  # the command or the connection has ended: the reader finds out which
                if self._progress is not None:
                    self._progress(len(chunk))
            if not self._open:
                with suppress(OSError, EOFError):
                    self._channel.shutdown_write()
        except BaseException as error:
            self.failure = error
            _signal(self._channel, "TERM")  # before its input closes: it must not mistake a part for the whole
            close(self._channel)


def limited(command: Command, timeout: float | None, keep: float = 0) -> str:
    """Returns the command line, wrapped in a remote time limit if there is one; it includes the time for ``keep``.

    The limit holds even if this side is gone: sshd does not end a command when its channel closes, and signals none for
    root.
    """
    if timeout is None:
        return command.render()
    limit = Command.of("timeout", "-k", "5", str(math.ceil(timeout + keep) + _MARGIN_S))
    if not command.env and command.cwd is None:  # a shell more is a process more
        return limit.extended(command.argv).render()
    return limit.extended(("sh", "-c", command.render())).render()


class _Bell:
    """An event for both of paramiko's buffers. Neither may clear it, which would hide the other's data."""

    def __init__(self) -> None:
        self.rung = threading.Event()

    def set(self) -> None:
        self.rung.set()

    def clear(self) -> None:
        pass


def read_all(channel: Any, sink: Sink, deadline: float | None, until: Callable[[], bool] = lambda: False) -> bytes:
    """Reads stdout into ``sink`` and returns stderr, to the end or ``until`` this. Raises OverdueError after the
    deadline.
    """
    errors, bell = bytearray(), _Bell()
    # Not its fileno(): paramiko closes that under its own writer, which ends the connection.
    channel.in_buffer.set_event(bell)
    channel.in_stderr_buffer.set_event(bell)
    while True:
        bell.rung.clear()
        # Checked first: data that arrived before the end is read after this check.
        ended = channel.eof_received or channel.closed
        if channel.recv_ready():
            _take(channel, sink)
        elif channel.recv_stderr_ready():
            errors += received(channel.recv_stderr)
        elif until() or (ended and channel.status_event.wait(_TICK_S)):
            return bytes(errors)
        elif not ended:
            bell.rung.wait(_TICK_S)
        if deadline is not None and time.monotonic() > deadline:
            raise OverdueError


def _take(channel: Any, sink: Sink) -> None:
    try:
        sink(received(channel.recv))
    except BaseException:
        _signal(channel, "TERM")  # nothing reads its further output
        raise


def received(read: Callable[[int], bytes]) -> bytes:
    """Returns the data of a channel's ``recv`` or ``recv_stderr``; empty if the connection is lost, which the channel's
    end reports.

    Both calls also send a window adjustment, and raise if it cannot be sent.
    """
    try:
        return read(CHUNK)
    except _GONE:
        return b""


def close(channel: Any) -> None:
    """Closes a channel, even if the remote side is gone."""
    with suppress(*_GONE):
        channel.close()


def _signal(channel: Any, name: str) -> None:
    """Asks sshd to signal the command (RFC 4254, 6.9): closing the channel alone would leave it running."""
    message = paramiko.Message()
    message.add_byte(cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string("signal")
    message.add_boolean(False)
    message.add_string(name)
    with suppress(Exception):  # it has ended, or its sshd does not support signals
        channel.transport._send_user_message(message)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A shell that waits for the next command, until its time limit."""

    channel: Any
    until: float
    pid: str = ""
    """Of the process that ends it and what it runs."""


class SshHost(Host):
    """One host; user, port, keys, jump hosts and known hosts come from the ssh configuration unless given."""

    def __init__(
        self,
        name: str,
        *,
        address: str | None = None,
        user: str | None = None,
        port: int | None = None,
        identity_file: str | None = None,
        config_file: str | None = None,
        connect_timeout: float = 10.0,
        retries: int = 4,
        look_up: Callable[[], Target] | None = None,
    ) -> None:
        """``look_up`` returns the target that ssh would use, if that is asked elsewhere."""
        self.name, self.address = name, address or name
        wanted = Wanted(user, port, identity_file, config_file)
        look_up = look_up or partial(resolve, name, self.address, wanted)
        self._first: Callable[[], Connection] | None = None
        self.connector = ssh_connection.Connector(name, look_up, config_file, connect_timeout, retries)
        self._timeout = connect_timeout
        self._lock = threading.Lock()
        self._connections: tuple[Connection, ...] = ()
        self._kept: list[_Kept] = []

    def _carry_out(
        self,
        command: Command,
        chunks: Iterable[bytes],
        progress: Progress | None,
        sink: Sink,
        timeout: float | None,
        keep: float = 0,
    ) -> Completed:
        kept = self._take_kept(timeout)
        if kept is not None:
            script = next_script(command, last=not keep, has_input=chunks != ())
            chunks = (script, *chunks) if isinstance(chunks, tuple) else itertools.chain((script,), chunks)
        else:
            # The time limit covers the command; connecting has its own.
            channel = run_in_thread(lambda: self._start(command, limited(command, timeout, keep)))
            kept = _Kept(channel, time.monotonic() + (timeout or 0) + keep)
        channel, end = kept.channel, bytearray()
        sender = Sender(channel, chunks, progress, open=bool(keep))
        brief = isinstance(chunks, tuple) and sum(map(len, chunks)) <= CHUNK

        def take(part: bytes) -> None:
            sink(part)
            if keep:
                end[:] = (end + part)[-KEPT_BYTES:]

        def talk() -> bytes:
            if brief:  # most commands: no thread for what no host leaves unread for long
                sender.run()
            else:
                sender.start()
            deadline = None if timeout is None else time.monotonic() + timeout
            try:
                errors = read_all(channel, take, deadline, lambda: KEPT.search(end) is not None)
            except OverdueError:
                assert timeout is not None
                self._end_kept(kept, command)
                raise ClusterError(timed_out(self.name, command, timeout)) from None
            finally:
                if KEPT.search(end) is None:
                    close(channel)
            if sender.ident is not None:
                sender.join()
            return errors

        errors = run_in_thread(talk, lambda: close(channel))
        if sender.failure is not None:
            raise sender.failure
        if found := KEPT.search(end):
            self._kept.append(replace(kept, pid=found[1].decode()))
            return completed(command, 0, errors)
        return completed(command, self.exit_code_of(channel, command), errors)

    def _take_kept(self, timeout: float | None) -> _Kept | None:
        """Returns the shell that is kept for the next command, if it waits long enough for one with this time limit."""
        if timeout is None:
            return None
        try:
            kept = self._kept.pop()
        except IndexError:
            return None
        if kept.channel.closed or kept.channel.eof_received or time.monotonic() + timeout > kept.until:
            run_in_thread(lambda: close(kept.channel))
            return None
        return kept

    def _end_kept(self, kept: _Kept, command: Command) -> None:
        """Ends a shell whose own time limit is longer than that of the command in it."""
        if kept.pid:
            with suppress(ClusterError):
                self._start(command, Command.of("kill", kept.pid).render())

    def connects_first_by(self, connect: Callable[[], Connection]) -> None:
        """Has the first connection come from somebody who may have opened it already."""
        self._first = connect

    def stream(self, command: Command) -> Stream:
        def start() -> Any:
            channel = self._start(command, command.render(), merged=True)
            channel.shutdown_write()
            return channel

        return _SshStream(self, run_in_thread(start), command)

    def close(self) -> None:
        # Takes no lock: its holder may be waiting for this connection.
        for connection in self._connections:
            run_in_thread(lambda connection=connection: ssh_connection.close(connection))  # type: ignore[misc]

    def exit_code_of(self, channel: Any, command: Command) -> int:
        """Returns the exit code of a channel's ended command. Raises if it is unknown."""
        code = int(channel.exit_status)
        if code >= 0:
            return code
        if channel.transport.is_active():
            raise ClusterError(killed(self.name, command))
        raise ClusterError(lost(self.name, f"`{shortened(command)}` ran", _last_error(channel.transport)))

    def _start(self, command: Command, line: str, *, merged: bool = False) -> Any:
        full: list[Connection] = []
        while True:
            connection, channel = self._open(command, full)
            with self._named(command, connection.transport):
                channel = channel or self._session(connection.transport)
                if channel is not None:
                    channel.set_combine_stderr(merged)
                    channel.exec_command(line)
                    return channel
            full.append(connection)

    def _open(self, command: Command, full: list[Connection]) -> tuple[Connection, Any]:
        """Returns a connection with a free channel slot, and its first channel if the connection is new."""
        with self._lock:
            self._connections = tuple(one for one in self._connections if one.is_connected)
            for one in self._connections:
                if not any(one is other for other in full):  # Fabric's connections to one host are equal
                    return one, None
            connect, self._first = self._first or self.connector.connect, None
            new = connect()
            self._connections = *self._connections, new
            with self._named(command, new.transport):
                channel = self._session(new.transport)
            if channel is None:
                ssh_connection.close(new)
                raise ClusterError(no_session(self.name))
            return new, channel

    def _session(self, transport: Any) -> Any:
        """Opens a channel. Returns None if the sshd allows no more channels on this connection."""
        try:
            return transport.open_session(timeout=self._timeout)
        except paramiko.SSHException as error:
            # The second text appears if several were refused at once: paramiko keeps one reason.
            if isinstance(error, paramiko.ChannelException) or str(error) == "Unable to open channel.":
                return None
            raise

    @contextmanager
    def _named(self, command: Command, transport: Any) -> Iterator[None]:
        """Converts connection errors into the error of the command that was about to start."""
        try:
            yield
        except (paramiko.SSHException, OSError, EOFError) as error:
            reason = str(error) or _last_error(transport)
            raise ClusterError(lost(self.name, f"`{shortened(command)}` was started", reason)) from None


class _SshStream:
    def __init__(self, host: SshHost, channel: Any, command: Command) -> None:
        self.exit_code = -1
        self._host, self._channel, self._command = host, channel, command

    def __iter__(self) -> Iterator[bytes]:
        channel = self._channel
        try:
            while part := run_in_thread(lambda: received(channel.recv), self.close):
                yield part
            run_in_thread(channel.status_event.wait, self.close)
        finally:
            self.close()
        self.exit_code = self._host.exit_code_of(self._channel, self._command)

    def close(self) -> None:
        run_in_thread(lambda: close(self._channel))


def _last_error(transport: Any) -> str:
    error = transport.saved_exception
    return str(error) or type(error).__name__ if error is not None else "it was closed by the other side"
