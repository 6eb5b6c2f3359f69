"""Lists the runs of this node's workspace with their states."""

import re
import time
from pathlib import Path

from tridock.contracts import run_folder
from tridock.contracts.node_answers import RunInfo
from tridock.contracts.records import read_lines, read_plan, slots_of
from tridock.contracts.run_state import exit_code_of, is_supervised, state_of

_TAIL_BYTES = 1 << 16


def list_runs(workspace: Path) -> list[RunInfo]:
    """Returns the runs of a workspace, oldest first."""
    folders = [f for f in (workspace / "runs").glob("*") if run_folder.is_run_id(f.name) and f.is_dir()]
    return sorted(map(_describe, folders), key=lambda run: (run.created, run.run_id))


def _describe(folder: Path) -> RunInfo:
    training = [entry for entry in read_lines(folder / run_folder.METRICS, _TAIL_BYTES) if "split" not in entry]
    *name, date, time_of_day, _ = folder.name.split("-")
    hosts = run_folder.read_text(folder / run_folder.HOSTFILE).splitlines()
    state = state_of(folder)
    return RunInfo(
        run_id=folder.name,
        state=state,
        exit_code=exit_code_of(folder),
        created=f"{date}-{time_of_day}",
        metrics=training[-1] if training else None,
        experiment="-".join(name),
        nodes=tuple(line.split()[0] for line in hosts if line.strip()),
        train_iters=_train_iters(folder),
        duration_s=_duration(folder),
        age_s=_seconds(time.time(), _time_of(folder / run_folder.METRICS)),
        slots=slots_of(read_plan(folder)) if state.is_active else {},
    )


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
    except FileNotFoundError:
        return None
