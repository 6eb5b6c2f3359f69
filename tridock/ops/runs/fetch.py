"""Copies a run's folder to this machine from every node that has a part of it."""

import shlex
import shutil
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Final

from tridock import interrupts
from tridock.contracts import heartbeat, run_folder
from tridock.contracts.checkpoint_files import Manifest, read_manifest
from tridock.contracts.checkpoints import saved_in
from tridock.contracts.partials import partial_folder
from tridock.contracts.pretrained import CONFIG
from tridock.contracts.tokenizers import MORE_TEMPLATES, TOKENIZER_FILES
from tridock.errors import ClusterError, Problem, RequestError, TridockError, cut, printable
from tridock.experiment import Experiment, recorded_experiment, recorded_run
from tridock.experiment.generation_config import GENERATION_CONFIG
from tridock.experiment.inputs import tokenizer_folders
from tridock.ops.hosts.client import NodeClient, everywhere
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.runs.archives import download, move, unpack
from tridock.ops.runs.cluster_runs import Run, choose_run, list_runs
from tridock.ops.runs.saved_checkpoints import SavedCheckpoints

# A node without a part in the run has no folder.
_PACK: Final = 'if [ -d "$1" ]; then shift; exec tar "$@"; fi'
# Of the names given, those that exist.
_PACK_FILES: Final = """cd "$1" 2>/dev/null || exit 0
shift
for it; do [ -e "$it" ] && set -- "$@" "$it"; shift; done
[ $# = 0 ] || exec tar -czh "$@"
"""


def newest_copy(
    hosts: Hosts, run_id: str | None, home: Path, check: Callable[[NodeClient, Run], object] = lambda *_: None
) -> Path:
    """Returns the folder of the named run, freshly fetched from the cluster, once ``check`` lets it pass.

    If none of ``hosts`` knows it, the other nodes of the hostfile are asked. If no node knows the run or none is up,
    uses the copy below ``home`` from an earlier fetch.
    """
    client = NodeClient.of(hosts)
    try:
        try:
            run = choose_run(client, run_id, active=False)
        except RequestError as unknown:
            if run_id is None:
                raise
            client = everywhere(client)
            try:
                run = choose_run(client, run_id, active=False)
            except ClusterError:
                raise unknown from None
    except TridockError as error:
        if run_id is not None and (home / run_id).is_dir():
            return home / run_id
        if run_id is None or not isinstance(error, RequestError):
            raise
        bring = f"bring one of other hosts: tridock fetch --hosts HOSTFILE --run {shlex.quote(run_id)} --checkpoints"
        raise RequestError(replace(it, todo=f"{it.todo}; {bring}") for it in error.problems) from None
    check(client, run)
    return fetch(client, run, home)


def fetch_checkpoint(client: NodeClient, run: Run, destination: Path, iteration: int | None) -> tuple[Path, int | None]:
    """Copies the run's folder to this machine with one checkpoint, the newest whole one or that of an iteration.

    What is here of it already stays. Returns the folder and the iteration; None where the folder is the nodes' own.
    Raises :class:`RequestError` if the nodes that are up have no such checkpoint.
    """
    found = iteration

    def bring(folder: Path, here: Path) -> set[str]:
        nonlocal found
        unpacked = folder / "runs" / run.run_id
        saved = _saved(client, run, folder, recorded_experiment(unpacked).train.checkpoint_folder)
        found = saved.choose(iteration)
        saved.bring(found, folder, here, unpacked / run_folder.CHECKPOINTS)
        return set()

    return _fetch(client, run, destination, bring), found


def fetch(client: NodeClient, run: Run, destination: Path, *, checkpoints: bool = False) -> Path:
    """Copies the run's folder to this machine, with the ranks' logs from every running node; checkpoints are optional.

    Everything is first written to a temporary folder and moved into place at the end, each file atomically; if the
    run's own files do not all arrive, or at Ctrl-C, nothing changes. Only files and folders are taken; a link in the
    copy that is here already is not followed. Every checkpoint is brought together from the nodes, without what is here
    of it already; the tokenizer of its data comes with them. Raises :class:`ClusterError`, once the rest is in place,
    with the checkpoints that did not come, or are not whole: of an active run these are a note, since one may be saved.
    """
    if not checkpoints:
        return _fetch(client, run, destination, None)
    failed: list[Problem] = []
    torn: list[Problem] = []

    def bring(folder: Path, here: Path) -> set[str]:
        unpacked = folder / "runs" / run.run_id
        try:
            own = recorded_experiment(unpacked).train.checkpoint_folder
        except RequestError:  # your own program, another version's run, or a folder that lost the file
            own = None
        saved = _saved(client, run, folder, own)
        left_out = _add_other_checkpoints(client, run, folder, [it.name for it in saved.by_iteration.values()])
        for iteration in reversed(saved.whole):  # an active run removes the oldest
            try:
                saved.bring(iteration, folder, here, unpacked / run_folder.CHECKPOINTS)
            except ClusterError as error:
                shutil.rmtree(
                    unpacked / run_folder.CHECKPOINTS / saved.by_iteration[iteration].name, ignore_errors=True
                )
                failed.extend(error.problems)
        torn.extend(saved.problems)
        return left_out

    home = _fetch(client, run, destination, bring)
    if torn and not any(it.run_id == run.run_id and it.state.is_active for it in list_runs(client)):
        failed += torn
    elif not client.hosts.quiet:
        for problem in torn:
            print(f"note: not fetched: {problem.where}, which {problem.what} ({problem.got})", file=sys.stderr)
    ClusterError.raise_for(failed)
    return home


