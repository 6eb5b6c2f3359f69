"""Runs on a job's first node in place of its script: the run's supervisor, and the steps after it ends."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tridock.cluster.hostfile import parse_hostfile
from tridock.contracts import run_folder
from tridock.contracts.events import Event, append_event, events_of
from tridock.contracts.records import read_lines
from tridock.contracts.run_state import LOCK
from tridock.errors import ClusterError, Problem, RequestError, TridockError
from tridock.experiment import dump_experiment, is_command
from tridock.launchers.slurm.launcher import Slurm
from tridock.launchers.slurm.ranks import starts_over_ssh
from tridock.ops.runs.local_run import start_and_follow
from tridock.ops.runs.prepare import Prepared, prepare
from tridock.ops.runs.provenance import image_manifest, provenance
from tridock.ops.runs.sinks import Sinks, check_here, sinks_of
from tridock.ops.runs.this_machine import CODE_FOLDER, gpu_here
from tridock.ops.slurm import scheduler
from tridock.ops.slurm.program import write_job_files
from tridock.ops.slurm.submit import note_job
from tridock.plan import Assumptions

_FRUITLESS: Final = 2
"""How often a run may be requeued without progress."""
_PATIENCE_S: Final = 120.0
"""Seconds to wait for Slurm's controller, which does not answer while it looks for a lost node."""
_ORPHAN_S: Final = 60.0
_SESSION: Final = re.compile(r"PATH|LD_LIBRARY_PATH|VIRTUAL_ENV|(NCCL|GLOO|TORCH|HF|DS|OMP|UCX|FI)_\w+")


@dataclass(frozen=True, slots=True)
class Job:
    """The script's arguments: the run's folder, the command that starts all ranks, and the experiment's location."""

    folder: Path
    argv: Sequence[str]
    config: Path | None = None
    overrides: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    requeue: bool = True
    in_container: bool = False
    """Whether the ranks of your own program are in a container with Tridock's layer."""


def supervise(job: Job) -> int:
    """Supervises the run until it or the job's time ends; returns the exit code."""
    _require_job(job)
    again = (job.folder / LOCK).exists()
    # If Slurm tracks a job's processes by their parents, the supervisor outlives a killed job.
    patience_s = _ORPHAN_S if again and _noted_job(job.folder) == _job_name() else 0.0
    try:
        ranks, sinks = _prepare(job, again)
    except TridockError as error:
        run_folder.write_atomic(job.folder / run_folder.EXIT_CODE, f"{error.exit_code}\n".encode())
        raise
    events_before = len(read_lines(job.folder / run_folder.EVENTS))
    code = start_and_follow(job.folder, ranks, again=again, patience_s=patience_s, secrets=sinks.secrets)
    if job.requeue and (reason := _reason(job.folder, code, events_before)) is not None:
        _queue_again(job.folder, reason)
    return code


def _require_job(job: Job) -> None:
    """Raises before anything is written if this is not a Slurm job."""
    problems = []
    if not run_folder.is_run_id(job.folder.name):
        problems.append(Problem(str(job.folder), "is not a run's folder", job.folder.name, "give runs/<run-id>"))
    if not job.argv:
        todo = "write -- and the command that starts the ranks"
        problems.append(Problem("tridock slurm supervise", "needs a command", "nothing", todo))
    for name in ("SLURM_JOB_ID", "MASTER_PORT"):
        if name not in os.environ:
            problems.append(Problem(name, "is not set", "", "let Slurm run the script of tridock slurm submit"))
    if run_folder.read_text(job.folder / run_folder.EXIT_CODE).strip() == "0":
        todo = "submit it again, with train.load to train further"
        problems.append(Problem(job.folder.name, "has already finished", "exit code 0", todo))
    if problems:
        raise RequestError(problems)


def _prepare(job: Job, again: bool) -> tuple[int, Sinks]:
    """Writes the missing files of the run's folder, for the job's nodes; returns the ranks per node and the sinks."""
    folder, workspace = job.folder, job.folder.parent.parent
    pool = parse_hostfile(run_folder.read_text(folder / run_folder.HOSTFILE), str(folder / run_folder.HOSTFILE)).pool
    slots = {node: range(count) for node, count in pool.items()}
    kept = folder / run_folder.EXPERIMENT
    config, overrides = _experiment(job)
    if is_command(config):
        experiment = write_job_files(
            folder,
            config,
            overrides,
            job.argv,
            slots,
            job.env,
            _job_manifest(job, provenance(CODE_FOLDER)),
            on_head=_is_on(next(iter(slots))),
            in_container=job.in_container,
        )
        sinks = sinks_of(experiment)
        check_here(sinks)
        _note_start(folder, slots, again)
        return max(len(numbers) for numbers in slots.values()), sinks
    prepared = prepare(config, slots, Assumptions(gpu=gpu_here()), overrides, force=True, run_id=folder.name)
    sinks = sinks_of(prepared.experiment)
    check_here(sinks)
    prepared.with_files_of(workspace)
    if not kept.exists():
        run_folder.write_atomic(kept, dump_experiment(prepared.experiment).encode())
    _write(job, prepared)
    _note_start(folder, slots, again)
    return max(len(numbers) for numbers in slots.values()), sinks


def _note_start(folder: Path, slots: Mapping[str, object], again: bool) -> None:
    note_job(folder, _job_name())
    append_event(folder, Event.JOB_STARTED, job=_job_name(), nodes=list(slots), again=again)


def _is_on(node: str) -> bool:
    return os.environ.get("SLURMD_NODENAME") == node


