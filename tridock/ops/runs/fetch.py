"""Copies a run's folder to this machine from every node that has a part of it."""

import sys
import tempfile
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from tridock.contracts import run_folder
from tridock.errors import ClusterError, Problem
from tridock.ops.hosts.session import Session
from tridock.ops.runs.registry import Run
from tridock.progress import bars
from tridock.remote import Host

if sys.version_info < (3, 11, 4):
    from backports import tarfile  # has extraction filters
else:
    import tarfile

# From here on the user may notice the wait.
_LARGE = 10_000_000
# A node without a part in the run has no folder.
_PACK = 'if [ -d "$1" ]; then shift; exec tar "$@"; fi'


def fetch(session: Session, run: Run, destination: Path, *, checkpoints: bool = False) -> Path:
    """Copies the run's folder to this machine, with the ranks' logs from every running node; checkpoints are optional.

    Everything is first written to a temporary folder and moved into place at the end. A transfer that fails or is
    interrupted changes nothing, and each file is replaced atomically.
    """
    home = destination / run.run_id
    there = Path(session.workspace(run.head), "runs", run.run_id)
    if not session.transport.separate_hosts and home.resolve() == there.resolve():
        return home  # the twin's nodes write to it directly
    try:
        destination.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch.", dir=destination) as folder:
            _fetch(session, run, Path(folder), checkpoints)
            _move(Path(folder) / run.run_id, home)
    except OSError as error:
        todo = "free space there, or make it writable, then try again"
        raise ClusterError(Problem(str(home), "could not be written", error.strerror or str(error), todo)) from None
    return home


def _fetch(session: Session, run: Run, folder: Path, checkpoints: bool) -> None:
    """Assembles the run's folder below ``folder`` from every node's part."""
    runs = f"{run_folder.WORKSPACE}/runs"
    exclude = () if checkpoints else (f"--exclude={run.run_id}/{run_folder.CHECKPOINTS}",)
    argv = ("sh", "-c", _PACK, "sh", f"{runs}/{run.run_id}", "-C", runs, *exclude, "-cz", run.run_id)
    archives = {node: folder / f"{node}.tar.gz" for node in session.running()}
    with ExitStack() as stack, bars(quiet=session.quiet) as begin:
        # The total size is unknown: the nodes pack while they send.
        count = begin(f"fetch {run.run_id}", None, hidden_below=_LARGE)
        # Opened here, not in the hosts' threads, so that no thread leaves a file behind after Ctrl-C.
        files = {node: stack.enter_context(path.open("wb")) for node, path in archives.items()}

        def download(node: str, host: Host) -> None:
            _download(session, node, host, argv, files[node], count)

        session.each(download, only=tuple(archives))
    # The head's files come last: they take precedence if nodes do not share a file system.
    for node in sorted(archives, key=lambda node: node == run.head):
        if archives[node].stat().st_size:
            part = folder / f"{node}.part"
            _unpack(node, archives[node], part)
            _move(part / run.run_id, folder / run.run_id)
        archives[node].unlink()
    if not (folder / run.run_id).exists():
        todo = "see tridock status for the runs"
        raise ClusterError(Problem(run.run_id, "its folder is on no node any more", "", todo))


def _download(
    session: Session, node: str, host: Host, argv: tuple[str, ...], file: IO[bytes], count: Callable[[int], None]
) -> None:
    def write(chunk: bytes) -> None:
        file.write(chunk)
        count(len(chunk))

    done = host.read_into(write, session.inside(node, *argv))
    # tar exits with 1 if a file grew while it was read: an active run can be fetched.
    if done.exit_code != 1 or not file.tell():
        done.checked(node)


def _unpack(node: str, archive: Path, folder: Path) -> None:
    try:
        with tarfile.open(archive, "r:gz") as opened:
            opened.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError, zlib.error) as error:
        todo = "remove what it names from the run's folder there, or try again"
        raise ClusterError(Problem(node, "sent an archive that cannot be unpacked", str(error), todo)) from None


def _move(source: Path, target: Path) -> None:
    """Moves a folder over an existing copy; new files replace old ones, each atomically."""
    if source.is_dir() and not source.is_symlink() and target.is_dir():
        for entry in source.iterdir():
            _move(entry, target / entry.name)
    else:
        source.replace(target)
