"""Slurm's commands: all access to the scheduler goes through this module."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tridock.errors import ClusterError, Problem, RequestError
from tridock.launchers.slurm.launcher import Slurm
from tridock.remote import clock

_TIMEOUT_S: Final = 60.0
_SINFO: Final = "%P|%G|%f|%l|%s"
_SQUEUE: Final = "%i|%T|%r|%M|%l|%N"


@dataclass(frozen=True, slots=True)
class Job:
    """A job as squeue lists it: ``id`` is ``12``, or ``12_0`` in an array."""

    id: str
    state: str
    reason: str
    elapsed: str
    limit: str
    nodes: str


def sinfo() -> list[str]:
    """Returns a line per group of equal nodes, none if sinfo does not answer.

    It has the partition, GRES, features, and the partition's limits: time, and the least and most nodes of a job.
    """
    try:
        return _checked("sinfo", "--noheader", f"--format={_SINFO}").splitlines()
    except ClusterError:
        return []


def estimate(script: Path) -> str:
    """Returns what Slurm says of when and where a job would start. Raises :class:`RequestError` with its error."""
    said = _sbatch("--test-only", str(script)).stderr
    return _message(said) if said.strip() else ""


def submit(script: Path, *options: str) -> str:
    """Submits a job, with options of sbatch, and returns its id. Raises :class:`RequestError` with Slurm's error."""
    return _sbatch("--parsable", *options, str(script)).stdout.strip().partition(";")[0]


def _sbatch(*argv: str) -> subprocess.CompletedProcess[str]:
    done = _run("sbatch", *argv)
    if done.returncode:
        todo = "correct the request; sinfo shows what the cluster has"
        raise RequestError(Problem("sbatch", "Slurm refuses the job", _message(done.stderr), todo))
    return done


def jobs() -> dict[str, Job]:
    """Returns this user's pending and running jobs by id."""
    done = _checked("squeue", "--me", "--array", "--noheader", f"--format={_SQUEUE}")
    found = (Job(*line.split("|", 5)) for line in done.splitlines() if line.count("|") == 5)
    return {job.id: job for job in found}


def ended_state(job: str) -> str | None:
    """Returns a job's final state from accounting; None without accounting."""
    try:
        done = _run("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=State")
    except ClusterError:
        return None
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return lines[-1].strip() if lines else None


def cancel(job: str) -> None:
    _checked("scancel", job)


def requeue(job: str) -> str | None:
    """Requeues a running job; returns Slurm's error if it refuses."""
    done = _run(*Slurm.requeue(job).argv)
    return _message(done.stderr or done.stdout) if done.returncode else None


def job_fields(job: str) -> dict[str, str]:
    """Returns the fields of ``scontrol show job`` by name."""
    fields = _checked("scontrol", "show", "job", job, "--oneliner").split()
    return dict(word.split("=", 1) for word in fields if "=" in word)


class BusyError(ClusterError):
    """Slurm's controller does not answer now, for example while it looks for a failed node."""


def is_busy(message: str) -> bool:
    """Whether Slurm's error means that its controller does not answer."""
    return "timed out" in message or "Unable to contact slurm controller" in message


def _checked(*argv: str) -> str:
    done = _run(*argv)
    if done.returncode:
        todo = "see whether Slurm's controller answers: scontrol ping"
        message = _message(done.stderr)
        error = BusyError if is_busy(message) else ClusterError
        raise error(Problem(argv[0], "Slurm refuses this", message, todo))
    return done.stdout


def _run(*argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "LC_ALL": "C"}
    try:
        done = clock.run(argv, _TIMEOUT_S, env=env)
    except FileNotFoundError:
        todo = "run it where Slurm's commands are"
        raise ClusterError(Problem(argv[0], "is not on this machine", "", todo)) from None
    except subprocess.TimeoutExpired:
        todo = "see whether Slurm's controller answers: scontrol ping"
        raise ClusterError(Problem(argv[0], "does not answer", f"nothing for {_TIMEOUT_S:.0f} s", todo)) from None
    out, errors = (it.decode(errors="replace") for it in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(argv, done.returncode, out, errors)


def _message(text: str) -> str:
    """Returns the stderr of a Slurm command on one line, without the command's name."""
    lines: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    messages = [line.partition(": ")[2] if line.split(":")[0].isalpha() else line for line in lines]
    return ", ".join(dict.fromkeys(line.removeprefix("error: ") for line in messages)) or "nothing"
