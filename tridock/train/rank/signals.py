"""What a rank does when it is told to end: at once, or after a checkpoint.

SIGTERM and SIGUSR1 are how a scheduler announces that a job's time is over. Inside :func:`saving` the first of them is
noted, and the training loop saves after the step that it is in; anywhere else SIGTERM ends the rank at once. So it does
where the run's folder holds ``.stopped``: whoever asks for the end with ``fab stop`` or Ctrl-C wants no checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from tridock.contracts.run_folder import STOPPED

STEP_SECONDS = 120.0
"""Time from SIGTERM to the end of the step; a rank that is not there by then waits for one that has gone."""
BURST_SECONDS = 3.0
"""A launcher hands on the SIGTERM that the ranks have had already; a later one is meant as a second."""
_WAY_OUT_SECONDS = 5.0
_AGAIN_SECONDS: Final = 0.05


class Stopped(BaseException):
    """The end is wanted at once. Not an Exception: nothing on the way up may take it for an ordinary failure."""


class Preempted(BaseException):
    """The run has saved and leaves, because it was told to; every rank holds it."""

    def __init__(self, iteration: int) -> None:
        super().__init__(f"saved after iteration {iteration}, as SIGTERM or SIGUSR1 asked")
        self.iteration = iteration


class _Heard:
    """What this process has been told. A handler runs in the main thread, the watch in another: plain assignments."""

    run_folder: Path | None = None
    saves = False
    step_is_over = False
    to_save = False
    first_sigterm: float | None = None


_heard = _Heard()


def note_usr1() -> None:
    """Takes SIGUSR1 down from now on; until :func:`listen` it would end the rank."""
    signal.signal(signal.SIGUSR1, _on_sigusr1)


def listen(run_folder: Path) -> None:
    """Answers SIGTERM and SIGUSR1 from now on; a rank that is deep inside a collective leaves all the same.

    Python runs signal handlers between bytecodes, and a rank that waits for a dead one executes none.
    The wake-up descriptor is written by the C handler itself, so a thread can see the signal and end the process.
    """
    _heard.run_folder = run_folder
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.signal(signal.SIGTERM, _on_sigterm)
    signal.signal(signal.SIGUSR1, _on_sigusr1)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(read_end,), name="signals", daemon=True).start()


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """Around a training loop that asks :func:`asked` after every step."""
    _heard.saves = True
    try:
        yield
    finally:
        _heard.saves = False


def asked(of_any_rank: Callable[[bool], bool]) -> bool:
    """Whether any rank has been told to save and leave; all learn of it after the same step.

    ``of_any_rank`` tells whether what it is given is true on any rank: a collective.
    """
    _heard.step_is_over = of_any_rank(_heard.to_save)
    return _heard.step_is_over


def _on_sigusr1(_number: int, _frame: FrameType | None) -> None:
    _heard.to_save = True


def _on_sigterm(_number: int, frame: FrameType | None) -> None:
    if _is_for_later():
        return
    if _in_finalizer(frame):
        # Python ignores what is raised there, and prints its traceback: once more in a moment.
        threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return
    raise Stopped


def _is_for_later() -> bool:
    """Whether this SIGTERM asks for a checkpoint, and is not the second. One after SIGUSR1 is the first."""
    if not _heard.saves or (_heard.run_folder is not None and (_heard.run_folder / STOPPED).exists()):
        return False
    now = time.monotonic()
    _heard.to_save = True
    if _heard.first_sigterm is None:
        _heard.first_sigterm = now
    return now - _heard.first_sigterm < BURST_SECONDS


def _watch(read_end: int) -> None:
    """Ends the process where its main thread does not come to do it."""
    deadline, for_the_step = float("inf"), False
    while True:
        left = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([read_end], [], [], None if left == float("inf") else left)
        if ready:
            data = os.read(read_end, 1)
            if not data:
                return
            if data[0] == signal.SIGTERM:
                for_the_step = _is_for_later()
                deadline = min(deadline, time.monotonic() + (STEP_SECONDS if for_the_step else _WAY_OUT_SECONDS))
        elif for_the_step and _heard.step_is_over:
            deadline = float("inf")
        else:
            os.write(2, f"rank {os.environ.get('RANK', '0')}: stopped by SIGTERM inside a collective\n".encode())
            os._exit(128 + signal.SIGTERM)


def _in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
