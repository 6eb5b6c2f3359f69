"""The runs of this node's workspace, each with its state."""

from __future__ import annotations

from pathlib import Path

from tridock import run_folder
from tridock.node.events import read_lines
from tridock.node.state import LOCK, exit_code_of, is_supervised

_TAIL_BYTES = 1 << 16


def list_runs(workspace: Path) -> list[dict[str, object]]:
    """One object a run, oldest first: run_id, state, exit_code, created (yyyymmdd-hhmmss), metrics (the last).

    States: ``ready`` (never started here), ``running``, ``done``, ``failed``, ``stopped``, ``lost``.
    """
    folders = [f for f in (workspace / "runs").glob("*") if run_folder.is_run_id(f.name) and f.is_dir()]
    runs = [_describe(folder) for folder in folders]
    return sorted(runs, key=lambda run: (str(run["created"]), str(run["run_id"])))


def _describe(folder: Path) -> dict[str, object]:
    code = exit_code_of(folder)
    training = [entry for entry in read_lines(folder / run_folder.METRICS, _TAIL_BYTES) if "split" not in entry]
    # The id ends in -yyyymmdd-hhmmss-xxxx: it sorts by the moment of creation whatever the experiment's name.
    created = "-".join(folder.name.split("-")[-3:-1])
    return {
        "run_id": folder.name,
        "state": _state(folder, code),
        "exit_code": code,
        "created": created,
        "metrics": training[-1] if training else None,
    }


def _state(folder: Path, code: int | None) -> str:
    if code is None:
        if is_supervised(folder):
            return "running"
        return "lost" if (folder / LOCK).exists() else "ready"
    return {0: "done", run_folder.EXIT_STOPPED: "stopped"}.get(code, "failed")
