"""Copies a run's folder to this machine from every node that has a part of it."""

import os
import re
import shlex
import sys
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import IO, Final

from tridock import interrupts
from tridock.command import Command
from tridock.contracts import heartbeat, run_folder
from tridock.contracts.checkpoint_files import Entry, Manifest, damage, read_manifest
from tridock.contracts.checkpoints import MANIFEST, saved_in
from tridock.contracts.files_below import entries, folder_below, open_below, write_below
from tridock.contracts.partials import partial_folder
from tridock.contracts.pretrained import CONFIG
from tridock.contracts.run_folder import write_atomic
from tridock.contracts.tokenizers import MORE_TEMPLATES, TOKENIZER_FILES
from tridock.errors import ClusterError, Problem, RequestError, TridockError, count, cut, printable
from tridock.experiment import Experiment, recorded_experiment, recorded_run
from tridock.experiment.generation_config import GENERATION_CONFIG
from tridock.experiment.inputs import tokenizer_folders
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.runs.cluster_runs import Run, choose_run
from tridock.progress import bars, size_text
from tridock.remote import Host

# A node without a part in the run has no folder.
_PACK = 'if [ -d "$1" ]; then shift; exec tar "$@"; fi'
# Of the names given, those that exist.
_PACK_FILES = """cd "$1" 2>/dev/null || exit 0
shift
for it; do [ -e "$it" ] && set -- "$@" "$it"; shift; done
[ $# = 0 ] || exec tar -czh "$@"
"""
_PACK_LISTS: Final = f'cd "$1" 2>/dev/null || exit 0; set -- */{MANIFEST}; [ -e "$1" ] || exit 0; exec tar -cz "$@"'


def newest_copy(
    hosts: Hosts, run_id: str | None, home: Path, check: Callable[[NodeClient, Run], object] = lambda *_: None
) -> Path:
    """Returns the folder of the named run, freshly fetched from the cluster, once ``check`` lets it pass.

    If no node knows the run or none is up, uses the copy below ``home`` from an earlier fetch.
    """
    try:
        client = NodeClient.of(hosts)
        run = choose_run(client, run_id, active=False)
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
    home = destination / run.run_id

    def bring(folder: Path) -> None:
        nonlocal found
        found = _bring_checkpoint(client, run, folder, home, iteration)

    return fetch(client, run, destination, also=bring), found


def fetch(
    client: NodeClient,
    run: Run,
    destination: Path,
    *,
    checkpoints: bool = False,
    also: Callable[[Path], object] | None = None,
) -> Path:
    """Copies the run's folder to this machine, with the ranks' logs from every running node; checkpoints are optional.

    Everything is first written to a temporary folder and moved into place at the end. A transfer that fails or is
    interrupted changes nothing, and each file is replaced atomically. A checkpoint is brought together from the nodes,
    and its files are compared with their hashes; the tokenizer of its data comes with them. Only files and folders are
    taken; a link in the copy that is here already is not followed. ``also`` adds to ``runs/RUN`` of the temporary
    folder that it gets.
    """
    home = destination / run.run_id
    there = Path(client.workspace(run.head), "runs", run.run_id)
    if not client.hosts.transport.separate_hosts and home.resolve() == there.resolve():
        return home  # the twin's nodes write to it directly
    todo = "free space there, or make it writable, then try again"
    with ClusterError.in_place_of(OSError, home, "could not be written", todo), partial_folder(home) as folder:
        left_out = _unpack_all(run, _download_run(client, run, folder, checkpoints), folder / "runs")
        if also is not None:
            also(folder)
        if checkpoints or also is not None:
            _bring_tokenizer(client, run, folder)
        with interrupts.delayed():
            _move(folder / "runs", run.run_id, destination)
    if left_out and not client.hosts.quiet:
        names = printable(cut(", ".join(sorted(left_out)), 300))
        print(f"note: not fetched, since they are links, special files or git's own: {names}", file=sys.stderr)
    return home


def _download_run(client: NodeClient, run: Run, folder: Path, checkpoints: bool) -> dict[str, Path]:
    """Downloads an archive of every node's part of the run's folder into ``folder``; empty ones from the others."""
    runs = f"{run_folder.WORKSPACE}/runs"
    exclude = [f"--exclude={run.run_id}/{heartbeat.FLIGHT_PIPES}*.pipe"]
    exclude += [] if checkpoints else [f"--exclude={run.run_id}/{run_folder.CHECKPOINTS}"]
    argv = ("sh", "-c", _PACK, "sh", f"{runs}/{run.run_id}", "-C", runs, *exclude, "-cz", run.run_id)
    # The total size is unknown: the nodes pack while they send.
    commands = {node: client.inside(node, *argv) for node in client.running()}
    return _download_all(client, commands, folder, ".tar.gz", f"fetch {run.run_id}", None)


