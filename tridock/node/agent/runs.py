"""The runs of this node's workspace, each with its state."""

from __future__ import annotations

import re
import time
from pathlib import Path

from tridock.contracts import run_folder
from tridock.contracts.events import read_lines
from tridock.contracts.run_state import exit_code_of, is_supervised, state_of

_TAIL_BYTES = 1 << 16


def list_runs(workspace: Path) -> list[dict[str, object]]:
    """One object a run, oldest first: run_id, state, exit_code, created (yyyymmdd-hhmmss), metrics (the last).

    Also experiment, nodes, train_iters, duration_s (until now, or the end), age_s (of the last step): None if unknown.
    ``state`` is a :class:`~tridock.contracts.run_state.RunState`.
    """
    folders = [f for f in (workspace / "runs").glob("*") if run_folder.is_run_id(f.name) and f.is_dir()]
    runs = [_describe(folder) for folder in folders]
    return sorted(runs, key=lambda run: (str(run["created"]), str(run["run_id"])))


def _describe(folder: Path) -> dict[str, object]:
    training = [entry for entry in read_lines(folder / run_folder.METRICS, _TAIL_BYTES) if "split" not in entry]
    # The id ends in -yyyymmdd-hhmmss-xxxx: it sorts by the moment of creation whatever the experiment's name.
    created = "-".join(folder.name.split("-")[-3:-1])
    return {
        "run_id": folder.name,
        "state": state_of(folder),
        "exit_code": exit_code_of(folder),
        "created": created,
        "metrics": training[-1] if training else None,
        "experiment": "-".join(folder.name.split("-")[:-3]),
        "nodes": _nodes(folder),
        "train_iters": _train_iters(folder),
        "duration_s": _duration(folder),
        "age_s": _seconds(time.time(), _time_of(folder / run_folder.METRICS)),
    }


def _nodes(folder: Path) -> list[str]:
    return [line.split()[0] for line in _text(folder / run_folder.HOSTFILE).splitlines() if line.strip()]


def _train_iters(folder: Path) -> int | None:
    # Written by ourselves, a field a line: a parser of YAML would take longer to import than all of this.
    found = re.search(r"^ +train_iters: (\d+)$", _text(folder / run_folder.EXPERIMENT), re.MULTILINE)
    return int(found[1]) if found else None


def _duration(folder: Path) -> float | None:
    """From the first file of the run to its exit code, or until now; None for one that nobody ended."""
    end = _time_of(folder / run_folder.EXIT_CODE) or (time.time() if is_supervised(folder) else None)
    return _seconds(end, _time_of(folder / run_folder.EXPERIMENT))


def _seconds(end: float | None, begin: float | None) -> float | None:
    return None if end is None or begin is None else round(max(0.0, end - begin), 1)


def _time_of(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
