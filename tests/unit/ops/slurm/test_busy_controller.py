"""Slurm's controller does not answer while it looks for a node that has failed."""

import subprocess

import pytest

from tridock.errors import ClusterError
from tridock.ops.slurm import scheduler, supervise


def test_a_controller_that_looks_for_a_lost_node_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    error = "slurm_load_jobs error: Socket timed out on send/recv operation"
    answers = iter([(1, error), (0, "JobState=RUNNING Restarts=0")])

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        code, text = next(answers)
        return subprocess.CompletedProcess(argv, code, text, text)

    monkeypatch.setattr(scheduler, "_run", run)
    monkeypatch.setattr(supervise.time, "sleep", lambda _: None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert supervise._job_state_once_it_answers() == ("RUNNING", False)
    answers = iter([(1, "slurm_load_jobs error: Invalid job id specified")])
    with pytest.raises(ClusterError):
        supervise._job_state_once_it_answers()
