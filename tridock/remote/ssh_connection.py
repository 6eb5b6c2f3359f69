"""Opens ssh connections with the operator's own keys, host keys and jump hosts, and with retries.

Trust is the operator's ssh trust: an unknown or changed host key is an error, on jump hosts too.
"""

import logging
import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import paramiko
from fabric import Config, Connection
from paramiko.common import MSG_CHANNEL_DATA, MSG_CHANNEL_EOF, MSG_CHANNEL_REQUEST, MSG_CHANNEL_WINDOW_ADJUST

from tridock.errors import ClusterError, TridockError
from tridock.remote.ssh_config import Target, Wanted, resolve
from tridock.remote.ssh_target import UnknownHostKeyError, connection_problem, is_transient, known_keys

_FIRST_WAIT_S: Final = 0.25
_LONGEST_WAIT_S: Final = 4.0
_KEEPALIVE_S: Final = 15
_UNANSWERED_MS: Final = 60_000
_TO_A_CHANNEL: Final = {MSG_CHANNEL_WINDOW_ADJUST, MSG_CHANNEL_DATA, MSG_CHANNEL_EOF, MSG_CHANNEL_REQUEST}
_QUICKACK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)

# Without a handler, Python prints paramiko's tracebacks; our messages contain the relevant part.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True)
class Connector:
    """Connects to one host; ``name`` is the node's name in messages. ``look_up`` returns its target."""

    name: str
    look_up: Callable[[], Target]
    config_file: str | None
    timeout: float
    retries: int

    def connect(self) -> Connection:
        """Returns an open connection. Raises :class:`ClusterError` if the retries are used up or cannot help."""
        target = self.look_up()
        wait = _FIRST_WAIT_S
        for left in range(self.retries, -1, -1):
            connection = self._connection_to(target, target.jumps)
            begin = time.monotonic()
            try:
                connection.open()
                _watch(connection.transport)
                return connection
            except TridockError:
                raise
            except Exception as error:
                close(connection)
                # paramiko aborts a handshake that takes too long without an error, and fails on it later.
                silent = str(error) == "No existing session" and time.monotonic() - begin >= 0.9 * self.timeout
                cause = TimeoutError() if silent else error
                if not left or not is_transient(cause):
                    problem = connection_problem(self.name, target, cause, self.timeout, self.retries + 1 - left)
                    raise ClusterError(problem) from None
            # Jitter, so that connections that were dropped together do not retry together.
            time.sleep(wait * random.uniform(0.5, 1.5))  # noqa: S311
            wait = min(2 * wait, _LONGEST_WAIT_S)
        raise AssertionError("the last attempt returns or raises")

    def _connection_to(self, target: Target, jumps: tuple[str, ...]) -> Connection:
        """Returns an unopened connection with all options set, so that Fabric reads no configuration of its own."""
        connect_kwargs = {
            "timeout": self.timeout,
            "banner_timeout": self.timeout,
            "auth_timeout": self.timeout,
            "channel_timeout": self.timeout,
            "key_filename": list(target.identity_files),
            "look_for_keys": False,
            "allow_agent": target.use_agent,
        }
        if target.proxy_command and not jumps:
            connect_kwargs["sock"] = _proxied(target.proxy_command)
        known = known_keys(target)
        connect_kwargs["transport_factory"] = _transport_for(known)
        connection = Connection(
            target.host,
            user=target.user,
            port=target.port,
            gateway=self._gateway(jumps) if jumps else None,
            config=Config(ssh_config=paramiko.SSHConfig(), lazy=True),
            connect_kwargs=connect_kwargs,
        )
        # Fabric's default policy accepts every host key.
        connection.client.set_missing_host_key_policy(_Refuse(target))
        name = target.host if target.port == 22 else f"[{target.host}]:{target.port}"
        for key in known:
            connection.client.get_host_keys().add(name, key.get_name(), key)
        return connection

    def _gateway(self, jumps: tuple[str, ...]) -> Connection:
        user, _, host = jumps[-1].rpartition("@")
        address, port = _host_and_port(host)
        wanted = Wanted(user or None, port, None, self.config_file)
        hop = resolve(self.name, address, wanted)
        # The previous hops were listed with this one; the first hop may have jump hosts of its own.
        return self._connection_to(hop, jumps[:-1] or hop.jumps)


