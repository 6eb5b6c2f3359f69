"""The interfaces that Gloo and NCCL would use, and whether the others reach them there. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tridock.cluster import Cluster
from tridock.errors import Problem
from tridock.ops.doctor.finding import Answer, Answers, Finding, fail, warn

_LOCAL: Final = ("lo", "docker", "virbr")
_TITLES: Final = {"gloo": "Gloo", "nccl": "NCCL"}


def network_findings(cluster: Cluster, meeting: Answers, on_gpus: bool) -> Iterator[Finding]:
    """``meeting`` has ``hello`` and ``look`` of each node that answered; a single node needs no network."""
    there = {node: said for node, said in meeting.items() if "hello" in said}
    if len(there) < 2:
        return
    libraries = ("gloo", "nccl") if on_gpus else ("gloo",)
    lost: set[str] = set()
    for node, said in there.items():
        for library in libraries:
            if found := _choice(cluster, node, library, said):
                lost.add(node)
                yield found
        yield from _route(cluster, node, said.get("look", {}))
    yield from _unreached(there, lost, libraries)
    yield from _mtu({node: said for node, said in there.items() if node not in lost}, libraries[-1])


def _choice(cluster: Cluster, node: str, library: str, said: Answer) -> Finding | None:
    """An interface that nobody else reaches, whatever its address."""
    network, title = said["hello"]["network"], _TITLES[library]
    variable, chosen, wanted = f"{title.upper()}_SOCKET_IFNAME", network[library], network["wanted"][library]
    why = f"ranks of other nodes are told to find it there; {title} waits until its time is over"
    names = ", ".join(it["name"] for it in network["interfaces"] if not it["name"].startswith(_LOCAL))
    if not network["interfaces"]:
        todo = "see container.network in the settings, then fab up"
        return fail("network", Problem(node, "has no network interface that is up", "", todo), why)
    if chosen is None:
        todo = f"correct it (env in the settings), or leave it out, then fab up; it has {names or 'none'}"
        problem = Problem(node, f"{variable} names no interface that it has", str(wanted), todo)
        return fail("network", problem, why)
    if chosen["name"].startswith(_LOCAL):
        use = _way_out(said.get("look", {})) or names.split(", ")[0] or "an interface that the others reach"
        todo = f"set {variable}: {use} for it (nodes.{cluster.host_of(node)}.env in the settings), then fab up"
        source = f"{variable} says so" if wanted else "its host name leads there" if library == "gloo" else "no other"
        got = f"{chosen['name']}, {chosen['address']} ({source})"
        return fail("network", Problem(node, f"{title} would use an interface of its own", got, todo), why)
    return None


def _way_out(look: Answer) -> str | None:
    """The interface from which the others are reached."""
    routes: Mapping[str, Any] = look.get("routes", {})
    through = [route["interface"] for route in routes.values() if route.get("interface")]
    return next((name for name in through if not name.startswith(_LOCAL)), None)


def _route(cluster: Cluster, node: str, look: Answer) -> Iterator[Finding]:
    """Every rank calls the head for the rendezvous; it calls itself by the same address."""
    route = look.get("routes", {}).get(cluster.head)
    if route is None:
        return
    address, todo = (
        cluster.address_of(cluster.head),
        f"give its address (nodes.{cluster.host_of(cluster.head)}.address)",
    )
    why = "the ranks meet at the head's address"
    if "error" in route:
        problem = Problem(node, f"does not find the head at {address}", route["error"].lower(), todo)
        yield fail("network", problem, why)
    elif route["interface"] == "lo":
        got = f"{route['target']} through {route['interface']}"
        yield fail("network", Problem(node, f"takes itself for the head at {address}", got, todo), why)


def _unreached(there: Answers, lost: set[str], libraries: tuple[str, ...]) -> Iterator[Finding]:
    """Real connections that failed; those to an interface that was named above are its consequence."""
    failed: dict[tuple[str, str], dict[str, str]] = {}
    for caller, said in there.items():
        for target, error in said.get("look", {}).get("unreached", {}).items():
            node, address = target.split(" ")
            network = there[node]["hello"]["network"]
            if node not in lost and any(network[it]["address"] == address for it in libraries):
                failed.setdefault((node, address), {})[caller] = error
    for (node, address), callers in failed.items():
        error = next(iter(callers.values()))
        who = "any other node" if len(callers) == len(there) - 1 else ", ".join(callers)
        todo = "let the nodes through to each other on all ports (firewall), or name a network that they share in env"
        problem = Problem(node, f"is not reached by {who} at {address}", error, f"{todo} (GLOO_, NCCL_SOCKET_IFNAME)")
        yield fail("network", problem, "ranks connect to each other on ports of the system's choice")


def _mtu(there: Answers, library: str) -> Iterator[Finding]:
    chosen = {node: network[library] for node, said in there.items() if (network := said["hello"]["network"])[library]}
    head = next(iter(chosen), None)
    for node, own in chosen.items():
        assert head is not None
        if own["mtu"] != chosen[head]["mtu"]:
            got = f"{own['mtu']} on {own['name']}, {chosen[head]['mtu']} on {chosen[head]['name']} of {head}"
            todo = "give both interfaces the same (ip link set mtu), the switch between them included"
            problem = Problem(node, "its network packets have another size (MTU) than the head's", got, todo)
            yield warn("network", problem, "large packets are cut or lost; collectives crawl or hang")
