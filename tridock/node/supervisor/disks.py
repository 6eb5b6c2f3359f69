"""The nodes' disks: one that is nearly full is an event, before a checkpoint fails; a full one starts no ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tridock.contracts import run_folder
from tridock.contracts.events import Event, append_event
from tridock.contracts.node_answers import Space
from tridock.errors import reason_of

_ROOM_BYTES: Final = 1 << 16
"""Bytes on the disk that a restart needs for its logs and records."""


class Disks:
    """Records each node's nearly full disk once, and again if it had space in between."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._full: set[str] = set()

    def note(self, seen: Mapping[str, Space]) -> None:
        """Processes the agents' reports."""
        for node, disk in seen.items():
            if disk.is_nearly_full and node not in self._full:
                self._full.add(node)
                append_event(
                    self._folder, Event.DISK_NEARLY_FULL, node=node, free_bytes=disk.free, total_bytes=disk.bytes
                )
            elif not disk.is_nearly_full:
                self._full.discard(node)


def no_room(folder: Path) -> str | None:
    """Returns why the run's folder cannot be written, or None if it can."""
    probe = folder / ".room"
    try:
        run_folder.write_atomic(probe, bytes(_ROOM_BYTES))
        probe.unlink()
    except OSError as error:
        return f"{folder} cannot be written: {reason_of(error)}"
    return None
