"""The launcher of a Slurm job: the sbatch script's command starts the ranks, and job steps reach the nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.supervision import Reach
from tridock.launchers.bundle import Start
from tridock.launchers.slurm.ranks import starts_over_ssh

if TYPE_CHECKING:  # the planner, which `tridock run` does not import
    from tridock.launchers.run import Run

_STEP = (
    *("srun", "--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=1"),
    *("--gres=none", "--unbuffered", "--quiet", "--nodelist={node}"),
)


@dataclass(frozen=True, slots=True)
class Slurm:
    """Starts the ranks with ``argv``, which ends in their program and its arguments.

    ``env`` holds the site's variables; those of the experiment take precedence. ``on_head``: the supervisor runs on the
    first node; on a login node it reaches that node like the others. ``prepared_at`` (a file time) is when the run was
    first prepared.
    """

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    on_head: bool = True
    prepared_at: float | None = None

    name: ClassVar[str] = "slurm"
    scheduler: ClassVar[str | None] = "Slurm"
    # Slurm may be slow to start a node's first step.
    reach: ClassVar[Reach] = Reach(_STEP, first_answer_s=60.0)

    def start(self, run: Run) -> Start:
        """Returns the script's command unchanged."""
        command = Command(tuple(self.argv))
        env = {**self.env, **run.program().env}
        if starts_over_ssh(self.argv):  # its ssh sessions do not have the job's environment
            env["DS_ENV_FILE"] = f"{run.path}/{run_folder.DEEPSPEED_ENV}"
        nodes = tuple(run.request.slots)
        return Start(
            command,
            # Every engine's program uses the last --load.
            command.extended(("--load", run.checkpoints)),
            env,
            remote=nodes[1:] if self.on_head else nodes,
            on_head=self.on_head,
            prepared_at=self.prepared_at,
        )

    @staticmethod
    def requeue(job: str) -> Command:
        """Returns the command that requeues the job, which then resumes from the newest checkpoint."""
        return Command.of("scontrol", "requeue", job)
