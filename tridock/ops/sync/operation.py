"""The operation: fingerprints here, a look at every host, what is lacking sent, all hosts at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from tridock.errors import ClusterError, Problem, TridockError
from tridock.ops.hosts.session import Session
from tridock.ops.sync.files import Chosen, DataFile
from tridock.ops.sync.hashes import fingerprint
from tridock.ops.sync.host_pool import Crew
from tridock.ops.sync.shared import Sharing, find_shared
from tridock.ops.sync.transfer import Held, arrived, asked, held, send
from tridock.remote import Host


@dataclass(slots=True)
class Row:
    """What was done for one node: files sent and those that were there, bytes and seconds of the sending.

    Of a file that was cut off before, only the rest is counted.
    """

    node: str
    sent: int = 0
    there: int = 0
    bytes: int = 0
    seconds: float = 0.0
    free: int | None = None
    """Bytes free before, where the data goes; the least of its folders'."""
    shared_with: tuple[str, ...] = ()
    """Nodes that some of it is shared with, and got it for both; OPERATOR for the project's own folder."""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Synced:
    """A row for each node, and what went wrong on some of them."""

    rows: tuple[Row, ...]
    crew: Crew
    sharing: Sharing

    @property
    def failure(self) -> TridockError | None:
        """What went wrong, on whichever hosts, up to now."""
        return self.crew.failure()


def sync(
    session: Session, chosen: Sequence[Chosen], only: tuple[str, ...] | None = None, *, dry_run: bool = False
) -> Synced:
    """Makes the workspaces of all nodes (or of ``only`` some) hold the files as they are here.

    A host that fails does not stop the others: look at :attr:`Synced.failure`. Raises :class:`RequestError` where the
    files here cannot be read. ``dry_run`` finds out what would be sent, and sends nothing.
    """
    project = session.cluster.project_folder
    with _bars() as bars:
        sizes = sum(item.source.stat().st_size for item in chosen)
        files = fingerprint(project, chosen, bars("read here", sizes))
        crew = Crew(session, only)
        places = tuple(dict.fromkeys(file.place for file in files))
        sharing = find_shared(crew, project, places, make=not dry_run)

        def bring(node: str, host: Host) -> Row:
            return _bring(node, host, crew.workspaces[node], files, sharing, bars, dry_run=dry_run)

        rows = crew.each(bring)
    return Synced(tuple(rows.get(node) or Row(node, failed=True) for node in crew.nodes), crew, sharing)


def _bring(
    node: str, host: Host, workspace: str, files: Sequence[DataFile], sharing: Sharing, bars: Bars, *, dry_run: bool
) -> Row:
    keepers = {file.name: sharing.keeper(node, file.place) for file in files}
    mine = [file for file in files if keepers[file.name] == node]
    others = tuple(dict.fromkeys(keeper for keeper in keepers.values() if keeper != node))
    free = [sharing.free[node, file.place] for file in files if (node, file.place) in sharing.free]
    row = Row(node, free=min(free, default=None), shared_with=others)
    if not mine:
        return row
    look = bars(f"look at {node}", None)
    there = held(node, host, workspace, asked(mine))
    look.end()
    lacking = [file for file in mine if there.sha256.get(file.name) != file.sha256]
    row.sent, row.there = len(lacking), len(mine) - len(lacking)
    row.bytes = sum(file.size - arrived(file, there) for file in lacking)
    _refuse(node, workspace, lacking, there, sharing)
    if lacking and not dry_run:
        started = time.monotonic()
        send(node, host, workspace, lacking, there, bars(f"send to {node}", row.bytes))
        row.seconds = time.monotonic() - started
    return row


def _refuse(node: str, workspace: str, files: Sequence[DataFile], there: Held, sharing: Sharing) -> None:
    """Before the first byte is sent: what could not be written there, and data that there is no room for."""
    strange = [name for name in there.strange if name in {file.name for file in files}]
    problems = [
        Problem(node, "has something else where a file of the data belongs", f"{workspace}/{name}", "remove it there")
        for name in strange
    ]
    for place in dict.fromkeys(file.place for file in files):
        need = sum(file.size - arrived(file, there) for file in files if file.place == place)
        free = sharing.free.get((node, place), need)
        if need > free:
            got = f"{_shown(need)} to send, {_shown(free)} free in {workspace}/{place}"
            todo = "free some space there, or choose another folder (workdir in the settings)"
            problems.append(Problem(node, "has too little room for the data", got, todo))
    if problems:
        raise ClusterError(problems)


def _shown(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


@dataclass(frozen=True, slots=True)
class Bar:
    """One line on the terminal; called with the bytes that are done."""

    progress: Progress
    task: TaskID

    def __call__(self, count: int) -> None:
        self.progress.advance(self.task, count)

    def end(self) -> None:
        """Takes the line away."""
        self.progress.remove_task(self.task)


Bars = Callable[[str, int | None], Bar]
"""Begins a bar of so many bytes, or of nobody knows how many."""


@contextmanager
def _bars() -> Iterator[Bars]:
    """Bars on a terminal's standard error; elsewhere they would be noise."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield lambda what, size: Bar(progress, progress.add_task(what, total=size))
