"""``tridock data sync``: copies data, and Megatron's index maps, to every host that lacks it, by hash."""

from __future__ import annotations

import hashlib
import posixpath
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rich.table import Column, Table

from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.codec import decode
from tridock.contracts.node_answers import IndexMaps
from tridock.engines import engine_of
from tridock.errors import ClusterError, Problem, RequestError, TridockError
from tridock.experiment import Experiment
from tridock.ops.hosts.session import NODE, Session
from tridock.ops.runs.default_experiment import choose_experiment
from tridock.ops.runs.preflight import data_files
from tridock.ops.runs.prepare import assumptions_for, prepare
from tridock.ops.sync.files import Chosen, DataFile, choose, fingerprint, of_experiment
from tridock.ops.sync.shared import OPERATOR, HostPool, Sharing, find_shared
from tridock.ops.sync.transfer import RemoteFiles, arrived, asked, drop_maps_command, read_command, remote_files, send
from tridock.plan import Plan
from tridock.progress import Bars, bars, size_text
from tridock.remote import Host


@dataclass(slots=True)
class Row:
    """The result for one node: files sent, files already there, and the bytes and seconds of sending.

    A resumed file counts only the bytes sent now.
    """

    node: str
    sent: int = 0
    there: int = 0
    bytes: int = 0
    seconds: float = 0.0
    free: int | None = None
    """Bytes free before, at the data's location; the minimum over its folders."""
    shared_with: tuple[str, ...] = ()
    """Nodes that share some of the files; OPERATOR for the project's own folder."""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Synced:
    """A row for each node, and the errors of failed ones."""

    rows: tuple[Row, ...]
    pool: HostPool
    sharing: Sharing

    @property
    def failure(self) -> TridockError | None:
        """The errors of all hosts so far; None if there are none."""
        return self.pool.failure()


def sync(
    session: Session, chosen: Sequence[Chosen], only: tuple[str, ...] | None = None, *, dry_run: bool = False
) -> Synced:
    """Makes the workspaces of all nodes (or of ``only`` some) contain the files as they are here.

    A failed host does not stop the others; see :attr:`Synced.failure`. Raises :class:`RequestError` if the files here
    cannot be read. ``dry_run`` determines what would be sent, and sends nothing.
    """
    project = session.cluster.project_folder
    with bars(quiet=session.quiet) as begin:
        sizes = sum(item.source.stat().st_size for item in chosen)
        files = fingerprint(project, chosen, begin("read here", sizes))
        pool = HostPool(session, only)
        places = tuple(dict.fromkeys(file.place for file in files))
        sharing = find_shared(pool, project, places, make=not dry_run)

        def send_to(node: str, host: Host) -> Row:
            return _send_missing(node, host, pool.workspaces[node], files, sharing, begin, dry_run=dry_run)

        rows = pool.each(send_to)
    return Synced(tuple(rows.get(node) or Row(node, failed=True) for node in pool.nodes), pool, sharing)


def _send_missing(
    node: str, host: Host, workspace: str, files: Sequence[DataFile], sharing: Sharing, begin: Bars, *, dry_run: bool
) -> Row:
    keepers = {file.name: sharing.keeper(node, file.place) for file in files}
    mine = [file for file in files if keepers[file.name] == node]
    others = tuple(dict.fromkeys(keeper for keeper in keepers.values() if keeper != node))
    free = [sharing.free[node, file.place] for file in files if (node, file.place) in sharing.free]
    row = Row(node, free=min(free, default=None), shared_with=others)
    if not mine:
        return row
    bar = begin(f"look at {node}", None)
    there = remote_files(node, host, workspace, asked(mine))
    bar.end()
    missing = [file for file in mine if there.sha256.get(file.name) != file.sha256]
    row.sent, row.there = len(missing), len(mine) - len(missing)
    row.bytes = sum(file.size - arrived(file, there) for file in missing)
    _refuse(node, workspace, missing, there, sharing)
    if missing and not dry_run:
        started = time.monotonic()
        send(node, host, workspace, missing, there, begin(f"send to {node}", row.bytes))
        row.seconds = time.monotonic() - started
    return row


