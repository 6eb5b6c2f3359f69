"""The launcher of ``fab launch``: DeepSpeed's pdsh from the head over the cluster's own ssh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tridock.contracts import cluster_ssh
from tridock.contracts.supervision import Reach
from tridock.launchers.deepspeed import deepspeed_start
from tridock.launchers.run import Run, Start


@dataclass(frozen=True, slots=True)
class Ssh:
    """Starts all ranks from the head."""

    name: ClassVar[str] = "ssh"
    scheduler: ClassVar[str | None] = None
    reach: ClassVar[Reach] = Reach((*cluster_ssh.SUPERVISOR, "{node}"), python="python", as_one_argument=True)

    def start(self, run: Run) -> Start:
        """The ``deepspeed`` command; the supervisor reaches every node but the head."""
        return deepspeed_start(run, remote=tuple(run.request.slots)[1:])
