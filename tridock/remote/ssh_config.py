"""The targets of ssh connections, as the user's ssh configuration has them.

Uses ``ssh -G`` rather than reading the files: it handles Include, Match, canonical names and defaults.
"""

import getpass
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tridock.errors import ClusterError, Problem, RequestError

_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Target:
    """One hop of a connection. ``jumps`` are the jump hosts in order; ``proxy_command`` is used instead if set."""

    host: str
    port: int
    user: str
    identity_files: tuple[str, ...]
    use_agent: bool
    host_key_alias: str | None
    known_hosts_files: tuple[str, ...]
    jumps: tuple[str, ...]
    proxy_command: str | None

    def __str__(self) -> str:
        return f"{self.user}@{self.host} port {self.port}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The cluster's ssh settings; None leaves a field to the ssh configuration."""

    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    config_file: str | None = None


def resolve(name: str, address: str, wanted: Wanted) -> Target:
    """Returns the target that ssh would use for ``address``; ``name`` is the node's name in messages."""
    argv = ["ssh", "-G"]
    if wanted.config_file is not None:
        argv += ["-F", _existing(wanted.config_file, "ssh.config_file")]
    if wanted.user is not None:
        argv += ["-l", wanted.user]
    if wanted.port is not None:
        argv += ["-p", str(wanted.port)]
    if wanted.identity_file is not None:
        argv += ["-i", _existing(wanted.identity_file, "ssh.identity_file")]
    try:
        done = subprocess.run(
            [*argv, "--", address], capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except FileNotFoundError:
        todo = "install OpenSSH's client (openssh-client)"
        raise ClusterError(Problem("this machine", "has no ssh", "no ssh on PATH", todo)) from None
    except subprocess.TimeoutExpired:
        todo = "look at the Match lines of ~/.ssh/config"
        raise ClusterError(Problem(name, "ssh -G did not end in time", f"{_TIMEOUT_S:g} s", todo)) from None
    if done.returncode:
        stderr = done.stderr.strip().splitlines()
        raise RequestError(
            Problem(name, "ssh cannot read its configuration", stderr[0] if stderr else "", "fix what it names")
        )
    return parse(done.stdout, address)


def parse(text: str, address: str) -> Target:
    """Parses the output of ``ssh -G`` for ``address``."""
    fields: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        fields.setdefault(key, []).append(value.strip())

    def one(key: str, default: str = "none") -> str | None:
        value = fields.get(key, [default])[0]
        return None if value.lower() == "none" else value

    host = one("hostname", address) or address
    user = one("user", getpass.getuser()) or getpass.getuser()
    port = one("port", "22") or "22"
    tokens = {"%": "%", "d": str(Path.home()), "h": host, "n": address, "p": port, "r": user, "u": getpass.getuser()}
    known = [word for key in ("userknownhostsfile", "globalknownhostsfile") for word in (one(key) or "").split()]
    jumps, proxy = one("proxyjump"), one("proxycommand")
    return Target(
        host=host,
        port=int(port),
        user=user,
        identity_files=_files(fields.get("identityfile", []), tokens),
        use_agent=fields.get("identityagent", [""])[0].lower() != "none",
        host_key_alias=one("hostkeyalias"),
        known_hosts_files=_files(known, tokens),
        jumps=tuple(jumps.split(",")) if jumps else (),
        proxy_command=_expanded(proxy, tokens) if proxy and not jumps else None,
    )


def _files(listed: Sequence[str], tokens: Mapping[str, str]) -> tuple[str, ...]:
    paths = (Path(_expanded(item.strip('"'), tokens)).expanduser() for item in listed)
    return tuple(dict.fromkeys(str(path) for path in paths if path.is_file()))


def _expanded(text: str, tokens: Mapping[str, str]) -> str:
    return re.sub("%(.)", lambda match: tokens.get(match[1], match[0]), text)


def _existing(path: str, field: str) -> str:
    full = Path(path).expanduser()
    if not full.is_file():
        raise RequestError(Problem(field, "names a file that does not exist", str(full), "correct the path"))
    return str(full)
