"""Records of a run's ranks as processes: when each started and how it ended, written on the node where it ran.

``<run>/.processes/<node>/rank-<N>`` appears before the rank's program starts, and is complete a moment after its end. A
node agent that looks ten times a second may never see a rank that fails at once; its record stays.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tridock.contracts import heartbeat, run_folder

FOLDER: Final = ".processes"


@dataclass(frozen=True)
class ProcessRecord:
    """One rank's process; times by the node's monotonic clock in seconds, as in a heartbeat."""

    rank: int
    pid: int
    start_ticks: int
    """Clock ticks since boot, which distinguish it from a later process with the same pid."""
    container: str
    """As :func:`this_container` named it: a container that starts again has none of these processes."""
    started_s: float
    memory_kills: int
    """What the node's counter of out-of-memory kills was at its start."""
    ended_s: float | None = None
    """None while it runs."""
    wait_status: int | None = None
    """As in wait(2); None where it is not known."""


def this_container() -> str:
    """Returns a name that this container has from its start to its end."""
    boot = run_folder.read_text(Path("/proc/sys/kernel/random/boot_id")).strip()
    try:
        return f"{boot}-{heartbeat.start_ticks(1)}"
    except OSError:  # /proc hides the processes of others
        return boot


def folder_of(folder: Path, node: str) -> Path:
    """Returns the folder of a node's records: nodes may share the run's."""
    return folder / FOLDER / node


def write(folder: Path, node: str, record: ProcessRecord) -> None:
    """Writes the record of a rank on this node, atomically."""
    path = folder_of(folder, node) / f"rank-{record.rank}"
    run_folder.write_atomic(path, json.dumps(asdict(record)).encode(), durable=False)


def read(path: Path) -> ProcessRecord | None:
    """Returns the record in a file; None if there is none, or one of an earlier container."""
    try:
        record = ProcessRecord(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    return record if record.container == this_container() else None


def names(folder: Path, node: str) -> dict[int, Path]:
    """Returns the files of a node's records by rank."""
    try:
        found = list(folder_of(folder, node).iterdir())
    except OSError:
        return {}
    ranks = {path: path.name.partition("-")[2] for path in found if path.name.startswith("rank-")}
    return {int(rank): path for path, rank in ranks.items() if rank.isdecimal()}


def remove(folder: Path, node: str = "") -> None:
    """Removes the records of a node, or of all, whose ranks will be started again."""
    with suppress(FileNotFoundError):
        shutil.rmtree(folder_of(folder, node))
