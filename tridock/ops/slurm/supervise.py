"""Runs on a job's first node in place of its script: the run's supervisor, and the steps after it ends."""

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from tridock.cluster.hostfile import parse_hostfile
from tridock.contracts import run_folder
from tridock.contracts.events import Event, append_event, event_count, events_of
from tridock.contracts.records import read_object, records_in
from tridock.contracts.run_state import LOCK
from tridock.errors import ClusterError, Problem, RequestError, TridockError
from tridock.experiment import dump_experiment, load_command
from tridock.launchers.run import make_bundle
from tridock.launchers.slurm.launcher import Slurm
from tridock.launchers.slurm.ranks import starts_over_ssh
from tridock.ops.runs.code import place_code
from tridock.ops.runs.local_run import start_and_follow
from tridock.ops.runs.prepared import Prepared
from tridock.ops.runs.provenance import image_manifest, provenance
from tridock.ops.runs.this_machine import CODE_FOLDER, gpu_here
from tridock.ops.runs.trackers import RunTrackers, check_here, trackers_of
from tridock.ops.slurm import scheduler
from tridock.ops.slurm.submit import note_job, prepare_run

_PACKAGE: Final = "tridock"
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
    patience_s = _ORPHAN_S if again and read_object(job.folder / run_folder.JOB).get("job_id") == _job_name() else 0.0
    try:
        prepared, trackers = _prepare(job, again)
    except TridockError as error:
        run_folder.write_atomic(job.folder / run_folder.EXIT_CODE, f"{error.exit_code}\n".encode())
        raise
    own, ranks = prepared.assessment is None, max(map(len, prepared.slots.values()))
    events_before = event_count(job.folder)
    code = start_and_follow(job.folder, ranks, again=again, patience_s=patience_s, secrets=trackers.secrets)
    if job.requeue and (reason := _reason(job.folder, code, events_before, own)) is not None:
        _queue_again(job.folder, reason, own)
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
        todo = "continue it with tridock resume"
        problems.append(Problem(job.folder.name, "has already finished", "exit code 0", todo))
    RequestError.raise_for(problems)


def _prepare(job: Job, again: bool) -> tuple[Prepared, RunTrackers]:
    """Writes the missing files of the run's folder, for the job's nodes; returns the run and its trackers."""
    folder, kept, index = job.folder, job.folder / run_folder.EXPERIMENT, job.folder / run_folder.CODE_INDEX
    pool = parse_hostfile(run_folder.read_text(folder / run_folder.HOSTFILE), str(folder / run_folder.HOSTFILE)).pool
    slots = {node: range(count) for node, count in pool.items()}
    config, overrides = (kept, ()) if kept.exists() or job.config is None else (job.config, job.overrides)
    if index.exists():  # your own program's code is there
        manifest = {"code": read_object(folder / run_folder.MANIFEST).get("code")}
        prepared = Prepared(load_command(config, overrides), slots, folder.name, manifest=manifest)
    else:
        prepared = prepare_run(config, overrides, slots, gpu_here(), force=True, run_id=folder.name)
    trackers = trackers_of(prepared.experiment)
    check_here(trackers)
    prepared = prepared.with_files_of(folder.parent.parent)
    if not kept.exists():
        run_folder.write_atomic(kept, dump_experiment(prepared.experiment).encode())
    _write(job, prepared)
    note_job(folder, _job_name())
    append_event(folder, Event.JOB_STARTED, job=_job_name(), nodes=list(slots), again=again)
    return prepared, trackers


def _write(job: Job, prepared: Prepared) -> None:
    head = next(iter(prepared.slots))
    launcher = Slurm(
        job.argv,
        env={**_for_ssh(job.argv), **job.env},
        on_head=os.environ.get("SLURMD_NODENAME") == head,
        prepared_at=(job.folder / run_folder.EXPERIMENT).stat().st_mtime,
    )
    if prepared.assessment is None and not job.in_container:
        # The job's own values: those of the supervisor begin with Tridock's paths.
        own = {name: os.environ.get(name, "") for name in ("PATH", "PYTHONPATH")}
        library = str(_library(job.folder))
        launcher = replace(launcher, env={**own, **launcher.env}, python=sys.executable, library=library)
    run = replace(
        prepared,
        master_port=int(os.environ["MASTER_PORT"]),
        manifest=_manifest(job, prepared),
        master_addr=head,
        workspace=str(job.folder.parent.parent),
    )
    bundle = make_bundle(run, launcher)
    for name, content in bundle.files.items():
        if name not in (run_folder.EXPERIMENT, run_folder.HOSTFILE):  # these two exist and are authoritative
            run_folder.write_atomic(job.folder / name, content)
    if prepared.code is not None:
        place_code(prepared.code, job.folder)


