"""Preemption: forwards a scheduler's signal to the ranks of your own program."""

import time
from pathlib import Path
from typing import Final

from tridock.contracts import run_folder
from tridock.contracts.supervision import Supervision
from tridock.node.supervisor.agent_connections import AgentConnections
from tridock.node.supervisor.verdict import StatusByNode

_SAVE_S: Final = 60.0
"""Seconds for the other ranks to save and end after the first: a launcher may wait for a rank that never does."""
_AGAIN_S: Final = 1.0
"""Seconds between signals, as a rank may start late; an agent signals each rank once."""


class ProgramPreemption:
    """Preemption of a program that a scheduler started. Never requested elsewhere or for ranks with heartbeats."""

    def __init__(self, folder: Path, supervision: Supervision) -> None:
        self._marker, self._signal = folder / run_folder.SIGNALLED, supervision.save_signal
        self._applies = supervision.observed and supervision.scheduler is not None
        self._sent_at = self._ended_at = 0.0

    def is_requested(self, agents: AgentConnections, *, received: bool) -> bool:
        """Whether the program must end; signals the ranks. ``received``: a signal to this process went to all."""
        if not self._applies or not self._marker.exists():
            return self._applies and received
        if time.monotonic() - self._sent_at >= _AGAIN_S:
            self._sent_at = time.monotonic()
            agents.order(f"signal {self._signal}")
        return True

    def is_overdue(self, seen: StatusByNode) -> bool:
        """Whether the ranks' time to end is over."""
        if not self._ended_at and any(not status.alive for statuses in seen.values() for status in statuses):
            self._ended_at = time.monotonic()
        return self._ended_at > 0.0 and time.monotonic() - self._ended_at > _SAVE_S