def _fetch(client: NodeClient, run: Run, destination: Path, bring: Callable[[Path, Path], set[str]] | None) -> Path:
    """Copies the run's folder without its checkpoints. ``bring`` adds some to ``runs/RUN`` in the first folder, which
    is temporary; the second one is the copy that is here already. It returns the names of what it has left out."""
    home = destination / run.run_id
    there = Path(client.workspace(run.head), "runs", run.run_id)
    if not client.hosts.transport.separate_hosts and home.resolve() == there.resolve():
        return home  # the twin's nodes write to it directly
    todo = "free space there, or make it writable, then try again"
    with ClusterError.in_place_of(OSError, home, "could not be written", todo), partial_folder(home) as folder:
        pipes = f"{run.run_id}/{heartbeat.FLIGHT_PIPES}*.pipe"
        left_out = _add(client, run, folder, run.run_id, [pipes, f"{run.run_id}/{run_folder.CHECKPOINTS}"])
        if not (folder / "runs" / run.run_id).exists():
            what = "its folder is on no node any more"
            raise ClusterError(Problem(run.run_id, what, "", "see tridock status for the runs"))
        if bring is not None:
            left_out |= bring(folder, home / run_folder.CHECKPOINTS)
            _bring_tokenizer(client, run, folder)
        with interrupts.delayed():
            move(folder / "runs", run.run_id, destination)
    if left_out and not client.hosts.quiet:
        names = printable(cut(", ".join(sorted(left_out)), 300))
        print(f"note: not fetched, since they are links, special files or git's own: {names}", file=sys.stderr)
    return home


def _saved(client: NodeClient, run: Run, folder: Path, checkpoint_folder: str | None) -> SavedCheckpoints:
    """Looks for the run's checkpoints, which may be in a folder of their own."""
    place = checkpoint_folder or f"runs/{run.run_id}/{run_folder.CHECKPOINTS}"
    return SavedCheckpoints.look(client, run.run_id, PurePosixPath(run_folder.WORKSPACE, place), folder, [run.head])


def _add(client: NodeClient, run: Run, folder: Path, part: str, exclude: Collection[str]) -> set[str]:
    """Adds ``part`` of the nodes' ``runs`` to that in ``folder``; returns the names of what is left out."""
    runs = f"{run_folder.WORKSPACE}/runs"
    argv = ("sh", "-c", _PACK, "sh", f"{runs}/{part}", "-C", runs, *(f"--exclude={it}" for it in exclude), "-cz", part)
    # The total size is unknown: the nodes pack while they send.
    commands = {node: client.inside(node, *argv) for node in client.running()}
    archives = download(client, commands, folder, ".tar.gz", f"fetch {run.run_id}", None)
    left_out = set[str]()
    # The head's files come last: they take precedence if nodes do not share a file system.
    for node in sorted(archives, key=lambda node: node == run.head):
        if archives[node].stat().st_size:
            left_out |= unpack(node, archives[node], folder / "runs")
    return left_out


def _add_other_checkpoints(client: NodeClient, run: Run, folder: Path, names: Collection[str]) -> set[str]:
    """Adds everything else in the run's folder of checkpoints: what your own program has saved, and pointers."""
    part = f"{run.run_id}/{run_folder.CHECKPOINTS}"
    left_out = _add(client, run, folder, part, [f"{part}/{name}" for name in names])
    for path in saved_in(folder / "runs" / part).values():
        if isinstance(read_manifest(path), Manifest):  # saved a moment ago: one node's part of it
            shutil.rmtree(path)
    return left_out


def _bring_tokenizer(client: NodeClient, run: Run, folder: Path) -> None:
    """Adds the tokenizer that the head has beside the run's data, or with its weights, and how those generate."""
    unpacked = folder / "runs" / run.run_id
    try:
        experiment = recorded_run(unpacked)
    except RequestError:  # another version's run, or a folder that lost the file: its checkpoints still count
        if not client.hosts.quiet:
            name = f"{run.run_id}/{run_folder.EXPERIMENT}"
            print(f"note: fetched without its tokenizer: {name} is missing or not readable", file=sys.stderr)
        return
    if not isinstance(experiment, Experiment):
        return
    files = [PurePosixPath(name) for name in (experiment.data.vocab_file, experiment.data.merge_file) if name]
    known = (*TOKENIZER_FILES, MORE_TEMPLATES, CONFIG, GENERATION_CONFIG)
    wanted = [(PurePosixPath(place), known) for place in tokenizer_folders(experiment)]
    for place, names in (*wanted, *((it.parent, (it.name,)) for it in files)):
        argv = ("sh", "-c", _PACK_FILES, "sh", str(run_folder.WORKSPACE / place), *names)
        commands = {run.head: client.inside(run.head, *argv)}
        archive = download(client, commands, folder, ".tokenizer.tar.gz", "fetch its tokenizer", None)[run.head]
        if archive.stat().st_size:
            unpack(run.head, archive, unpacked / run_folder.FETCHED_TOKENIZER)
