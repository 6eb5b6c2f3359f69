"""The doctor: asks hosts and nodes, compares what they say, and tries what a launch will do."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from tridock import run_folder
from tridock.cluster.containers import container_name
from tridock.errors import ClusterError, Problem, TridockError
from tridock.experiment import Experiment, load_experiment
from tridock.ops.doctor.allreduce import reduce_all
from tridock.ops.doctor.devices import device_findings
from tridock.ops.doctor.finding import KEYS, UP, Answer, Answers, Finding, fail, warn
from tridock.ops.doctor.network import network_findings
from tridock.ops.doctor.paths import path_findings
from tridock.ops.doctor.room import limit_findings, shown, space_findings
from tridock.ops.doctor.sameness import (
    clock_findings,
    code_findings,
    environment_findings,
    image_findings,
    sharing,
    sharing_findings,
)
from tridock.ops.facts import keys_digest
from tridock.ops.image import wanted_image
from tridock.ops.key_store import KeyStore
from tridock.ops.nodes import outdated
from tridock.ops.planning import told
from tridock.ops.preflight import check_nodes
from tridock.ops.runs import list_runs
from tridock.ops.session import Session
from tridock.plan import Plan, assess
from tridock.remote import Host, on_all, raise_failures

T = TypeVar("T")

_LOOK_S: Final = 20.0
_MEET_S: Final = 40.0
_ENDED: Final = ("done", "failed", "stopped", "lost")
# What the all-reduce rests on: where one of these fails it would only say the same, after a long wait.
_FIRST: Final = ("hosts", "nodes", "ssh", "image", "network")


@dataclass
class Report:
    """What was found, and what was seen on the way, by check; ``seen`` has a check's line where all is well."""

    session: Session
    findings: list[Finding] = field(default_factory=list)
    seen: dict[str, str] = field(default_factory=dict)
    reduced: Mapping[str, Any] | None = None
    seconds: float = 0.0
    done: list[str] = field(default_factory=list)
    """What was mended."""

    @property
    def healthy(self) -> bool:
        """Whether nothing fails; warnings are allowed."""
        return not any(finding.severity == "fail" for finding in self.findings)

    def fails(self, *checks: str) -> bool:
        """Whether one of these checks has failed."""
        return any(finding.severity == "fail" and finding.check in checks for finding in self.findings)


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
    there = _hosts(session, report)
    up = _nodes(there, report)
    looks = _looks(there, up, report)
    if looks:
        _compare(session, looks, report)
        if session.head in looks:
            _meet(there, looks, report)
        if request is not None and planned is not None and tuple(looks) == session.nodes:
            _data(session, request.config, *planned, report)
        _leftovers(there, looks, report)
    if not report.fails(*_FIRST) and tuple(looks) == session.nodes:
        _reduce(session, looks[session.head], report)
    report.seconds = time.monotonic() - began
    return report


def check_quickly(session: Session) -> None:
    """What each launch asks first: the way from the head to every node, the same image, room on disk and in /dev/shm.

    Raises :class:`ClusterError` with all that fails. The rendezvous port is the preflight's.
    """
    others = list(session.nodes) if len(session.nodes) > 1 else []

    def ask(node: str, _: Host) -> Answer:
        return _verb(session, node, _LOOK_S, "look", "--quick", *(others if node == session.head else ()))

    looks = session.each(ask)
    images = {node: state.container.image_id for node, state in session.states().items() if state.container}
    found = list(image_findings(str(session.cluster.hostfile_path), images))
    for node, look in looks.items():
        found += space_findings(session.cluster, node, look)
    found += path_findings(session.cluster, looks[session.head].get("paths", {}), _shown_key(session))
    if problems := [finding.problem for finding in found if finding.severity == "fail"]:
        raise ClusterError(problems)


def _verb(session: Session, node: str, timeout: float, *words: str) -> Answer:
    answer: Answer = json.loads(session.node_verb(node, *words, timeout=timeout).checked(node).stdout)
    return answer


def _asked(session: Session, report: Report, nodes: Sequence[str], ask: Callable[[str, Host], T]) -> dict[str, T]:
    """The answers of those that gave one; the others are found to be at fault."""
    hosts = {node: session.hosts[node] for node in nodes}
    outcomes = on_all(hosts, ask, cap=session.cluster.settings.ssh.max_connections)
    for outcome in outcomes.values():
        if isinstance(outcome.error, TridockError):
            why = "its container does not answer the doctor, and would not answer a launch"
            report.findings += [fail("nodes", problem, why) for problem in outcome.error.problems]
    return raise_failures({node: it for node, it in outcomes.items() if not isinstance(it.error, TridockError)})


