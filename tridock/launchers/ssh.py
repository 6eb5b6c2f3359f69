"""The launcher of a cluster: starts ranks from the head over the cluster's ssh, by pdsh or Tridock."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tridock.command import Command
from tridock.contracts import cluster_ssh, run_folder
from tridock.contracts.supervision import Reach
from tridock.launchers.command import start_command
from tridock.launchers.deepspeed import deepspeed_command
from tridock.launchers.local import start_ranks
from tridock.launchers.run import DEEPSPEED_ENV, Launcher, Run, Start, start_planned


class Ssh(Launcher):
    """Starts all ranks from the head."""

    name = "ssh"
    reach = Reach((*cluster_ssh.SUPERVISOR, "{node}"), python=run_folder.PYTHON, as_one_argument=True)

    def remote(self, nodes: Sequence[str]) -> Sequence[str]:
        return nodes[1:]

    def start(self, run: Run) -> Start:
        """Starts your own program as it is; the ranks of an engine with the starter of ``launch.launcher``."""
        if run.assessment is None:
            return start_command(run, self)
        return STARTERS[run.assessment.experiment.launch.launcher](run)


def _by_deepspeed(run: Run) -> Start:
    first, again = run.programs
    where = (run.slots, f"{run.path}/{run_folder.HOSTFILE}", run.master_addr, run.port)
    commands = {
        run_folder.LAUNCH_SCRIPT: deepspeed_command(first, *where),
        run_folder.RESUME_SCRIPT: deepspeed_command(again, *where),
    }
    env = {**first.env, DEEPSPEED_ENV: f"{run.path}/{run_folder.DEEPSPEED_ENV}"}
    return start_planned(run, first, commands, env)


def _by_ssh(run: Run) -> Start:
    first, again = run.programs
    heads = (run_folder.LAUNCH_SCRIPT, run_folder.RESUME_SCRIPT)
    nodes = (run_folder.RANKS_SCRIPT, run_folder.RESUME_RANKS_SCRIPT)
    ranks = [start_ranks(run, program, ("--run", run.path)) for program in (first, again)]
    if len(run.slots) == 1:
        return start_planned(run, first, dict(zip(heads, ranks, strict=True)))
    commands = (*(Command(Ssh().on_nodes(run, script)) for script in nodes), *ranks)
    return start_planned(run, first, dict(zip((*heads, *nodes), commands, strict=True)))


STARTERS: Final[Mapping[str, Callable[[Run], Start]]] = {"deepspeed": _by_deepspeed, "ssh": _by_ssh}
"""Starters of a run with a plan by ``launch.launcher``."""
