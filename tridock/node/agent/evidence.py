"""Evidence of this node about a failed run: the ends of its files, and the kernel's messages during the run."""

import io
import os
import pickle
import re
import time
from pathlib import Path
from typing import Any, Final, NoReturn

from tridock.contracts import run_folder
from tridock.contracts.events import Event, event_lines, events_of
from tridock.contracts.node_answers import Evidence
from tridock.contracts.records import last_iterations, read_plan
from tridock.contracts.rotated_logs import tail

_LOG_BYTES: Final = 8000
_LOG_LINES: Final = 60
_PRINTED_BYTES: Final = 1 << 20
_OF_RANK: Final = re.compile(rb"^(?:\S+: )?\[rank(\d{1,6})\]: (.*)$", re.DOTALL)
"""torch's prefix of each line of an uncaught exception in a rank, after an optional node prefix."""
_STEPS: Final = 8
_KERNEL_LINES: Final = 5
_KMSG: Final = Path("/dev/kmsg")
_ABOUT_MEMORY: Final = re.compile(r"Out of memory|oom-kill|oom_reaper|Killed process")


def evidence(folder: Path) -> Evidence:
    """Returns the evidence of this node; empty if the node had no part in the run."""
    if not folder.is_dir():
        return Evidence()
    logs = {path.stem.removeprefix("rank-"): path for path in (folder / "logs").glob("rank-*.log")}
    return Evidence(
        events=event_lines(folder),
        logs={int(rank): _end(path) for rank, path in logs.items() if rank.isdecimal()},
        printed=_printed(folder / run_folder.LAUNCHER_LOG, _log_offset(folder)),
        launcher=_end(folder / run_folder.LAUNCHER_LOG, _log_offset(folder)),
        metrics=tuple(last_iterations(folder)[-_STEPS:]),
        plan=_plan(folder),
        kernel=_kernel(folder),
        last_collectives=last_collectives(folder),
    )


def _log_offset(folder: Path) -> int:
    """Returns the offset of the last attempt in the launcher's log; earlier attempts have other failures."""
    restarts = events_of(folder, Event.RUN_RESTARTED)
    return int(restarts[-1].get("log_bytes", 0)) if restarts else 0


def _end(path: Path, first: int = 0) -> str:
    return "\n".join(tail(path, _LOG_BYTES, first).decode(errors="replace").splitlines()[-_LOG_LINES:])


def _printed(path: Path, first: int) -> dict[int, str]:
    found: dict[int, list[str]] = {}
    for line in tail(path, _PRINTED_BYTES, first).split(b"\n"):
        if match := _OF_RANK.match(line):
            found.setdefault(int(match[1]), []).append(match[2].decode(errors="replace").rstrip())
    return {rank: "\n".join(lines[-_LOG_LINES:]) for rank, lines in found.items()}


def _plan(folder: Path) -> dict[str, Any]:
    plan = read_plan(folder)
    return {"ranks": plan.get("ranks", []), "memory": plan.get("memory") or {}} if plan else {}


def _kernel(folder: Path) -> tuple[str, ...]:
    """The kernel's messages about memory since the run was created; none if this process may not read them."""
    try:
        descriptor = os.open(_KMSG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ()
    since = time.clock_gettime(time.CLOCK_MONOTONIC) - (time.time() - _created(folder))
    found: list[str] = []
    try:
        while True:
            # One record per read: priority,number,microseconds since boot,flags;message
            head, _, message = os.read(descriptor, 1 << 13).decode(errors="replace").partition(";")
            if int(head.split(",")[2]) / 1e6 >= since and _ABOUT_MEMORY.search(message):
                found.append(message.splitlines()[0])
    except (OSError, ValueError, IndexError):
        pass  # no more records
    finally:
        os.close(descriptor)
    return tuple(found[-_KERNEL_LINES:])


def _created(folder: Path) -> float:
    """Returns the run's creation time, that of its experiment file, which never changes afterwards."""
    path = folder / run_folder.EXPERIMENT
    return path.stat().st_mtime if path.exists() else folder.stat().st_mtime


_WORLD: Final = "0"
"""The name of the process group of all ranks."""


def last_collectives(folder: Path) -> dict[int, int]:
    """The number of the last collective of all ranks that each rank began; empty without flight records."""
    prefix = folder / run_folder.FLIGHT
    found: dict[int, int] = {}
    for path in prefix.parent.glob(f"{prefix.name}*"):
        number = path.name.removeprefix(prefix.name)
        if number.isdecimal() and (last := last_collective(path)) is not None:
            found[int(number)] = last
    return found


def last_collective(path: Path) -> int | None:
    """The number of the last collective of all ranks in a rank's dump; None if it has none or is not whole."""
    try:
        dump = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        entries = [entry for entry in dump["entries"] if str(entry["process_group"][0]) == _WORLD]
        return max(int(entry["collective_seq_id"]) for entry in entries)
    except Exception:
        return None  # missing, truncated when its process was killed, or written by an unknown version of torch


class _PlainUnpickler(pickle.Unpickler):
    """Reads only lists, dicts, numbers and strings: a run's folder may contain anybody's files."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")
