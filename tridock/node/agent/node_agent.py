"""``tridock.node watch``: one node's eyes and hands of the supervisor, at the other end of a connection.

It prints what it sees of the node's ranks as lines of JSON, one a second and at once when a rank has died, and reads
orders: ``ping``, ``stacks RANK…``, ``stop GRACE``, ``bye``. Where the orders cease, the head or the network has gone:
the node's part of the run is of no use to anybody any more, and is ended.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from tridock.contracts import heartbeat, run_folder
from tridock.contracts.events import append_event
from tridock.node.agent.processes import find_processes, stop_processes
from tridock.node.agent.rank_status import Vitals
from tridock.node.agent.spare_lock import release

SILENCE_S: Final = 25.0
"""Without any order for so long, the head counts as gone."""
SUCCESSION_S: Final = 10.0
"""After the connection has ended, the time for the supervisor to make another."""
_TICK_S: Final = 0.1
_BEAT_S: Final = 1.0
_GRACE_S: Final = 3.0


def watch(folder: Path, node: str, ranks: Sequence[int]) -> int:
    """Watches until ``bye``, until another watch has taken over, or until the run's processes here are ended."""
    # A scheduler sends the latter two to all processes of its job; the watch goes when its supervisor does.
    for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    return _Watch(folder, node, ranks).run()


class _Watch:
    def __init__(self, folder: Path, node: str, ranks: Sequence[int]) -> None:
        self._folder, self._node = folder, node
        self._vitals = Vitals(folder, ranks)
        self._words = b""
        self._connected = True
        self._settled = False
        self._mark = folder / heartbeat.FOLDER / f"watch-{node}"
        run_folder.write_atomic(self._mark, str(os.getpid()).encode())

    def run(self) -> int:
        heard = looked = printed = time.monotonic()
        dead: set[int] = set()
        while True:
            orders = self._orders() if self._connected else self._wait()
            now = time.monotonic()
            if orders or now - looked > SILENCE_S / 2:  # this node itself stood still: the orders have a fresh chance
                heard = now
            looked = now
            for order in orders:
                if order == "bye":
                    return 0
                self._obey(order)
            late = now - heard > (SILENCE_S if self._connected else SUCCESSION_S)
            if (late or not self._connected) and self._succeeded():
                return 0
            if late:
                return self._end_all(now - heard)
            if not self._connected:
                continue
            vitals = self._vitals.look()
            gone = {vital.rank for vital in vitals if not vital.alive}
            if not self._settled and len(gone) < len(vitals):
                release(self._folder.name)
                self._settled = True
            if gone - dead or now - printed >= _BEAT_S:
                self._print(ranks=[asdict(vital) for vital in vitals])
                printed, dead = now, gone

    def _orders(self) -> list[str]:
        """The lines that have come within a tick, or until a rank dies; notes the end of the connection."""
        if 0 not in select.select([0, *self._vitals.deaths()], [], [], _TICK_S)[0]:
            return []
        chunk = os.read(0, 4096)
        self._connected = bool(chunk)
        *lines, self._words = (self._words + chunk).split(b"\n")
        return [line.decode() for line in lines]

    def _wait(self) -> list[str]:
        time.sleep(_TICK_S)
        return []

    def _succeeded(self) -> bool:
        """Whether the supervisor has made another connection, and watches there."""
        try:
            return self._mark.read_bytes() != str(os.getpid()).encode()
        except OSError:
            return False  # somebody removed the run's folder

    def _obey(self, order: str) -> None:
        word, *rest = order.split()
        if word == "stacks":
            self._print(stacks=self._vitals.stacks([int(rank) for rank in rest]))
        elif word == "stop":
            stopped, left = stop_processes(self._folder.name, float(rest[0]))
            self._vitals.forget()
            self._print(stopped=stopped, left=left)

    def _print(self, **fields: object) -> None:
        with suppress(OSError):  # the other end has gone: the next look for orders tells
            os.write(1, json.dumps(fields).encode() + b"\n")

    def _end_all(self, silence_s: float) -> int:
        """The head has gone."""
        if find_processes(self._folder.name):
            reason = f"heard nothing from the head for {silence_s:.0f} s"
            append_event(self._folder, "head_lost", node=self._node, reason=reason)
            stop_processes(self._folder.name, _GRACE_S)
            # A head that comes back must not take this end for one that its ranks came to by themselves.
            self._vitals.forget()
        return 0
