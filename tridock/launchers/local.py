"""The launcher of ``tridock train``: each machine starts its own ranks, without ssh."""

from dataclasses import dataclass
from typing import ClassVar

from tridock.contracts.supervision import Reach
from tridock.launchers.run import Run, Start
from tridock.launchers.ssh import deepspeed_start


@dataclass(frozen=True, slots=True)
class Local:
    """Starts the ranks of the machine with this rank."""

    node_rank: int = 0

    name: ClassVar[str] = "local"
    scheduler: ClassVar[str | None] = None
    reach: ClassVar[Reach] = Reach()

    def start(self, run: Run) -> Start:
        """The ``deepspeed`` command of this node; the supervisor reaches no other."""
        return deepspeed_start(run, node_rank=self.node_rank)
