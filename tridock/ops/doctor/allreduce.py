"""A short all-reduce over all ranks, started as in a launch (pdsh over ssh); finds the nodes that make it fail."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tridock.errors import ClusterError, Problem
from tridock.ops.checks.finding import Finding, fail
from tridock.ops.hosts.client import NodeClient
from tridock.ops.rank_group import Reduced, parse, reduce_command
from tridock.remote import Host, on_all, raise_failures

LIMIT_S: Final = 90
_PAIR_LIMIT_S: Final = 60
_MARGIN_S: Final = 10.0
_AT_ONCE: Final = 4
_ALONE: Final = "the all-reduce fails among its own ranks"
_ALONE_TODO: Final = "fix that there, or restart its container: tridock down, then tridock up"
_PAIR: Final = "the all-reduce of these two fails"
# Offsets from the head's free port, so that concurrent groups use different rendezvous ports.
_PORTS: Final = 97


Group = tuple[str, ...]
Attempts = Callable[[Sequence[Group]], Mapping[Group, Reduced]]
"""Runs the all-reduce on groups of nodes, several at a time; the first node of a group leads."""


def reduce_all(client: NodeClient, port: int) -> tuple[Mapping[str, Any] | None, list[Finding]]:
    """Runs the all-reduce on all nodes. If it fails, tries smaller groups until the bad nodes are known."""
    nodes = client.hosts.nodes
    whole = _attempt(client, nodes, port, LIMIT_S)
    if whole.result is not None:
        return whole.result, []

    def again(groups: Sequence[Group]) -> Mapping[Group, Reduced]:
        named = {",".join(group): group for group in groups}
        hosts = {name: client.hosts[group[0]] for name, group in named.items()}

        def one(name: str, _: Host) -> Reduced:
            few = named[name]
            return _attempt(client, few, port + 1 + nodes.index(few[-1]) % _PORTS, _PAIR_LIMIT_S)

        tried = raise_failures(on_all(hosts, one, cap=_AT_ONCE))
        return {named[name]: done for name, done in tried.items()}

    return None, reduce_findings(nodes, whole.error, blame(nodes, again))


Blame = tuple[Group, str, str]


def reduce_findings(nodes: Sequence[str], error: str, blamed: Sequence[Blame]) -> list[Finding]:
    """Returns the findings for a failed all-reduce. Nodes with the same error share a finding."""
    why = "the first step of a run would hang or fail here"
    todo = "look at their network with NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL in env"
    if not blamed:
        what = f"the all-reduce of all {len(nodes)} fails, and each node alone and each pair with the head passes"
        return [fail("all-reduce", Problem(", ".join(nodes), what, error, todo), why)]
    alike: dict[tuple[str, str], list[str]] = {}
    for few, what, own in blamed:
        alike.setdefault((what, own or error), []).append(" and ".join(few))
    return [
        fail("all-reduce", Problem(", ".join(who), what, own, _ALONE_TODO if what == _ALONE else todo), why)
        for (what, own), who in alike.items()
    ]


def blame(nodes: Sequence[str], attempts: Attempts) -> list[Blame]:
    """Finds the nodes that make an all-reduce fail: the nodes, the symptom, the error of the attempt.

    It tries each node alone, then the head with each node that passed. If the head fails with all of them, and they
    pass among themselves, the head is to blame.
    """
    alone = attempts([(node,) for node in nodes])
    bad: list[Blame] = [((node,), _ALONE, done.error) for (node,), done in alone.items() if done.result is None]
    good = [node for node in nodes if alone[node,].result is not None]
    if len(good) < 2:
        return bad
    first, *others = good
    pairs = attempts([(first, node) for node in others])
    failed = {node: done for (_, node), done in pairs.items() if done.result is None}
    if len(failed) == len(others) > 1:
        return bad + _not_the_first(first, others, failed, attempts)
    return bad + [((first, node), _PAIR, done.error) for node, done in failed.items()]


def _not_the_first(first: str, others: list[str], failed: Mapping[str, Reduced], attempts: Attempts) -> list[Blame]:
    second, *rest = others
    pairs = attempts([(second, node) for node in rest])
    if any(done.result is not None for done in pairs.values()):
        error = next(iter(failed.values())).error
        with_second = [((second, node), _PAIR, d.error)
                       for (_, node), d in pairs.items() if d.result is None]  # fmt: skip
        return [((first,), "the all-reduce fails with every other node, which pass without it", error), *with_second]
    return [((first, node), _PAIR, done.error) for node, done in failed.items()]


def _attempt(client: NodeClient, nodes: tuple[str, ...], port: int, limit: int) -> Reduced:
    address = client.cluster.node(nodes[0]).address
    slots = {node: client.cluster.everywhere[node] for node in nodes}
    argv = reduce_command(slots, address, port, limit)
    try:
        return parse(client.run_inside(nodes[0], *argv, timeout=limit + _MARGIN_S), limit)
    except ClusterError as error:
        return Reduced(None, error.problems[0].what)
