"""Peer-to-peer transfer of image pieces between hosts: each host runs an sshd while one command runs.

It runs as the ssh user, listens on a free port, accepts one key that is made for this command, and runs only the script
that prints a piece. It ends with the operator's connection, and its keys are then removed.
"""

import random
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from tridock.cluster.keys import ClusterKeys
from tridock.cluster.settings import Cluster
from tridock.command import Command
from tridock.contracts import cluster_ssh
from tridock.contracts.run_folder import RENDEZVOUS_PORTS
from tridock.errors import ClusterError
from tridock.ops.hosts.attached import AWAIT_KEEPALIVES, AttachedCommand
from tridock.ops.hosts.session import Session
from tridock.remote import Host, on_all

KEYS = "ssh"
"""The folder with the keys, inside the folder with the pieces."""
_PORTS = 8
_START_S = 30.0

# A piece's name is hexadecimal digits and a dot, so no path can leave the folder or reach the keys.
_GIVE = r"""
case ${SSH_ORIGINAL_COMMAND:-.} in .* | *[!0-9a-f.]*) echo "gives pieces only" >&2; exit 1;; esac
cd -- "${0%/*}/.." && exec cat -- "$SSH_ORIGINAL_COMMAND"
"""

# sshd writes its pid file once it listens.
_SERVE = r"""
set -eu; umask 077; cd -- "$1"; shift
PATH=$PATH:/usr/sbin:/usr/local/sbin:/sbin
pid=
trap 'rm -rf -- ssh; [ -z "$pid" ] || { kill "$pid" && wait "$pid"; } 2>/dev/null || true' EXIT
trap 'exit 1' HUP INT TERM PIPE
# Its keys stay where it cannot give: with them it fetches.
sshd=$(command -v sshd) || { trap - EXIT; echo "it has no sshd program" >&2; exit 1; }
if [ "$(id -u)" = 0 ]; then echo 'UsePAM yes' >>ssh/sshd_config; fi
for port; do
  "$sshd" -D -e -f "$PWD/ssh/sshd_config" -p "$port" </dev/null >/dev/null 2>ssh/log &
  pid=$!
  until [ -s ssh/pid ]; do
    case $(cat "/proc/$pid/stat" 2>/dev/null || true) in '' | *') Z '*) break;; esac
    sleep 0.05
  done
  # Of several addresses it takes those that are free.
  if [ ! -s ssh/pid ] || grep -q 'in use' ssh/log; then kill "$pid" 2>/dev/null || true; rm -f ssh/pid; continue; fi
  printf '%s %s\n' "$port" "$(id -un)"
  AWAIT_KEEPALIVES
  exit 0
done
trap - EXIT
tail -n 1 ssh/log >&2
exit 1
""".replace("AWAIT_KEEPALIVES", AWAIT_KEEPALIVES)


@dataclass(frozen=True, slots=True)
class PieceServer:
    """How other hosts reach a host's sshd; ``alias`` is the host's name in their ``known_hosts``."""

    alias: str
    address: str
    port: int
    user: str

    def command(self, keys: str) -> tuple[str, ...]:
        """Returns the ssh command from a host with the key folder ``keys``; append the piece's name."""
        files = f"-oUserKnownHostsFile={keys}/known_hosts", f"-oHostKeyAlias={self.alias}"
        return (
            *(*cluster_ssh.PEER, *files, "-i", f"{keys}/id"),
            *("-p", str(self.port), "-l", self.user, "--", self.address),
        )


class Peers:
    """Runs an sshd on each host while the block runs; ``piece_servers`` has those that listen."""

    def __init__(self, session: Session, folders: Mapping[str, str], ended: Callable[[str], object]) -> None:
        """``folders``: each node's absolute path of its pieces. ``ended`` is called with a node if its sshd exits."""
        self.piece_servers: dict[str, PieceServer] = {}
        self.problems: dict[str, str] = {}
        """By node, the reason why it cannot serve pieces."""
        self._session, self._folders, self._ended = session, folders, ended
        self._keys = ClusterKeys.generate(folders)
        self._servers: list[AttachedCommand] = []

    def __enter__(self) -> Self:
        hosts = {node: self._session.hosts[node] for node in self._folders}
        try:
            outcomes = on_all(hosts, self._open, cap=self._session.cluster.settings.ssh.max_connections)
        except BaseException:
            self.__exit__()
            raise
        for node, outcome in outcomes.items():
            if outcome.value is not None:
                self.piece_servers[node] = outcome.value
            else:
                self.problems[node] = _reason(outcome.error)
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.release()
        for server in self._servers:
            server.end()

    def _open(self, node: str, host: Host) -> PieceServer:
        cluster, folder = self._session.cluster, self._folders[node]
        host.put_tree(key_files(cluster, self._keys, folder, node), f"{folder}/{KEYS}", mode=0o600)
        ports = (cluster.settings.ssh_port, *random.sample(RENDEZVOUS_PORTS, _PORTS))
        serve = Command.of("sh", "-c", _SERVE, "serve", folder, *map(str, ports))
        server = AttachedCommand(host, serve, "its sshd cannot give pieces", lambda: self._ended(node))
        self._servers.append(server)
        port, _, user = server.line(_START_S).partition(" ")
        return PieceServer(alias(self._folders, node), cluster.address_of(node), int(port), user)


def alias(nodes: Mapping[str, object], node: str) -> str:
    """Returns a node's name for ``known_hosts``: its own may have capitals, which ssh lowers."""
    return f"host-{list(nodes).index(node)}"


def key_files(cluster: Cluster, keys: ClusterKeys, folder: str, node: str) -> dict[str, bytes]:
    """Returns the files of :data:`KEYS` for a node's host, by name; ``folder`` is where its pieces are."""
    there = f"{folder}/{KEYS}"
    listen = "".join(f"ListenAddress {address}\n" for address in cluster.listen_of(node))
    config = f"""{listen}HostKey "{there}/host_key"
AuthorizedKeysFile "{there.replace("%", "%%")}/authorized_keys"
PidFile "{there}/pid"
ForceCommand sh {shlex.quote(f"{there}/give")}
AuthenticationMethods publickey
PermitRootLogin prohibit-password
StrictModes no
DisableForwarding yes
PermitTTY no
PermitUserRC no
MaxStartups 200
ClientAliveInterval 15
LogLevel INFO
"""
    known = "".join(f"{alias(keys.hosts, name)} {pair.public}\n" for name, pair in keys.hosts.items())
    return {
        "host_key": keys.hosts[node].private,
        "id": keys.client.private,
        "authorized_keys": f"restrict {keys.client.public}\n".encode(),
        "known_hosts": known.encode(),
        "sshd_config": config.encode(),
        "give": _GIVE.encode(),
    }


def _reason(error: Exception | None) -> str:
    if isinstance(error, ClusterError):
        problem = error.problems[0]
        return problem.got or problem.what
    raise error if error is not None else AssertionError
