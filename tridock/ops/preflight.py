"""What has to hold on the nodes before a run's first file is written there: its data, a port for the rendezvous."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tridock.errors import ClusterError, Problem, RequestError
from tridock.experiment import Experiment
from tridock.ops.session import Session
from tridock.remote import Host

_TIMEOUT_S = 60.0

Fingerprint = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Preflight:
    """What the nodes answered: the port to use on the head, the data's SHA-256 by path, the image's manifest."""

    port: int
    data_sha256: Mapping[str, str]
    image_manifest: object


def check_nodes(session: Session, config: Path, experiment: Experiment) -> Preflight:
    """Asks every node once. Raises :class:`RequestError` where data are missing or differ from the head's.

    A port that is taken is a :class:`ClusterError`.
    """
    files = data_files(experiment)
    wanted = experiment.launch.master_port
    head_words = ("--head", *(() if wanted is None else ("--port", str(wanted))))

    def ask(node: str, _: Host) -> dict[str, Any]:
        words = ("preflight", *(head_words if node == session.head else ()), "--", *files)
        answer: dict[str, Any] = json.loads(session.node_verb(node, *words, timeout=_TIMEOUT_S).checked(node).stdout)
        return answer

    answers = session.each(ask)
    problems = list(_data_problems(session, config, files, {node: answer["files"] for node, answer in answers.items()}))
    if problems:
        raise RequestError(problems)
    head = answers[session.head]
    if "port_problem" in head:
        raise ClusterError(_port_problem(session.head, config, wanted, head["port_problem"]))
    hashes = {name: found["sha256"] for name, found in head["files"].items() if found["sha256"] is not None}
    return Preflight(head["port"], hashes, head["image_manifest"])


def data_files(experiment: Experiment) -> dict[str, str]:
    """The files that every rank reads, each with the field that names it."""
    data = experiment.data
    files = {f"{data.data_path}.bin": "data.data_path", f"{data.data_path}.idx": "data.data_path"}
    if experiment.engine == "megatron-deepspeed":
        files |= {name: f"data.{field}" for field in ("vocab_file", "merge_file") if (name := getattr(data, field))}
    return files


def _data_problems(
    session: Session, config: Path, files: Mapping[str, str], found: Mapping[str, Mapping[str, Fingerprint | None]]
) -> Iterator[Problem]:
    expected = found[session.head]
    for field in dict.fromkeys(files.values()):
        names = [name for name in files if files[name] == field]
        push = f"fab push --hosts {session.cluster.hostfile_path} --path {Path(names[0]).parent}"
        where, todo = f"{config}: {field}", f"bring the data to the nodes: {push}"
        for node, there in found.items():
            missing = [name for name in names if there[name] is None]
            other = [name for name in names if there[name] != expected[name] and expected[name] is not None]
            if missing:
                yield Problem(where, f"is not on node {node}", ", ".join(missing), todo)
            elif other:
                got = ", ".join(_shown(name, there[name]) for name in other)
                yield Problem(where, f"has another content on node {node} than on the head", got, todo)


def _shown(name: str, found: Fingerprint | None) -> str:
    assert found is not None
    return f"{found['sha256']}  {name}" if found["sha256"] is not None else f"{found['bytes']} bytes  {name}"


def _port_problem(head: str, config: Path, wanted: int | None, text: str) -> Problem:
    told = Problem.parse(text)
    assert told is not None
    if wanted is None:
        return Problem(f"{head}: {told.where}", told.what, told.got, told.todo)
    what = f"{told.where} {told.what} on {head}"
    return Problem(f"{config}: launch.master_port", what, told.got, "change it or leave it out")
