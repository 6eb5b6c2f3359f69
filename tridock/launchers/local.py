"""The launcher of ``tridock train``: each machine starts its own ranks, without ssh."""

from dataclasses import dataclass
from typing import ClassVar

from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.supervision import Reach
from tridock.engines import RankProgram
from tridock.launchers.run import Run, Start


@dataclass(frozen=True, slots=True)
class Local:
    """Starts the ranks of the machine with this rank."""

    node_rank: int = 0

    name: ClassVar[str] = "local"
    scheduler: ClassVar[str | None] = None
    reach: ClassVar[Reach] = Reach()

    def start(self, run: Run) -> Start:
        """The command of this node; the supervisor reaches no other."""
        program = run.program()
        resume = self._command(run, run.program(resume=True))
        script = run_folder.launch_script(self.node_rank)
        return Start(self._command(run, program), resume, program.env, script=script)

    def _command(self, run: Run, program: RankProgram) -> Command:
        """Imports neither torch nor DeepSpeed, unlike their own launchers, which takes seconds."""
        request = run.request
        (ranks,) = {len(slots) for slots in request.slots.values()}
        return Command(
            (
                *("python", "-m", "tridock.node", "start-ranks"),
                *("--nnodes", str(len(request.slots)), "--node-rank", str(self.node_rank)),
                *("--nproc-per-node", str(ranks)),
                *("--master-addr", request.master_addr, "--master-port", str(request.master_port)),
                *("--module", program.module, *program.arguments),
            )
        )
