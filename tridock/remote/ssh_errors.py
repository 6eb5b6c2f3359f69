"""Why ssh could not log in, in its own words, and what to do. Pure."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from tridock.errors import Problem


@dataclass(frozen=True, slots=True)
class Target:
    """What ssh makes of a host's name and the configuration (``ssh -G``)."""

    host: str
    port: str
    user: str
    control_path: str = ""
    """Of the connection that commands share."""

    @classmethod
    def parse(cls, text: str, address: str) -> Self:
        """Parses the output of ``ssh -G``."""
        one = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
        return cls(one.get("hostname", address), one.get("port", "22"), one.get("user", ""), one.get("controlpath", ""))

    def __str__(self) -> str:
        return f"{self.user}@{self.host} port {self.port}"

    @property
    def by_hand(self) -> str:
        """The command that a user would type."""
        login = f"{self.user}@{self.host}" if self.user else self.host
        return f"ssh {f'-p {self.port} ' if self.port != '22' else ''}{shlex.quote(login)}"


_REFUSED: Final = re.compile(
    r"(?:(?P<user>\S+)@(?P<host>\S+): )?(?P<got>Permission denied \([^)]*\)|Too many authentication failures)"
)
_DROPPED: Final = re.compile(
    r"kex_exchange_identification: (?:read: )?(?:Connection (?:closed|reset)|write)[^\n]*"
    r"|Connection (?:closed|reset) by (?!UNKNOWN)[^\n]*|client_loop: send disconnect|Broken pipe"
)
_TRANSIENT: Final = re.compile(rf"Connection refused|{_DROPPED.pattern}")
_FAULTS: Final[Mapping[re.Pattern[str], tuple[str, str]]] = {
    re.compile(
        r"fingerprint for the (?P<got>\S+ key sent by the remote host is\n\S+?)\.?\n"
        r"[\s\S]*Host key for (?P<known>\S+) has changed"
    ): (
        "its host key has changed",
        "if the host was reinstalled, remove the old key (ssh-keygen -R {known}); if not, somebody may be in between",
    ),
    re.compile(r"No \S+ host key is known for \[?(?P<host>[^\s\]]+)\]?(?::(?P<port>\d+))?"): (
        "{its} host key is not known here",
        "compare it with the host's own (ssh-keygen -l), then take it over: {by_hand}",
    ),
    _REFUSED: (
        "{it}refuses the login as {login}",
        "make `{by_hand}` work: ssh-copy-id, ssh-add, or ssh.user and ssh.identity_file",
    ),
    re.compile(r"Could not resolve hostname (?P<got>(?P<host>\S+): [^\n]+)"): (
        "{its} name cannot be resolved",
        "correct it in the hostfile, or its HostName or ProxyJump in ~/.ssh/config",
    ),
    # The first of an ssh to the jump host of its own, the second of one that shares a connection to it.
    re.compile(r"open failed: [^\n]+(?=\nstdio forwarding failed)|Stdio forwarding request failed: [^\n]+"): (
        "its jump host cannot reach {target}",
        "check that host's sshd, as seen from the jump host",
    ),
    re.compile(
        r"connect to host (?P<host>\S+) port (?P<port>\d+): (?P<got>[^\n]+)"
        r"|Connection timed out during banner exchange|Connection to \S+ port \d+ timed out"
    ): (
        "{it}does not answer ssh at {host} port {port}",
        "see that it is up, that its sshd listens at that port (ssh.port), and that no firewall stands between",
    ),
    _DROPPED: (
        "drops connections before the login as {target}",
        "see that an sshd listens there; lower ssh.max_connections, or raise MaxStartups in its sshd_config",
    ),
    re.compile(
        r"Unable to negotiate with[^\n]+|Host key verification failed|open failed|Session open refused by peer"
    ): (
        "{it}opens no session as {login}",
        "see `{by_hand} -v`; MaxSessions in its sshd_config limits their number",
    ),
}
"""What ssh says, what it means and what to do; the first that is found counts.

The groups ``host``, ``port`` and ``user`` are of the host that failed, which may be a jump host. ``got`` is quoted, or
all that is found.
"""


def _fault(text: str) -> tuple[re.Pattern[str], re.Match[str]] | None:
    return next(((pattern, found) for pattern in _FAULTS if (found := pattern.search(text))), None)


def is_refused_login(text: str) -> bool:
    """Whether the host wants something else than the keys that are at hand."""
    return (fault := _fault(text)) is not None and fault[0] == _REFUSED


def is_transient(text: str) -> bool:
    """Whether another attempt may help: a connection refused or dropped, as by an sshd that starts or is overloaded."""
    return (fault := _fault(text)) is not None and _TRANSIENT.search(fault[1][0]) is not None


def connection_problem(name: str, target: Target, text: str, attempts: int) -> Problem | None:
    """Returns the problem of a failed login to node ``name``, from ssh's own words; None if it says nothing of one.

    With jump hosts, ssh names the host that failed: a jump host's fault is said to be the jump host's.
    """
    if (fault := _fault(text)) is None:
        return None
    (what, todo), groups = _FAULTS[fault[0]], fault[1].groupdict()
    host = groups.get("host") or target.host
    port = groups.get("port") or (target.port if host == target.host else "22")
    is_target = (host, port) == (target.host, target.port)
    at = target if is_target else Target(host, port, groups.get("user") or "")
    words = {
        "its": "its" if is_target else "its jump host's",
        "it": "" if is_target else "its jump host ",
        "login": str(target) if is_target else f"{at.user}@{host}",
        "known": shlex.quote(groups.get("known") or host),
        "by_hand": at.by_hand,
        "target": str(target),
    }
    got = " ".join((groups.get("got") or fault[1][0]).split()) + (f", {attempts} times" if attempts > 1 else "")
    return Problem(name, what.format(host=host, port=port, **words), got, todo.format(**words))
