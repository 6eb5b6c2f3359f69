"""Reserves a spare node for one run: the first to ask gets it, until the run's ranks have started there."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from tridock.contracts import environment, run_folder
from tridock.contracts.file_locks import wait_for_lock
from tridock.node.agent.processes import find_processes

RESERVED_S: Final = 300.0
_LOCK_S: Final = 60.0
_NAME: Final = "reservation.json"


def busy_with(run_id: str, *, reserve: bool = False, folder: Path | None = None) -> tuple[str, ...]:
    """Returns the other runs that have processes here or have reserved this node, sorted.

    ``reserve``: reserves the node for ``run_id`` if there are none. A file lock in ``folder`` (the container's own
    state) orders requests that come at the same time. A reservation expires after ``RESERVED_S`` seconds.
    """
    with _locked(_path(folder)) as file:
        others = {process.run_id for process in find_processes()}
        if holder := _holder(file):
            others.add(holder)
        others.discard(run_id)
        if reserve and not others:
            _write(file, json.dumps({"run": run_id, "until": time.time() + RESERVED_S}))
    return tuple(sorted(others))


def release(run_id: str, folder: Path | None = None) -> None:
    """Ends the reservation of a run whose ranks have started: from now on its processes show that the node is busy."""
    path = _path(folder)
    if path.exists():
        with _locked(path) as file:
            if _holder(file) == run_id:
                _write(file, "")


def _path(folder: Path | None) -> Path:
    return (folder or Path(os.environ.get(environment.STATE) or Path(run_folder.SSHD_PID).parent)) / _NAME


@contextmanager
def _locked(path: Path) -> Iterator[IO[str]]:
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+") as file:
        wait_for_lock(file.fileno(), path, _LOCK_S)
        yield file


def _holder(file: IO[str]) -> str | None:
    """Returns the run that currently holds the reservation."""
    found = json.loads(file.read() or '{"run": "", "until": 0}')
    return str(found["run"]) if found["until"] > time.time() else None


def _write(file: IO[str], text: str) -> None:
    file.seek(0)
    file.write(text)
    file.truncate()