def _hosts(session: Session, report: Report) -> Session:
    """The session with the hosts that answer."""
    there, failure = session.reachable()
    missing = set(session.nodes) - set(there.nodes)
    for problem in failure.problems if failure else ():
        if not there.nodes or problem.where != ", ".join(there.nodes):  # the last of them names those that are well
            report.findings.append(fail("hosts", problem, "its node cannot be looked at, started or stopped"))
    report.seen["hosts"] = f"{len(there.nodes)} of {len(session.nodes)} answer"
    return there if missing else session


def _nodes(session: Session, report: Report) -> tuple[str, ...]:
    """The nodes that run; what their containers are made of, and the keys that their hosts hold."""
    cluster, states = session.cluster, session.states()
    todo = f"run fab up --hosts {cluster.hostfile_path}"
    images = {}
    for node, state in states.items():
        if state.container is None:
            problem = Problem(node, "has no node", f"no container {container_name(cluster, node)}", todo)
        elif not state.container.running:
            problem = Problem(node, "its node is not running", f"exited with {state.container.exit_code}", todo)
        else:
            images[node] = state.container.image_id
            continue
        report.findings.append(fail("nodes", problem, "a launch starts its ranks in it", UP))
    report.findings += image_findings(str(cluster.hostfile_path), images) if images else ()
    report.seen["nodes"] = f"{len(images)} run"
    if images:
        report.seen["image"] = next(iter(images.values())).removeprefix("sha256:")[:12]
    _recipes(session, tuple(images), report)
    _keys(session, tuple(images), report)
    return tuple(images)


def _recipes(session: Session, up: tuple[str, ...], report: Report) -> None:
    try:
        old = outdated(session, wanted_image(session))
    except ClusterError as error:
        report.findings += [warn("image", problem, "fab up could not start a node") for problem in error.problems]
        return
    todo = f"run fab up --hosts {session.cluster.hostfile_path}"
    for node in up:
        if node in old and not report.fails("image"):
            what = "its container is not what the settings and the image ask for now"
            why = "a launch replaces it first"
            report.findings.append(warn("nodes", Problem(node, what, "", todo), why, UP))


def _keys(session: Session, up: tuple[str, ...], report: Report) -> None:
    store = KeyStore(session.cluster)
    for node in up:
        files = store.on_file(node)
        if files is None or session.states()[node].keys != keys_digest(files):
            got = "none on file" if files is None else "others there" if session.states()[node].keys else "none there"
            todo = f"give all nodes the cluster's keys again: fab keys --hosts {session.cluster.hostfile_path}"
            problem = Problem(node, f"its keys are not those in {store.folder}", got, todo)
            report.findings.append(fail("ssh", problem, "the nodes of a cluster know each other by them", KEYS))


def _looks(session: Session, up: tuple[str, ...], report: Report) -> dict[str, Answer]:
    def ask(node: str, _: Host) -> Answer:
        return _verb(session, node, _LOOK_S, "look")

    return _asked(session, report, up, ask)


def _compare(session: Session, looks: Answers, report: Report) -> None:
    cluster = session.cluster
    report.findings += code_findings(str(cluster.hostfile_path), looks)
    for node, look in looks.items():
        report.findings += space_findings(cluster, node, look)
        report.findings += limit_findings(cluster, node, look)
        if node == session.head and look["port"] is None:
            told = Problem.parse(look["port_problem"])
            assert told is not None
            problem = Problem(f"{node}: {told.where}", told.what, told.got, told.todo)
            report.findings.append(fail("network", problem, "the ranks meet at a port of the head"))
    report.findings += device_findings(cluster, looks)
    disk, shm = (min(look[what]["free"] if look[what] else 0 for look in looks.values()) for what in ("disk", "shm"))
    report.seen["space"] = f"at least {shown(disk)} of disk and {shown(shm)} of /dev/shm free"
    report.seen["limits"] = f"{min(look['cores'] for look in looks.values())} cores or more"
    gpus = sum(len(look["gpus"] or ()) for look in looks.values() if look["accelerator"] != "cpu")
    slots = sum(map(len, cluster.slots.values()))
    report.seen["devices"] = f"{gpus} GPUs for {slots} slots" if gpus else f"{slots} slots on the CPU"


