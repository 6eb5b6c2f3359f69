"""A host over SSH: one Fabric connection, opened at first use, many channels.

Nothing is trusted that the operator's ssh does not trust already: an unknown or changed host key is an error.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import paramiko
from fabric import Config, Connection
from paramiko.ssh_exception import NoValidConnectionsError

from tridock.command import Command
from tridock.errors import ClusterError, Problem
from tridock.remote.host import CHUNK, Completed, Stream, put_tree_command, timed_out

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.3, 5.0
_KEEPALIVE_S = 15


class SshHost:
    """One host; ssh's user, port, keys and jump hosts come from ~/.ssh/config unless given."""

    def __init__(
        self, name: str, *, address: str | None = None, user: str | None = None, port: int | None = None,
        identity_file: str | None = None, config_file: str | None = None, connect_timeout: float = 10.0, retries: int = 4,
    ) -> None:  # fmt: skip
        self.name, self._target, self._retries = name, address or name, retries
        self._timeout = connect_timeout
        overrides: dict[str, Any] = {"connect_kwargs": {}}
        if identity_file is not None:
            overrides["connect_kwargs"]["key_filename"] = str(Path(identity_file).expanduser())
        self._config = Config(
            overrides=overrides, runtime_ssh_path=str(Path(config_file).expanduser()) if config_file else None
        )
        self._user, self._port = user, port
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def run(self, command: Command, timeout: float | None = None) -> Completed:
        channel = self._start(command)
        sender = threading.Thread(target=_send, args=(channel, command.stdin), daemon=True)
        sender.start()
        return self._drain(channel, command, timeout)

    def stream(self, command: Command) -> Stream:
        channel = self._start(command, merged=True)
        channel.shutdown_write()
        return _SshStream(self.name, channel)

    def pipe(
        self, chunks: Iterable[bytes], command: Command, progress: Callable[[int], object] | None = None
    ) -> Completed:
        channel = self._start(command)
        failure: list[BaseException] = []

        def feed() -> None:
            try:
                for chunk in chunks:
                    channel.sendall(chunk)
                    if progress is not None:
                        progress(len(chunk))
                channel.shutdown_write()
            except OSError:
                pass  # the command has ended early, or the connection did: the reader learns which
            except BaseException as error:  # the source of the chunks failed: the caller must hear of it
                failure.append(error)
                channel.close()

        sender = threading.Thread(target=feed, daemon=True)
        sender.start()
        done = self._drain(channel, command, None)
        sender.join()
        if failure:
            raise failure[0]
        return done

    def put_tree(self, files: Mapping[str, bytes], folder: str, mode: int) -> None:
        self.run(put_tree_command(files, folder, mode), timeout=60.0).checked(self.name)

    def close(self) -> None:
        """Ends the connection; the next use opens it again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _start(self, command: Command, *, merged: bool = False) -> paramiko.Channel:
        connection = self._open()
        try:
            channel: paramiko.Channel = connection.transport.open_session(timeout=self._timeout)
            channel.set_combine_stderr(merged)
            channel.exec_command(command.render())
        except (paramiko.SSHException, OSError, EOFError) as error:
            self.close()
            raise ClusterError(_lost(self.name, error)) from None
        return channel

    def _drain(self, channel: paramiko.Channel, command: Command, timeout: float | None) -> Completed:
        deadline = None if timeout is None else time.monotonic() + timeout
        out, err = bytearray(), bytearray()
        channel.settimeout(0.2)
        while True:
            if channel.recv_stderr_ready():
                err += channel.recv_stderr(CHUNK)
            try:
                part = channel.recv(CHUNK)
            except TimeoutError:
                if deadline is not None and time.monotonic() > deadline:
                    channel.close()
                    raise ClusterError(timed_out(self.name, command, timeout)) from None
                continue
            if not part:
                break
            out += part
        while part := _stderr(channel):
            err += part
        code = channel.recv_exit_status()
        channel.close()
        if code < 0:
            raise ClusterError(_lost(self.name, EOFError("the connection ended before the command did")))
        return Completed(code, bytes(out), bytes(err))

    def _open(self) -> Connection:
        with self._lock:
            if self._connection is None or not self._connection.is_connected:
                self._connection = self._connect()
            return self._connection

    def _connect(self) -> Connection:
        wait = _FIRST_WAIT_S
        for left in range(self._retries, -1, -1):
            try:
                connection = self._connection_to()
                connection.open()
                connection.transport.set_keepalive(_KEEPALIVE_S)
                return connection
            except Exception as error:
                if left == 0 or not _passing(error):
                    raise ClusterError(connection_problem(self.name, error)) from None
                # Jitter, so that hosts behind one gateway do not all come again at the same moment.
                time.sleep(wait * random.uniform(0.5, 1.5))
                wait = min(2 * wait, _LONGEST_WAIT_S)
        raise AssertionError("unreachable")

    def _connection_to(self) -> Connection:
        connection = Connection(
            self._target, user=self._user, port=self._port, config=self._config, connect_timeout=self._timeout
        )
        client = connection.client
        # Fabric's own policy would add whatever key a host shows.
        client.set_missing_host_key_policy(paramiko.RejectPolicy())
        client.load_system_host_keys()
        for listed in connection.ssh_config.get("userknownhostsfile", "").split():
            if (path := Path(listed).expanduser()).is_file():
                client.load_system_host_keys(str(path))
        return connection


class _SshStream:
    def __init__(self, name: str, channel: paramiko.Channel) -> None:
        self.exit_code = -1
        self._name, self._channel = name, channel

    def __iter__(self) -> Iterator[bytes]:
        # A short time-out keeps the main thread open to Ctrl-C while nothing comes.
        self._channel.settimeout(0.2)
        try:
            while True:
                try:
                    part = self._channel.recv(CHUNK)
                except TimeoutError:
                    continue
                if not part:
                    break
                yield part
            self.exit_code = self._channel.recv_exit_status()
        finally:
            self._channel.close()
        if self.exit_code < 0:
            raise ClusterError(_lost(self._name, EOFError("the connection ended while the output was read")))


def _send(channel: paramiko.Channel, content: bytes | None) -> None:
    try:
        if content:
            channel.sendall(content)
        channel.shutdown_write()
    except OSError:
        pass  # the command has ended without reading its input


def _stderr(channel: paramiko.Channel) -> bytes:
    try:
        part: bytes = channel.recv_stderr(CHUNK)
        return part
    except TimeoutError:
        return b""


def _passing(error: Exception) -> bool:
    """Whether trying again may help: a refused or dropped connection, as of an sshd under load."""
    if isinstance(error, paramiko.AuthenticationException | paramiko.BadHostKeyException):
        return False
    if isinstance(error, NoValidConnectionsError):
        return any(isinstance(cause, ConnectionRefusedError | ConnectionResetError) for cause in error.errors.values())
    if isinstance(error, ConnectionError | EOFError):
        return True
    return isinstance(error, paramiko.SSHException) and "banner" in str(error).lower()


def connection_problem(name: str, error: Exception) -> Problem:
    """ssh's own words about a host, and the fix."""
    match error:
        case paramiko.BadHostKeyException():
            what = "shows another host key than the one in known_hosts"
            got = f"{error.key.get_name()} {error.key.fingerprint}"
            todo = f"make sure that it is the right machine, then ssh-keygen -R {error.hostname} and ssh to it once"
        case paramiko.AuthenticationException():
            what, got = "refuses the login", str(error)
            todo = (
                f"make `ssh {name}` work without a password (ssh-copy-id, ssh-agent, or ssh.user and ssh.identity_file)"
            )
        case paramiko.SSHException() if "not found in known_hosts" in str(error):
            what, got, todo = "is not in known_hosts", str(error), f"check its key and ssh to {name} once"
        case socket.gaierror():
            what, got = "is no name that this machine can resolve", error.strerror or str(error)
            todo = "mend the name in the hostfile, or add it to ~/.ssh/config or /etc/hosts"
        case NoValidConnectionsError():
            causes = "; ".join(sorted({cause.strerror or str(cause) for cause in error.errors.values()}))
            what, got, todo = "cannot be reached over ssh", causes, "start sshd there, or mend ssh.port"
        case TimeoutError():
            what, got, todo = "does not answer over ssh", "timed out", "see whether it is up and its port is open"
        case _:
            what, got, todo = (
                "cannot be reached over ssh",
                str(error) or type(error).__name__,
                f"make `ssh {name}` work",
            )
    return Problem(name, what, got, todo)


def _lost(name: str, error: BaseException) -> Problem:
    return Problem(name, "the ssh connection was lost", str(error) or type(error).__name__, f"see whether {name} is up")
