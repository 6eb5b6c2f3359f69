"""What torch's flight recorders have recorded: a rank on GPUs dumps it when it is asked through its named pipe."""

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tridock.contracts import heartbeat, run_folder
from tridock.node.agent.evidence import last_collective

DUMPS_S: Final = 4.0
"""Seconds for the dumps of all ranks of a node: torch looks at its pipe once a second."""
_TICK_S: Final = 0.1


def ask_for_dumps(folder: Path, ranks: Iterable[int]) -> list[Path]:
    """Asks the ranks here that have a pipe; returns the files that they will write, of which no older ones remain."""
    asked: list[Path] = []
    for rank in ranks:
        dump = folder / f"{run_folder.FLIGHT}{rank}"
        with suppress(OSError):  # it has no pipe, or nobody reads it
            pipe = os.open(f"{folder / heartbeat.FLIGHT_PIPES}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            try:
                dump.unlink(missing_ok=True)
                os.write(pipe, b"1")
            finally:
                os.close(pipe)
            asked.append(dump)
    return asked


def wait_for_dumps(dumps: Sequence[Path], deadline: float) -> None:
    """Waits until all are whole; at most until ``deadline``, by ``time.monotonic``: a rank may not let go of Python."""
    while any(last_collective(dump) is None for dump in dumps) and time.monotonic() < deadline:
        time.sleep(_TICK_S)
