"""The supervisor's connections to the agents of all nodes: reports, orders, and silence."""

import math
import os
import selectors
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from tridock.contracts import environment, heartbeat
from tridock.contracts.codec import decode
from tridock.contracts.lease import HeldLease
from tridock.contracts.node_answers import Space
from tridock.contracts.rank_status import AgentMessage, LinkFaults, LockReport, RankStatus
from tridock.contracts.supervision import Reach, Supervision
from tridock.node.supervisor.verdict import StatusByNode

T = TypeVar("T")

_PING_S: Final = 2.0
_RECONNECT_S: Final = 1.0
_PAUSE_S: Final = 5.0
_CLOSE_S: Final = 1.0
_EXIT_S: Final = 0.2
_FIRST_ANSWER_S: Final = 60.0
"""Seconds more for another node's first message: a busy machine or a scheduler may start its agent late."""
_CLOCKS: Final = 5
"""Reports of which the one that was fastest on its way tells a node's clock."""
_CHUNK: Final = 1 << 16
_ALIVE: Final = AgentMessage()
_NEVER: Final = RankStatus(0, heartbeat.OBSERVED, 0, 0, 0, 0.0, alive=False)
_SLURM_VARIABLES: Final = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CONF")
"""The job variables that an agent keeps; srun would take the others as options for the agent's own step."""


