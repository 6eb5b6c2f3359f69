"""The step time by the ranks' own clocks, and the ranks' progress."""

import time
from collections import deque

from tridock.contracts import heartbeat
from tridock.node.supervisor.verdict import StatusByNode


class StepTimes:
    """The step times of one attempt of a run."""

    def __init__(self) -> None:
        self.reached = 0
        self._last: dict[int, tuple[int, float]] = {}
        self._times: deque[float] = deque(maxlen=64)

    def note(self, seen: StatusByNode) -> None:
        """Processes the ranks' reports."""
        now = time.monotonic()
        for status in (status for statuses in seen.values() for status in statuses if status.phase == heartbeat.TRAIN):
            at = now - status.age_s
            iteration, before = self._last.get(status.rank, (status.iteration, at))
            if status.iteration > iteration:
                self._times.append((at - before) / (status.iteration - iteration))
            if status.iteration != iteration or status.rank not in self._last:
                self._last[status.rank] = status.iteration, at
            self.reached = max(self.reached, status.iteration)

    @property
    def median(self) -> float | None:
        """Returns the median step time in seconds; None before the second step."""
        # Not statistics.median: its module takes longer to import than all of this package.
        return sorted(self._times)[len(self._times) // 2] if self._times else None