def _download_all(
    client: NodeClient, commands: Mapping[str, Command], folder: Path, suffix: str, what: str, size: int | None
) -> dict[str, Path]:
    """Downloads what a command of each node prints into a file ``NODE`` + suffix of ``folder``."""
    archives = {node: folder / f"{node}{suffix}" for node in commands}
    with ExitStack() as stack, bars(quiet=client.hosts.quiet) as begin:
        bar = begin(what, size)
        # Opened here, not in the hosts' threads, so that no thread leaves a file behind after Ctrl-C.
        files = {node: stack.enter_context(path.open("wb")) for node, path in archives.items()}

        client.hosts.each(
            lambda node, host: _download(node, host, commands[node], files[node], bar), only=tuple(archives)
        )
    return archives


def _unpack_all(run: Run, archives: Mapping[str, Path], folder: Path) -> set[str]:
    """Assembles the run's folder below ``folder`` from every node's part; returns the names of what is left out."""
    left_out = set[str]()
    found: dict[Path, Manifest] = {}
    # The head's files come last: they take precedence if nodes do not share a file system.
    for node in sorted(archives, key=lambda node: node == run.head):
        if archives[node].stat().st_size:
            left_out |= _unpack(node, archives[node], folder)
            _note_checkpoints(folder / run.run_id / run_folder.CHECKPOINTS, found)
    if not (folder / run.run_id).exists():
        todo = "see tridock status for the runs"
        raise ClusterError(Problem(run.run_id, "its folder is on no node any more", "", todo))
    for checkpoint, manifest in found.items():
        ClusterError.raise_for(damage(checkpoint, manifest.here, manifest.here, read=True))
        write_atomic(checkpoint / MANIFEST, manifest.to_bytes())
    return left_out


def _bring_checkpoint(client: NodeClient, run: Run, folder: Path, home: Path, iteration: int | None) -> int:
    """Adds one checkpoint to the run's unpacked folder, without the files of it that are whole in ``home``."""
    unpacked = folder / "runs" / run.run_id
    saved = recorded_experiment(unpacked).train.checkpoint_folder or f"runs/{run.run_id}/{run_folder.CHECKPOINTS}"
    place = PurePosixPath(run_folder.WORKSPACE, saved)
    names, parts = _parts_of(client, str(place), folder)
    whole = [number for number, nodes in parts.items() if not _lacking(nodes)]
    ill = {number: it.ill for number in whole for it in parts[number].values() if it.ill is not None}
    newest = max((it for it in whole if it not in ill), default=max(whole, default=None))
    number = newest if iteration is None else iteration
    if number is None or number not in whole:
        got = "" if iteration is None else f"--iteration {iteration}"
        todo = f"whole are {', '.join(map(str, sorted(whole)))}"
        if not whole:
            todo = (
                "wait until it has saved (train.save_interval), or bring up the nodes that have the rest (tridock up)"
            )
        raise RequestError(Problem(run.run_id, "no whole checkpoint of it is on the nodes that are up", got, todo))
    sources: dict[str, tuple[str, Entry]] = {}
    for node in sorted(parts[number], key=lambda it: it == run.head):
        sources |= {name: (node, entry) for name, entry in parts[number][node].here.items()}
    entries = {name: entry for name, (_, entry) in sources.items()}
    there, target = (it / run_folder.CHECKPOINTS / names[number] for it in (home, unpacked))
    missing = [name for name in entries if any(damage(there, entries, [name], read=True))]
    size = sum(entries[name].size for name in missing)
    if not client.hosts.quiet:
        total = f"{count(len(entries), 'file')}, {size_text(sum(it.size for it in entries.values()))}"
        rest = "" if len(missing) == len(entries) else f"; {size_text(size)} are not here yet"
        print(f"{run.run_id}: fetch the checkpoint of iteration {number}, {total}{rest}", file=sys.stderr)
    asked: dict[str, list[str]] = defaultdict(list)
    for name in missing:
        asked[sources[name][0]].append(name)
    argv = ("tar", "-C", str(place / names[number]), "-c", "--null", "-T", "-")
    names_of = {node: "\0".join(own).encode(errors="surrogateescape") for node, own in asked.items()}
    commands = {node: client.inside(node, *argv, stdin=own) for node, own in names_of.items()}
    try:
        archives = _download_all(client, commands, folder, ".tar", f"fetch {run.run_id}", size)
    except ClusterError:
        if number in _parts_of(client, str(place), folder / "again")[0]:
            raise
        what, todo = "was removed while it was fetched", "try again; train.keep_checkpoints is how many a run keeps"
        raise ClusterError(Problem(run.run_id, f"the checkpoint of iteration {number} {what}", "", todo)) from None
    for node, archive in archives.items():
        _unpack(node, archive, target)
        archive.unlink()
    ClusterError.raise_for(damage(target, entries, missing, read=True))
    write_atomic(target / MANIFEST, Manifest(entries, ill=ill.get(number)).to_bytes())
    return number


