"""``tridock.node agent``: watches and ends the ranks of one node for the supervisor, over a connection.

It prints the status of the node's ranks as lines of JSON, once a second and as soon as a rank dies, and, while a slow
disk keeps it from reading them, that it is alive. It reads orders: ``ping LAUNCH AGE`` (the number of the run's
launches so far, and the seconds since the last one), ``lock TURN`` and ``release TURN`` (the node's devices, which it
locks at its start, too), ``stacks RANK…``, ``signal NAME``, ``stop GRACE``, ``bye``. When orders stop coming, the head
or the network is gone: the agent then ends the node's part of the run, which is of no further use.
"""

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from tridock.contracts import heartbeat, run_folder
from tridock.contracts.codec import encode
from tridock.contracts.events import Cause, Event, append_event
from tridock.contracts.lease import newest
from tridock.contracts.node_answers import Space, Stopped
from tridock.contracts.rank_status import NODE_SILENCE_S, AgentMessage
from tridock.contracts.rotated_logs import RANK_BYTES, rotate
from tridock.contracts.supervision import Supervision
from tridock.node.agent.device_locks import DeviceLocks
from tridock.node.agent.leftovers import Leftovers, lock_waits
from tridock.node.agent.processes import find_processes, stop_processes
from tridock.node.agent.rank_status import RankMonitor
from tridock.node.agent.spare_lock import release
from tridock.node.probes.limits_and_space import space

SILENCE_S: Final = 25.0
"""Seconds without an order after which the head counts as lost; NODE_SILENCE_S after the connection has ended."""
_TICK_S: Final = 0.1
_REPORT_S: Final = 1.0
_GRACE_S: Final = 3.0
_NOTE_S: Final = 2.0
_NOTE_PATIENCE_S: Final = 1.0
_CLEAR_PATIENCE_S: Final = 2.0
"""Seconds that a stop gives a disk that does not answer, before and after the processes end."""
_DISK_PATIENCE_S: Final = 120.0
"""Seconds for which the agent may wait for a disk: a shared file system that fails over takes about a minute."""


def own_disk(folder: Path, *, on_head: bool) -> Space | None:
    """Returns the disk with a run's folder; None on a node that sees the head's lease and so shares its disk."""
    return space(folder) if on_head or not newest(folder) else None


def is_replaced(folder: Path, node: str) -> bool:
    """Whether a supervisor has started another agent of the node than this process, over a new connection."""
    try:
        return _pid_file(folder, node).read_bytes() != str(os.getpid()).encode()
    except OSError:
        return False  # the run's folder was removed


def container_age_s() -> float:
    """Returns the seconds since process 1 here began; infinity where /proc hides the processes of others.

    Two machines agree on durations, whatever their clocks show.
    """
    with suppress(OSError):
        return time.clock_gettime(time.CLOCK_BOOTTIME) - heartbeat.start_ticks(1) / os.sysconf("SC_CLK_TCK")
    return math.inf