class _Refuse:
    """Rejects an unknown host key and keeps it for the message."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def missing_host_key(self, _client: paramiko.SSHClient, _hostname: str, key: paramiko.PKey) -> None:
        """Called by paramiko."""
        raise UnknownHostKeyError(self._target, key)


def _transport_for(known: list[paramiko.PKey]) -> Any:
    """Returns a factory of transports that prefer the key types on file, as ssh does: a server has several keys."""
    names = [key.get_name() for key in known]

    def make(sock: Any, **kwargs: Any) -> paramiko.Transport:
        transport = _Transport(_prompt(sock), **kwargs)
        options = transport.get_security_options()
        options.key_types = sorted(
            options.key_types, key=lambda kind: ("ssh-rsa" if kind.startswith("rsa-sha2") else kind) not in names
        )
        return transport

    return make


class _Transport(paramiko.Transport):  # type: ignore[misc]
    """A connection that survives commands that end at a bad moment. In paramiko's it breaks, with all other commands.

    While new keys are exchanged (every 512 MB, or as the sshd wants it), paramiko's thread would answer the end of a
    command only with these keys, which nobody else can receive. Here the answer waits, and not the thread.

    A thread that sends input, or its end, may find that the command has ended meanwhile. Once paramiko's thread has
    confirmed that, sshd knows no such channel, and disconnects. Here what comes too late is not sent.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._after_keys: list[Any] = []
        super().__init__(*arguments, **options)

    def _send_user_message(self, message: Any) -> None:
        if threading.current_thread() is self and not self.clear_to_send.is_set():
            self._after_keys.append(message)
            return
        header = message.packet.getbuffer()[:5]
        if header[0] in _TO_A_CHANNEL:
            number = int.from_bytes(header[1:])
            open_ = (it for it in self._channels.values() if it.active and it.remote_chanid == number)
            message.channel = next(open_, None)
        super()._send_user_message(message)

    def _send_message(self, message: Any) -> None:
        # Under the lock of all senders: a channel that is still open here cannot be confirmed as closed before.
        channel: Any = getattr(message, "channel", self)
        if channel is self or (channel is not None and not channel.closed):
            super()._send_message(message)

    def _parse_newkeys(self, message: Any) -> None:
        super()._parse_newkeys(message)
        waiting, self._after_keys = self._after_keys, []
        for one in waiting:
            self._send_user_message(one)


class _PromptSocket(socket.socket):
    """A TCP socket that waits neither to send nor to acknowledge.

    ssh's messages are short and several in a row: with Nagle's algorithm here or there each command, and most steps of
    a login, would take 40 ms longer, the time after which Linux sends an acknowledgement that it has held back.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(fileno=sock.detach())
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def recv(self, *arguments: int) -> bytes:
        data = super().recv(*arguments)
        if _QUICKACK is not None:  # which holds until the kernel takes it back: again each time
            with suppress(OSError):
                self.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)
        return data


def _prompt(sock: Any) -> Any:
    """Returns a socket that transmits without delay; a jump host's channel or a proxy command's socket as it is."""
    if type(sock) is socket.socket and sock.family in (socket.AF_INET, socket.AF_INET6):
        timeout = sock.gettimeout()
        sock = _PromptSocket(sock)
        sock.settimeout(timeout)
    return sock


def _proxied(command: str) -> socket.socket:
    """Returns a socket connected to a ProxyCommand; paramiko's own ProxyCommand treats its end as silence."""
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
    """Enables keepalives, which detect a vanished host within about a minute."""
    transport.set_keepalive(_KEEPALIVE_S)
    with suppress(OSError, AttributeError):  # a jump host's channel is not a local socket
        transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)


def close(connection: Connection) -> None:
    """Closes a connection in any state, and the jump host connections below it."""
    with suppress(Exception):
        # Fabric does not close a connection that was not fully established.
        connection.client.close()
    if isinstance(connection.gateway, Connection):
        close(connection.gateway)


def _host_and_port(text: str) -> tuple[str, int | None]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, int(rest[1:]) if rest[1:] else None
    host, _, port = text.rpartition(":")
    return (host, int(port)) if host and ":" not in host and port.isdecimal() else (text, None)
