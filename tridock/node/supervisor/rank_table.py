"""The status of the ranks on all nodes in one file on the head, for remote watchers."""

import json
import time
from pathlib import Path
from typing import Final

from tridock.contracts import run_folder
from tridock.node.supervisor.verdict import StatusByNode

_EVERY_S: Final = 2.0


class RankTable:
    """Writes ``.ranks.json`` every two seconds: rank, phase, iteration and the age of its heartbeat in seconds."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / run_folder.RANKS
        self._written = 0.0

    def note(self, seen: StatusByNode) -> None:
        """Processes the agents' reports."""
        if (now := time.monotonic()) - self._written < _EVERY_S:
            return
        self._written = now
        rows = sorted((it.rank, it.phase, it.iteration, round(it.age_s, 1)) for them in seen.values() for it in them)
        partial = self._path.with_suffix(".part")
        try:  # not synced: it is replaced every two seconds
            partial.write_text(json.dumps(rows))
            partial.replace(self._path)
        except OSError:  # the disk is full
            return
