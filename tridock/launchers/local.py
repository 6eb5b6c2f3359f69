"""The launcher of ``tridock train`` and ``rehearse``: each machine starts its own ranks, without ssh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tridock.command import Command
from tridock.contracts import run_folder
from tridock.launchers.command import start_command
from tridock.launchers.run import Launcher, Run, Start, start_planned

if TYPE_CHECKING:  # the planner, which `tridock run` does not import
    from tridock.engines import RankProgram


@dataclass(frozen=True)
class Local(Launcher):
    """Starts the ranks of this machine, whose node rank this is."""

    name = "local"
    node_rank: int = 0
    python: str = field(default="python", kw_only=True)
    library: str = field(default="", kw_only=True)

    def remote(self, _nodes: Sequence[str]) -> Sequence[str]:
        """Returns none: each node is started by hand."""
        return ()

    def start(self, run: Run) -> Start:
        """Returns this node's command: of your own program as it is, or of an engine's ranks."""
        if run.assessment is None:
            return start_command(run, self)
        first, again = run.programs
        (ranks,) = {len(numbers) for numbers in run.slots.values()}
        nodes = ("--nnodes", str(len(run.slots)), "--node-rank", str(self.node_rank), "--nproc-per-node", str(ranks))
        scripts = run_folder.launch_script(self.node_rank), run_folder.RESUME_SCRIPT
        commands = (start_ranks(run, program, nodes) for program in (first, again))
        return start_planned(run, first, dict(zip(scripts, commands, strict=True)))


def start_ranks(run: Run, program: RankProgram, nodes: Sequence[str]) -> Command:
    """Returns the command that starts a node's ranks, without the seconds that importing torch or DeepSpeed takes.

    ``nodes``: the options that identify these ranks.
    """
    return Command(
        (
            *("python", "-m", "tridock.node", "start-ranks", *nodes),
            *("--master-addr", run.master_addr, "--master-port", str(run.port)),
            *("--module", program.module, *program.arguments),
        )
    )
