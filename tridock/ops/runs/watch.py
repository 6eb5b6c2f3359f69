"""Sources of updates about a watched run: its folder on this machine, or its head over existing SSH."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tridock.contracts import run_folder
from tridock.contracts.codec import decode
from tridock.contracts.node_answers import RunUpdate
from tridock.contracts.records import check_run
from tridock.errors import ClusterError, Problem
from tridock.ops.runs.this_machine import node_argv, node_environment

if TYPE_CHECKING:
    from tridock.ops.hosts.session import Session
    from tridock.ops.runs.registry import Run

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
        argv = [*node_argv(), "run-update", str(folder), *_position(known)]
        done = subprocess.run(argv, env=node_environment(1), capture_output=True, check=False)
        if done.returncode:
            what = "its records cannot be read"
            got = done.stderr.decode(errors="replace").strip()[-300:]
            raise ClusterError(Problem(str(folder), what, got, "check whether the folder still exists"))
        return decode(RunUpdate, done.stdout)

    return ask


def ask_head(session: Session, run: Run) -> Callable[[Position], RunUpdate]:
    """Returns a function that reads updates from the head of a run."""
    path = f"{run_folder.WORKSPACE}/runs/{run.run_id}"

    def ask(known: Position) -> RunUpdate:
        return session.ask(run.head, RunUpdate, "run-update", path, *_position(known), timeout=_TIMEOUT_S)

    return ask


def _position(known: Position) -> tuple[str, ...]:
    return f"--offset={known.offset}", f"--inode={known.inode}", f"--events={known.event_count}"
