"""The doctor: asks hosts and nodes, compares their answers, and tries what a launch will do."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from tridock.contracts.mesh_answers import MeshAnswer
from tridock.contracts.node_answers import PROTOCOL, HostKey, NodeReport, QuickReport
from tridock.errors import ClusterError, TridockError, count
from tridock.ops.doctor.allreduce import reduce_all
from tridock.ops.doctor.consistency_checks import (
    clock_findings,
    code_findings,
    environment_findings,
    image_findings,
    sharing,
    sharing_findings,
)
from tridock.ops.doctor.device_checks import (
    GpuHost,
    cuda_findings,
    device_findings,
    gpu_host_command,
    leftover_findings,
    parse_gpu_host,
)
from tridock.ops.doctor.finding import Report, Reports, fail
from tridock.ops.doctor.host_checks import check_containers, check_hosts
from tridock.ops.doctor.limit_checks import limit_findings, space_findings
from tridock.ops.doctor.network_checks import network_findings
from tridock.ops.doctor.ssh_checks import ssh_findings
from tridock.ops.hosts.session import NODE, Session
from tridock.ops.runs.registry import list_runs
from tridock.progress import size_text
from tridock.remote import Host, on_all, raise_failures

if TYPE_CHECKING:
    from tridock.experiment import Experiment
    from tridock.plan import Plan

T = TypeVar("T")
R = TypeVar("R", bound=QuickReport)

# If one of these fails, the all-reduce would fail for the same reason, after a long wait.
_FIRST: Final = ("hosts", "nodes", "ssh", "image", "network")
REPORT_TIMEOUT_S: Final = 60.0
_MESH_TIMEOUT_S: Final = 40.0
QUICK: Final = "--quick"


@dataclass(frozen=True, slots=True)
class Request:
    """An experiment whose data is also checked."""

    config: Path
    overrides: Sequence[str] = ()


def check(session: Session, request: Request | None = None) -> Report:
    """Runs all checks, on all hosts at once. Changes nothing.

    Raises :class:`RequestError` for an invalid experiment before it contacts a host.
    """
    began = time.monotonic()
    planned = _planned(session, request) if request is not None else None
    report = Report(session)
    there = check_hosts(session, report)
    up = check_containers(there, report)
    reports = ask_nodes(there, report, up, lambda node, _: node_report(there, node, NodeReport))
    if reports:
        _compare(session, reports, report)
        if session.head in reports:
            _probe_mesh(there, reports, report)
        if request is not None and planned is not None and tuple(reports) == session.nodes:
            _data(session, request.config, *planned, report)
        _leftovers(there, reports, report)
    if not report.fails(*_FIRST) and tuple(reports) == session.nodes:
        _reduce(session, reports, report)
    report.seconds = time.monotonic() - began
    return report


def ask_for_quick_reports(session: Session) -> None:
    """Lets the command that reads a host's facts ask for its node's part of :func:`check_quickly` too.

    Except on the head, whose part takes its time: it connects to all nodes.
    """
    session.ask_with_states(*NODE, "node-report", QUICK, nodes=session.nodes[1:])


def check_quickly(session: Session, *, on_cpu: bool = False) -> None:
    """Runs the checks of every launch: ssh from the head to every node, the same image, space on disk and in /dev/shm.

    Unless ``on_cpu``, also checks that CUDA starts on nodes with a GPU image and that torch has kernels for their GPUs.
    Raises :class:`ClusterError` with all failures. The preflight checks the rendezvous port.
    """
    others = list(session.nodes) if len(session.nodes) > 1 else []

    def ask(node: str, _: Host) -> QuickReport:
        return node_report(session, node, QuickReport, QUICK, *(others if node == session.head else ()))

    reports = session.each(ask)
    images = {node: state.container.image_id for node, state in session.states().items() if state.container}
    found = list(image_findings(session.cluster.hosts_option, images))
    for node, report in reports.items():
        found += space_findings(session.cluster, node, report)
        found += () if on_cpu else cuda_findings(node, session.cluster.everywhere[node], report)
    found += ssh_findings(session.cluster, reports[session.head].ssh, lambda node: _host_key(session, node))
    if problems := [finding.problem for finding in found if finding.severity == "fail"]:
        raise ClusterError(problems)


def node_report(session: Session, node: str, kind: type[R], *arguments: str) -> R:
    """Returns a node's report. Raises :class:`ClusterError` if its image has another protocol version."""
    report = session.ask(node, kind, "node-report", *arguments, timeout=REPORT_TIMEOUT_S)
    if report.protocol != PROTOCOL:
        raise session.other_version(node, f"protocol {report.protocol}, {PROTOCOL} here")
    return report


