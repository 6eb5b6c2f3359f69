"""When a checkpoint is written, what waits for it, and what the run records."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.patience import STEP_S
from tridock.contracts.events import Event, events_of
from tridock.errors import Problem, RunError
from tridock.train.checkpoints.saver import Saver
from tridock.train.rank import signals
from tridock.train.rank.phases import Phases
from tridock.train.rank.process_group import AgreedError, Ranks

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
FAILED = AgreedError(RunError(Problem("a", "b", "c", "d")))


class Slow:
    """Checkpoints whose writing a test holds up and lets go."""

    def __init__(self, folder: Path, error: Exception | None = None) -> None:
        self.folder, self.error, self.may_end = folder, error, threading.Event()
        self.from_copy: list[bool] = []

    def start(self, in_background: bool) -> Callable[[], Path]:
        self.from_copy.append(in_background)

        def write() -> Path:
            if in_background:
                assert self.may_end.wait(STEP_S)
            if self.error is not None:
                raise self.error
            return self.folder

        return write


def named(folder: Path, event: Event) -> list[int]:
    return [found["iteration"] for found in events_of(folder, event)]


@pytest.fixture
def saver(tmp_path: Path) -> Saver:
    return Saver(ALONE, tmp_path, Phases(ALONE.device), in_background=True)


def test_training_continues_while_a_checkpoint_is_written_and_the_next_one_waits(
    tmp_path: Path, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, finish = Slow(tmp_path), saver.finish

    def wait() -> None:
        threading.Timer(0.05, slow.may_end.set).start()
        finish()

    saver.save(slow.start, 10, is_last=False)  # returns although it is not written
    saver.check()
    assert events_of(tmp_path, Event.CHECKPOINT_SAVED) == []
    monkeypatch.setattr(saver, "finish", wait)
    saver.save(slow.start, 20, is_last=False)
    (waited,) = events_of(tmp_path, Event.CHECKPOINT_WAITED)
    assert (waited["iteration"], waited["previous"]) == (20, 10)
    saver.save(slow.start, 30, is_last=True)
    assert named(tmp_path, Event.CHECKPOINT_SAVED) == [10, 20, 30]
    assert slow.from_copy == [True, True, False]
    first, _, last = events_of(tmp_path, Event.CHECKPOINT_SAVED)
    assert first["pause_seconds"] < first["seconds"]
    assert last["pause_seconds"] == last["seconds"]


def test_a_checkpoint_in_the_background_that_cannot_be_written_is_a_warning(
    tmp_path: Path, saver: Saver, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = Slow(tmp_path, FAILED)
    failing.may_end.set()
    saver.save(failing.start, 10, is_last=False)
    saver.finish()
    assert named(tmp_path, Event.CHECKPOINT_FAILED) == [10]
    assert capsys.readouterr().out == "warning: iteration 10 is not saved, and the run continues:\na: b; got c; d\n"
    with pytest.raises(AgreedError):
        saver.save(failing.start, 20, is_last=True)


def test_any_other_error_of_the_thread_ends_the_run(tmp_path: Path, saver: Saver) -> None:
    broken = Slow(tmp_path, RuntimeError("Connection closed by peer"))
    saver.save(broken.start, 10, is_last=False)
    saver.check()
    broken.may_end.set()
    with pytest.raises(RuntimeError, match="Connection closed by peer"), saver.finishing():
        pass


@pytest.mark.parametrize("end", [signals.Stopped(), signals.Preempted(12), FAILED])
def test_a_run_that_all_ranks_end_finishes_the_checkpoint_first(
    tmp_path: Path, saver: Saver, end: BaseException
) -> None:
    slow = Slow(tmp_path)
    saver.save(slow.start, 10, is_last=False)
    threading.Timer(0.05, slow.may_end.set).start()
    with pytest.raises(type(end)), saver.finishing():
        raise end
    assert named(tmp_path, Event.CHECKPOINT_SAVED) == [10]


def test_another_failure_does_not_wait_for_ranks_that_may_have_gone(tmp_path: Path, saver: Saver) -> None:
    slow = Slow(tmp_path)
    saver.save(slow.start, 10, is_last=False)
    with pytest.raises(ValueError, match="bug"), saver.finishing():
        raise ValueError("bug")
    assert named(tmp_path, Event.CHECKPOINT_SAVED) == []
    slow.may_end.set()


@pytest.mark.parametrize("in_background", [True, False])
def test_every_checkpoint_is_copied_and_a_copy_that_fails_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], in_background: bool
) -> None:
    copied: list[Path] = []

    def copy(folder: Path) -> bool:
        copied.append(folder)
        if len(copied) == 2:
            raise FAILED
        return len(copied) < 4  # then there is one file system

    saver = Saver(ALONE, tmp_path, Phases(ALONE.device), in_background, copy)
    slow = Slow(tmp_path)
    slow.may_end.set()
    for iteration in (10, 20, 30, 40):
        saver.save(slow.start, iteration, is_last=iteration == 40)
    assert copied == [tmp_path] * 4
    assert named(tmp_path, Event.CHECKPOINT_SAVED) == [10, 20, 30, 40]
    assert named(tmp_path, Event.CHECKPOINT_COPIED) == [10, 30]
    (failed,) = events_of(tmp_path, Event.CHECKPOINT_FAILED)
    assert (failed["iteration"], failed["copy"]) == (20, True)
    said = "warning: iteration 20 has no second copy, and the run continues:\na: b; got c; d\n"
    assert said in capsys.readouterr().out
