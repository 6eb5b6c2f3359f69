"""``tridock data sync``: copies what an experiment reads, and Megatron's index maps, to every node that lacks it."""

import posixpath
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from rich.table import Column, Table

from tridock.contracts.codec import decode
from tridock.contracts.node_answers import IndexMaps
from tridock.contracts.run_folder import WORKSPACE
from tridock.engines import program_of
from tridock.errors import ClusterError, Problem, RequestError
from tridock.experiment import Experiment
from tridock.ops.hosts.client import NODE
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.runs.default_experiment import choose_experiment
from tridock.ops.runs.prepare import assumptions_for, prepare
from tridock.ops.sync.files import Absent, Chosen, Wanted, choose, manifest_sha256, of_experiment, refuse_damage
from tridock.ops.sync.rsync import OPERATOR, Nodes, Sharing, find_shared
from tridock.plan import Plan
from tridock.progress import bars, size_text
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


class Synced(NamedTuple):
    """A row for each node, and the nodes, with the errors of failed ones."""

    rows: tuple[Row, ...]
    nodes: Nodes
    sharing: Sharing


def sync(
    hosts: Hosts,
    chosen: Sequence[Chosen],
    absent: Sequence[Absent] = (),
    *,
    dry_run: bool = False,
    checksum: bool = False,
) -> Synced:
    """Makes the workspaces of all nodes contain the files as they are here; brings the nodes up before.

    A file is up to date if its size and time are equal; with ``checksum``, if its content is. A failed node does not
    stop the others; see :meth:`Nodes.failure`. Raises :class:`RequestError` if the files here are damaged, or if nodes
    lack what is ``absent`` here. ``dry_run`` determines what would be sent, and sends nothing.
    """
    project = hosts.cluster.project_folder
    stamps = {file: file.stamp() for file in chosen}
    nodes = Nodes(hosts, start=not dry_run)
    _refuse_absent(nodes, absent)
    with bars(quiet=hosts.quiet) as begin:
        places = tuple(dict.fromkeys(file.place for file in chosen))
        sharing = find_shared(nodes, project, places, make=not dry_run)
        rows = {node: Row(node) for node in hosts}
        lacking: dict[str, dict[str, list[Chosen]]] = {node: {} for node in hosts}

        def look(node: str, _host: Host) -> None:
            row, bar = rows[node], begin(f"look at {node}", None)
            row.free = min((sharing.free[node, place] for place in places), default=None)
            keepers = {place: sharing.keeper(node, place) for place in places}
            row.shared_with = tuple(dict.fromkeys(keeper for keeper in keepers.values() if keeper != node))
            for place in (it for it in places if keepers[it] == node):
                files = {it.below: it for it in chosen if it.place == place}
                names = list(files)
                if (node, place) in sharing.there:  # a dry run has not made it
                    names = nodes.differing(node, place, project / place, files, checksum=checksum)
                arrived = nodes.arrived(node, place, names)
                need = sum(max(0, stamps[files[name]][0] - arrived.get(name, 0)) for name in names)
                if need > (free := sharing.free[node, place]):
                    got = f"{size_text(need)} to send, {size_text(free)} free in {node}:{WORKSPACE}/{place}"
                    todo = "free some space there, or choose another folder (workdir in the settings)"
                    raise ClusterError(Problem(node, "has too little disk space for the data", got, todo))
                lacking[node][place] = [files[name] for name in names]
                row.sent, row.there = row.sent + len(names), row.there + len(files) - len(names)
                row.bytes += need
            bar.end()

        def send(node: str, _host: Host) -> None:
            row, files = rows[node], list(chain(*lacking[node].values()))
            started, done, size = time.monotonic(), 0, sum(stamps[it][0] for it in files)
            row.bytes, bar = 0, begin(f"send to {node}", size)
            for place, some in lacking[node].items():
                show = partial(lambda before, now: bar.set(before + now, size), done)
                row.bytes += nodes.send(node, place, project / place, [it.below for it in some], show)
                done += sum(stamps[it][0] for it in some)
            row.seconds = time.monotonic() - started
            if changed := [it.name for it in files if it.stamp() != stamps[it]]:
                todo = "wait until it is written, then try again"
                raise RequestError(Problem(name, "changed while it was sent", "", todo) for name in changed)

        nodes.each(look)
        if not dry_run:
            read = [
                it
                for it in chosen
                if manifest_sha256(it) and any(it in lacking[n].get(it.place, ()) for n in nodes.fit)
            ]
            refuse_damage(read, begin("read here", sum(stamps[it][0] for it in read)))
            nodes.each(send, only=[node for node, row in rows.items() if row.sent])
    return Synced(tuple(rows[it] if it in nodes.fit else Row(it, failed=True) for it in hosts), nodes, sharing)


def run(
    hosts: Hosts,
    paths: Sequence[str],
    config: Path | None,
    overrides: Sequence[str],
    *,
    dry_run: bool = False,
    checksum: bool = False,
) -> tuple[Synced, str]:
    """Copies the data to the nodes; returns the result, with the nodes' errors, and a line about index maps, if any.

    ``paths`` are files, folders or prefixes. An experiment's files are copied if it is named, or if no path is.
    """
    project = hosts.cluster.project_folder
    wanted: list[Wanted] = []
    absent: list[Absent] = []
    laid_out: tuple[Experiment, Plan] | None = None
    if config or not paths:
        cluster = hosts.cluster
        config, overrides, _ = choose_experiment(config, overrides, cluster.slots)
        prepared = prepare(config, cluster.slots, assumptions_for(cluster), overrides, force=True)
        experiment, plan = prepared.experiment, prepared.plan
        laid_out = experiment.resolved(plan.data_parallel_size), plan
        wanted, absent = of_experiment(project, config, experiment)
    synced = sync(hosts, choose(project, paths, wanted), absent, dry_run=dry_run, checksum=checksum)
    return synced, "" if laid_out is None or dry_run else send_index_maps(synced, *laid_out)