def ask_nodes(session: Session, report: Report, nodes: Sequence[str], ask: Callable[[str, Host], T]) -> dict[str, T]:
    """Returns the answers by node; adds a finding for each node that does not answer."""
    hosts = {node: session.hosts[node] for node in nodes}
    outcomes = on_all(hosts, ask, cap=session.cluster.settings.ssh.max_connections)
    for outcome in outcomes.values():
        if isinstance(outcome.error, TridockError):
            why = "its container does not answer the doctor, and would not answer a launch"
            report.findings += [fail("nodes", problem, why) for problem in outcome.error.problems]
    return raise_failures({node: it for node, it in outcomes.items() if not isinstance(it.error, TridockError)})


def ask_gpu_hosts(session: Session, reports: Reports) -> dict[str, GpuHost]:
    """Asks the hosts of nodes with GPUs about their GPUs."""
    on_gpus = tuple(node for node, report in reports.items() if report.on_gpus)

    def ask(_: str, host: Host) -> GpuHost:
        return parse_gpu_host(host.run(gpu_host_command(), timeout=REPORT_TIMEOUT_S).stdout.decode(errors="replace"))

    return session.each(ask, only=on_gpus) if on_gpus else {}


def _host_key(session: Session, node: str) -> str | None:
    try:
        return session.ask(node, HostKey, "host-key", timeout=REPORT_TIMEOUT_S).fingerprint
    except ClusterError:
        return None


def _compare(session: Session, reports: Reports, report: Report) -> None:
    cluster = session.cluster
    report.findings += code_findings(cluster.hosts_option, reports)
    for node, own in reports.items():
        report.findings += space_findings(cluster, node, own)
        report.findings += limit_findings(cluster, node, own)
        if node == session.head and (problem := own.rendezvous.problem) is not None:
            problem = replace(problem, where=f"{node}: {problem.where}")
            report.findings.append(fail("network", problem, "the rendezvous of the ranks is at a port of the head"))
    report.findings += device_findings(cluster, reports, ask_gpu_hosts(session, reports))
    disk = min(own.disk.free if own.disk else 0 for own in reports.values())
    shm = min(own.shm.free if own.shm else 0 for own in reports.values())
    report.seen["space"] = f"at least {size_text(disk)} of disk and {size_text(shm)} of /dev/shm free"
    report.seen["limits"] = f"{count(min(own.cores for own in reports.values()), 'core')} or more"
    gpus = sum(len(own.accelerators.gpus or ()) for own in reports.values() if own.on_gpus)
    slots = count(sum(map(len, cluster.everywhere.values())), "slot")
    report.seen["devices"] = f"{count(gpus, 'GPU')} for {slots}" if gpus else f"{slots} on the CPU"


