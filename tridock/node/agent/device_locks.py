"""Locks of the devices that a run uses on a node's host.

The kernel holds them: abstract Unix sockets, which all containers with the host's network see, of whatever cluster and
account, and which end with their process.
"""

import errno
import math
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tridock.contracts.rank_status import NODE_SILENCE_S, LockReport

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE: Final = Path("/proc/self/ns/net")


class DeviceLocks:
    """Takes all of a node's devices or none; the supervisor of the run orders it to, or to release them."""

    def __init__(self, devices: Iterable[str]) -> None:
        self._devices = self._missing = tuple(sorted({*devices}))
        self._domain = f"{_BOOT.read_text().strip()}/{_NAMESPACE.stat().st_ino}" if self._devices else ""
        self._held: list[socket.socket] = []
        self._taken_at, self._wanted, self._turn = -math.inf, True, 0

    @property
    def report(self) -> LockReport:
        return LockReport(self._domain, self._missing, self._turn)

    def order(self, *, wanted: bool, turn: int) -> None:
        """Follows the supervisor's order of this number."""
        self._wanted, self._turn = wanted, turn
        if not wanted:
            self.release()

    def take(self, *, at_once: bool) -> bool:
        """Takes the devices if they are wanted and free; returns whether that is new.

        Those that were taken have to be free for as long as another run's agent may need to start again, except
        ``at_once``: this run uses them already.
        """
        if not (self._wanted and self._missing):
            return False
        now = time.monotonic()
        if taken := tuple(device for device in self._devices if not _is_free(device)):
            self._missing, self._taken_at = taken, now
        elif at_once or now >= self._taken_at + NODE_SILENCE_S:
            self._bind()
        return not self._missing

    def release(self) -> None:
        while self._held:
            self._held.pop().close()
        self._missing = self._devices

    def _bind(self) -> None:
        try:
            for device in self._devices:
                self._held.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
                self._held[-1].bind(_address(device))
            self._missing = ()
        except OSError:  # another run was faster
            self.release()


def _address(device: str) -> str:
    return f"\0tridock-device/{device}"


def _is_free(device: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex(_address(device)) == errno.ECONNREFUSED
