"""The doctor: asks hosts and nodes, compares their answers, and tries what a launch will do."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from tridock.cluster.settings import Cluster
from tridock.contracts.mesh_answers import MeshAnswer
from tridock.contracts.node_answers import NodeReport
from tridock.errors import ClusterError, Problem, TridockError, count
from tridock.ops.checks import consistency, devices
from tridock.ops.checks.finding import KEYS, UP, Reports, fail, warn
from tridock.ops.checks.limits import limit_findings, space_findings
from tridock.ops.checks.network import network_findings
from tridock.ops.checks.quick import REPORT_TIMEOUT_S, host_key, node_report
from tridock.ops.checks.ssh import ssh_findings
from tridock.ops.doctor.allreduce import reduce_all
from tridock.ops.doctor.report import Report
from tridock.ops.hosts.client import NodeClient, reachable
from tridock.ops.hosts.facts import keys_digest
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.hosts.keys import KeyStore
from tridock.ops.image.ensure import wanted_image
from tridock.ops.nodes.containers import outdated
from tridock.ops.runs.cluster_runs import list_runs
from tridock.progress import size_text
from tridock.remote import Host, raise_failures


def check_hosts(hosts: Hosts, report: Report) -> NodeClient:
    """A client of the hosts that answer."""
    client, failure = reachable(hosts)
    for problem in failure.problems if failure else ():
        report.findings.append(fail("hosts", problem, "its node cannot be looked at, started or stopped"))
    report.seen["hosts"] = f"{len(client.hosts)} of {len(hosts)} answer"
    return client


def check_containers(client: NodeClient, report: Report) -> tuple[str, ...]:
    """The nodes that run; what their containers are made of, and the keys that their hosts hold."""
    cluster, states = client.cluster, client.states
    todo = f"run tridock up {cluster.hosts_option}"
    images = {}
    for node, state in states.items():
        if state.container is None:
            problem = Problem(node, "has no node", f"no container {client.hosts.transport.container_name(node)}", todo)
        elif not state.container.running:
            problem = Problem(node, "its node is not running", f"exited with {state.container.exit_code}", todo)
        else:
            images[node] = state.container.image_id
            continue
        report.findings.append(fail("nodes", problem, "a launch starts its ranks in it", UP))
    report.findings += consistency.image_findings(cluster.hosts_option, images) if images else ()
    report.seen["nodes"] = f"{len(images)} run"
    if images:
        report.seen["image"] = next(iter(images.values())).removeprefix("sha256:")[:12]
    _recipes(client, tuple(images), report)
    _keys(client, tuple(images), report)
    return tuple(images)


def _recipes(client: NodeClient, up: tuple[str, ...], report: Report) -> None:
    try:
        old = outdated(client.hosts, client.states, wanted_image(client.cluster, client.states))
    except ClusterError as error:
        report.findings += [warn("image", problem, "tridock up could not start a node") for problem in error.problems]
        return
    todo = f"run tridock up {client.cluster.hosts_option}"
    for node in up:
        if node in old and not report.fails("image"):
            what = "its container is not what the settings and the image ask for now"
            report.findings.append(warn("nodes", Problem(node, what, "", todo), "a launch replaces it first", UP))


def _keys(client: NodeClient, up: tuple[str, ...], report: Report) -> None:
    store = KeyStore(client.cluster)
    on_file = store.on_file(up)
    for node in up:
        files = on_file.get(node)
        if files is None or client.states[node].keys != keys_digest(files):
            got = "none on file" if files is None else "others there" if client.states[node].keys else "none there"
            todo = f"give all nodes the cluster's keys again: tridock keys {client.cluster.hosts_option}"
            problem = Problem(node, f"its keys are not those in {store.folder}", got, todo)
            report.findings.append(fail("ssh", problem, "the nodes of a cluster know each other by them", KEYS))


if TYPE_CHECKING:
    from tridock.ops.runs.prepare import Planned

T = TypeVar("T")

# If one of these fails, the all-reduce would fail for the same reason, after a long wait.
_FIRST: Final = ("hosts", "nodes", "ssh", "image", "network")
_MESH_TIMEOUT_S: Final = 40.0


def check(hosts: Hosts, config: Path | None = None, overrides: Sequence[str] = ()) -> Report:
    """Runs all checks, on all hosts at once, with those of the data if an experiment is named. Changes nothing.

    Raises :class:`RequestError` for an invalid experiment before it contacts a host.
    """
    began = time.monotonic()
    prepared = None if config is None else _prepared(hosts.cluster, config, overrides)
    report = Report(hosts)
    client = check_hosts(hosts, report)
    up = check_containers(client, report)
    reports = ask_nodes(client.hosts, report, up, lambda node, _: node_report(client, node, NodeReport))
    if reports:
        _compare(hosts, reports, report)
        if hosts.head in reports:
            _probe_mesh(client, reports, report)
        if prepared is not None and tuple(reports) == hosts.nodes:
            _data(client, prepared, report)
        _leftovers(client, reports, report)
    if not (report.fails(*_FIRST) or report.skipped) and tuple(reports) == hosts.nodes:
        _reduce(client, reports, report)
    report.seconds = time.monotonic() - began
    return report


def ask_nodes(hosts: Hosts, report: Report, nodes: Sequence[str], ask: Callable[[str, Host], T]) -> dict[str, T]:
    """Returns the answers by node; adds a finding for each node that does not answer."""
    outcomes = hosts.try_each(ask, only=nodes)
    for outcome in outcomes.values():
        if isinstance(outcome.error, TridockError):
            why = "its container does not answer the doctor, and would not answer a launch"
            report.findings += [fail("nodes", problem, why) for problem in outcome.error.problems]
    return raise_failures({node: it for node, it in outcomes.items() if not isinstance(it.error, TridockError)})


def ask_gpu_hosts(hosts: Hosts, reports: Reports) -> dict[str, devices.GpuHost]:
    """Asks the hosts of nodes with GPUs about their GPUs."""
    on_gpus = tuple(node for node, report in reports.items() if report.on_gpus)

    def ask(_: str, host: Host) -> devices.GpuHost:
        return devices.parse_gpu_host(
            host.run(devices.gpu_host_command(), timeout=REPORT_TIMEOUT_S).stdout.decode(errors="replace")
        )

    return hosts.each(ask, only=on_gpus) if on_gpus else {}


def _compare(hosts: Hosts, reports: Reports, report: Report) -> None:
    cluster = hosts.cluster
    report.findings += consistency.code_findings(cluster.hosts_option, reports)
    for node, own in reports.items():
        report.findings += space_findings(cluster, node, own)
        report.findings += limit_findings(cluster, node, own)
        if node == hosts.head and (problem := own.rendezvous.problem) is not None:
            problem = replace(problem, where=f"{node}: {problem.where}")
            report.findings.append(fail("network", problem, "the rendezvous of the ranks is at a port of the head"))
    report.findings += devices.device_findings(cluster, reports, ask_gpu_hosts(hosts, reports))
    disk = min(own.disk.free if own.disk else 0 for own in reports.values())
    shm = min(own.shm.free if own.shm else 0 for own in reports.values())
    report.seen["space"] = f"at least {size_text(disk)} of disk and {size_text(shm)} of /dev/shm free"
    report.seen["limits"] = f"{count(min(own.cores for own in reports.values()), 'core')} or more"
    gpus = sum(len(own.accelerators.gpus or ()) for own in reports.values() if own.on_gpus)
    slots = count(sum(map(len, cluster.everywhere.values())), "slot")
    report.seen["devices"] = f"{count(gpus, 'GPU')} for {slots}" if gpus else f"{slots} on the CPU"


def _probe_mesh(client: NodeClient, reports: Reports, report: Report) -> None:
    """Connects from the head to every node over ssh, itself included, and from there to the others."""
    cluster = client.cluster
    addresses = [f"{node}={cluster.node(node).address}" for node in reports]
    arguments = ("mesh-probe", secrets.token_hex(6), "--", *addresses)
    try:
        mesh = client.ask(client.head, dict[str, MeshAnswer], *arguments, timeout=_MESH_TIMEOUT_S)
    except ClusterError as error:
        why = "the head cannot connect to the other nodes"
        report.findings += [fail("ssh", problem, why) for problem in error.problems]
        return
    on_gpus = any(own.on_gpus and own.accelerators.gpus for own in reports.values())
    answers = {node: answer.ssh for node, answer in mesh.items()}
    report.findings += ssh_findings(cluster, answers, lambda node: host_key(client, node))
    report.findings += network_findings(cluster, mesh, on_gpus)
    hellos = {node: answer.hello for node, answer in mesh.items() if answer.hello is not None}
    if client.head not in hellos:
        return
    report.findings += consistency.environment_findings(
        cluster, {node: hello.environment for node, hello in hellos.items()}
    )
    clocks = {node: answer.clock for node, answer in mesh.items() if answer.clock is not None}
    report.findings += consistency.clock_findings(clocks)
    groups = consistency.sharing({node: hello.folder for node, hello in hellos.items()})
    report.findings += consistency.sharing_findings(groups)
    report.seen["ssh"] = f"{client.head}'s ssh reaches {count(len(hellos), 'node')} of {cluster.name}"
    report.seen["environment"] = count(len(hellos[client.head].environment), "variable")
    offsets = [clock.offset for clock in clocks.values()]
    report.seen["clock"] = f"within {max(max(offsets) - min(offsets), 0.001) * 1e3:.0f} ms"
    chosen = {it: hellos[client.head].network.chosen[it] for it in (("gloo", "nccl") if on_gpus else ("gloo",))}
    used = [f"{it}: {own.name} {own.address}" for it, own in chosen.items() if own]
    report.seen["network"] = ", ".join(used) + f" on {client.head}"
    if len(hellos) > 1:
        where = "shared by all" if len(groups) == 1 else "local to each" if len(groups) == len(hellos) else "mixed"
        report.seen["space"] += f"; /workspace/runs is {where}"


def _prepared(cluster: Cluster, config: Path, overrides: Sequence[str]) -> Planned:
    from tridock.ops.runs.prepare import assumptions_for, prepare  # most checks need no plan, which takes its time

    return prepare(config, cluster.slots, assumptions_for(cluster), overrides, force=True)


def _data(client: NodeClient, prepared: Planned, report: Report) -> None:
    """Checks what a launch would: the same files everywhere, and a port for the rendezvous."""
    from tridock.ops.runs.preflight import check_nodes

    why = "every rank reads it; a launch refuses to start"
    try:
        found = check_nodes(client, prepared.config, prepared.experiment, prepared.plan)
    except TridockError as error:
        report.findings += [fail("data", problem, why) for problem in error.problems]
        return
    names = ", ".join(prepared.experiment.data.prefixes)
    report.seen["data"] = f"{names} is the same everywhere; port {found.port} is free"


def _leftovers(client: NodeClient, reports: Reports, report: Report) -> None:
    """Runs that have processes on some node. Beside one that continues, an all-reduce is slow, and slows the run."""
    holders: dict[str, list[str]] = {}
    for node, own in reports.items():
        for run_id in own.runs:
            holders.setdefault(run_id, []).append(node)
    if not holders:
        return
    try:
        states = {run.run_id: run.state for run in list_runs(client)}
    except ClusterError as error:
        why = "it is unknown whether the processes there are still needed"
        report.findings += [fail("nodes", problem, why) for problem in error.problems]
        return
    report.findings += devices.leftover_findings(client.cluster.hosts_option, holders, states)
    if live := [it for it in holders if it not in states or not states[it].is_over]:
        report.skipped["all-reduce"] = f"{live[0]} continues there"


def _reduce(client: NodeClient, reports: Reports, report: Report) -> None:
    head = reports[client.head]
    assert head.rendezvous.port is not None
    if reasons := {node: why for node, own in reports.items() if (why := own.no_reduction) is not None}:
        node, why = next(iter(reasons.items()))
        report.skipped["all-reduce"] = f"{node}'s image has {why}"
        return
    result, found = reduce_all(client, head.rendezvous.port)
    report.findings += found
    if result is not None:
        report.reduced = result
        rate = result["bus_bytes_per_second"] / 1e9
        title = {"nccl": "NCCL", "gloo": "Gloo"}[result["backend"]]
        moved = f"{rate:.2f} GB/s" if result["ranks"] > 1 else "alone"
        report.seen["all-reduce"] = f"{result['ranks']} ranks, {title}, {result['bytes'] / 1e6:.0f} MB: {moved}"