def _probe_mesh(session: Session, reports: Reports, report: Report) -> None:
    """Connects from the head to every node over ssh, itself included, and from there to the others."""
    cluster = session.cluster
    addresses = [f"{node}={cluster.address_of(node)}" for node in reports]
    arguments = ("mesh-probe", secrets.token_hex(6), "--", *addresses)
    try:
        mesh = session.ask(session.head, dict[str, MeshAnswer], *arguments, timeout=_MESH_TIMEOUT_S)
    except ClusterError as error:
        why = "the head cannot connect to the other nodes"
        report.findings += [fail("ssh", problem, why) for problem in error.problems]
        return
    on_gpus = any(own.on_gpus and own.accelerators.gpus for own in reports.values())
    answers = {node: answer.ssh for node, answer in mesh.items()}
    report.findings += ssh_findings(cluster, answers, lambda node: _host_key(session, node))
    report.findings += network_findings(cluster, mesh, on_gpus)
    hellos = {node: answer.hello for node, answer in mesh.items() if answer.hello is not None}
    if session.head not in hellos:
        return
    report.findings += environment_findings(cluster, {node: hello.environment for node, hello in hellos.items()})
    clocks = {node: answer.clock for node, answer in mesh.items() if answer.clock is not None}
    report.findings += clock_findings(clocks)
    groups = sharing({node: answer.peers.sees for node, answer in mesh.items() if answer.peers is not None})
    report.findings += sharing_findings(groups)
    report.seen["ssh"] = f"{session.head}'s ssh reaches {count(len(hellos), 'node')} of {cluster.name}"
    report.seen["environment"] = count(len(hellos[session.head].environment), "variable")
    offsets = [clock.offset for clock in clocks.values()]
    report.seen["clock"] = f"within {max(max(offsets) - min(offsets), 0.001) * 1e3:.0f} ms"
    chosen = {it: hellos[session.head].network.chosen[it] for it in (("gloo", "nccl") if on_gpus else ("gloo",))}
    used = [f"{it}: {own.name} {own.address}" for it, own in chosen.items() if own]
    report.seen["network"] = ", ".join(used) + f" on {session.head}"
    if len(hellos) > 1:
        where = "shared by all" if len(groups) == 1 else "local to each" if len(groups) == len(hellos) else "mixed"
        report.seen["space"] += f"; /workspace/runs is {where}"


def _planned(session: Session, request: Request) -> tuple[Experiment, Plan]:
    from tridock.ops.runs.prepare import assumptions_for, prepare  # most checks need no plan, which takes its time

    cluster = session.cluster
    prepared = prepare(request.config, cluster.slots, assumptions_for(cluster), request.overrides, force=True)
    return prepared.experiment, prepared.plan


def _data(session: Session, config: Path, experiment: Experiment, plan: Plan, report: Report) -> None:
    """Checks what a launch would: the same files everywhere, and a port for the rendezvous."""
    from tridock.ops.runs.preflight import check_nodes

    why = "every rank reads it; a launch refuses to start"
    try:
        found = check_nodes(session, config, experiment, plan)
    except TridockError as error:
        report.findings += [fail("data", problem, why) for problem in error.problems]
        return
    report.seen["data"] = f"{experiment.data.data_path} is the same everywhere; port {found.port} is free"


def _leftovers(session: Session, reports: Reports, report: Report) -> None:
    """Runs that have processes on some node."""
    holders: dict[str, list[str]] = {}
    for node, own in reports.items():
        for run_id in own.runs:
            holders.setdefault(run_id, []).append(node)
    if not holders:
        return
    try:
        states = {run.run_id: run.state for run in list_runs(session)}
    except ClusterError as error:
        why = "it is unknown whether the processes there are still needed"
        report.findings += [fail("nodes", problem, why) for problem in error.problems]
        return
    report.findings += leftover_findings(session.cluster.hosts_option, holders, states)


def _reduce(session: Session, reports: Reports, report: Report) -> None:
    head = reports[session.head]
    assert head.rendezvous.port is not None
    if reasons := {node: why for node, own in reports.items() if (why := own.no_reduction) is not None}:
        node, why = next(iter(reasons.items()))
        report.skipped["all-reduce"] = f"{node}'s image has {why}"
        return
    result, found = reduce_all(session, head.rendezvous.port)
    report.findings += found
    if result is not None:
        report.reduced = result
        rate = result["bus_bytes_per_second"] / 1e9
        title = {"nccl": "NCCL", "gloo": "Gloo"}[result["backend"]]
        moved = f"{rate:.2f} GB/s" if result["ranks"] > 1 else "alone"
        report.seen["all-reduce"] = f"{result['ranks']} ranks, {title}, {result['bytes'] / 1e6:.0f} MB: {moved}"