def _library(folder: Path) -> Path:
    """Returns a folder with the package alone: your program may use another Python and other versions than Tridock."""
    library = folder / run_folder.LIBRARY
    library.mkdir(exist_ok=True)
    if not (library / _PACKAGE).is_symlink():
        (library / _PACKAGE).symlink_to(CODE_FOLDER / _PACKAGE)
    return library


def _for_ssh(argv: Sequence[str]) -> dict[str, str]:
    """Returns the job variables for ranks started over ssh, which does not pass them on."""
    if not starts_over_ssh(argv):
        return {}
    return {name: value for name, value in os.environ.items() if _SESSION.fullmatch(name) and "\n" not in value}


def _manifest(job: Job, prepared: Prepared) -> dict[str, object]:
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT")
    return {
        **provenance(CODE_FOLDER),
        **prepared.manifest,
        "image_manifest": image_manifest(),
        "config": None if job.config is None else str(job.config),
        "slurm": {"job": _job_name(), **{name: os.environ[name] for name in names if name in os.environ}},
    }


def _job_name() -> str:
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


# ---- afterwards ----


def _reason(folder: Path, code: int, events_before: int, own: bool) -> str | None:
    """Returns why the job is to be requeued; None if it is not."""
    if code == run_folder.EXIT_PREEMPTED:
        return "its time was over" if own else "its time was over, and it has saved"
    lost = events_of(folder, Event.NODE_LOST, events_before)
    return f"{lost[-1].get('node')} was lost" if lost and code not in (0, run_folder.EXIT_STOPPED) else None


def _queue_again(folder: Path, reason: str, own: bool) -> None:
    reached = _reached(folder, own)
    continues = f"{reason}; it {'starts again' if own else f'continues from iteration {reached}'}"
    before = events_of(folder, Event.JOB_REQUEUED)
    fruitless = [event for event in before if event.get("iteration") == reached and reached is not None]
    try:
        state, by_slurm = _job_state_once_it_answers()
    except ClusterError as error:
        return _not_queued(folder, str(error))
    if by_slurm:
        append_event(folder, Event.JOB_REQUEUED, iteration=reached, reason=reason)
        print(f"tridock: Slurm itself has queued it again: {continues}")
        return None
    if state != "RUNNING":
        return _not_queued(folder, f"Slurm is ending the job ({state.lower()})")
    if len(fruitless) >= _FRUITLESS:
        jobs = len(fruitless) + 1
        return _not_queued(folder, f"the run has come no further than iteration {reached} in {jobs} jobs")
    # Logged first: Slurm ends this job immediately.
    append_event(folder, Event.JOB_REQUEUED, iteration=reached, reason=reason)
    print(f"tridock: queued again: {continues}")
    deadline = time.monotonic() + _PATIENCE_S
    while (refusal := scheduler.requeue(os.environ["SLURM_JOB_ID"])) is not None and not _queued_after_all():
        if not scheduler.is_busy(refusal) or time.monotonic() > deadline:
            return _not_queued(folder, refusal)
    return None


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


def _not_queued(folder: Path, reason: str) -> None:
    append_event(folder, Event.JOB_NOT_REQUEUED, reason=reason)
    print(f"tridock: not queued again: {reason}")


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


def _reached(folder: Path, own: bool) -> int | None:
    """Returns the iteration of the newest recorded checkpoint; for your own program, whose checkpoints are unknown, the
    furthest iteration that it printed, or None."""
    if own:
        printed = (record.get("iteration") for record in records_in(folder / run_folder.METRICS))
        return max((number for number in printed if isinstance(number, int)), default=None)
    saved = [event.get("iteration") for event in events_of(folder, Event.CHECKPOINT_SAVED)]
    return max((int(number) for number in saved if number is not None), default=0)
