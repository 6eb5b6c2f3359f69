"""Lists the runs of this node's workspace with their states."""

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from tridock.contracts import run_folder
from tridock.contracts.forms import is_node_name
from tridock.contracts.node_answers import RunInfo
from tridock.contracts.records import last_iterations, read_object, read_plan, slots_of
from tridock.contracts.run_state import exit_code_of, is_supervised, state_of
from tridock.node.agent.processes import find_runs


def list_runs(workspace: Path, *, sizes: bool = False) -> list[RunInfo]:
    """Returns the runs of a workspace, oldest first; with ``sizes``, what their folders take on disk."""
    folders = [f for f in (workspace / "runs").glob("*") if run_folder.is_run_id(f.name) and f.is_dir()]
    here = find_runs()
    found = [_describe(folder, has_processes=folder.name in here, sizes=sizes) for folder in folders]
    return sorted(found, key=lambda run: (run.created, run.run_id))


def _describe(folder: Path, *, has_processes: bool, sizes: bool) -> RunInfo:
    training = last_iterations(folder)
    *name, date, time_of_day, _ = folder.name.split("-")
    hosts = run_folder.read_text(folder / run_folder.HOSTFILE).splitlines()
    state, exited = state_of(folder), exit_code_of(folder) is not None
    by = read_object(folder / run_folder.MANIFEST).get("started_by")
    return RunInfo(
        run_id=folder.name,
        state=state,
        exit_code=exit_code_of(folder),
        created=f"{date}-{time_of_day}",
        metrics=training[-1] if training else None,
        experiment="-".join(name),
        nodes=tuple(name for line in hosts for name in line.split()[:1] if is_node_name(name)),
        train_iters=_train_iters(folder),
        duration_s=_duration(folder),
        age_s=_seconds(time.time(), _time_of(folder / run_folder.METRICS)),
        slots=slots_of(read_plan(folder)) if state.is_active or (has_processes and not exited) else {},
        has_processes=has_processes and not exited,
        started_by=by if isinstance(by, str) else "",
        disk_bytes=_disk_bytes(folder) if sizes else None,
        folder_id=_identity(folder / run_folder.EXPERIMENT),
    )


def _disk_bytes(folder: Path) -> int:
    """Returns the bytes of the disk that a folder's files take."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # removed since
                total += 512 * os.lstat(f"{parent}/{name}").st_blocks
    return total


def _identity(path: Path) -> str:
    """Returns what two file systems do not have alike: a file's number and the time when it was written."""
    try:
        found = path.stat()
    except OSError:
        return ""
    return f"{found.st_ino}-{found.st_mtime_ns}"


def _train_iters(folder: Path) -> int | None:
    # Tridock writes this file with one field per line. Importing a YAML parser would take longer than this module.
    experiment = run_folder.read_text(folder / run_folder.EXPERIMENT)
    found = re.search(r"^ +train_iters: (\d+)$", experiment, re.MULTILINE)
    return int(found[1]) if found else None


def _duration(folder: Path) -> float | None:
    """Returns the seconds from the run's first file to its exit code or to now; None if it ended without one."""
    end = _time_of(folder / run_folder.EXIT_CODE) or (time.time() if is_supervised(folder) else None)
    return _seconds(end, _time_of(folder / run_folder.EXPERIMENT))


def _seconds(end: float | None, begin: float | None) -> float | None:
    return None if end is None or begin is None else round(max(0.0, end - begin), 1)


def _time_of(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
