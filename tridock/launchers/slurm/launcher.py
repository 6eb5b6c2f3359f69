"""The launcher of a Slurm job: the sbatch script's command starts the ranks, and job steps reach the nodes."""

from collections.abc import Sequence
from dataclasses import dataclass

from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.supervision import Reach
from tridock.launchers.command import start_command
from tridock.launchers.run import DEEPSPEED_ENV, Launcher, Run, Start, start_planned
from tridock.launchers.slurm.ranks import starts_over_ssh

_STEP = (
    *("srun", "--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=1"),
    *("--gres=none", "--unbuffered", "--quiet", "--nodelist={node}"),
)


@dataclass(frozen=True)
class Slurm(Launcher):
    """Starts the ranks with ``argv``, which ends in their program and its arguments; of your own program, in the path
    of a node's script."""

    name = "slurm"
    scheduler = "Slurm"
    reach = Reach(_STEP)
    argv: Sequence[str]

    def remote(self, nodes: Sequence[str]) -> Sequence[str]:
        return nodes[1:] if self.on_head else nodes

    def start(self, run: Run) -> Start:
        """Returns the script's command unchanged, and the scripts that it starts for your own program."""
        if run.assessment is None:
            return start_command(run, self)
        command, program = Command(tuple(self.argv)), run.programs[0]
        env = {**self.env, **program.env}
        if starts_over_ssh(self.argv):  # its ssh sessions do not have the job's environment
            env[DEEPSPEED_ENV] = f"{run.path}/{run_folder.DEEPSPEED_ENV}"
        # Every engine's program uses the last --load.
        resume = command.extended(("--load", run.planned.checkpoints(run.path)))
        commands = {run_folder.LAUNCH_SCRIPT: command, run_folder.RESUME_SCRIPT: resume}
        return start_planned(run, program, commands, env)

    def on_nodes(self, run: Run, script: str) -> tuple[str, ...]:
        return (*self.argv[:-1], f"{run.path}/{script.format(node_rank=run_folder.NODE_NUMBER)}")

    @staticmethod
    def requeue(job: str) -> Command:
        """Returns the command that requeues the job, which then resumes from the newest checkpoint."""
        return Command.of("scontrol", "requeue", job)