def _refuse(node: str, workspace: str, files: Sequence[DataFile], there: RemoteFiles, sharing: Sharing) -> None:
    """Raises before the first byte is sent if data cannot be written there or does not fit on the disk."""
    strange = [name for name in there.strange if name in {file.name for file in files}]
    problems = [
        Problem(node, "has something else where a file of the data belongs", f"{workspace}/{name}", "remove it there")
        for name in strange
    ]
    for place in dict.fromkeys(file.place for file in files):
        need = sum(file.size - arrived(file, there) for file in files if file.place == place)
        free = sharing.free.get((node, place), need)
        if need > free:
            got = f"{size_text(need)} to send, {size_text(free)} free in {workspace}/{place}"
            todo = "free some space there, or choose another folder (workdir in the settings)"
            problems.append(Problem(node, "has too little disk space for the data", got, todo))
    if problems:
        raise ClusterError(problems)


def run(
    session: Session,
    paths: Sequence[str],
    config: Path | None,
    overrides: Sequence[str],
    say: Callable[[str | Table], object],
    *,
    dry_run: bool = False,
) -> None:
    """Copies the data to the hosts and prints the result; raises the hosts' errors at the end.

    ``paths`` are files, folders or prefixes. An experiment's files are copied if it is named, or if no path is.
    """
    project = session.cluster.project_folder
    chosen: tuple[Chosen, ...] = choose(project, paths)
    laid_out: tuple[Experiment, Plan] | None = None
    if config or not paths:
        cluster = session.cluster
        config, overrides, _ = choose_experiment(config, overrides, cluster.slots)
        prepared = prepare(config, cluster.slots, assumptions_for(cluster), overrides, force=True)
        experiment, plan = prepared.experiment, prepared.plan
        laid_out = experiment.resolved(plan.data_parallel_size), plan
        chosen += of_experiment(project, config, experiment.data.data_path, data_files(experiment))
    synced = sync(session, tuple({item.name: item for item in chosen}.values()), dry_run=dry_run)
    say(table(synced.rows, dry_run=dry_run))
    if laid_out is not None and not dry_run:
        say(send_index_maps(synced, *laid_out))
    if failure := synced.failure:
        raise failure


def table(rows: Sequence[Row], *, dry_run: bool) -> Table:
    """Returns a table with one row per node."""
    sent = "to send" if dry_run else "sent"
    shown = Table("node", sent, "there", "MB", "seconds", "MB free", Column(overflow="fold"))
    for row in rows:
        if row.failed:
            shown.add_row(row.node, *[""] * 5, "failed")
            continue
        free = "" if row.free is None else f"{row.free / 1e6:,.0f}"
        own = [str(row.sent), str(row.there), f"{row.bytes / 1e6:,.1f}", f"{row.seconds:.1f}", free]
        if row.shared_with and not row.sent + row.there:
            own = [""] * 5  # reported in another row
        shown.add_row(row.node, *own, ", ".join(map(_whose, row.shared_with)))
    return shown


def _whose(keeper: str) -> str:
    return "the project's folder" if keeper == OPERATOR else f"shared with {keeper}"


_TIMEOUT_S: Final = 60.0


def send_index_maps(synced: Synced, experiment: Experiment, plan: Plan) -> str:
    """Builds the missing index maps of a run on the head and copies them; returns a line about it.

    Host errors are kept in ``synced``. Does nothing for engines that need no maps, or while the head's node is not up:
    a launch then builds them.
    """
    pool = synced.pool
    head = pool.nodes[0]
    program = engine_of(experiment).index_map_program(experiment, plan, run_folder.WORKSPACE)
    if program is None:
        return f"index maps: none are needed, engine {experiment.engine} finds its samples in memory"
    container = pool.states[head].container if pool.fit(head) else None
    if container is None or not container.running:
        up = f"tridock up {pool.cluster.hosts_option}"
        return f"index maps: not made, the node on {head} is not up; run {up} first, or the nodes make them at a launch"
    made = pool.each(lambda node, host: _make(synced, node, host, experiment, program), only=(head,))
    if head not in made:
        return f"index maps: not made, see the error of {head}"
    count, names = made[head]
    folder = posixpath.dirname(names[0])
    keepers = {node: synced.sharing.keeper(node, folder) for node in pool.nodes if pool.fit(node)}
    keeper = keepers[head]
    others = tuple(node for node in keepers if keepers[node] == node and node not in (head, keeper))
    sent = _copy(synced, head, names, others) if others else ()
    origin = f"made on {head}" if count else f"already on {head}"
    return f"index maps: {len(names) - 1} files, {origin}" + (f", sent to {', '.join(sent)}" if sent else "")


