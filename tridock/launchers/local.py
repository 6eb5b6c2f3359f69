"""The launcher of ``tridock train``: each machine starts its own ranks, without ssh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.supervision import Reach
from tridock.launchers.bundle import Start

if TYPE_CHECKING:  # the planner, which `tridock run` does not import
    from tridock.engines import RankProgram
    from tridock.launchers.run import Run


@dataclass(frozen=True, slots=True)
class Local:
    """Starts the ranks of this machine, whose node rank this is."""

    node_rank: int = 0

    name: ClassVar[str] = "local"
    scheduler: ClassVar[str | None] = None
    reach: ClassVar[Reach] = Reach()

    def start(self, run: Run) -> Start:
        """Returns this node's command; the supervisor reaches no other node."""
        program = run.program()
        resume = self._command(run, run.program(resume=True))
        script = run_folder.launch_script(self.node_rank)
        return Start(self._command(run, program), resume, program.env, script=script)

    def _command(self, run: Run, program: RankProgram) -> Command:
        slots = run.request.slots
        (ranks,) = {len(numbers) for numbers in slots.values()}
        nodes = ("--nnodes", str(len(slots)), "--node-rank", str(self.node_rank), "--nproc-per-node", str(ranks))
        return start_ranks(run, program, nodes)


def start_ranks(run: Run, program: RankProgram, nodes: Sequence[str]) -> Command:
    """Returns the command that starts a node's ranks, without the seconds that importing torch or DeepSpeed takes.

    ``nodes``: the options that identify these ranks.
    """
    request = run.request
    return Command(
        (
            *("python", "-m", "tridock.node", "start-ranks", *nodes),
            *("--master-addr", request.master_addr, "--master-port", str(request.master_port)),
            *("--module", program.module, *program.arguments),
        )
    )
