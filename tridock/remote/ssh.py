"""A host over SSH: one Fabric connection, opened at the first use, with a channel for each command.

Nothing is trusted that the operator's ssh does not trust already: an unknown or changed host key is an error, on the
way through a jump host too. Commands run on paramiko's channels: Invoke's runner would send Ctrl-C to the other side.
"""

from __future__ import annotations

import logging
import math
import random
import select
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

import paramiko
from fabric import Config, Connection
from paramiko.common import cMSG_CHANNEL_REQUEST

from tridock.command import Command
from tridock.errors import ClusterError, TridockError
from tridock.remote.failures import killed, lost, shown, timed_out
from tridock.remote.host import CHUNK, Completed, FileOperations, Progress, Stream, completed
from tridock.remote.ssh_failures import UnknownHostKeyError, connection_problem, is_passing
from tridock.remote.ssh_target import Target, Wanted, known_keys, resolve

_FIRST_WAIT_S: Final = 0.25
_LONGEST_WAIT_S: Final = 4.0
_KEEPALIVE_S: Final = 15
_UNANSWERED_MS: Final = 60_000
_TICK_S: Final = 0.2
_MARGIN_S: Final = 2

# Without a handler, Python prints paramiko's own tracebacks; what matters of them is in our messages.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class SshHost(FileOperations):
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
        self._wanted = Wanted(user, port, identity_file, config_file)
        self._timeout, self._retries = connect_timeout, retries
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def run(self, command: Command, timeout: float | None = None) -> Completed:
        """As in :class:`tridock.remote.host.Host`."""
        return self.pipe((command.stdin,) if command.stdin else (), command, timeout=timeout)

    def pipe(
        self,
        chunks: Iterable[bytes],
        command: Command,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> Completed:
        """As in :class:`tridock.remote.host.Host`."""
        # The time limit is the command's: connecting has its own.
        channel = self._start(command, _limited(command, timeout))
        sender = _Sender(channel, chunks, progress)
        sender.start()
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            out, err = _read_all(channel, deadline)
        except TimeoutError:
            assert timeout is not None
            raise ClusterError(timed_out(self.name, command, timeout)) from None
        finally:
            channel.close()
        sender.join()
        if sender.failure is not None:
            raise sender.failure
        return completed(command, self._exit_code(channel, command), out, err)

    def stream(self, command: Command) -> Stream:
        """As in :class:`tridock.remote.host.Host`."""
        channel = self._start(command, command.render(), merged=True)
        channel.shutdown_write()
        return _SshStream(self, channel, command)

    def close(self) -> None:
        """As in :class:`tridock.remote.host.Host`."""
        # Takes no lock: whoever holds it may be waiting for this very connection.
        connection = self._connection
        if connection is not None:
            _close(connection)

    def _exit_code(self, channel: Any, command: Command) -> int:
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
        except (paramiko.SSHException, OSError, EOFError) as error:
            words = str(error) or _last_words(transport)
            raise ClusterError(lost(self.name, f"`{shown(command)}` was started", words)) from None
        return channel

    def _open(self) -> Connection:
        with self._lock:
            if self._connection is None or not self._connection.is_connected:
                self._connection = self._connected()
            return self._connection

    def _connected(self) -> Connection:
        target = resolve(self.name, self.address, self._wanted)
        wait = _FIRST_WAIT_S
        for left in range(self._retries, -1, -1):
            connection = self._connection_to(target, target.jumps)
            begin = time.monotonic()
            try:
                connection.open()
                _watch(connection.transport)
                return connection
            except TridockError:
                raise
            except Exception as error:
                _close(connection)
                # paramiko gives up a handshake that takes too long without saying so, and stumbles over it later.
                silent = str(error) == "No existing session" and time.monotonic() - begin >= 0.9 * self._timeout
                cause = TimeoutError() if silent else error
                if not left or not is_passing(cause):
                    problem = connection_problem(self.name, target, cause, self._timeout, self._retries + 1 - left)
                    raise ClusterError(problem) from None
            # Jitter, so that connections that were dropped together do not come again together.
            time.sleep(wait * random.uniform(0.5, 1.5))  # noqa: S311
            wait = min(2 * wait, _LONGEST_WAIT_S)
        raise AssertionError("the last attempt returns or raises")

    def _connection_to(self, target: Target, jumps: tuple[str, ...]) -> Connection:
        """A connection that is not open yet. Everything is said: Fabric reads no configuration of its own."""
        connect_kwargs = {
            "timeout": self._timeout,
            "banner_timeout": self._timeout,
            "auth_timeout": self._timeout,
            "channel_timeout": self._timeout,
            "key_filename": list(target.identity_files),
            "look_for_keys": False,
            "allow_agent": target.use_agent,
        }
        if target.proxy_command and not jumps:
            connect_kwargs["sock"] = _proxied(target.proxy_command)
        known = known_keys(target)
        if known:
            connect_kwargs["transport_factory"] = _transport_for(known)
        connection = Connection(
            target.host,
            user=target.user,
            port=target.port,
            gateway=self._gateway(jumps) if jumps else None,
            config=Config(ssh_config=paramiko.SSHConfig(), lazy=True),
            connect_kwargs=connect_kwargs,
        )
        # Fabric's own policy would add whatever key a host shows.
        connection.client.set_missing_host_key_policy(_Refuse(target))
        name = target.host if target.port == 22 else f"[{target.host}]:{target.port}"
        for key in known:
            connection.client.get_host_keys().add(name, key.get_name(), key)
        return connection

    def _gateway(self, jumps: tuple[str, ...]) -> Connection:
        user, _, host = jumps[-1].rpartition("@")
        address, port = _host_and_port(host)
        wanted = Wanted(user or None, port, None, self._wanted.config_file)
        hop = resolve(self.name, address, wanted)
        # The hops before this one were named with it; the first one may have jumps of its own.
        return self._connection_to(hop, jumps[:-1] or hop.jumps)


class _Refuse:
    """Refuses an unknown host key, and keeps it for the message."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def missing_host_key(self, _client: paramiko.SSHClient, _hostname: str, key: paramiko.PKey) -> None:
        """Called by paramiko."""
        raise UnknownHostKeyError(self._target, key)


class _Sender(threading.Thread):
    """Sends the chunks as fast as the other side takes them; an error of their source is kept for the caller."""

    def __init__(self, channel: Any, chunks: Iterable[bytes], progress: Progress | None) -> None:
        super().__init__(daemon=True)
        self._channel, self._chunks, self._progress = channel, chunks, progress
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            for chunk in self._chunks:
                try:
                    # In pieces: paramiko copies what is left of its argument for every packet.
                    for start in range(0, len(chunk), CHUNK):
                        self._channel.sendall(chunk[start : start + CHUNK])
                except (OSError, EOFError, paramiko.SSHException):
                    return  # the command or the connection has ended: the reader learns which
                if self._progress is not None:
                    self._progress(len(chunk))
            with suppress(OSError, EOFError):
                self._channel.shutdown_write()
        except BaseException as error:
            self.failure = error
            _signal(self._channel, "TERM")  # before its input closes: it must not take the part for the whole
            self._channel.close()


class _SshStream:
    def __init__(self, host: SshHost, channel: Any, command: Command) -> None:
        self.exit_code = -1
        self._host, self._channel, self._command = host, channel, command

    def __iter__(self) -> Iterator[bytes]:
        # Short waits keep the main thread open to Ctrl-C while nothing comes.
        self._channel.settimeout(_TICK_S)
        try:
            while True:
                try:
                    part = self._channel.recv(CHUNK)
                except TimeoutError:
                    continue
                if not part:
                    break
                yield part
            while not self._channel.status_event.wait(_TICK_S):
                pass
        finally:
            self.close()
        self.exit_code = self._host._exit_code(self._channel, self._command)

    def close(self) -> None:
        self._channel.close()


def _limited(command: Command, timeout: float | None) -> str:
    """The line to run; with a time limit that holds there too, whatever becomes of this side.

    sshd leaves a command running whose channel is closed, and signals none for root.
    """
    if timeout is None:
        return command.render()
    seconds = str(math.ceil(timeout) + _MARGIN_S)
    return Command.of("timeout", "-k", "5", seconds, "sh", "-c", command.render()).render()


def _read_all(channel: Any, deadline: float | None) -> tuple[bytes, bytes]:
    """Both outputs to their ends, and the exit status; TimeoutError once the deadline is over."""
    out, err = bytearray(), bytearray()
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    ended = False
    while True:
        # Asked first: what came before the end is read after it.
        ended = channel.eof_received or channel.closed
        if channel.recv_ready():
            out += channel.recv(CHUNK)
        elif channel.recv_stderr_ready():
            err += channel.recv_stderr(CHUNK)
        elif ended and channel.status_event.wait(_TICK_S):
            return bytes(out), bytes(err)
        elif not ended:
            poll.poll(_TICK_S * 1000)
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError


def _signal(channel: Any, name: str) -> None:
    """Asks sshd to signal the command (RFC 4254, 6.9): closing the channel alone would leave it running."""
    message = paramiko.Message()
    message.add_byte(cMSG_CHANNEL_REQUEST)
    message.add_int(channel.remote_chanid)
    message.add_string("signal")
    message.add_boolean(False)
    message.add_string(name)
    with suppress(Exception):  # it is gone already, or its sshd knows no signals
        channel.transport._send_user_message(message)


def _transport_for(known: list[paramiko.PKey]) -> Any:
    """Makes transports that ask first for the kinds of host key on file, as ssh does: a server has several."""
    names = [key.get_name() for key in known]

    def make(*args: Any, **kwargs: Any) -> paramiko.Transport:
        transport = paramiko.Transport(*args, **kwargs)
        options = transport.get_security_options()
        options.key_types = sorted(
            options.key_types, key=lambda kind: ("ssh-rsa" if kind.startswith("rsa-sha2") else kind) not in names
        )
        return transport

    return make


def _proxied(command: str) -> socket.socket:
    """A socket whose other end is a ProxyCommand; paramiko's own stand-in for one takes its end for silence."""
    ours, its = socket.socketpair()
    with its:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"],
            stdin=its.fileno(),
            stdout=its.fileno(),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    threading.Thread(target=process.wait, daemon=True).start()
    return ours


def _watch(transport: Any) -> None:
    """Notices a host that vanished without a word, in about a minute."""
    transport.set_keepalive(_KEEPALIVE_S)
    with suppress(OSError, AttributeError):  # a jump host's channel is no socket of this machine
        transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)


def _last_words(transport: Any) -> str:
    error = transport.saved_exception
    return str(error) or type(error).__name__ if error is not None else "it was closed by the other side"


def _close(connection: Connection) -> None:
    with suppress(Exception):
        # Fabric closes nothing before the connection was made whole.
        connection.client.close()
    if isinstance(connection.gateway, Connection):
        _close(connection.gateway)


def _host_and_port(text: str) -> tuple[str, int | None]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, int(rest[1:]) if rest[1:] else None
    host, _, port = text.rpartition(":")
    return (host, int(port)) if host and ":" not in host and port.isdecimal() else (text, None)