def _meet(session: Session, looks: Answers, report: Report) -> None:
    """From the head to every other over ssh, itself included, and from there among each other."""
    cluster = session.cluster
    words = [f"{node}={cluster.address_of(node)}" for node in looks]
    try:
        meeting = _verb(session, session.head, _MEET_S, "meet", secrets.token_hex(6), "--", *words)
    except ClusterError as error:
        why = "the head cannot call the other nodes"
        report.findings += [fail("ssh", problem, why) for problem in error.problems]
        return
    on_gpus = any(look["accelerator"] != "cpu" and look["gpus"] for look in looks.values())
    report.findings += path_findings(cluster, meeting, _shown_key(session))
    report.findings += network_findings(cluster, meeting, on_gpus)
    hellos = {node: said["hello"] for node, said in meeting.items() if "hello" in said}
    if session.head not in hellos:
        return
    report.findings += environment_findings(cluster, {node: hello["environment"] for node, hello in hellos.items()})
    met = {node: said["clock"] for node, said in meeting.items() if "clock" in said}
    clocks = {node: (clock["offset"], clock["error"]) for node, clock in met.items()}
    report.findings += clock_findings(clocks)
    groups = sharing({node: said["look"]["sees"] for node, said in meeting.items() if "look" in said})
    report.findings += sharing_findings(groups)
    report.seen["ssh"] = f"{len(hellos)} nodes answer {session.head}'s ssh as nodes of {cluster.name}"
    report.seen["environment"] = f"{len(hellos[session.head]['environment'])} variables"
    spread = max(clocks.values())[0] - min(clocks.values())[0]
    report.seen["clock"] = f"within {max(spread, 0.001) * 1e3:.0f} ms"
    chosen = {it: hellos[session.head]["network"][it] for it in (("gloo", "nccl") if on_gpus else ("gloo",))}
    used = [f"{it}: {own['name']} {own['address']}" for it, own in chosen.items() if own]
    report.seen["network"] = ", ".join(used) + f" on {session.head}"
    if len(hellos) > 1:
        where = "shared by all" if len(groups) == 1 else "local to each" if len(groups) == len(hellos) else "mixed"
        report.seen["space"] += f"; /workspace/runs is {where}"


def _shown_key(session: Session) -> Callable[[str], str | None]:
    def ask(node: str) -> Any:
        try:
            return _verb(session, node, _LOOK_S, "shown-key")["key"]
        except ClusterError:
            return None

    return ask


def _planned(session: Session, request: Request) -> tuple[Experiment, Plan]:
    experiment = load_experiment(request.config, request.overrides)
    assessment = assess(experiment, session.cluster.slots, str(request.config), told(session.cluster))
    return experiment, assessment.checked(force=True)


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
    """Runs that have processes: those that go on, and what dead ones left behind."""
    holders: dict[str, list[str]] = {}
    for node, look in looks.items():
        for run_id in look["runs"]:
            holders.setdefault(run_id, []).append(node)
    if not holders:
        return
    states = {run["run_id"]: run["state"] for run in list_runs(session)}
    hosts = session.cluster.hostfile_path
    for run_id, nodes in holders.items():
        if states.get(run_id) in _ENDED and run_folder.is_run_id(run_id):
            todo = f"end them: fab stop --hosts {hosts} --run {run_id}"
            what = f"has processes of a run that is {states[run_id]}"
            why = "they hold memory, GPUs and ports that the next run needs"
            report.findings += [
                warn("devices", Problem(node, what, run_id, todo), why, ("stop", run_id)) for node in nodes
            ]
        else:
            todo = f"wait for its end, or stop it: fab stop --hosts {hosts} --run {run_id}"
            why = "two runs on the same slots share their memory and time"
            report.findings.append(warn("devices", Problem(", ".join(nodes), "a run goes on there", run_id, todo), why))


def _reduce(session: Session, look: Answer, report: Report) -> None:
    result, found = reduce_all(session, look["port"])
    report.findings += found
    if result is not None:
        report.reduced = result
        rate = result["bus_bytes_per_second"] / 1e9
        title = {"nccl": "NCCL", "gloo": "Gloo"}[result["backend"]]
        moved = f"{rate:.2f} GB/s" if result["ranks"] > 1 else "alone"
        report.seen["all-reduce"] = f"{result['ranks']} ranks, {title}, {result['bytes'] / 1e6:.0f} MB: {moved}"
