"""Saves the checkpoints of a run, synchronously or in the background, and records their time and outcome.

In the background a rank pauses to copy its state; a thread then writes the copy while training continues. At most one
checkpoint is being written; the next one waits for it. The last one is written synchronously, without a copy.
"""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from tridock.contracts import heartbeat
from tridock.contracts.checkpoint_files import Illness
from tridock.contracts.events import Event, append_event
from tridock.experiment.schema import Train
from tridock.train.checkpoints.checkpoint import Checkpoints
from tridock.train.rank import signals
from tridock.train.rank.phases import CHECKPOINT, Phases
from tridock.train.rank.process_group import AgreedError, Ranks

Start = Callable[[bool], Callable[[], Path]]
"""Begins a checkpoint, from a copy of the state if True; returns the function that writes it, see ``Checkpoints``."""

_LONG_WAIT_SECONDS: Final = 1.0


def saves_in_background(train: Train) -> bool:
    """Whether any checkpoint is written in the background; the last one never is."""
    return train.save and train.async_save and 0 < train.save_interval < train.train_iters


def needs_group(train: Train) -> bool:
    """Whether checkpoints are written in the background, or copied to other nodes: over a Gloo group of their own."""
    return saves_in_background(train) or (train.save and train.checkpoint_copies > 1)


