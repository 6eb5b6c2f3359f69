"""Findings from the head's ssh to each node: ssh's error and its fix. Pure."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from tridock.cluster.settings import Cluster
from tridock.contracts.node_answers import SshAnswer
from tridock.errors import Problem
from tridock.ops.checks.finding import KEYS, Finding, Remedy, fail

_WHY: Final = "a launch starts the ranks over this connection"
_RECREATE: Final = "recreate its container: tridock down, then tridock up"
_CHANGED: Final = "REMOTE HOST IDENTIFICATION HAS CHANGED"
_GREETING: Final = "tridock-node"
_MARKER: Final = re.compile(rf"^{_GREETING}(?: (\S+) (\S+))?\s*$", re.MULTILINE)

HostKeyOf = Callable[[str], str | None]
"""Asks a node for the host key of its sshd; called only if the answer decides what is wrong."""


def ssh_findings(cluster: Cluster, answers: Mapping[str, SshAnswer], host_key_of: HostKeyOf) -> Iterator[Finding]:
    """Findings from the answers of all nodes to the head's ssh."""
    for node, answer in answers.items():
        if found := _problem(cluster, node, answer, host_key_of):
            what, got, todo, remedy = found
            yield fail("ssh", Problem(node, what, got, todo), _WHY, remedy)


Found = tuple[str, str, str, Remedy]


def _problem(cluster: Cluster, node: str, answer: SshAnswer, host_key_of: HostKeyOf) -> Found | None:
    head, port = cluster.head, cluster.settings.ssh_port
    where = f"{cluster.node(node).address} port {port}"
    stderr, greeted = _last_line(answer.err), _MARKER.search(answer.out)
    if greeted is not None and greeted[1] is not None:
        return _by_identity(cluster, node, answer, where, greeted[1], greeted[2])
    if greeted is not None or answer.exit in (0, 126, 127):
        return _foreign(cluster, node, where, "it let us in, and is no node")
    if _CHANGED in answer.err:
        return _other_key(cluster, node, answer.err, where, host_key_of)
    if answer.exit is None:
        return f"did not answer the head's ssh at {where} in time", stderr, "see what delays its sshd", ()
    return _by_stderr(cluster, node, stderr, where) or (
        f"is not reached from {head} over ssh at {where}",
        stderr or f"exit code {answer.exit}",
        f"try it there: docker exec in {head}'s container, ssh {node}",
        (),
    )


def _by_identity(
    cluster: Cluster, node: str, answer: SshAnswer, where: str, other_cluster: str, name: str
) -> Found | None:
    if (other_cluster, name) != (cluster.name, node):
        got = f"node {name} of cluster {other_cluster}"
        what = f"another node answers the head's ssh at {where}"
        return what, got, f"give its own address (nodes.{cluster.node(node).host}.address in the settings)", ()
    if answer.exit != 0:
        got = _last_line(answer.err) or f"exit code {answer.exit}"
        return "its commands fail over ssh", got, _RECREATE, ()
    return None


def _foreign(cluster: Cluster, node: str, where: str, got: str) -> Found:
    todo = (
        f"end the sshd that holds the port there, choose another ssh_port in the settings, "
        f"or give the node's own address (nodes.{cluster.node(node).host}.address)"
    )
    return f"an sshd that is not the node's answers at {where}", got, todo, ()


def _other_key(cluster: Cluster, node: str, stderr: str, where: str, host_key_of: HostKeyOf) -> Found:
    sent = re.search(r"SHA256:\S+?(?=\.?\s|\.?$)", stderr)
    fingerprint = sent[0] if sent else "another one"
    if host_key_of(node) == fingerprint:
        return _keys(cluster, "shows another host key than the head has on file", fingerprint)
    return _foreign(cluster, node, where, f"host key {fingerprint}")


def _keys(cluster: Cluster, what: str, got: str) -> Found:
    return what, got, f"give all nodes the cluster's keys again: tridock keys {cluster.hosts_option}", KEYS


def _by_stderr(cluster: Cluster, node: str, stderr: str, where: str) -> Found | None:
    low, head = stderr.lower(), cluster.head
    address = f"nodes.{cluster.node(node).host}.address in the settings"
    if "host key verification failed" in low or "permission denied" in low:
        return _keys(cluster, f"does not trust the head's ssh, or is not trusted, at {where}", stderr)
    if "no matching host key type" in low or "no matching key exchange" in low:
        return _foreign(cluster, node, where, stderr)
    if "could not resolve" in low or "name or service not known" in low:
        return f"its name leads nowhere on {head}", stderr, f"give its address ({address})", ()
    if "refused" in low:
        todo = f"see `listen` in the settings and what listens there (ss -ltn), or give its address ({address})"
        return f"nothing listens at {where} for {head}", stderr, todo, ()
    if "during banner exchange" in low:
        return f"what listens at {where} says nothing", stderr, _RECREATE, ()
    if "timed out" in low or "no route" in low or "unreachable" in low:
        todo = f"let {head} through to it (firewall), or give an address on a network that they share ({address})"
        return f"is not reached from {head} at {where}", stderr, todo, ()
    if "kex_exchange" in low or "banner" in low or "connection closed" in low or "connection reset" in low:
        return _foreign(cluster, node, where, stderr)
    return None


def _last_line(stderr: str) -> str:
    """The last line of ssh's stderr that is not empty or decoration."""
    lines = [line.strip().rstrip(".") for line in stderr.splitlines()]
    return next((line for line in reversed(lines) if line and not line.startswith("@")), "")
