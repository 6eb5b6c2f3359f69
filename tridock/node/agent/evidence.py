"""What this node can tell of a run that failed: ends of files, and what the kernel said meanwhile."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import time
from pathlib import Path
from typing import Final, NoReturn

from tridock.contracts import run_folder
from tridock.contracts.events import Event, events_of, read_lines

_LOG_BYTES: Final = 8000
_LOG_LINES: Final = 60
_METRICS_BYTES: Final = 1 << 16
_STEPS: Final = 8
_KERNEL_LINES: Final = 5
_KMSG: Final = Path("/dev/kmsg")
_ABOUT_MEMORY: Final = re.compile(r"Out of memory|oom-kill|oom_reaper|Killed process")


def evidence(folder: Path) -> dict[str, object]:
    """For ``json.dumps``; a node that had no part in the run has nothing to tell."""
    if not folder.is_dir():
        return {}
    logs = {path.stem.removeprefix("rank-"): path for path in (folder / "logs").glob("rank-*.log")}
    training = [entry for entry in read_lines(folder / run_folder.METRICS, _METRICS_BYTES) if "split" not in entry]
    return {
        "events": _text(folder / run_folder.EVENTS),
        "logs": {rank: _end(path) for rank, path in logs.items() if rank.isdecimal()},
        "launcher": _end(folder / run_folder.LAUNCHER_LOG, _log_offset(folder)),
        "metrics": training[-_STEPS:],
        "plan": _plan(folder),
        "kernel": _kernel(folder),
        "flights": last_collectives(folder),
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _log_offset(folder: Path) -> int:
    """Where the launcher's output of the last attempt begins: a restarted run's earlier failures stand before it."""
    restarts = events_of(folder, Event.RUN_RESTARTED)
    return int(str(restarts[-1].get("log_bytes", 0))) if restarts else 0


def _end(path: Path, first: int = 0) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(first, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-_LOG_LINES:])


def _plan(folder: Path) -> object:
    try:
        plan = json.loads((folder / run_folder.PLAN).read_text())
        return {"ranks": plan.get("ranks", []), "memory": plan.get("memory") or {}}
    except (FileNotFoundError, ValueError):
        return None


def _kernel(folder: Path) -> list[str]:
    """The kernel's messages about memory since the run's folder was made; none where they may not be read."""
    try:
        descriptor = os.open(_KMSG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    since = time.clock_gettime(time.CLOCK_MONOTONIC) - (time.time() - _made(folder))
    found: list[str] = []
    try:
        while True:
            # A record a read: priority,number,microseconds since the start of the system,flags;message
            head, _, message = os.read(descriptor, 1 << 13).decode(errors="replace").partition(";")
            if int(head.split(",")[2]) / 1e6 >= since and _ABOUT_MEMORY.search(message):
                found.append(message.splitlines()[0])
    except (OSError, ValueError, IndexError):
        pass  # the end of what there is
    finally:
        os.close(descriptor)
    return found[-_KERNEL_LINES:]


def _made(folder: Path) -> float:
    """When the run was put there: nothing writes that file again."""
    path = folder / run_folder.EXPERIMENT
    return path.stat().st_mtime if path.exists() else folder.stat().st_mtime


_WORLD: Final = "0"
"""The name of the process group of all ranks."""


def last_collectives(folder: Path) -> dict[int, int]:
    """The number of the last collective of all ranks that each rank began; none where nothing was recorded."""
    prefix = folder / run_folder.FLIGHT
    found: dict[int, int] = {}
    for path in prefix.parent.glob(f"{prefix.name}*"):
        number = path.name.removeprefix(prefix.name)
        if number.isdecimal() and (last := _last(path)) is not None:
            found[int(number)] = last
    return found


def _last(path: Path) -> int | None:
    try:
        dump = _Plain(io.BytesIO(path.read_bytes())).load()
        entries = [entry for entry in dump["entries"] if str(entry["process_group"][0]) == _WORLD]
        return max(int(entry["collective_seq_id"]) for entry in entries)
    except (OSError, EOFError, ValueError, LookupError, TypeError, pickle.UnpicklingError):
        return None  # cut short when its process was ended, or of a form that another torch writes


class _Plain(pickle.Unpickler):
    """Lists, dicts, numbers and texts, of which a dump is made: a run's folder may hold anybody's files."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")
