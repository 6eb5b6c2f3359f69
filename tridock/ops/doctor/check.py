"""The doctor: asks hosts and nodes, compares what they say, and tries what a launch will do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tridock.errors import ClusterError, Problem, TridockError
from tridock.experiment import Experiment
from tridock.ops.doctor.allreduce import reduce_all
from tridock.ops.doctor.consistency_checks import code_findings, image_findings
from tridock.ops.doctor.device_checks import cuda_findings, device_findings, leftover_findings
from tridock.ops.doctor.finding import Answer, Answers, fail
from tridock.ops.doctor.host_checks import check_containers, check_hosts
from tridock.ops.doctor.limit_checks import limit_findings, shown, space_findings
from tridock.ops.doctor.mesh_checks import meet
from tridock.ops.doctor.node_client import asked, node_report, shown_key
from tridock.ops.doctor.report import Report
from tridock.ops.doctor.ssh_checks import path_findings
from tridock.ops.hosts.session import Session
from tridock.ops.runs.preflight import check_nodes
from tridock.ops.runs.prepare import assumptions_for, prepare
from tridock.ops.runs.registry import list_runs
from tridock.plan import Plan
from tridock.remote import Host

# What the all-reduce rests on: where one of these fails it would only say the same, after a long wait.
_FIRST: Final = ("hosts", "nodes", "ssh", "image", "network")


@dataclass(frozen=True, slots=True)
class Request:
    """An experiment whose data is to be looked at, too."""

    config: Path
    overrides: Sequence[str] = ()


def check(session: Session, request: Request | None = None) -> Report:
    """Everything, on all hosts at once, and nothing is changed there.

    Raises :class:`RequestError` for an experiment that is wrong, before a host is contacted.
    """
    began = time.monotonic()
    planned = _planned(session, request) if request is not None else None
    report = Report(session)
    there = check_hosts(session, report)
    up = check_containers(there, report)
    looks = _looks(there, up, report)
    if looks:
        _compare(session, looks, report)
        if session.head in looks:
            meet(there, looks, report)
        if request is not None and planned is not None and tuple(looks) == session.nodes:
            _data(session, request.config, *planned, report)
        _leftovers(there, looks, report)
    if not report.fails(*_FIRST) and tuple(looks) == session.nodes:
        _reduce(session, looks[session.head], report)
    report.seconds = time.monotonic() - began
    return report


def check_quickly(session: Session, *, on_cpu: bool = False) -> None:
    """What each launch asks first: the way from the head to every node, the same image, room on disk and in /dev/shm,
    and unless ``on_cpu`` whether CUDA starts on nodes with a GPU image.

    Raises :class:`ClusterError` with all that fails. The rendezvous port is the preflight's.
    """
    others = list(session.nodes) if len(session.nodes) > 1 else []

    def ask(node: str, _: Host) -> Answer:
        return node_report(session, node, "--quick", *(others if node == session.head else ()))

    looks = session.each(ask)
    images = {node: state.container.image_id for node, state in session.states().items() if state.container}
    found = list(image_findings(str(session.cluster.hostfile_path), images))
    for node, look in looks.items():
        found += space_findings(session.cluster, node, look)
        found += () if on_cpu else cuda_findings(node, look)
    found += path_findings(session.cluster, looks[session.head].get("paths", {}), shown_key(session))
    if problems := [finding.problem for finding in found if finding.severity == "fail"]:
        raise ClusterError(problems)


def _looks(session: Session, up: tuple[str, ...], report: Report) -> dict[str, Answer]:
    def ask(node: str, _: Host) -> Answer:
        return node_report(session, node)

    return asked(session, report, up, ask)


def _compare(session: Session, looks: Answers, report: Report) -> None:
    cluster = session.cluster
    report.findings += code_findings(str(cluster.hostfile_path), looks)
    for node, look in looks.items():
        report.findings += space_findings(cluster, node, look)
        report.findings += limit_findings(cluster, node, look)
        if node == session.head and "port_problem" in look:
            said = Problem.of(look["port_problem"])
            problem = Problem(f"{node}: {said.where}", said.what, said.got, said.todo)
            report.findings.append(fail("network", problem, "the ranks meet at a port of the head"))
    report.findings += device_findings(cluster, looks)
    disk, shm = (min(look[what]["free"] if look[what] else 0 for look in looks.values()) for what in ("disk", "shm"))
    report.seen["space"] = f"at least {shown(disk)} of disk and {shown(shm)} of /dev/shm free"
    report.seen["limits"] = f"{min(look['cores'] for look in looks.values())} cores or more"
    gpus = sum(len(look["gpus"] or ()) for look in looks.values() if look["accelerator"] != "cpu")
    slots = sum(map(len, cluster.everywhere.values()))
    report.seen["devices"] = f"{gpus} GPUs for {slots} slots" if gpus else f"{slots} slots on the CPU"


def _planned(session: Session, request: Request) -> tuple[Experiment, Plan]:
    cluster = session.cluster
    prepared = prepare(request.config, cluster.slots, assumptions_for(cluster), request.overrides, force=True)
    return prepared.experiment, prepared.plan


def _data(session: Session, config: Path, experiment: Experiment, plan: Plan, report: Report) -> None:
    """As a launch would see it: the same files everywhere, and a port for the ranks to meet."""
    why = "every rank reads it; a launch refuses to start"
    try:
        found = check_nodes(session, config, experiment, plan)
    except TridockError as error:
        report.findings += [fail("data", problem, why) for problem in error.problems]
        return
    report.seen["data"] = f"{experiment.data.data_path} is the same everywhere; port {found.port} is free"


def _leftovers(session: Session, looks: Answers, report: Report) -> None:
    """Runs that have processes on some node."""
    holders: dict[str, list[str]] = {}
    for node, look in looks.items():
        for run_id in look["runs"]:
            holders.setdefault(run_id, []).append(node)
    if not holders:
        return
    try:
        states = {run["run_id"]: run["state"] for run in list_runs(session)}
    except ClusterError as error:
        why = "nobody knows whether what runs there is meant to"
        report.findings += [fail("nodes", problem, why) for problem in error.problems]
        return
    report.findings += leftover_findings(str(session.cluster.hostfile_path), holders, states)


def _reduce(session: Session, look: Answer, report: Report) -> None:
    result, found = reduce_all(session, look["port"])
    report.findings += found
    if result is not None:
        report.reduced = result
        rate = result["bus_bytes_per_second"] / 1e9
        title = {"nccl": "NCCL", "gloo": "Gloo"}[result["backend"]]
        moved = f"{rate:.2f} GB/s" if result["ranks"] > 1 else "alone"
        report.seen["all-reduce"] = f"{result['ranks']} ranks, {title}, {result['bytes'] / 1e6:.0f} MB: {moved}"