def _pid_file(folder: Path, node: str) -> Path:
    return folder / heartbeat.FOLDER / f"agent-{node}"


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Does some work in a thread, which is left to itself where a disk keeps it waiting."""

    def attempt() -> None:
        with suppress(OSError):
            work()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)


class NodeAgent:
    """Watches a node's ranks until ``bye``, until another agent replaces it, or until it has ended the ranks."""

    def __init__(self, folder: Path, node: str) -> None:
        supervision = Supervision.read(folder)
        self._folder, self._node, self._on_head = folder, node, node == supervision.head
        self._monitor = RankMonitor(folder, supervision.ranks[node], observed=supervision.observed, node=node)
        self._leftovers, self._at_leftovers = Leftovers(folder.name), threading.Lock()
        self._locks, self._has_launched = DeviceLocks(supervision.devices.get(node, ())), False
        self._removed: list[str] = []
        self._partial_line = b""
        self._connected = True
        self._released = False
        self._began, self._missed_launch = time.time(), 0
        self._printed = self._reported = time.monotonic()
        self._printing, self._ended = threading.Lock(), threading.Event()
        run_folder.write_atomic(_pid_file(folder, node), str(os.getpid()).encode())
        (folder / run_folder.INCOMPLETE).unlink(missing_ok=True)

    def run(self) -> bool:
        """Runs the agent; returns whether the head was lost."""
        # A scheduler sends the latter two to all processes of its job; the agent ends with its supervisor.
        for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        self._clear()  # of a run that died with its agent; this one's ranks are not so far yet
        for work in (self._say_alive, self._limit_logs, self._note_leftovers):
            threading.Thread(target=work, daemon=True).start()
        try:
            return self._watch()
        finally:
            self._ended.set()
            self._locks.release()  # this process may become the run's supervisor

    def _watch(self) -> bool:
        last_order = last_round = time.monotonic()
        dead: set[int] = set()
        while True:
            orders = self._read_orders()
            now = time.monotonic()
            if orders or now - last_round > SILENCE_S / 2:  # this node itself was suspended: restart the silence
                last_order = now
            last_round = now
            for order in orders:
                if order == "bye":
                    return False
                self._execute(order)
            timed_out = now - last_order > (SILENCE_S if self._connected else NODE_SILENCE_S)
            if (timed_out or not self._connected) and is_replaced(self._folder, self._node):
                return False
            if timed_out:
                self._end_all(now - last_order)
                return True
            if not self._connected:
                continue
            has_locked = self._locks.take(at_once=self._has_launched)
            statuses = self._monitor.read()
            if self._monitor.awaits_records:
                continue
            gone = {status.rank for status in statuses if not status.alive}
            if not self._released and len(gone) < len(statuses):
                release(self._folder.name)
                self._released = True
            if gone - dead or has_locked or now - self._reported >= _REPORT_S:
                disk = own_disk(self._folder, on_head=self._on_head)
                stopped, ranks = self._is_stopped(), tuple(statuses)
                kills, links, missed = self._monitor.memory_kills, self._monitor.link_faults, self._missed_launch
                about = AgentMessage(ranks, disk, stop_asked=stopped, missed_launch=missed, memory_kills=kills)
                about = replace(about, links=links, locks=self._locks.report, clock_s=time.time())
                self._print(replace(about, removed=self._take_removed()))
                self._reported, dead = now, gone

    def _say_alive(self) -> None:
        """Tells the head, while a disk keeps the other thread waiting, that the node is not lost."""
        while not self._ended.wait(_REPORT_S):
            now = time.monotonic()
            if self._printed + 2 * _REPORT_S < now < self._reported + _DISK_PATIENCE_S:
                self._print(AgentMessage())

    def _limit_logs(self) -> None:
        """Rotates the logs of this node's ranks."""
        while not self._ended.wait(_REPORT_S):
            for rank in self._monitor.ranks:
                with suppress(OSError):  # the disk is full
                    rotate(self._folder / run_folder.rank_log(rank), RANK_BYTES)

    def _note_leftovers(self) -> None:
        """Notes what this node's ranks would leave if they were killed."""
        while not self._ended.wait(_NOTE_S):
            self._note()

    def _note(self) -> None:
        with self._at_leftovers, suppress(OSError):
            self._leftovers.note()

    def _stop(self, grace_s: float) -> Stopped:
        """Ends the run's processes here and removes what they leave; returns the numbers."""
        _within(_NOTE_PATIENCE_S, self._note)
        stopped = stop_processes(self._folder.name, grace_s)
        self._clear()
        return stopped

    def _clear(self) -> None:
        def clear() -> None:
            with self._at_leftovers:
                self._removed.extend(self._leftovers.clear())

        _within(_CLEAR_PATIENCE_S, clear)

    def _take_removed(self) -> tuple[str, ...]:
        """Returns what was removed and is not said yet; a thread that a disk keeps waiting may add to it meanwhile."""
        return tuple(self._removed.pop(0) for _ in range(len(self._removed)))

    def _is_stopped(self) -> bool:
        """Whether a user has stopped the run here since: its head may not be in the hostfile."""
        with suppress(OSError):
            return (self._folder / run_folder.STOPPED).stat().st_mtime >= self._began
        return False

    def _read_orders(self) -> list[str]:
        """The lines that arrive within a tick, or until a rank dies; notes the end of the connection."""
        if not self._connected:
            time.sleep(_TICK_S)
            return []
        if 0 not in select.select([0, *self._monitor.pidfds()], [], [], _TICK_S)[0]:
            return []
        chunk = os.read(0, 4096)
        self._connected = bool(chunk)
        *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
        return [line.decode() for line in lines]

    def _execute(self, order: str) -> None:
        verb, *arguments = order.split()
        if verb == "ping":
            launch, age_s = int(arguments[0]), float(arguments[1])
            self._missed_launch = launch if container_age_s() < age_s else 0
            self._has_launched = launch > 0
        elif verb in ("lock", "release"):
            self._locks.order(wanted=verb == "lock", turn=int(arguments[0]))
        elif verb == "stacks":
            ranks = [int(rank) for rank in arguments]
            stacks = self._monitor.stacks(ranks)
            locks: dict[int, str] = {}
            _within(_CLEAR_PATIENCE_S, lambda: locks.update(lock_waits(self._folder, ranks, stacks)))
            self._print(AgentMessage(stacks=stacks, build_locks=dict(locks)))
        elif verb == "signal":
            self._monitor.send_signal(signal.Signals[arguments[0]])
        elif verb == "stop":
            stopped = self._stop(float(arguments[0]))
            self._monitor.reset()
            self._print(AgentMessage(stopped=stopped, removed=self._take_removed()))

    def _print(self, message: AgentMessage) -> None:
        with suppress(OSError), self._printing:  # the supervisor has disconnected: the next read of orders notices
            os.write(1, f"{encode(message)}\n".encode())
            self._printed = time.monotonic()

    def _end_all(self, silence_s: float) -> None:
        """Ends the run's processes here, because the head is lost."""
        if find_processes(self._folder.name):
            reason = f"heard nothing from the head for {silence_s:.0f} s"
            append_event(self._folder, Event.HEAD_LOST, node=self._node, cause=Cause.HEAD_SILENT, reason=reason)
            self._stop(_GRACE_S)
            # A head that returns must not take this for an exit of the ranks themselves.
            self._monitor.reset()