def _parts_of(client: NodeClient, place: str, folder: Path) -> tuple[dict[int, str], dict[int, dict[str, Manifest]]]:
    """Returns the names of the checkpoints on the nodes, and what each node has of them, by iteration."""
    names: dict[int, str] = {}
    parts: dict[int, dict[str, Manifest]] = defaultdict(dict)
    commands = {node: client.inside(node, "sh", "-c", _PACK_LISTS, "sh", place) for node in client.running()}
    folder.mkdir(exist_ok=True)
    for node, archive in _download_all(client, commands, folder, ".lists.tar.gz", "look", None).items():
        if archive.stat().st_size:
            _unpack(node, archive, folder / "lists" / node)
            for number, path in saved_in(folder / "lists" / node).items():
                if isinstance(manifest := read_manifest(path), Manifest):
                    names[number], parts[number][node] = path.name, manifest
    return names, parts


def _lacking(nodes: Mapping[str, Manifest]) -> set[str]:
    """Returns the files of a checkpoint that only other nodes have."""
    here = {name for it in nodes.values() for name in it.here}
    return {name for it in nodes.values() for name in it.elsewhere} - here


def _bring_tokenizer(client: NodeClient, run: Run, folder: Path) -> None:
    """Adds the tokenizer that the head has beside the run's data, or with its weights, and how those generate."""
    unpacked, archive = folder / "runs" / run.run_id, folder / "tokenizer.tar.gz"
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
        with archive.open("wb") as file:
            _download(run.head, client.hosts[run.head], client.inside(run.head, *argv), file, lambda _: None)
        if archive.stat().st_size:
            _unpack(run.head, archive, unpacked / run_folder.FETCHED_TOKENIZER)


def _note_checkpoints(folder: Path, found: dict[Path, Manifest]) -> None:
    """Adds what the node that was unpacked last has of each checkpoint; other nodes may have the rest of it."""
    for path in saved_in(folder).values():
        manifest = read_manifest(path)
        if isinstance(manifest, Manifest):
            before = found.get(path, Manifest({}))
            found[path] = replace(manifest, elsewhere={**before.elsewhere, **manifest.elsewhere, **before.here})
            found[path] = found[path].with_more({**before.here, **manifest.here})


def _download(node: str, host: Host, command: Command, file: IO[bytes], progress: Callable[[int], None]) -> None:
    def write(chunk: bytes) -> None:
        file.write(chunk)
        progress(len(chunk))

    done = host.read_into(write, command)
    # tar exits with 1 if a file grew while it was read: an active run can be fetched.
    if done.exit_code != 1 or not file.tell():
        done.checked(node)


def _unpack(node: str, archive: Path, folder: Path) -> set[str]:
    """Unpacks files and folders below ``folder``, a hard link as a copy; returns the names of everything else."""
    left_out, umask = set[str](), _umask()
    try:
        for entry, content in entries(archive):
            if entry.islnk() and not _is_gits(entry.name):
                content = open_below(folder, entry.linkname)
            if _is_gits(entry.name):
                left_out.add(entry.name)
            elif content is not None:
                mode = 0o777 & ~umask if entry.mode & 0o100 else None
                with content:
                    write_below(folder, entry.name, content, mode, mtime=entry.mtime, durable=False)
            elif entry.isdir():
                with folder_below(folder, entry.name, make=True):
                    pass
            else:
                left_out.add(entry.name)
    except (tarfile.TarError, EOFError, zlib.error, RecursionError, RequestError) as error:
        todo = "remove what it names from the run's folder there, or try again"
        raise ClusterError(Problem(node, "sent an archive that cannot be unpacked", str(error), todo)) from None
    return left_out


def _umask() -> int:
    """Returns this process's umask. Setting it to learn it would change what other threads create meanwhile."""
    with suppress(OSError):
        if found := re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(found[1], 8)
    return 0o077


def _is_gits(name: str) -> bool:
    """Whether a file would make a git repository of its folder, or of a folder without ``.git``.

    A shell's prompt runs git where you look at a run's code, and a repository's configuration names programs to run.
    """
    parts = [part.lower() for part in PurePosixPath(name).parts]
    return ".git" in parts or parts[-1:] == ["head"]


def _move(folder: Path, run_id: str, destination: Path) -> None:
    """Moves a run's folder over an existing copy; new files replace old ones, each atomically, past no link."""
    for path, _, names, source in os.fwalk(folder / run_id):
        with folder_below(destination, str(Path(path).relative_to(folder)), make=True) as target:
            for name in names:
                os.replace(name, name, src_dir_fd=source, dst_dir_fd=target)
