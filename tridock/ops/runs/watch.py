"""Sources of updates about a watched run: its folder on this machine, or its head over existing SSH."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tridock.contracts import run_folder
from tridock.contracts.node_answers import RunUpdate
from tridock.contracts.records import check_run
from tridock.ops.hosts.client import NodeClient
from tridock.ops.runs.cluster_runs import Run
from tridock.ops.runs.this_machine import ask_here

_TIMEOUT_S = 120.0


class Position(Protocol):
    """The position up to which a run's records have been read."""

    offset: int
    inode: int
    event_count: int


def ask_folder(folder: Path) -> Callable[[Position], RunUpdate]:
    """Returns a function that reads updates from a run's folder here. Raises :class:`RequestError` if it is none."""
    check_run(folder)

    def ask(known: Position) -> RunUpdate:
        return ask_here(RunUpdate, "run-update", str(folder), *_position(known), where=str(folder), timeout=_TIMEOUT_S)

    return ask


def ask_head(client: NodeClient, run: Run) -> Callable[[Position], RunUpdate]:
    """Returns a function that reads updates from the head of a run."""
    path = f"{run_folder.WORKSPACE}/runs/{run.run_id}"

    def ask(known: Position) -> RunUpdate:
        return client.ask(run.head, RunUpdate, "run-update", path, *_position(known), timeout=_TIMEOUT_S)

    return ask


def _position(known: Position) -> tuple[str, ...]:
    return f"--offset={known.offset}", f"--inode={known.inode}", f"--events={known.event_count}"
