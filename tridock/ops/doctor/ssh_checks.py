"""What ssh said on the way from the head to each node, as findings: ssh's error and its fix. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from tridock.cluster import Cluster
from tridock.errors import Problem
from tridock.ops.doctor.finding import KEYS, Answer, Answers, Finding, Remedy, fail

_WHY: Final = "a launch starts the ranks over this connection"
_ANEW: Final = "start its container anew: fab down, then fab up"
_CHANGED: Final = "REMOTE HOST IDENTIFICATION HAS CHANGED"
_GREETING: Final = "tridock-node"
_MARKER: Final = re.compile(rf"^{_GREETING}(?: (\S+) (\S+))?\s*$", re.MULTILINE)

ShownKey = Callable[[str], str | None]
"""Asks a node for the host key that its own sshd shows; only where that decides what is wrong."""


def path_findings(cluster: Cluster, paths: Answers, shown_key: ShownKey) -> Iterator[Finding]:
    """``paths`` has for each node what the head's ssh said: ``exit`` (None: no end), ``out``, ``err``."""
    for node, said in paths.items():
        if found := _problem(cluster, node, said, shown_key):
            what, got, todo, remedy = found
            yield fail("ssh", Problem(node, what, got, todo), _WHY, remedy)


Found = tuple[str, str, str, Remedy]


def _problem(cluster: Cluster, node: str, said: Answer, shown_key: ShownKey) -> Found | None:
    head, port = cluster.head, cluster.settings.ssh_port
    where = f"{cluster.address_of(node)} port {port}"
    stderr, greeted = _last_line(said["err"]), _MARKER.search(said["out"])
    if greeted is not None and greeted[1] is not None:
        return _whose(cluster, node, said, where, greeted[1], greeted[2])
    if greeted is not None or said["exit"] in (0, 126, 127):
        return _foreign(cluster, node, where, "it let us in, and is no node")
    if _CHANGED in said["err"]:
        return _other_key(cluster, node, said["err"], where, shown_key)
    if said["exit"] is None:
        return f"did not answer the head's ssh at {where} in time", stderr, "see what holds its sshd up", ()
    return _by_stderr(cluster, node, stderr, where) or (
        f"is not reached from {head} over ssh at {where}",
        stderr or f"exit code {said['exit']}",
        f"try it there: docker exec in {head}'s container, ssh {node}",
        (),
    )


def _whose(cluster: Cluster, node: str, said: Answer, where: str, of_cluster: str, name: str) -> Found | None:
    if (of_cluster, name) != (cluster.name, node):
        got = f"node {name} of cluster {of_cluster}"
        what = f"another node answers the head's ssh at {where}"
        return what, got, f"give its own address (nodes.{cluster.host_of(node)}.address in the settings)", ()
    if said["exit"] != 0:
        got = _last_line(said["err"]) or f"exit code {said['exit']}"
        return "its commands fail over ssh", got, _ANEW, ()
    return None


def _foreign(cluster: Cluster, node: str, where: str, got: str) -> Found:
    todo = (
        f"end the sshd that holds the port there, choose another ssh_port in the settings, "
        f"or give the node's own address (nodes.{cluster.host_of(node)}.address)"
    )
    return f"an sshd that is not the node's answers at {where}", got, todo, ()


def _other_key(cluster: Cluster, node: str, errors: str, where: str, shown_key: ShownKey) -> Found:
    sent = re.search(r"SHA256:\S+?(?=\.?\s|\.?$)", errors)
    fingerprint = sent[0] if sent else "another one"
    if shown_key(node) == fingerprint:
        return _keys(cluster, "shows another host key than the head has on file", fingerprint)
    return _foreign(cluster, node, where, f"host key {fingerprint}")


def _keys(cluster: Cluster, what: str, got: str) -> Found:
    return what, got, f"give all nodes the cluster's keys again: fab keys --hosts {cluster.hostfile_path}", KEYS


def _by_stderr(cluster: Cluster, node: str, stderr: str, where: str) -> Found | None:
    low, head = stderr.lower(), cluster.head
    address = f"nodes.{cluster.host_of(node)}.address in the settings"
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
        return f"what listens at {where} says nothing", stderr, _ANEW, ()
    if "timed out" in low or "no route" in low or "unreachable" in low:
        todo = f"let {head} through to it (firewall), or give an address on a network that they share ({address})"
        return f"is not reached from {head} at {where}", stderr, todo, ()
    if "kex_exchange" in low or "banner" in low or "connection closed" in low or "connection reset" in low:
        return _foreign(cluster, node, where, stderr)
    return None


def _last_line(errors: str) -> str:
    """ssh's last line that says something."""
    lines = [line.strip().rstrip(".") for line in errors.splitlines()]
    return next((line for line in reversed(lines) if line and not line.startswith("@")), "")