def _make(
    synced: Synced, node: str, host: Host, experiment: Experiment, program: Sequence[str]
) -> tuple[int, list[str]]:
    """Returns how many were built, and all that the run needs, by paths below the workspace; the marker comes last."""
    # The environment of CPU ranks, the only ones here, whatever the experiment requests.
    python = Command((*NODE[:-1], *program), env=experiment.env)
    done = host.run(synced.pool.transport.exec_command(node, synced.pool.states[node].facts, python))
    try:
        answer = decode(IndexMaps, done.stdout)
    except ValueError:
        replace(done, command="make the index maps").checked(node)
        what, todo = "its image has another version of Tridock", "run tridock image, then tridock up"
        raise ClusterError(Problem(node, what, "another form of answer to index_maps", todo)) from None
    if answer.problems:
        raise RequestError(replace(problem, where=f"{node}: {problem.where}") for problem in answer.problems)
    path = posixpath.relpath(posixpath.join(run_folder.WORKSPACE, experiment.data.data_path), run_folder.WORKSPACE)
    return answer.made, [posixpath.join(posixpath.dirname(path), name) for name in answer.files]


def _copy(synced: Synced, head: str, names: Sequence[str], others: tuple[str, ...]) -> tuple[str, ...]:
    """Copies missing maps from the head through this machine; returns the nodes that lacked some."""
    pool, mark = synced.pool, names[-1]
    with tempfile.TemporaryDirectory(prefix="tridock-maps-") as folder:
        wanted = [("any", name) for name in names]
        listed = pool.each(lambda node, host: remote_files(node, host, pool.workspaces[node], wanted), (head,))
        if head not in listed:
            return ()
        files = [_file(name, listed[head], Path(folder)) for name in names]
        there = pool.each(lambda node, host: remote_files(node, host, pool.workspaces[node], asked(files)), others)
        missing = {node: _missing(files, it) for node, it in there.items()}
        # A different marker means maps of other data or another split, under names that may be needed later.
        stale = {node for node, some in missing.items() if mark in {file.name for file in some}}
        missing = {node: tuple(files) if node in stale else some for node, some in missing.items() if some}
        needed = {file.name for some in missing.values() for file in some}
        fetched = pool.each(lambda node, host: _fetch(node, host, pool.workspaces[node], files, needed), (head,))
        if head not in fetched:
            return ()

        def send_to(node: str, host: Host) -> None:
            workspace, to_send = pool.workspaces[node], [fetched[head][file.name] for file in missing[node]]
            if node in stale:
                prefix = mark.removesuffix("_indexmap.sha256")
                host.run(drop_maps_command(workspace, prefix), timeout=_TIMEOUT_S).checked(node)
            send(node, host, workspace, to_send, there[node], lambda _: None)

        return tuple(pool.each(send_to, only=tuple(missing)))


def _missing(files: Sequence[DataFile], there: RemoteFiles) -> tuple[DataFile, ...]:
    return tuple(file for file in files if there.sha256.get(file.name) != file.sha256)


def _file(name: str, listed: RemoteFiles, folder: Path) -> DataFile:
    size, sha256 = listed.sizes.get(name, 0), listed.sha256.get(name, "")
    return DataFile(name, folder / posixpath.basename(name), posixpath.dirname(name), size, 0, sha256)


def _fetch(node: str, host: Host, workspace: str, files: Sequence[DataFile], needed: set[str]) -> dict[str, DataFile]:
    return {file.name: _fetched(node, host, workspace, file) for file in files if file.name in needed}


def _fetched(node: str, host: Host, workspace: str, file: DataFile) -> DataFile:
    digest = hashlib.sha256()
    with file.source.open("wb") as opened:

        def write(chunk: bytes) -> None:
            opened.write(chunk)
            digest.update(chunk)

        done = host.read_into(write, read_command(workspace, file.name))
        replace(done, command=f"read {file.name}").checked(node)
    if digest.hexdigest() != file.sha256:
        raise ClusterError(Problem(node, f"{file.name} changed while it was read", "", "try again"))
    return replace(file, mtime_ns=file.source.stat().st_mtime_ns)
