"""What the supervisor notes of the ranks: their status, how far they are, and the metrics that a program prints."""

import json
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from tridock.contracts import heartbeat, run_folder
from tridock.contracts.events import append_line
from tridock.contracts.output_metrics import OutputMetrics
from tridock.contracts.partials import remove_left_files
from tridock.contracts.rotated_logs import GrowingLog
from tridock.contracts.supervision import Supervision
from tridock.node.supervisor.verdict import HangLimits, StatusByNode, each


class Iterations:
    """How far the ranks have come; ``has_begun`` in this attempt, ``reached`` in the last iteration seen of it."""

    def __init__(self) -> None:
        self.reached = 0
        self.has_begun = False

    def note(self, seen: StatusByNode) -> None:
        """Processes the ranks' reports."""
        for _, status in each(seen):
            if status.phase == heartbeat.TRAIN:
                self.reached, self.has_begun = max(self.reached, status.iteration), True


_EVERY_S: Final = 2.0


class RankTable:
    """Writes ``.ranks.json`` every two seconds: rank, phase, iteration, the seconds since its last progress, and those
    after which it counts as hung (null for never).
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / run_folder.RANKS
        self._written = 0.0

    def note(self, seen: StatusByNode, limits: HangLimits) -> None:
        """Processes the agents' reports."""
        if (now := time.monotonic()) - self._written < _EVERY_S:
            return
        self._written = now
        rows = [
            (it.rank, it.phase, it.iteration, round(it.age_s, 1), round(limit, 1) if math.isfinite(limit) else None)
            for _, it in each(seen)
            for limit in (limits.of(it),)
        ]
        rows.sort(key=lambda row: row[0])
        with suppress(OSError):  # the disk is full
            remove_left_files(self._path)
            run_folder.write_atomic(self._path, json.dumps(rows).encode(), durable=False)


class PrintedMetrics:
    """Reads the launcher's log as it grows, and records the pattern's matches; without a pattern, nothing."""

    def __init__(self, folder: Path, supervision: Supervision) -> None:
        self._folder = folder
        self.begin(0, supervision)

    def begin(self, offset: int, supervision: Supervision) -> None:
        """Starts another attempt, which may repeat iterations, at this byte of the log."""
        others = [node for node in supervision.ranks if node != supervision.head]
        if supervision.scheduler:  # srun writes the number of a node
            others += map(str, range(1, 1 + len(others)))
        self._metrics = OutputMetrics(supervision.metrics, others) if supervision.metrics else None
        self._log, self._rest = GrowingLog(self._folder / run_folder.LAUNCHER_LOG, offset), b""

    def read(self) -> None:
        """Records the matches in the new lines."""
        if self._metrics is None:
            return
        while new := self._log.read(run_folder.LONGEST_LINE):
            # A progress bar restarts its line with a carriage return.
            *lines, rest = (self._rest + new).replace(b"\r", b"\n").split(b"\n")
            self._rest = rest[-run_folder.LONGEST_LINE :]
            for line in lines:
                for record in self._metrics.records(line.decode(errors="replace")):
                    append_line(self._folder / run_folder.METRICS, record)