class Saver:
    """Saves checkpoints and records their events; at most one is being written.

    ``copy`` makes the second copy of a saved one; it returns whether there is one, and may raise :class:`AgreedError`.
    """

    def __init__(
        self,
        ranks: Ranks,
        run_folder: Path,
        phases: Phases,
        in_background: bool,
        copy: Callable[[Path], bool] | None = None,
    ) -> None:
        self._ranks, self._run_folder, self._phases, self._copy = ranks, run_folder, phases, copy
        self._thread = ThreadPoolExecutor(1, "checkpoint", self._choose_device) if in_background else None
        self._pending: tuple[int, Future[AgreedError | None]] | None = None

    def _choose_device(self) -> None:
        if self._ranks.device.type == "cuda":  # each thread has its own; torch would open a context on the first GPU
            torch.cuda.set_device(self._ranks.device)

    def set_aside(self, checkpoints: Checkpoints, iteration: int, loaded: Path | None) -> None:
        """Sets aside the checkpoints that a run which continues from ``iteration`` would overwrite. A collective."""
        if names := checkpoints.set_aside_after(iteration, loaded):
            self._event(Event.CHECKPOINTS_SET_ASIDE, iteration=iteration, folders=names)
            origin = f"continues from iteration {iteration}" if iteration else "begins from scratch"
            where = f"the later checkpoints in {checkpoints.folder} are set aside"
            self._say(f"warning: the run {origin}; {where}: {', '.join(names)}")

    def save(self, start: Start, iteration: int, is_last: bool, ill: Illness | None = None) -> float:
        """Saves a checkpoint; returns the seconds for which training paused. A collective.

        A write error ends the run only if this ``is_last``. A checkpoint in ``ill`` health gets a warning.
        """
        started = time.monotonic()
        with self._phases.inside(CHECKPOINT):
            heartbeat.beat(heartbeat.SAVE)
            self._wait_for_previous(iteration)
            failed = self._save(start, iteration, is_last, started, ill)
            if failed is not None and is_last:
                raise failed
            heartbeat.beat(heartbeat.TRAIN)
        return time.monotonic() - started

    def _save(
        self, start: Start, iteration: int, is_last: bool, started: float, ill: Illness | None
    ) -> AgreedError | None:
        in_background = self._thread is not None and not is_last
        try:
            write = start(in_background)
        except AgreedError as failed:
            return self._report_failure(iteration, failed, is_last)
        if self._thread is None or is_last:
            return self._write(write, iteration, is_last, started, None, ill)
        paused = time.monotonic() - started
        self._pending = iteration, self._thread.submit(self._write, write, iteration, is_last, started, paused, ill)
        return None

    def _write(
        self,
        write: Callable[[], Path],
        iteration: int,
        is_last: bool,
        started: float,
        paused: float | None,
        ill: Illness | None,
    ) -> AgreedError | None:
        try:
            folder = write()
        except AgreedError as failed:
            return self._report_failure(iteration, failed, is_last)
        seconds = time.monotonic() - started
        pause = seconds if paused is None else paused
        fields: dict[str, object] = {"seconds": round(seconds, 3), "pause_seconds": round(pause, 3)}
        if ill is not None:
            fields["ill"] = str(ill)
        self._event(Event.CHECKPOINT_SAVED, iteration=iteration, folder=str(folder), **fields)
        self._say(f"checkpoint saved: {folder}")
        if ill is not None:
            self._say(f"warning: {folder.name} replaces no other checkpoint, and no resume takes it by itself: {ill}")
        if self._copy is not None:
            self._make_copy(self._copy, folder, iteration)
        return None

    def condemn(self, checkpoints: Checkpoints, iteration: int, ill: Illness) -> None:
        """Marks a saved checkpoint whose weights have turned out to be of no use. A collective."""
        self.finish()
        try:
            if not checkpoints.condemn(iteration, ill):
                return
        except AgreedError as failed:
            self._say(f"warning: the checkpoint of iteration {iteration} is of no use: {ill}:\n{failed}")
            return
        self._event(Event.CHECKPOINT_CONDEMNED, iteration=iteration, ill=str(ill))
        self._say(f"warning: no resume takes the checkpoint of iteration {iteration} by itself: {ill}")

    def _make_copy(self, copy: Callable[[Path], bool], folder: Path, iteration: int) -> None:
        """Makes the second copy. Without it the checkpoint is still complete: a failure is a warning."""
        started = time.monotonic()
        try:
            made = copy(folder)
        except AgreedError as failed:
            self._event(Event.CHECKPOINT_FAILED, iteration=iteration, reason=str(failed), copy=True)
            self._say(f"warning: iteration {iteration} has no second copy, and the run continues:\n{failed}")
            return
        if made:
            self._event(Event.CHECKPOINT_COPIED, iteration=iteration, seconds=round(time.monotonic() - started, 3))

    def _report_failure(self, iteration: int, failed: AgreedError, is_last: bool) -> AgreedError:
        self._event(Event.CHECKPOINT_FAILED, iteration=iteration, reason=str(failed))
        if not is_last:
            self._say(f"warning: iteration {iteration} is not saved, and the run continues:\n{failed}")
        return failed

    def _wait_for_previous(self, iteration: int) -> None:
        if self._pending is None:
            return
        before, (previous, future) = time.monotonic(), self._pending
        waits = not future.done()
        self.finish()
        if waits:
            seconds = round(time.monotonic() - before, 3)
            self._event(Event.CHECKPOINT_WAITED, iteration=iteration, previous=previous, seconds=seconds)
            if seconds >= _LONG_WAIT_SECONDS:
                self._say(
                    f"warning: the checkpoint of iteration {iteration} waited {seconds:.0f} s for that of iteration "
                    f"{previous} to be written; a longer train.save_interval avoids that"
                )

    def check(self) -> None:
        """Raises the thread's error if it ends the run. Call this after every step."""
        if self._pending is not None and self._pending[1].done():
            self.finish()

    def finish(self) -> None:
        """Waits for the checkpoint in the background, if there is one."""
        if self._pending is not None:
            (_, future), self._pending = self._pending, None
            future.result()

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Encloses a training loop, and finishes the background checkpoint at its end.

        It also does so after an error that all ranks share, and after a stop; any other end leaves it incomplete.
        """
        try:
            yield
        except (AgreedError, signals.Stopped, signals.Preempted):
            if self._pending is not None:
                self._pending[1].exception()
            raise
        self.finish()

    def _say(self, line: str) -> None:
        if self._ranks.first:
            sys.stdout.write(f"{line}\n")  # one write, because the thread and the training loop both print
            sys.stdout.flush()

    def _event(self, event: Event, **fields: object) -> None:
        if self._ranks.first:
            append_event(self._run_folder, event, **fields)
