"""The launcher of one attempt of a run: a script on the head, whose output is the run's log; its signals."""

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from tridock.contracts import environment, run_folder
from tridock.contracts.events import Cause
from tridock.contracts.records import read_plan
from tridock.contracts.rotated_logs import COPY_BYTES, RANK_BYTES, rotate, tail
from tridock.contracts.supervision import Supervision
from tridock.node.supervisor.agent_connections import AgentConnections
from tridock.node.supervisor.verdict import StatusByNode, Verdict, lost_session, signal_name

_SSH_FAILED: Final = 255
_END_BYTES: Final = 1 << 20


class LauncherProcess:
    """Starts immediately; is the parent of the run's processes on this node."""

    def __init__(self, folder: Path, script: str, node: str) -> None:
        # Only the run itself carries the marker: stopping the run must not end the process that records its end.
        env = {environment.NODE: node, **os.environ, environment.RUN_ID: folder.name}
        self._log = folder / run_folder.LAUNCHER_LOG
        with self._log.open("ab") as log:
            self.log_offset = self._judged = log.tell()
            argv = ["bash", str(folder / script)]
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        self._most = COPY_BYTES if read_plan(folder).get("rank_logs", True) else RANK_BYTES

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it runs, negative if a signal ended it."""
        return self._process.poll()

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it: the ranks that it started on this node die with it."""
        return (self.exit_code or 0) < 0

    @property
    def has_ranks_exit_code(self) -> bool:
        """Whether its exit code is that of the ranks: not after a signal or a failure of ssh itself."""
        return not self.was_killed and self.exit_code != _SSH_FAILED

    def kill(self) -> None:
        if self.exit_code is None:
            self._process.kill()
            self._process.wait()

    def verdict(self) -> Verdict:
        """Returns the verdict on its early end, before the run was done."""
        code = self.exit_code or 0
        if code < 0:
            return Verdict(Cause.LAUNCHER_EXITED, f"was ended by {signal_name(-code)}", code=128 - code)
        if code == 0:
            # DeepSpeed's runner exits with 0 if a signal killed its child.
            return Verdict(Cause.LAUNCHER_EXITED, "ended with 0, but rank 0 never finished")
        return Verdict(Cause.LAUNCHER_EXITED, f"ended with exit code {code}", code=code)

    def limit_log(self) -> None:
        """Rotates the run's log if it is long."""
        with suppress(OSError):  # the disk is full
            rotate(self._log, self._most)

    def refused_login(self) -> Verdict | None:
        """Returns the verdict on the node that did not let it in, once the log has grown."""
        size = self._log.stat().st_size
        if size == self._judged:
            return None
        self._judged = size
        found = self.lost_session()
        return found if found is not None and found.cause is Cause.LOGIN_REFUSED else None

    def lost_session(self) -> Verdict | None:
        """Returns the verdict on the node whose ssh session it reports as lost."""
        return lost_session(tail(self._log, _END_BYTES, self.log_offset))


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
