"""Megatron v1.1.5's index maps: made once, in the head's container, and copied to the nodes that lack them."""

from __future__ import annotations

import hashlib
import json
import posixpath
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from tridock.command import Command
from tridock.contracts import run_folder
from tridock.engines import engine_of
from tridock.errors import ClusterError, Problem, RequestError
from tridock.experiment import Experiment
from tridock.ops.hosts.session import NODE
from tridock.ops.sync.files import DataFile
from tridock.ops.sync.operation import Synced
from tridock.ops.sync.scripts import drop_maps_command, read_command
from tridock.ops.sync.transfer import Held, asked, held, send
from tridock.plan import Plan
from tridock.remote import Host

_TIMEOUT_S: Final = 60.0


def bring_index_maps(synced: Synced, experiment: Experiment, plan: Plan) -> str:
    """Makes the maps of a run on the head, where they are not there, and copies them; returns a line about it.

    What goes wrong on a host is kept in ``synced``. Nothing is done for engines that need none, nor while the head's
    node is not up: a launch then has them made.
    """
    crew = synced.crew
    head = crew.nodes[0]
    program = engine_of(experiment).index_map_program(experiment, plan, run_folder.WORKSPACE)
    if program is None:
        return f"index maps: none are needed, engine {experiment.engine} finds its samples in memory"
    container = crew.states[head].container if crew.fit(head) else None
    if container is None or not container.running:
        up = f"fab up --hosts {crew.cluster.hostfile_path}"
        return f"index maps: not made, the node on {head} is not up; run {up} first, or the nodes make them at a launch"
    made = crew.each(lambda node, host: _make(synced, node, host, experiment, program), only=(head,))
    if head not in made:
        return f"index maps: not made, see what {head} says"
    count, names = made[head]
    folder = posixpath.dirname(names[0])
    keepers = {node: synced.sharing.keeper(node, folder) for node in crew.nodes if crew.fit(node)}
    keeper = keepers[head]
    others = tuple(node for node in keepers if keepers[node] == node and node not in (head, keeper))
    sent = _copy(synced, head, names, others) if others else ()
    said = f"made on {head}" if count else f"already on {head}"
    return f"index maps: {len(names) - 1} files, {said}" + (f", sent to {', '.join(sent)}" if sent else "")


def _make(
    synced: Synced, node: str, host: Host, experiment: Experiment, program: Sequence[str]
) -> tuple[int, list[str]]:
    """How many were made, and all that the run needs, by their paths below the workspace; the mark comes last."""
    # As the ranks have it; CPU ranks are the only ones, whatever the experiment asks for.
    python = Command((*NODE[:-1], *program), env=experiment.env)
    done = host.run(synced.crew.transport.exec_command(node, synced.crew.states[node].facts, python))
    if done.exit_code:
        told = Problem.parse(done.stderr.decode(errors="replace").strip().rpartition("\n")[2])
        if told is not None:
            raise RequestError(replace(told, where=f"{node}: {told.where}"))
        replace(done, command="make the index maps").checked(node)
    answer = json.loads(done.stdout)
    path = posixpath.relpath(posixpath.join(run_folder.WORKSPACE, experiment.data.data_path), run_folder.WORKSPACE)
    return answer["made"], [posixpath.join(posixpath.dirname(path), name) for name in answer["files"]]


def _copy(synced: Synced, head: str, names: Sequence[str], others: tuple[str, ...]) -> tuple[str, ...]:
    """From the head by way of this machine, what is lacking somewhere; the nodes that lacked some."""
    crew, mark = synced.crew, names[-1]
    with tempfile.TemporaryDirectory(prefix="tridock-maps-") as folder:
        wanted = [("any", name) for name in names]
        listed = crew.each(lambda node, host: held(node, host, crew.workspaces[node], wanted), (head,))
        if head not in listed:
            return ()
        files = [_file(name, listed[head], Path(folder)) for name in names]
        there = crew.each(lambda node, host: held(node, host, crew.workspaces[node], asked(files)), others)
        lacking = {node: _lacking(files, it) for node, it in there.items()}
        # Whose mark is another has maps of other data or of another split, under names that may come to be asked for.
        stale = {node for node, some in lacking.items() if mark in {file.name for file in some}}
        lacking = {node: tuple(files) if node in stale else some for node, some in lacking.items() if some}
        needed = {file.name for some in lacking.values() for file in some}
        fetched = crew.each(lambda node, host: _fetch(node, host, crew.workspaces[node], files, needed), (head,))
        if head not in fetched:
            return ()

        def bring(node: str, host: Host) -> None:
            workspace, to_send = crew.workspaces[node], [fetched[head][file.name] for file in lacking[node]]
            if node in stale:
                prefix = mark.removesuffix("_indexmap.sha256")
                host.run(drop_maps_command(workspace, prefix), timeout=_TIMEOUT_S).checked(node)
            send(node, host, workspace, to_send, there[node], lambda _: None)

        return tuple(crew.each(bring, only=tuple(lacking)))


def _lacking(files: Sequence[DataFile], there: Held) -> tuple[DataFile, ...]:
    return tuple(file for file in files if there.sha256.get(file.name) != file.sha256)


def _file(name: str, listed: Held, folder: Path) -> DataFile:
    size, sha256 = listed.sizes.get(name, 0), listed.sha256.get(name, "")
    return DataFile(name, folder / posixpath.basename(name), posixpath.dirname(name), size, 0, sha256)


def _fetch(node: str, host: Host, workspace: str, files: Sequence[DataFile], needed: set[str]) -> dict[str, DataFile]:
    return {file.name: _fetched(node, host, workspace, file) for file in files if file.name in needed}


def _fetched(node: str, host: Host, workspace: str, file: DataFile) -> DataFile:
    digest = hashlib.sha256()
    with file.source.open("wb") as opened:

        def take(chunk: bytes) -> None:
            opened.write(chunk)
            digest.update(chunk)

        done = host.read_into(take, read_command(workspace, file.name))
        replace(done, command=f"read {file.name}").checked(node)
    if digest.hexdigest() != file.sha256:
        raise ClusterError(Problem(node, f"{file.name} changed while it was read", "", "try again"))
    return replace(file, mtime_ns=file.source.stat().st_mtime_ns)
