"""A run's output as it comes, until it ends."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tridock import run_folder
from tridock.errors import Problem, RequestError, RunError
from tridock.node.state import exit_code_of, is_supervised

_POLL_S = 0.05
_CHUNK = 1 << 16


def follow(folder: Path, offset: int = 0) -> int:
    """Prints ``launcher.log`` from ``offset`` until the run has ended and all is printed; returns its exit code."""
    if not (folder / run_folder.LAUNCHER_LOG).is_file():
        raise RequestError(Problem(folder.name, "has no output here", str(folder), "see fab status for the runs"))
    with (folder / run_folder.LAUNCHER_LOG).open("rb") as log:
        log.seek(offset)
        while True:
            # Looked at before the log: what was written before the end is read after it.
            alive, code = is_supervised(folder), exit_code_of(folder)
            while chunk := log.read(_CHUNK):
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
            if code is not None:
                return code
            if not alive and exit_code_of(folder) is None:
                todo = "its node was restarted or its supervisor killed; launch again, with train.load to go on"
                raise RunError(
                    Problem(folder.name, "was lost: nothing supervises it and no exit code was written", "", todo)
                )
            time.sleep(_POLL_S)
