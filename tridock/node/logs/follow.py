"""A run's output as it comes, until it ends.

For a reader far away, bytes that no text has tell more: BEAT that this end is still there, and END that it has spoken
to its end, and was not cut short.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

from tridock.contracts import run_folder
from tridock.contracts.run_state import exit_code_of, is_supervised
from tridock.errors import Problem, RequestError, RunError, TridockError

_POLL_S = 0.05
_CHUNK = 1 << 16


def follow_with_beats(folder: Path, offset: int = 0) -> int:
    """As :func:`follow`, for ``fab``."""
    try:
        return follow(folder, offset, run_folder.BEAT_S)
    except TridockError as error:
        _write(f"{error}\n".encode())
        return error.exit_code
    finally:
        _write(run_folder.END)


def follow(folder: Path, offset: int = 0, beat_s: float = math.inf) -> int:
    """Prints ``launcher.log`` from ``offset`` until the run has ended and all is printed; returns its exit code."""
    if not (folder / run_folder.LAUNCHER_LOG).is_file():
        raise RequestError(Problem(folder.name, "has no output here", str(folder), "see fab status for the runs"))
    with (folder / run_folder.LAUNCHER_LOG).open("rb") as log:
        log.seek(offset)
        spoke = time.monotonic()
        while True:
            # Looked at before the log: what was written before the end is read after it.
            alive, code = is_supervised(folder), exit_code_of(folder)
            while chunk := log.read(_CHUNK):
                _write(chunk)
                spoke = time.monotonic()
            if time.monotonic() - spoke >= beat_s:
                _write(run_folder.BEAT)
                spoke = time.monotonic()
            if code is not None:
                return code
            if not alive and exit_code_of(folder) is None:
                todo = "its node was restarted or its supervisor killed; launch again, with train.load to go on"
                raise RunError(
                    Problem(folder.name, "was lost: nothing supervises it and no exit code was written", "", todo)
                )
            time.sleep(_POLL_S)


def _write(chunk: bytes) -> None:
    sys.stdout.buffer.write(chunk)
    sys.stdout.buffer.flush()
