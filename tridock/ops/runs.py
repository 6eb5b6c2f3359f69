"""Runs on a cluster: which there are, their logs, stopping one, bringing its folder home."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tridock import run_folder
from tridock.cluster.containers import workspace_on_host
from tridock.errors import ClusterError, Problem, RequestError, RunError
from tridock.ops.session import NODE, Session
from tridock.remote import Host, Stream

_VERB_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One line of ``fab status``: a node, its container and the processes of each run there."""

    node: str
    container: str
    image_id: str | None
    processes: dict[str, int]


def active_runs(session: Session, nodes: tuple[str, ...]) -> dict[str, list[str]]:
    """The ids of the runs that have processes on each of ``nodes``."""

    def ask(node: str, _: Host) -> list[str]:
        done = session.node_verb(node, "processes", timeout=_VERB_TIMEOUT_S).checked(node)
        return sorted({process["run_id"] for process in json.loads(done.stdout)})

    return session.each(ask, only=nodes) if nodes else {}


def list_runs(session: Session) -> list[dict[str, Any]]:
    """The runs of the head's workspace, oldest first, as ``tridock.node runs`` describes them."""
    done = session.node_verb(session.head, "runs", timeout=_VERB_TIMEOUT_S).checked(session.head)
    runs: list[dict[str, Any]] = json.loads(done.stdout)
    return runs


def choose_run(session: Session, run_id: str | None, *, active: bool) -> str:
    """The run that a task is about: the one named, or else the only active one, or else (logs, fetch) the last.

    Raises :class:`RequestError` where the name is unknown or where several are active and none is named.
    """
    runs = list_runs(session)
    known: list[str] = [run["run_id"] for run in runs]
    where = "--run"
    if run_id is not None:
        if run_id not in known:
            last = ", ".join(known[-5:]) or "none"
            raise RequestError(Problem(where, "is no run of this cluster", run_id, f"use one of: {last}"))
        return run_id
    going: list[str] = [run["run_id"] for run in runs if run["state"] == "running"]
    if len(going) > 1:
        raise RequestError(Problem(where, "is needed while several runs go on", ", ".join(going), "name one of them"))
    if going:
        return going[0]
    if active or not known:
        raise RequestError(Problem(where, "no run goes on" if active else "there is no run yet", "", "see fab status"))
    return known[-1]


def stop(session: Session, run_id: str) -> dict[str, int]:
    """Ends the run's processes on every node, and nothing else; returns how many each node had."""

    def end(node: str, _: Host) -> int:
        done = session.node_verb(node, "stop", run_id, timeout=_VERB_TIMEOUT_S).checked(node)
        return int(json.loads(done.stdout)["stopped"])

    return session.each(end)


def follow(session: Session, run_id: str) -> Stream:
    """The run's output as it comes; once it is drained, ``exit_code`` is the run's."""
    folder = f"{run_folder.WORKSPACE}/runs/{run_id}"
    command = session.inside(session.head, *NODE, "follow", folder)
    return session.hosts[session.head].stream(command)


def check_exit(session: Session, run_id: str, exit_code: int) -> None:
    """Raises :class:`RunError` for a run that ended badly, naming the logs of the ranks to look at."""
    if exit_code == run_folder.EXIT_STOPPED:
        raise RunError(Problem(run_id, "the run was stopped", "", f"its folder is {folder_of(session, run_id)}"))
    if exit_code:
        todo = f"look at {folder_of(session, run_id)}/logs, or fab logs --run {run_id} --rank 0"
        raise RunError(Problem(run_id, "the run failed", f"exit code {exit_code}", todo))


def folder_of(session: Session, run_id: str) -> str:
    """Where the run's folder lies, for people: a local path for the twin, ``host:path`` over ssh."""
    path = f"{workspace_on_host(session.cluster, session.states()[session.head].facts)}/runs/{run_id}"
    return path if session.cluster.settings.transport == "compose" else f"{session.head}:{path}"


def parse_rank(text: str) -> int:
    """A rank's number from the command line."""
    if not text.isdecimal():
        raise RequestError(Problem("--rank", "must be a whole number", repr(text), "give a rank's number"))
    return int(text)


def rank_log(session: Session, run_id: str, rank: int) -> bytes:
    """The log of one rank, from the node where it ran."""
    folder = f"{run_folder.WORKSPACE}/runs/{run_id}"
    plan = _read(session, session.head, f"{folder}/{run_folder.PLAN}")
    ranks = {entry["rank"]: entry["node"] for entry in json.loads(plan)["ranks"]}
    if rank not in ranks:
        raise RequestError(Problem("--rank", "is no rank of this run", str(rank), f"use 0 to {len(ranks) - 1}"))
    return _read(session, ranks[rank], f"{folder}/{run_folder.rank_log(rank)}")


def _read(session: Session, node: str, path: str) -> bytes:
    done = session.hosts[node].run(session.inside(node, "cat", path), timeout=_VERB_TIMEOUT_S)
    if done.exit_code:
        words = done.stderr.decode(errors="replace").strip()
        raise ClusterError(Problem(node, f"cannot read {path}", words, "see fab status"))
    return done.stdout


def fetch(session: Session, run_id: str, destination: Path, *, checkpoints: bool = False) -> Path:
    """Brings the run's folder home, the ranks' logs from every node; checkpoints only when asked for."""
    exclude = () if checkpoints else (f"--exclude={run_id}/{run_folder.CHECKPOINTS}",)

    def pack(node: str, host: Host) -> bytes:
        words = ("tar", "-C", f"{run_folder.WORKSPACE}/runs", *exclude, "-cz", run_id)
        done = host.run(session.inside(node, *words), timeout=None)
        # tar ends with 1 where a file grew while it was read: a run that goes on may be looked at.
        if done.exit_code > 1:
            done.checked(node)
        return done.stdout

    archives = session.each(pack)
    # The head's files come last: they win where nodes do not share a file system.
    for node in reversed(session.nodes):
        with tarfile.open(fileobj=io.BytesIO(archives[node])) as archive:
            archive.extractall(destination, filter="data")
    return destination / run_id
