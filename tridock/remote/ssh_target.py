"""The trusted host keys of an ssh target, and explanations of failures to connect."""

import hmac
import re
import socket
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import paramiko
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey
from paramiko.ssh_exception import BadAuthenticationType, ChannelException, NoValidConnectionsError

from tridock.errors import Problem
from tridock.remote.ssh_config import Target


def known_keys(target: Target) -> list[paramiko.PKey]:
    """Returns a target's host keys in file order, under the names that ssh looks up."""
    name = target.host_key_alias or (target.host if target.port == 22 else f"[{target.host}]:{target.port}")
    for wanted in (name, target.host_key_alias or target.host):  # ssh falls back to the name without its port
        keys = [key for path in target.known_hosts_files for key in _listed(path, wanted.lower())]
        if keys:
            return keys
    return []


def _listed(path: str, name: str) -> list[paramiko.PKey]:
    try:
        plain, hashed = _lines(path, Path(path).stat().st_mtime_ns)
    except OSError:
        return []  # ssh also ignores a file that it cannot read; the key is then unknown
    lines = [
        *plain.get(name, ()),
        *(line for salt, own, line in hashed if hmac.digest(salt, name.encode(), "sha1") == own),
    ]
    keys: dict[str, paramiko.PKey] = {}
    for line in lines:
        with suppress(paramiko.SSHException, InvalidHostKey):
            entry = HostKeyEntry.from_line(line)
            if entry is not None and entry.key is not None:
                keys.setdefault(entry.key.get_name(), entry.key)
    return list(keys.values())


@lru_cache
def _lines(path: str, _changed: int) -> tuple[Mapping[str, list[str]], Sequence[tuple[bytes, bytes, str]]]:
    """Returns the lines of a known_hosts file: plain ones by name, hashed ones with salt and hash.

    Only the lines of one host are parsed later: parsing all keys for each of a thousand hosts takes minutes.
    """
    plain: dict[str, list[str]] = {}
    hashed = []
    for line in map(str.strip, Path(path).read_text(errors="replace").splitlines()):
        names = re.split("[ \t]", line, maxsplit=1)[0]
        if names.startswith("|1|"):
            with suppress(ValueError):
                salt, own = map(b64decode, names.split("|")[2:])
                hashed.append((salt, own, line))
        else:
            for name in names.split(","):
                plain.setdefault(name, []).append(line)
    return plain, hashed


_DROPPED = (ConnectionRefusedError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError, EOFError)


class UnknownHostKeyError(Exception):
    """A host presents a key and no key is on file for it."""

    def __init__(self, target: Target, key: paramiko.PKey) -> None:
        super().__init__(str(target))
        self.target, self.key = target, key


def is_transient(error: BaseException) -> bool:
    """Whether a retry may help: refused or dropped connections, as from an sshd that is starting or overloaded."""
    if isinstance(error, paramiko.AuthenticationException | paramiko.BadHostKeyException | UnknownHostKeyError):
        return False
    if any(isinstance(cause, TimeoutError) for cause in _causes(error)):
        return False
    return _is_dropped(error)


def _is_dropped(error: BaseException) -> bool:
    # paramiko's thread ends without an error if the peer disconnects during negotiation.
    return any(isinstance(cause, _DROPPED) for cause in _causes(error)) or str(error) in (
        "Negotiation failed.",
        "No existing session",
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the error, its causes, and the errors of each address that was tried."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        if isinstance(seen, NoValidConnectionsError):
            yield from seen.errors.values()
        seen = seen.__cause__ or seen.__context__


def connection_problem(name: str, target: Target, error: BaseException, timeout: float, attempts: int) -> Problem:
    """Returns the problem of a failed connection to host ``name`` after that many attempts."""
    again = f", {attempts} times" if attempts > 1 else ""
    match error:
        case UnknownHostKeyError():
            got = f"{error.target}: {_fingerprint(error.key)}"
            todo = f"compare it with the host's own (ssh-keygen -l), then take it over: {_by_hand(error.target)}"
            return Problem(name, "its host key is not known here", got, todo)
        case paramiko.BadHostKeyException():
            got = f"{_fingerprint(error.key)} where known_hosts has {_fingerprint(error.expected_key)}"
            host = error.hostname if target.port == 22 else f"[{error.hostname}]:{target.port}"
            remove = f"ssh-keygen -R '{target.host_key_alias or host}'"
            todo = f"if the host was reinstalled, remove the old key ({remove}); if not, somebody may stand in between"
            return Problem(name, "its host key has changed", got, todo)
        case paramiko.PasswordRequiredException():
            todo = "load it into an agent: ssh-add"
            return Problem(name, f"a key for {target} has a passphrase", ", ".join(target.identity_files), todo)
        case paramiko.AuthenticationException() if "timeout" in str(error).lower():
            return _silent(name, target, timeout)
        case paramiko.AuthenticationException():
            return _denied(name, target, error)
        case paramiko.SSHException() if "no authentication methods" in str(error).lower():
            return _denied(name, target, error)
        case paramiko.ssh_exception.IncompatiblePeer():
            todo = "update one of the two: see ssh -v"
            return Problem(name, "its sshd and this machine have no algorithm in common", str(error), todo)
        case ChannelException():
            todo = "check that host's sshd, as seen from the jump host"
            return Problem(name, f"its jump host cannot reach {target}", error.text or str(error), todo)
        case socket.gaierror():
            todo = "correct it in the hostfile, or give its HostName in ~/.ssh/config"
            return Problem(name, "its name cannot be resolved", f"{target.host}: {error.strerror}", todo)
    causes = list(_causes(error))
    if any(isinstance(cause, TimeoutError) for cause in causes):
        return _silent(name, target, timeout)
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        todo = "start sshd there, or give the right port (ssh.port in the settings, or Port in ~/.ssh/config)"
        return Problem(name, f"nothing listens at {target.host} port {target.port}", f"connection refused{again}", todo)
    if _is_dropped(error):
        todo = "lower ssh.max_connections, or raise MaxStartups in its sshd_config"
        return Problem(name, f"its sshd drops connections before the login as {target}", f"no greeting{again}", todo)
    # The innermost cause is the operating system's; the outer ones only wrap it.
    reasons = [cause.strerror for cause in causes if isinstance(cause, OSError) and cause.strerror]
    reason = reasons[-1] if reasons else str(error)
    todo = "check the address, the network between, and that the host is up"
    return Problem(name, f"cannot be reached at {target.host} port {target.port}", reason.lower(), todo)


def _silent(name: str, target: Target, timeout: float) -> Problem:
    todo = "check that the host is up and no firewall stands between, or raise ssh.connect_timeout"
    return Problem(name, f"no ssh answer from {target.host} port {target.port}", f"nothing within {timeout:g} s", todo)


def _denied(name: str, target: Target, error: BaseException) -> Problem:
    allowed = f" ({','.join(error.allowed_types)})" if isinstance(error, BadAuthenticationType) else ""
    keys = ", ".join(target.identity_files) or "none"
    todo = f"make `{_by_hand(target)}` work without a password: ssh-copy-id, ssh-add, or ssh.user and ssh.identity_file"
    return Problem(name, f"refuses the login as {target}", f"permission denied{allowed} with key files {keys}", todo)


def _by_hand(target: Target) -> str:
    port = f" -p {target.port}" if target.port != 22 else ""
    return f"ssh{port} {target.user}@{target.host}"


def _fingerprint(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {key.fingerprint}"
