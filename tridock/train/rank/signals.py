"""Handles SIGTERM and SIGUSR1 on a rank: exits immediately, or saves a checkpoint first.

A scheduler sends them before a job's time limit. Inside :func:`save_on_signal` the first one is recorded, and the
training loop saves after the current step or the next. Anywhere else SIGTERM ends the rank immediately; so it does if
the run folder has ``.stopped``, because ``tridock stop`` and Ctrl-C request no checkpoint.
"""

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
"""Time limit from SIGTERM to the end of the step; a rank that exceeds it waits for a rank that has exited."""
BURST_SECONDS = 3.0
"""Time in which a repeated SIGTERM counts as the same one, forwarded by a launcher; a later one is a second request."""
_EXIT_SECONDS = 5.0
_RETRY_SECONDS: Final = 0.05


class Stopped(BaseException):
    """The rank must exit immediately. Not an Exception, so that no caller handles it as an ordinary failure."""


class Preempted(BaseException):
    """The run has saved a checkpoint and exits, because of a signal. Raised on every rank."""

    def __init__(self, iteration: int) -> None:
        super().__init__(f"saved after iteration {iteration}, as SIGTERM or SIGUSR1 asked")
        self.iteration = iteration


class _State:
    """Signals received so far. Handlers run in the main thread, :func:`_watch` in another: plain assignments only."""

    run_folder: Path | None = None
    can_save = False
    step_done = False
    save_requested_here = False
    first_sigterm: float | None = None


_state = _State()


def handle_sigusr1() -> None:
    """Starts recording SIGUSR1, which would otherwise end the rank."""
    signal.signal(signal.SIGUSR1, _on_sigusr1)


def listen(run_folder: Path) -> None:
    """Starts handling SIGTERM and SIGUSR1, even while the rank waits in a collective.

    Python runs signal handlers between bytecodes, and a rank that waits for a dead rank executes none. The C handler
    itself writes to the wake-up descriptor, so that a thread sees the signal and ends the process.
    """
    _state.run_folder = run_folder
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.signal(signal.SIGTERM, _on_sigterm)
    signal.signal(signal.SIGUSR1, _on_sigusr1)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(read_end,), name="signals", daemon=True).start()


@contextlib.contextmanager
def save_on_signal() -> Iterator[None]:
    """Encloses a training loop that calls :func:`save_requested` after every step. A context manager."""
    _state.can_save = True
    try:
        yield
    finally:
        _state.can_save = False


def save_requested(any_rank: Callable[[bool], bool]) -> bool:
    """Whether any rank has received a signal. All ranks get True after the same step, at most one step later.

    ``any_rank`` is a collective that returns whether its argument, or that of the previous call, is true on any rank.
    """
    _state.step_done = any_rank(_state.save_requested_here)
    return _state.step_done


def _on_sigusr1(_number: int, _frame: FrameType | None) -> None:
    _state.save_requested_here = True


def _on_sigterm(_number: int, frame: FrameType | None) -> None:
    if _waits_for_step():
        return
    if _in_finalizer(frame):
        # Python ignores an exception there and prints its traceback: send the signal again in a moment.
        threading.Timer(_RETRY_SECONDS, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return
    raise Stopped


def _waits_for_step() -> bool:
    """Whether this SIGTERM is the first and requests a checkpoint. One after SIGUSR1 counts as the first."""
    if not _state.can_save or (_state.run_folder is not None and (_state.run_folder / STOPPED).exists()):
        return False
    now = time.monotonic()
    _state.save_requested_here = True
    if _state.first_sigterm is None:
        _state.first_sigterm = now
    return now - _state.first_sigterm < BURST_SECONDS


def _watch(read_end: int) -> None:
    """Ends the process if the main thread cannot handle the signal."""
    deadline, awaits_step = float("inf"), False
    while True:
        remaining = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([read_end], [], [], None if remaining == float("inf") else remaining)
        if ready:
            data = os.read(read_end, 1)
            if not data:
                return
            if data[0] == signal.SIGTERM:
                awaits_step = _waits_for_step()
                deadline = min(deadline, time.monotonic() + (STEP_SECONDS if awaits_step else _EXIT_SECONDS))
        elif awaits_step and _state.step_done:
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