def _experiment(job: Job) -> tuple[Path, Sequence[str]]:
    """Returns the folder's experiment, or if Tridock did not submit the script, the named file with its overrides."""
    kept = job.folder / run_folder.EXPERIMENT
    return (kept, ()) if kept.exists() or job.config is None else (job.config, job.overrides)


def _write(job: Job, prepared: Prepared) -> None:
    launcher = Slurm(
        job.argv,
        {**_for_ssh(job.argv), **job.env},
        on_head=_is_on(next(iter(prepared.slots))),
        prepared_at=(job.folder / run_folder.EXPERIMENT).stat().st_mtime,
    )
    bundle = prepared.bundle(
        launcher,
        master_port=int(os.environ["MASTER_PORT"]),
        manifest=_manifest(job, prepared),
        workspace=str(job.folder.parent.parent),
    )
    for name, content in bundle.files.items():
        if name not in (run_folder.EXPERIMENT, run_folder.HOSTFILE):  # these two exist and are authoritative
            run_folder.write_atomic(job.folder / name, content)


def _for_ssh(argv: Sequence[str]) -> dict[str, str]:
    """Returns the job variables for ranks started over ssh, which does not pass them on."""
    if not starts_over_ssh(argv):
        return {}
    return {name: value for name, value in os.environ.items() if _SESSION.fullmatch(name) and "\n" not in value}


def _noted_job(folder: Path) -> str | None:
    text = run_folder.read_text(folder / run_folder.JOB)
    return str(json.loads(text)["job_id"]) if text else None


def _manifest(job: Job, prepared: Prepared) -> dict[str, object]:
    return _job_manifest(job, prepared.manifest(CODE_FOLDER))


def _job_manifest(job: Job, manifest: Mapping[str, object]) -> dict[str, object]:
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT")
    return {
        **manifest,
        "image_manifest": image_manifest(),
        "config": None if job.config is None else str(job.config),
        "slurm": {"job": _job_name(), **{name: os.environ[name] for name in names if name in os.environ}},
    }


def _job_name() -> str:
    """Returns the job's id as squeue shows it."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


# ---- afterwards ----


def _reason(folder: Path, code: int, events_before: int) -> str | None:
    """Returns why the job is to be requeued; None if it is not."""
    if code == run_folder.EXIT_PREEMPTED:
        return "its time was over" if _is_program(folder) else "its time was over, and it has saved"
    lost = events_of(folder, Event.NODE_LOST, events_before)
    return f"{lost[-1].get('node')} was lost" if lost and code not in (0, run_folder.EXIT_STOPPED) else None


def _queue_again(folder: Path, reason: str) -> None:
    reached = _reached(folder)
    how = "starts again" if _is_program(folder) else f"continues from iteration {reached}"
    continues = f"{reason}; it {how}"
    before = events_of(folder, Event.JOB_REQUEUED)
    fruitless = [event for event in before if event.get("iteration") == reached and reached is not None]
    try:
        state, by_slurm = _job_state_once_it_answers()
    except ClusterError as error:
        _not_queued(folder, f"not queued again: {error}", str(error))
        return
    if by_slurm:
        append_event(folder, Event.JOB_REQUEUED, iteration=reached, reason=reason)
        print(f"tridock: Slurm itself has queued it again: {continues}")
        return
    refusal = None
    if state != "RUNNING":
        refusal = f"Slurm is ending the job ({state.lower()})"
    elif len(fruitless) >= _FRUITLESS:
        refusal = f"the run has come no further than iteration {reached} in {len(fruitless) + 1} jobs"
    if refusal is not None:
        _not_queued(folder, f"not queued again: {refusal}", refusal)
        return
    # Logged first: Slurm ends this job immediately.
    append_event(folder, Event.JOB_REQUEUED, iteration=reached, reason=reason)
    print(f"tridock: queued again: {continues}")
    deadline = time.monotonic() + _PATIENCE_S
    while (refusal := scheduler.requeue(os.environ["SLURM_JOB_ID"])) is not None and not _queued_after_all():
        if not scheduler.is_busy(refusal) or time.monotonic() > deadline:
            _not_queued(folder, f"Slurm did not queue it again: {refusal}", refusal)
            return


def _job_state_once_it_answers() -> tuple[str, bool]:
    """Returns the job's state; retries while Slurm's controller looks for the node whose loss ended the run."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return _job_state()
        except scheduler.BusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def _not_queued(folder: Path, message: str, reason: str) -> None:
    append_event(folder, Event.JOB_NOT_REQUEUED, reason=reason)
    print(f"tridock: {message}")


def _job_state() -> tuple[str, bool]:
    """Returns the job's state, and whether Slurm itself has requeued it after giving up a node.

    A cancelled job is not running either, but its restart count has not increased.
    """
    fields = scheduler.job_fields(os.environ["SLURM_JOB_ID"])
    restarts = int(fields.get("Restarts", "0"))
    return fields.get("JobState", "unknown"), restarts > int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def _queued_after_all() -> bool:
    """Whether the job is queued although Slurm refused: Slurm was faster, or its answer was late."""
    try:
        return _job_state_once_it_answers()[1]
    except ClusterError:
        return False


def _is_program(folder: Path) -> bool:
    kept = folder / run_folder.EXPERIMENT
    return kept.exists() and is_command(kept)


def _reached(folder: Path) -> int | None:
    """Returns the iteration of the newest recorded checkpoint; for your own program, whose checkpoints are unknown, the
    furthest iteration that it printed, or None.
    """
    if _is_program(folder):
        printed = [record.get("iteration") for record in read_lines(folder / run_folder.METRICS)]
        return max((number for number in printed if isinstance(number, int)), default=None)
    saved = [event.get("iteration") for event in events_of(folder, Event.CHECKPOINT_SAVED)]
    return max((int(number) for number in saved if number is not None), default=0)
