"""A spare is one run's: the first that claims it has it, until its ranks are there and say so themselves."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from tridock.contracts import run_folder
from tridock.node.agent.processes import find_processes

CLAIM_S: Final = 300.0
_NAME: Final = "claim.json"


def busy_with(run_id: str, *, claim: bool = False, folder: Path | None = None) -> list[str]:
    """The other runs that this node is at, or is claimed by, in order; ``claim``: if there are none, it is this run's.

    Two that claim at the same time are told apart by the lock of a file in ``folder`` (the container's own state). A
    claim whose run never comes ends after ``CLAIM_S`` seconds.
    """
    with _opened(_path(folder)) as file:
        others = {process.run_id for process in find_processes()}
        if claimed := _claimed(file):
            others.add(claimed)
        others.discard(run_id)
        if claim and not others:
            _write(file, json.dumps({"run": run_id, "until": time.time() + CLAIM_S}))
    return sorted(others)


def release(run_id: str, folder: Path | None = None) -> None:
    """The run's ranks are here: from now on they say whose the node is, and no claim outlives them."""
    path = _path(folder)
    if path.exists():
        with _opened(path) as file:
            if _claimed(file) == run_id:
                _write(file, "")


def _path(folder: Path | None) -> Path:
    return (folder or Path(os.environ.get("TRIDOCK_STATE") or Path(run_folder.SSHD_PID).parent)) / _NAME


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _claimed(file: IO[str]) -> str | None:
    """The run that has it now."""
    found = json.loads(file.read() or '{"run": "", "until": 0}')
    return str(found["run"]) if found["until"] > time.time() else None


def _write(file: IO[str], text: str) -> None:
    file.seek(0)
    file.write(text)
    file.truncate()
