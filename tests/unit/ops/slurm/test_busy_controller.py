"""Slurm's controller does not answer while it looks for a node that has failed."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tridock.contracts.events import Event, events_of
from tridock.errors import ClusterError
from tridock.ops.slurm import scheduler, supervise

BUSY = (1, "slurm_load_jobs error: Socket timed out on send/recv operation")
RUNNING = (0, "JobState=RUNNING Restarts=0")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, str]]]:
    """What Slurm's commands answer, one after another; all of it has been asked for at the end."""
    waiting: list[tuple[int, str]] = []

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        code, text = waiting.pop(0)
        return subprocess.CompletedProcess(argv, code, text, text)

    monkeypatch.setattr(scheduler, "_run", run)
    monkeypatch.setattr(supervise.time, "sleep", lambda _: None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    yield waiting
    assert waiting == []


def test_a_controller_that_looks_for_a_lost_node_is_asked_again(answers: list[tuple[int, str]]) -> None:
    answers += [BUSY, BUSY, RUNNING]
    assert supervise._job_state_once_it_answers() == ("RUNNING", False)


def test_any_other_error_ends_it(answers: list[tuple[int, str]]) -> None:
    answers += [(1, "slurm_load_jobs error: Invalid job id specified")]
    with pytest.raises(ClusterError):
        supervise._job_state_once_it_answers()


@pytest.mark.parametrize(
    ("after", "refused"), [([BUSY, RUNNING, (0, "")], 0), ([(1, "Access/permission denied"), RUNNING], 1)]
)
def test_the_job_is_requeued_once_the_controller_answers(
    answers: list[tuple[int, str]], tmp_path: Path, after: list[tuple[int, str]], refused: int
) -> None:
    answers += [BUSY, RUNNING, *after]
    supervise._queue_again(tmp_path, "n2 was lost", own=False)
    assert len(events_of(tmp_path, Event.JOB_REQUEUED)) == 1
    assert len(events_of(tmp_path, Event.JOB_NOT_REQUEUED)) == refused
