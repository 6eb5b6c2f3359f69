"""The result of composing a run: its first files, its command lines, and values derived from its slots and id. Pure.

Imports no planner: `tridock run` has no plan.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.run_folder import RENDEZVOUS_PORTS


@dataclass(frozen=True, slots=True)
class Start:
    """How a launcher starts a run's ranks: the head's command for a start and for a restart, and their environment."""

    command: Command
    resume: Command
    env: Mapping[str, str]
    remote: tuple[str, ...] = ()
    """The nodes that the supervisor reaches."""
    ranks: tuple[Command, Command] | None = None
    """The commands that run on every node if they are scripts of the run's folder: start and restart."""
    script: str = run_folder.LAUNCH_SCRIPT
    on_head: bool = True
    prepared_at: float | None = None
    """As in :class:`Supervision`."""


@dataclass(frozen=True, slots=True)
class RunBundle:
    """A run that is ready to start: its id, its folder, the head's command and the folder's first files."""

    run_id: str
    path: str
    command: Command
    files: Mapping[str, bytes]
    waits_for: tuple[str, ...] | None = None
    """For a queued run, the runs that hold its slots or precede it."""

    def with_file(self, name: str, content: bytes) -> RunBundle:
        return replace(self, files={**self.files, name: content})


def hostfile_text(slots: Mapping[str, Sequence[int]]) -> str:
    """Returns the run's hostfile. If filters leave slots 4 and 5 of a node, it must still declare six for DeepSpeed."""
    return "".join(f"{node} slots={max(numbers) + 1}\n" for node, numbers in slots.items())


def default_port(run_id: str) -> int:
    """Returns the default rendezvous port, derived from the run id so that two runs on a node rarely collide."""
    return RENDEZVOUS_PORTS[zlib.crc32(run_id.encode()) % len(RENDEZVOUS_PORTS)]