def _refuse_absent(nodes: Nodes, absent: Sequence[Absent]) -> None:
    """Raises :class:`RequestError` with what is neither here nor on the nodes that need it."""
    if not absent:
        return
    paths = [path for it in absent for path in it.paths]
    found = nodes.each(lambda node, _: {*nodes.run(node, "sh", "-c", THERE, "sync", *paths).split("\0")})
    problems = []
    for it in absent:
        without = [node for node, there in found.items() if not there.issuperset(it.paths)]
        if without and (it.everywhere or all(there.isdisjoint(it.paths) for there in found.values())):
            what = f"is neither here nor on {', '.join(without)}"
            problems.append(Problem(it.where, what, ", ".join(it.paths), it.todo))
    RequestError.raise_for(problems)


THERE: Final = 'for f; do [ ! -e "$f" ] || printf "%s\\0" "$f"; done\n'


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


def send_index_maps(synced: Synced, experiment: Experiment, plan: Plan) -> str:
    """Builds the missing index maps of a run on the head and copies them; returns a line about it.

    Errors are kept in ``synced``. Does nothing for engines that need no maps.
    """
    nodes, sharing = synced.nodes, synced.sharing
    head = nodes.client.head
    program = program_of(experiment).index_maps(experiment, plan, WORKSPACE)
    if program is None:
        return f"index maps: none are needed, engine {experiment.engine} finds its samples in memory"
    made = nodes.each(lambda node, _: _make(nodes, node, experiment, program), only=(head,))
    if head not in made:
        return f"index maps: not made, see the error of {head}"
    count, names = made[head].made, made[head].files
    prefix = posixpath.relpath(posixpath.join(WORKSPACE, experiment.data.prefix), WORKSPACE)
    folder = posixpath.dirname(prefix) or "."
    keeper = sharing.keeper(head, folder)
    others = [it for it in nodes.fit if sharing.keeper(it, folder) == it and it not in (head, keeper)]
    sent = _copy(nodes, head, folder, names, others) if others else ()
    origin = f"made on {head}" if count else f"already on {head}"
    return f"index maps: {len(names) - 1} files, {origin}" + (f", sent to {', '.join(sent)}" if sent else "")


def _make(nodes: Nodes, node: str, experiment: Experiment, program: Sequence[str]) -> IndexMaps:
    """Returns how many were built, and the names of all that the run needs; the marker comes last."""
    # The environment of CPU ranks, the only ones here, whatever the experiment requests.
    env = [f"{name}={value}" for name, value in experiment.env.items()]
    done = nodes.client.run_inside(node, "env", *env, *NODE[:-1], *program)
    try:
        answer = decode(IndexMaps, done.stdout)
    except ValueError:
        replace(done, command="make the index maps").checked(node)
        raise nodes.client.other_version(node, "another form of answer to index_maps") from None
    if answer.problems:
        raise RequestError(replace(problem, where=f"{node}: {problem.where}") for problem in answer.problems)
    return answer


def _copy(nodes: Nodes, head: str, folder: str, names: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    """Copies missing maps from the head through this machine; returns the nodes that lacked some."""
    mark = names[-1]
    sums = nodes.each(lambda node, _: _sums(nodes, node, folder, names), only=(head, *others))
    if head not in sums:
        return ()
    wanted = sums.pop(head)
    missing = {node: [name for name in names if it.get(name) != wanted.get(name)] for node, it in sums.items()}
    # A different marker means maps of other data or another split, under names that may be needed later.
    stale = [node for node, some in missing.items() if mark in some]
    missing = {node: list(names) if node in stale else some for node, some in missing.items() if some}
    needed = [name for name in names if any(name in some for some in missing.values())]
    with tempfile.TemporaryDirectory(prefix="tridock-maps-") as temporary:
        if needed and not nodes.each(lambda node, _: nodes.fetch(node, folder, needed, Path(temporary)), only=(head,)):
            return ()

        def send_to(node: str, _host: Host) -> None:
            if node in stale:
                nodes.script(node, DROP_MAPS, folder, mark.removesuffix("_indexmap.sha256"))
            nodes.send(node, folder, Path(temporary), missing[node], lambda _: None)

        return tuple(nodes.each(send_to, only=missing))


DROP_MAPS: Final = 'set -eu; cd -- "$1"; rm -f -- "$2"_*_indexmap_*.npy "$2"_indexmap.sha256\n'
SUMS: Final = 'cd -- "$1" || exit 0; shift; sha256sum --zero -- "$@" 2>/dev/null || true\n'


def _sums(nodes: Nodes, node: str, folder: str, names: Sequence[str]) -> dict[str, str]:
    """Returns the SHA-256 of those of the files that are there."""
    printed = nodes.run(node, "sh", "-c", SUMS, "sums", folder, *names, timeout=None)
    lines = (line.partition("  ") for line in printed.split("\0"))
    return {name: digest for digest, _, name in lines if name}