class _Connection:
    """The connection to one node's agent, which is restarted whenever it ends."""

    def __init__(self, node: str, ranks: Sequence[int], command: Sequence[str], patience_s: float = 0.0) -> None:
        self.node, self.ranks, self._command = node, ranks, command
        self.last_message_at = time.monotonic() + patience_s
        """The time of the node's last message; later than now while the agent's start may take long."""
        self.ssh_error = ""
        """The last line of ssh's stderr."""
        self.reported_at = -math.inf
        """The time of the last message with ranks."""
        self.memory_kills = 0
        """Processes that the kernel has killed for memory there since the launch."""
        self.links: tuple[LinkFaults, ...] = ()
        """The node's links that went down since the launch, at the last report."""
        self.clocks_s: deque[float] = deque(maxlen=_CLOCKS)
        """How far its clock was ahead of this one's in the last reports, less the time that each was on its way."""
        self.disk: Space | None = None
        self.locks: LockReport | None = None
        """Of its devices, since the last order about them."""
        self._locks_wanted, self._turn = True, 0
        self.stop_asked = False
        self.removed: list[str] = []
        """Files that killed processes had left there, and that nobody has asked for yet."""
        self.answers: list[AgentMessage] = []
        self.launch = 0
        self.statuses: tuple[RankStatus, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._partial_line = b""
        self._reconnect_at = 0.0
        self._sending = threading.Lock()

    def open(self, selector: selectors.BaseSelector) -> None:
        """Starts the agent, unless it runs or has just ended."""
        if self._process is not None or time.monotonic() < self._reconnect_at:
            return
        env = {name: value for name, value in os.environ.items() if _is_for_agent(name)}
        env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [env.get("PYTHONPATH")])])
        pipe = subprocess.PIPE
        # In a session of its own, so that signals to the supervisor's group do not reach it.
        process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=pipe, env=env, cwd="/", start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._orders, self._answers, self._errors = process.stdin, process.stdout, process.stderr
        os.set_blocking(self._orders.fileno(), False)
        selector.register(self._answers, selectors.EVENT_READ, (self, True))
        selector.register(self._errors, selectors.EVENT_READ, (self, False))
        self._process, self._partial_line = process, b""

    def send(self, order: str) -> None:
        """Sends an order; ignores a broken connection, which the next read closes."""
        with self._sending, suppress(OSError):
            if self._process is not None:
                os.write(self._orders.fileno(), f"{order}\n".encode())

    def order_locks(self, *, wanted: bool) -> None:
        """Has the node lock its devices, which an agent does at its start, or release them."""
        if wanted != self._locks_wanted:
            self.locks, self._locks_wanted, self._turn = None, wanted, self._turn + 1
            self.send(f"{'lock' if wanted else 'release'} {self._turn}")

    def read(self, selector: selectors.BaseSelector, *, answers: bool) -> None:
        """Reads what has arrived; closes a connection that has ended."""
        if self._process is None:
            return
        chunk = os.read((self._answers if answers else self._errors).fileno(), _CHUNK)
        if not answers:
            self._note_error(chunk)
            if not chunk:
                selector.unregister(self._errors)
        elif chunk:
            self._take(chunk)
        else:
            self.close(selector)

    def _note_error(self, chunk: bytes) -> None:
        lines = chunk.decode(errors="replace").strip().splitlines()
        self.ssh_error = lines[-1].strip() if lines else self.ssh_error

    def _take(self, chunk: bytes) -> None:
        self.last_message_at, self.ssh_error = time.monotonic(), ""
        *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
        for line in lines:
            with suppress(ValueError):  # a login banner
                message = decode(AgentMessage, line)
                self.removed += message.removed
                if message.ranks is not None:
                    self.statuses, self.disk = (*message.ranks, *self._lost(message)), message.disk
                    self.stop_asked = self.stop_asked or message.stop_asked
                    self.reported_at = self.last_message_at
                    self.memory_kills = max(self.memory_kills, message.memory_kills)
                    self.links = message.links
                    if message.locks is not None and message.locks.turn == self._turn:
                        self.locks = message.locks
                    if message.clock_s:
                        self.clocks_s.append(message.clock_s - time.time())
                elif message != _ALIVE:
                    self.answers.append(message)

    def _lost(self, message: AgentMessage) -> Iterator[RankStatus]:
        """Yields the ranks that a new agent does not know.

        Those of a container that is younger than the launch ended with the one before it, which may have reported
        nothing yet, or an end that only its launcher saw.
        """
        reported = {status.rank for status in message.ranks or ()}
        known = {status.rank: status for status in self.statuses}
        if message.missed_launch and message.missed_launch == self.launch:
            ended = {rank for rank, status in known.items() if status.phase == heartbeat.END}
            known = {rank: known.get(rank, _NEVER) for rank in self.ranks if rank not in ended}
            known = {rank: replace(status, rank=rank, phase=heartbeat.OBSERVED) for rank, status in known.items()}
        for rank, status in known.items():
            if rank not in reported and status.phase == heartbeat.OBSERVED:
                yield replace(status, alive=False)

    def close(self, selector: selectors.BaseSelector, deadline: float = 0.0, *, may_kill: bool = True) -> None:
        """Ends the connection; the next ``open`` makes another. The agent has until ``deadline`` to exit by itself.

        ``may_kill``: whether its process, on this node the agent itself, is killed then.
        """
        with self._sending:
            process, self._process = self._process, None
            if process is None:
                return
            self.last_message_at = min(self.last_message_at, time.monotonic())
            self.locks, self._locks_wanted, self._turn = None, True, 0
            self._orders.close()
        for pipe in (self._answers, self._errors):
            if pipe in {key.fileobj for key in selector.get_map().values()}:
                selector.unregister(pipe)
        if may_kill:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(_EXIT_S, deadline - time.monotonic()))
            process.kill()
            process.wait()
            # ssh closes its output before it prints the reason.
            os.set_blocking(self._errors.fileno(), False)
            self._note_error(self._errors.read() or b"")
            self._reconnect_at = time.monotonic() + _RECONNECT_S
        self._answers.close()
        self._errors.close()

    @property
    def connected(self) -> bool:
        return self._process is not None


def _later(status: RankStatus, seconds: float) -> RankStatus:
    """Returns the status of a rank that ended or failed, some seconds after it was reported."""
    if status.alive and status.phase != heartbeat.FAILED:
        return status
    return replace(status, age_s=status.age_s + seconds, gone_s=status.gone_s + seconds)


