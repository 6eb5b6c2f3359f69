"""The interfaces that Gloo and NCCL would use, and whether the other nodes reach them. Pure."""

from collections.abc import Iterator, Mapping
from typing import Final

from tridock.cluster.settings import Cluster
from tridock.contracts.mesh_answers import PeerProbe
from tridock.contracts.network import Network
from tridock.contracts.node_answers import QuickReport
from tridock.errors import Problem
from tridock.ops.checks.finding import Finding, Mesh, fail, warn

_LOCAL: Final = ("lo", "docker", "virbr")
_TITLES: Final = {"gloo": "Gloo", "nccl": "NCCL"}


def network_findings(cluster: Cluster, mesh: Mesh, on_gpus: bool) -> Iterator[Finding]:
    """Findings from the nodes whose responders answered; a single node needs no network."""
    networks = {node: answer.hello.network for node, answer in mesh.items() if answer.hello is not None}
    if len(networks) < 2:
        return
    probes = {node: mesh[node].peers or PeerProbe() for node in networks}
    libraries = ("gloo", "nccl") if on_gpus else ("gloo",)
    unusable: set[str] = set()
    for node, network in networks.items():
        for library in libraries:
            if found := _choice(cluster, node, library, network, probes[node]):
                unusable.add(node)
                yield found
        yield from _route(cluster, node, probes[node])
    usable = {node: network for node, network in networks.items() if node not in unusable}
    yield from _unreached(usable, probes, libraries)
    yield from _mtu(usable, libraries[-1])


def _choice(cluster: Cluster, node: str, library: str, network: Network, probe: PeerProbe) -> Finding | None:
    """An interface that no other node reaches, whatever its address."""
    title, chosen, wanted = _TITLES[library], network.chosen[library], network.wanted[library]
    variable = f"{title.upper()}_SOCKET_IFNAME"
    why = f"ranks of other nodes try to reach it there; {title} waits until it times out"
    names = ", ".join(it.name for it in network.interfaces if not it.name.startswith(_LOCAL))
    if not network.interfaces:
        todo = "see container.network in the settings, then tridock up"
        return fail("network", Problem(node, "has no network interface that is up", "", todo), why)
    if chosen is None:
        todo = f"correct it (env in the settings), or leave it out, then tridock up; it has {names or 'none'}"
        problem = Problem(node, f"{variable} names no interface that it has", str(wanted), todo)
        return fail("network", problem, why)
    if chosen.name.startswith(_LOCAL):
        use = _outgoing_interface(probe) or names.split(", ")[0] or "an interface that the others reach"
        todo = f"set {variable}: {use} for it (nodes.{cluster.node(node).host}.env in the settings), then tridock up"
        source = f"{variable} says so" if wanted else "its host name leads there" if library == "gloo" else "no other"
        got = f"{chosen.name}, {chosen.address} ({source})"
        return fail("network", Problem(node, f"{title} would use an interface of its own", got, todo), why)
    return None


def interface_findings(cluster: Cluster, node: str, report: QuickReport) -> Iterator[Finding]:
    """What a node knows itself of the interfaces that other nodes do not reach, without asking them."""
    if report.network is None or not report.network.interfaces:  # an image without `ip`
        return
    for library in ("gloo", "nccl") if report.on_gpus else ("gloo",):
        if found := _choice(cluster, node, library, report.network, PeerProbe()):
            yield found


def _outgoing_interface(probe: PeerProbe) -> str | None:
    """The interface over which this node reaches the others."""
    names = [route.interface for route in probe.routes.values() if route.interface]
    return next((name for name in names if not name.startswith(_LOCAL)), None)


def _route(cluster: Cluster, node: str, probe: PeerProbe) -> Iterator[Finding]:
    """Every rank connects to the head for the rendezvous; the head uses the same address."""
    route = probe.routes.get(cluster.head)
    if route is None:
        return
    address = cluster.node(cluster.head).address
    todo = f"give its address (nodes.{cluster.node(cluster.head).host}.address)"
    why = "the rendezvous of the ranks is at that address"
    if route.error:
        problem = Problem(node, f"does not find the head at {address}", route.error.lower(), todo)
        yield fail("network", problem, why)
    elif route.interface == "lo":
        got = f"{route.target} through {route.interface}"
        yield fail("network", Problem(node, f"resolves the head's name to itself at {address}", got, todo), why)


def _unreached(
    usable: Mapping[str, Network], probes: Mapping[str, PeerProbe], libraries: tuple[str, ...]
) -> Iterator[Finding]:
    """Connections that failed; an unusable interface already has a finding of its own."""
    failed: dict[tuple[str, str], dict[str, str]] = {}
    for caller, probe in probes.items():
        for it in probe.unreached:
            chosen = [usable[it.node].chosen[library] for library in libraries] if it.node in usable else []
            if any(own is not None and own.address == it.address for own in chosen):
                failed.setdefault((it.node, it.address), {})[caller] = it.error
    for (node, address), callers in failed.items():
        error = next(iter(callers.values()))
        who = "any other node" if len(callers) == len(probes) - 1 else ", ".join(callers)
        todo = "let the nodes through to each other on all ports (firewall), or name a network that they share in env"
        problem = Problem(node, f"is not reached by {who} at {address}", error, f"{todo} (GLOO_, NCCL_SOCKET_IFNAME)")
        yield fail("network", problem, "ranks connect to each other on ports of the system's choice")


def _mtu(networks: Mapping[str, Network], library: str) -> Iterator[Finding]:
    chosen = {node: own for node, network in networks.items() if (own := network.chosen[library]) is not None}
    head = next(iter(chosen), None)
    for node, own in chosen.items():
        assert head is not None
        if own.mtu != chosen[head].mtu:
            got = f"{own.mtu} on {own.name}, {chosen[head].mtu} on {chosen[head].name} of {head}"
            todo = "give both interfaces the same (ip link set mtu), the switch between them included"
            problem = Problem(node, "its MTU differs from the head's", got, todo)
            yield warn("network", problem, "large packets are cut or lost; collectives crawl or hang")
