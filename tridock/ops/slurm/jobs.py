"""Submitted jobs: state, output, cancellation."""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.table import Column, Table

from tridock.contracts import run_folder
from tridock.contracts.node_answers import RunInfo
from tridock.contracts.records import read_object
from tridock.contracts.rotated_logs import GrowingLog
from tridock.contracts.run_state import RunState, exit_code_of
from tridock.errors import Problem, RequestError, RunError
from tridock.ops.runs.removal import runs_here
from tridock.ops.slurm import scheduler

_JOB_ID: Final = re.compile(r"\d+(_\d+)?")
_POLL_S: Final = 0.5
_ASK_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Submitted:
    folder: Path
    job_id: str

    @property
    def exit_code(self) -> int | None:
        return exit_code_of(self.folder)


def submitted(workspace: Path) -> list[Submitted]:
    """Returns this workspace's runs that were submitted as jobs, oldest first."""
    found = []
    for path in (workspace.absolute() / "runs").glob(f"*/{run_folder.JOB}"):
        job_id = str(read_object(path).get("job_id"))
        if _JOB_ID.fullmatch(job_id):  # it becomes an argument of scancel; a fetched run may be here too
            found.append((path.stat().st_mtime, path.parent.name, Submitted(path.parent, job_id)))
    return [run for *_, run in sorted(found, key=lambda entry: entry[:2])]


def in_queue(workspace: Path) -> dict[str, str]:
    """Returns the jobs that are pending or running, by the ids of their runs; asks Slurm only if there can be any."""
    runs = submitted(workspace)
    queue = scheduler.jobs() if runs else {}
    return {run.folder.name: run.job_id for run in runs if run.job_id in queue}


def find(workspace: Path, name: str | None) -> Submitted:
    """Returns the run with this id or job id, or the newest if none is named."""
    runs = submitted(workspace)
    chosen = [run for run in runs if name is None or name in (run.folder.name, run.job_id)]
    if not chosen:
        got = "none was submitted from here" if name is None else repr(name)
        raise RequestError(Problem("RUN", "is not a submitted run", got, "see tridock slurm status"))
    return chosen[-1]


def table(workspace: Path) -> list[dict[str, Any]]:
    """Returns one row per run: its job's queue state, and its progress."""
    queue, progress = scheduler.jobs(), {run.run_id: run for run in runs_here(workspace)}
    return [_row(run, queue, progress.get(run.folder.name)) for run in submitted(workspace)]


def _row(run: Submitted, queue: Mapping[str, scheduler.Job], progress: RunInfo | None) -> dict[str, Any]:
    job = queue.get(run.job_id)
    row = {"run": run.folder.name, "job": run.job_id, "exit_code": run.exit_code if job is None else None}
    metrics = (progress.metrics if progress else None) or {}
    row |= {"iteration": metrics.get("iteration"), "train_iters": progress.train_iters if progress else None}
    row |= {"loss": metrics.get("loss"), "nodes": "", "elapsed": "", "limit": "", "reason": ""}
    if job is None:
        return row | {"state": _ended(run)}
    waits = job.state == "PENDING"
    where = {"reason": job.reason} if waits else {"nodes": job.nodes}
    return row | where | {"state": job.state.lower(), "elapsed": job.elapsed, "limit": job.limit}


def _ended(run: Submitted) -> str:
    if run.exit_code is not None:
        return RunState.of_exit_code(run.exit_code)
    return (scheduler.ended_state(run.job_id) or "gone").lower()


def show_logs(workspace: Path, name: str | None, ranks: Sequence[int], *, follow: bool) -> int:
    """Prints the run's output or rank logs, with ``follow`` until the job has ended; returns the run's exit code."""
    run = find(workspace, name)
    paths = [run.folder / run_folder.rank_log(rank) for rank in ranks] or [run.folder / run_folder.LAUNCHER_LOG]
    if not follow:
        if missing := [path for path in paths if not path.exists()]:
            job = scheduler.jobs().get(run.job_id)
            got = f"job {run.job_id} is {job.state.lower()} ({job.reason})" if job else f"job {run.job_id} has ended"
            raise RequestError(Problem(str(missing[0]), "is not there", got, "wait for its start, with --follow"))
        for path in paths:
            _print_rest(GrowingLog(path))
        return run.exit_code or 0
    return _follow(run, paths)


def _follow(run: Submitted, paths: Sequence[Path]) -> int:
    logs = [*map(GrowingLog, paths)]
    asked = -_ASK_S
    queued = True
    reason = ""
    while queued:
        if time.monotonic() - asked >= _ASK_S:
            job = scheduler.jobs().get(run.job_id)
            asked, queued = time.monotonic(), job is not None
            if job is not None and job.state == "PENDING" and job.reason not in (reason, "None"):
                reason = job.reason
                print(f"tridock: job {run.job_id} waits: {reason}", file=sys.stderr)
        # Read after the query: output written before the end is then included.
        for log in logs:
            _print_rest(log)
        if queued:
            time.sleep(_POLL_S)
    if run.exit_code is None:
        got = scheduler.ended_state(run.job_id) or ""
        what, todo = "has ended without an exit code", f"look at Slurm's own output in {run.folder}/logs"
        raise RunError(Problem(run.folder.name, what, got.lower(), todo))
    return run.exit_code


def _print_rest(log: GrowingLog) -> None:
    while chunk := log.read(1 << 16):
        sys.stdout.buffer.write(chunk)
    sys.stdout.buffer.flush()


def cancel(workspace: Path, name: str | None) -> Submitted:
    """Cancels the job of a run without saving. Raises if it has already ended."""
    run = find(workspace, name)
    job = scheduler.jobs().get(run.job_id)
    if job is None:
        got = "exit code unknown" if run.exit_code is None else f"exit code {run.exit_code}"
        raise RequestError(Problem(run.folder.name, "has ended already", got, "see tridock slurm status"))
    # Before the signal, which the ranks would otherwise take for the end of their time, and save.
    (run.folder / run_folder.STOPPED).touch()
    scheduler.cancel(run.job_id)
    if job.state == "PENDING":  # nothing else records how it ended
        run_folder.write_atomic(run.folder / run_folder.EXIT_CODE, f"{run_folder.EXIT_STOPPED}\n".encode())
    return run


def as_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        "run", "job", Column("state", overflow="fold"), Column("nodes", overflow="fold"), "time", "step", "loss"
    )
    for row in rows:
        why = f"exit code {row['exit_code']}" if row["state"] == RunState.FAILED else row["reason"]
        table.add_row(
            row["run"],
            row["job"],
            f"{row['state']} ({why})" if why and why != "None" else row["state"],
            row["nodes"],
            f"{row['elapsed']} of {row['limit']}" if row["elapsed"] else "",
            f"{row['iteration'] or 0}/{row['train_iters']}" if row["train_iters"] else str(row["iteration"] or ""),
            "" if row["loss"] is None else f"{row['loss']:.4f}",
        )
    return table
