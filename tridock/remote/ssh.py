"""A host over SSH: one Fabric connection, opened at the first use, with a channel for each command.

Commands run on paramiko's channels: Invoke's runner would send Ctrl-C to the other side.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import paramiko
from fabric import Connection

from tridock.command import Command
from tridock.errors import ClusterError
from tridock.remote import ssh_connection
from tridock.remote.failures import killed, lost, no_session, shown, timed_out
from tridock.remote.host import Completed, Operations, Progress, Sink, Stream, completed
from tridock.remote.run_in_thread import aside
from tridock.remote.ssh_channel import OverdueError, Sender, close, limited, read_all, received
from tridock.remote.ssh_target import Wanted


class SshHost(Operations):
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
    ) -> None:
        self.name, self.address = name, address or name
        wanted = Wanted(user, port, identity_file, config_file)
        self._connector = ssh_connection.Connector(name, self.address, wanted, connect_timeout, retries)
        self._timeout = connect_timeout
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def _carry_out(
        self,
        command: Command,
        chunks: Iterable[bytes],
        progress: Progress | None,
        sink: Sink,
        timeout: float | None,
    ) -> Completed:
        # The time limit is the command's: connecting has its own.
        channel = aside(lambda: self._start(command, limited(command, timeout)))
        sender = Sender(channel, chunks, progress)

        def talk() -> bytes:
            sender.start()
            deadline = None if timeout is None else time.monotonic() + timeout
            try:
                errors = read_all(channel, sink, deadline)
            except OverdueError:
                assert timeout is not None
                raise ClusterError(timed_out(self.name, command, timeout)) from None
            finally:
                close(channel)
            sender.join()
            return errors

        errors = aside(talk, lambda: close(channel))
        if sender.failure is not None:
            raise sender.failure
        return completed(command, self.exit_code_of(channel, command), errors)

    def stream(self, command: Command) -> Stream:
        """As in :class:`tridock.remote.host.Host`."""

        def start() -> Any:
            channel = self._start(command, command.render(), merged=True)
            channel.shutdown_write()
            return channel

        return _SshStream(self, aside(start), command)

    def close(self) -> None:
        """As in :class:`tridock.remote.host.Host`."""
        # Takes no lock: whoever holds it may be waiting for this very connection.
        connection = self._connection
        if connection is not None:
            aside(lambda: ssh_connection.close(connection))

    def exit_code_of(self, channel: Any, command: Command) -> int:
        """How the command of a channel that has ended did so; raises where nobody knows."""
        code = int(channel.exit_status)
        if code >= 0:
            return code
        if channel.transport.is_active():
            raise ClusterError(killed(self.name, command))
        raise ClusterError(lost(self.name, f"`{shown(command)}` ran", _last_words(channel.transport)))

    def _start(self, command: Command, line: str, *, merged: bool = False) -> Any:
        connection = self._open()
        transport = connection.transport
        try:
            channel = transport.open_session(timeout=self._timeout)
            channel.set_combine_stderr(merged)
            channel.exec_command(line)
        except paramiko.ChannelException as error:
            raise ClusterError(no_session(self.name, error.text)) from None
        except (paramiko.SSHException, OSError, EOFError) as error:
            words = str(error) or _last_words(transport)
            raise ClusterError(lost(self.name, f"`{shown(command)}` was started", words)) from None
        return channel

    def _open(self) -> Connection:
        with self._lock:
            if self._connection is None or not self._connection.is_connected:
                self._connection = self._connector.connect()
            return self._connection


class _SshStream:
    def __init__(self, host: SshHost, channel: Any, command: Command) -> None:
        self.exit_code = -1
        self._host, self._channel, self._command = host, channel, command

    def __iter__(self) -> Iterator[bytes]:
        channel = self._channel
        try:
            while part := aside(lambda: received(channel.recv), self.close):
                yield part
            aside(channel.status_event.wait, self.close)
        finally:
            self.close()
        self.exit_code = self._host.exit_code_of(self._channel, self._command)

    def close(self) -> None:
        aside(lambda: close(self._channel))


def _last_words(transport: Any) -> str:
    error = transport.saved_exception
    return str(error) or type(error).__name__ if error is not None else "it was closed by the other side"
