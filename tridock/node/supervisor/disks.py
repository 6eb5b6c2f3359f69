"""Watches the nodes' disks: one that is nearly full is an event, before a checkpoint fails."""

from collections.abc import Mapping
from pathlib import Path

from tridock.contracts.events import Event, append_event
from tridock.contracts.node_answers import Space


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