def _is_for_agent(name: str) -> bool:
    return name != environment.RUN_ID and (not name.startswith("SLURM_") or name in _SLURM_VARIABLES)


class AgentConnections:
    """The connections to the agents of all nodes that the supervisor watches."""

    def __init__(self, folder: Path, supervision: Supervision, lease: HeldLease) -> None:
        self._lease = lease
        self._nodes, self._remote = {}, supervision.remote
        for node in supervision.watched:
            remote = node in supervision.remote
            reach, patience_s = (supervision.reach, _FIRST_ANSWER_S) if remote else (Reach(), 0.0)
            command, ranks = reach.command(node, "agent", str(folder), node), supervision.ranks.get(node, ())
            self._nodes[node] = _Connection(node, ranks, command, patience_s)
        self.build_locks: dict[int, str] = {}
        """By rank, the lock of torch's extension builder that it waited for at the last request of stacks."""
        self._selector = selectors.DefaultSelector()
        self._polled = time.monotonic()
        self._launch = (0, self._polled)
        self._closed = threading.Event()
        # In a thread: on a slow disk this process may wait for a minute to write a line, and agents must not miss it.
        threading.Thread(target=self._ping, daemon=True).start()

    def _ping(self) -> None:
        while not self._closed.wait(_PING_S):
            launch, began = self._launch
            self.order(f"ping {launch} {time.monotonic() - began:.2f}")

    def poll(self, seconds: float) -> None:
        """Reads messages for at most this many seconds, and keeps the connections open.

        Raises :class:`LeaseLostError` if another node has taken over the run: its agents must not be replaced.
        """
        self._lease.renew()
        self._notice_pause()
        for connection in self._nodes.values():
            if not connection.connected:
                self._lease.check()
                connection.open(self._selector)
        ready = self._selector.select(seconds)
        self._notice_pause()
        for key, _ in ready:
            connection, answers = key.data
            connection.read(self._selector, answers=answers)

    def _notice_pause(self) -> None:
        """After a pause of this process (container, machine, a slow disk), no node counts as silent."""
        now = time.monotonic()
        if now - self._polled > _PAUSE_S:
            for connection in self._nodes.values():
                connection.last_message_at = max(now, connection.last_message_at)
        self._polled = now

    def order(self, text: str) -> None:
        """Sends an order to every node."""
        for connection in self._nodes.values():
            connection.send(text)

    def statuses(self) -> StatusByNode:
        """Returns the last status of the ranks, by node; the times of ranks that have ended are those before now, as
        nodes report at different times."""
        now = time.monotonic()
        return {
            node: tuple(_later(status, now - connection.reported_at) for status in connection.statuses)
            for node, connection in self._nodes.items()
        }

    def have_reported_since(self, moment: float) -> bool:
        """Whether every node has sent the status of its ranks since then."""
        return all(connection.reported_at >= moment for connection in self._nodes.values())

    def memory_kills(self) -> dict[str, int]:
        """Returns how many processes the kernel has killed for memory since the launch, for nodes where it has."""
        return {node: connection.memory_kills for node, connection in self._nodes.items() if connection.memory_kills}

    def link_faults(self) -> dict[str, tuple[LinkFaults, ...]]:
        """Returns the links that went down since the launch, for nodes with any."""
        return {node: connection.links for node, connection in self._nodes.items() if connection.links}

    def clocks_s(self) -> dict[str, float]:
        """Returns how far each node's clock is ahead of this one's (negative: behind), as far as reports tell."""
        return {node: max(connection.clocks_s) for node, connection in self._nodes.items() if connection.clocks_s}

    def lock_devices(self) -> tuple[str, tuple[str, ...]] | None:
        """Returns the first node that has not locked its devices, with those it lacks as far as it has said; None once
        all have.

        Runs lock in one order, so that no two wait for each other: nodes after the first that lacks some have none.
        """
        locks = {node: connection.locks for node, connection in self._nodes.items() if connection.locks is not None}
        if late := [node for node in self._nodes if node not in locks]:
            return late[0], ()
        first: tuple[str, tuple[str, ...]] | None = None
        for node in sorted(locks, key=lambda it: locks[it].domain):
            connection, missing = self._nodes[node], locks[node].missing
            connection.order_locks(wanted=first is None)
            if first is None and (missing or connection.locks is None):
                first = node, missing if connection.locks is not None else ()
        return first

    def disks(self) -> dict[str, Space]:
        """Returns the disk with the run's folder for each node with a disk of its own."""
        return {node: connection.disk for node, connection in self._nodes.items() if connection.disk is not None}

    def is_stop_asked(self) -> bool:
        """Whether a user has stopped the run on some node."""
        return any(connection.stop_asked for connection in self._nodes.values())

    def silence_s(self) -> dict[str, float]:
        """Returns the seconds since each node's last message, without pauses of this process."""
        self._notice_pause()
        now = time.monotonic()
        return {node: now - connection.last_message_at for node, connection in self._nodes.items()}

    def ssh_errors(self) -> Mapping[str, str]:
        """Returns the last line of ssh's stderr for each node that does not answer."""
        return {node: connection.ssh_error for node, connection in self._nodes.items()}

    def stacks(self, ranks: Sequence[int], patience_s: float) -> dict[int, tuple[str, ...]]:
        """Returns the stacks of ranks, from all nodes that answer in time; notes the build locks they wait for."""
        answers = self._ask(f"stacks {' '.join(map(str, ranks))}", lambda message: message.stacks, patience_s)
        said = [answer for connection in self._nodes.values() for answer in connection.answers]
        self.build_locks = {rank: path for answer in said for rank, path in answer.build_locks.items()}
        return {rank: frames for stacks in answers.values() for rank, frames in stacks.items()}

    def stop(self, grace_s: float, patience_s: float) -> dict[str, int]:
        """Ends the run's processes on every node; returns how many remain on each node that answers in time."""
        answers = self._ask(f"stop {grace_s}", lambda message: message.stopped, patience_s)
        for connection in self._nodes.values():
            connection.statuses = ()
        return {node: stopped.remaining for node, stopped in answers.items()}

    def take_removed(self) -> dict[str, list[str]]:
        """Returns, for nodes with any, the files that killed processes had left and that were removed since the last
        call.
        """
        found = {node: connection.removed for node, connection in self._nodes.items() if connection.removed}
        for node in found:
            self._nodes[node].removed = []
        return found

    def launched(self) -> None:
        """Notes that the launcher has just begun, and forgets the ranks of the launch before."""
        self._launch = (self._launch[0] + 1, time.monotonic())
        for connection in self._nodes.values():
            connection.launch, connection.memory_kills, connection.links = self._launch[0], 0, ()
            connection.statuses = ()

    def _ask(self, order: str, field: Callable[[AgentMessage], T | None], patience_s: float) -> dict[str, T]:
        for connection in self._nodes.values():
            connection.answers.clear()
        self.order(order)
        asked = {node for node, connection in self._nodes.items() if connection.connected}
        found: dict[str, T] = {}
        deadline = time.monotonic() + patience_s
        while asked - found.keys() and time.monotonic() < deadline:
            self.poll(0.05)
            for node, connection in self._nodes.items():
                for answer in map(field, connection.answers):
                    if answer is not None:
                        found[node] = answer
        return found

    def close(self, *, says_bye: bool = True) -> None:
        """Ends all connections. Agents that hear no bye wait for the next supervisor, or become it."""
        self._closed.set()
        if says_bye:
            self.order("bye")
        deadline = time.monotonic() + _CLOSE_S
        for node, connection in self._nodes.items():
            connection.close(self._selector, deadline, may_kill=says_bye or node in self._remote)
