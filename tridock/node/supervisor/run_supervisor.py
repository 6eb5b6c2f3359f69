"""The supervisor of a run: its attempts one after another, with the nodes that each has."""

import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tridock.contracts import run_folder
from tridock.contracts.events import Cause, Event, append_event, events_of
from tridock.contracts.lease import HeldLease
from tridock.contracts.rank_status import NODE_SILENCE_S
from tridock.contracts.supervision import Supervision
from tridock.node.probes import ports
from tridock.node.supervisor.agent_connections import AgentConnections
from tridock.node.supervisor.attempt import (
    STOP_PATIENCE_S,
    TERM_S,
    Attempt,
    Observations,
    counted,
    is_stopped,
    say,
    stop,
)
from tridock.node.supervisor.disks import no_room
from tridock.node.supervisor.failover import move
from tridock.node.supervisor.restart import (
    RestartAttempt,
    cannot_help,
    checkpoint_iteration,
    previous_attempts,
    refusal,
)
from tridock.node.supervisor.verdict import Verdict

_FIT_PATIENCE_S: Final = 120.0


class RunSupervisor:
    """One run, from its first start to its last end."""

    def __init__(self, folder: Path, supervision: Supervision, lease: HeldLease) -> None:
        self._folder, self._supervision, self._lease = folder, supervision, lease
        self._agents = AgentConnections(folder, supervision, lease)
        self.observations = Observations(folder, supervision)
        self._attempt = self._new_attempt()
        self._restarts: list[RestartAttempt] = []
        self._must_move = False
        self._silent: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        self._agents.close()

    def _new_attempt(self) -> Attempt:
        return Attempt(self._folder, self._supervision, self._lease, self._agents, self.observations)

    def begin(self, script: str) -> None:
        """Starts an attempt with ``script``."""
        self._attempt = self._new_attempt()
        self._attempt.begin(script)

    def take_over(self, previous: str) -> int | None:
        """Restarts a run whose supervisor on ``previous`` is gone; returns its exit code if it cannot continue."""
        if events_of(self._folder, Event.RUN_FINISHED):
            self._agents.stop(TERM_S, STOP_PATIENCE_S)
            return 0
        self._must_move = previous != self._supervision.head
        self._attempt = self._new_attempt()
        newest = checkpoint_iteration(self._folder, self._supervision, self._lease.prepared_at)
        self._attempt.steps.reached = newest or 0
        self._restarts = previous_attempts(self._folder, time.monotonic())
        verdict = Verdict(Cause.HEAD_SILENT, "does not supervise the run any more", previous)
        about = {"node": self._supervision.head, "previous": previous, "token": self._lease.token}
        append_event(self._folder, Event.TAKEN_OVER, **about, reason=str(verdict))
        self._print(f"{verdict}: {self._supervision.head} takes over")
        if self._restart(verdict):
            return None
        return run_folder.EXIT_STOPPED if self._is_stopped() else verdict.code

    def abandon(self) -> None:
        """Ends the processes that this supervisor started, once it has lost the run, to another node or to none."""
        self._attempt.abandon()
        self._agents.close(says_bye=False)

    def script(self) -> str:
        """Returns the script that resumes from the run's newest checkpoint, or the start script without a checkpoint.

        A run of your own program, which manages its own checkpoints, uses its resume command if it has one.
        """
        if self._supervision.observed:  # your own program: whatever it has saved, its script for that decides
            resumes = (self._folder / run_folder.RESUME_SCRIPT).exists()
        else:
            resumes = checkpoint_iteration(self._folder, self._supervision, self._lease.prepared_at) is not None
        return run_folder.RESUME_SCRIPT if resumes else run_folder.LAUNCH_SCRIPT

    def run_to_end(self) -> int:
        """Waits until all processes of the run have ended; returns its exit code."""
        while True:
            code, verdict = self._attempt.run()
            if verdict is None or not self._restart(verdict):
                return run_folder.EXIT_STOPPED if self._is_stopped() else code

    def _restart(self, verdict: Verdict) -> bool:
        """Restarts the run from its last checkpoint, if restarts are allowed and can help."""
        if not self._supervision.max_restarts:
            return False
        self._lease.check()
        reached = max([self._attempt.steps.reached, *(one.before for one in self._restarts)])
        if self._restarts:
            self._restarts[-1] = replace(self._restarts[-1], reached=self._attempt.steps.reached)
        why = refusal(self._supervision, self._restarts, time.monotonic())
        why = why or cannot_help(verdict, self._folder, self._attempt.events_before) or self._left_to_scheduler(verdict)
        why = why or self._wait_until_fit()
        if self._is_stopped():
            return False
        if why is not None:
            append_event(self._folder, Event.NOT_RESTARTED, reason=why)
            self._print(f"not restarted: {why}")
            return False
        self._lease.check()
        iteration = checkpoint_iteration(self._folder, self._supervision, self._lease.prepared_at)
        self._restarts.append(RestartAttempt(time.monotonic(), reached))
        log_bytes = (self._folder / run_folder.LAUNCHER_LOG).stat().st_size
        fields = {"attempt": len(self._restarts), "iteration": iteration or 0, "reason": str(verdict)}
        append_event(self._folder, Event.RUN_RESTARTED, **fields, log_bytes=log_bytes)
        script = self.script()
        origin = "from the beginning" if iteration is None else f"from the checkpoint of iteration {iteration}"
        if self._supervision.observed:
            origin = f"with {script}"
        self._print(f"restart {len(self._restarts)} of at most {self._supervision.max_restarts}, {origin}")
        self.begin(script)
        return True

    def _left_to_scheduler(self, verdict: Verdict) -> str | None:
        """Returns a reason if a scheduler is to replace the lost node by ending the job."""
        if self._supervision.scheduler is not None and verdict.cause.event is Event.NODE_LOST:
            return f"{self._supervision.scheduler} gives the job other nodes"
        return None

    def _wait_until_fit(self) -> str | None:
        """Waits until no process of the run remains on any node and the port is free; returns what prevents it.

        The run continues without a node that does not come back.
        """
        deadline, began = time.monotonic() + _FIT_PATIENCE_S, time.monotonic()
        while (why := self._obstacle()) is not None:
            if time.monotonic() > max(deadline, began + self._supervision.node_timeout_s) or self._is_stopped():
                return why
            movable = self._supervision.scheduler is None
            if movable and self._silent and time.monotonic() > began + self._supervision.node_timeout_s:
                if (refused := self._move()) is not None:
                    return f"{why}; {refused}"
                deadline, began = time.monotonic() + _FIT_PATIENCE_S, time.monotonic()
            self._agents.poll(1.0)
        # The scripts and the rendezvous are the previous head's.
        return self._move() if self._must_move else None

    def _move(self) -> str | None:
        """Lays the run out without the nodes that do not answer; returns why it cannot, or None."""
        self._lease.check()
        from_scratch = checkpoint_iteration(self._folder, self._supervision, self._lease.prepared_at) is None
        moved = move(self._folder, self._supervision, self._silent, from_scratch=from_scratch)
        if moved.supervision is None:
            return moved.reason
        self._print(moved.reason)
        self._agents.close()
        self._supervision = moved.supervision
        self._agents = AgentConnections(self._folder, moved.supervision, self._lease)
        self._must_move = False
        return None

    def _obstacle(self) -> str | None:
        remaining, silence_s = stop(self._folder, self._agents), self._agents.silence_s()
        late = [node for node in self._supervision.watched if node not in remaining]
        self._silent = [node for node in late if silence_s[node] >= NODE_SILENCE_S]  # others are slow, and not lost
        if late:
            error = self._agents.ssh_errors()[late[0]]
            return f"{', '.join(late)} does not answer" + (f" ({error})" if error else "")
        if any(remaining.values()):
            return f"previous processes do not end: {counted(remaining)}"
        if (full := no_room(self._folder)) is not None:
            return full
        port = self._supervision.master_port
        if not ports.is_free(port):
            return f"port {port} is taken by {ports.holder(port) or 'a process that cannot be seen from here'}"
        return None

    def _is_stopped(self) -> bool:
        return is_stopped(self._folder, self._agents)

    def _print(self, line: str) -> None:
        say(self._folder, line)
