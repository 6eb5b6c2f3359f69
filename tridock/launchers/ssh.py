"""The launcher of ``tridock launch``: starts ranks from the head over the cluster's ssh, by pdsh or Tridock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from tridock.command import Command
from tridock.contracts import cluster_ssh, run_folder
from tridock.contracts.supervision import Reach
from tridock.launchers.bundle import Start
from tridock.launchers.deepspeed import deepspeed_command
from tridock.launchers.local import start_ranks

if TYPE_CHECKING:  # the planner, which `tridock run` does not import
    from tridock.engines import RankProgram
    from tridock.launchers.run import Run


@dataclass(frozen=True, slots=True)
class Ssh:
    """Starts all ranks from the head."""

    name: ClassVar[str] = "ssh"
    scheduler: ClassVar[str | None] = None
    reach: ClassVar[Reach] = Reach((*cluster_ssh.SUPERVISOR, "{node}"), python=run_folder.PYTHON, as_one_argument=True)

    def start(self, run: Run) -> Start:
        """Uses the starter of ``launch.launcher``; the supervisor reaches every node except the head."""
        return STARTERS[run.experiment.launch.launcher](run, run.program(), run.program(resume=True))


def _by_deepspeed(run: Run, first: RankProgram, again: RankProgram) -> Start:
    request, hostfile = run.request, f"{run.path}/{run_folder.HOSTFILE}"
    command, resume = (
        deepspeed_command(it, request.slots, hostfile, request.master_addr, request.master_port)
        for it in (first, again)
    )
    env = {**first.env, "DS_ENV_FILE": f"{run.path}/{run_folder.DEEPSPEED_ENV}"}
    return Start(command, resume, env, remote=tuple(request.slots)[1:])


def _by_ssh(run: Run, first: RankProgram, again: RankProgram) -> Start:
    places = ("--run", run.path)
    ranks = start_ranks(run, first, places), start_ranks(run, again, places)
    nodes = tuple(run.request.slots)
    if len(nodes) == 1:
        return Start(*ranks, first.env)
    command, resume = (
        Command.of(run_folder.PYTHON, "-P", "-m", "tridock.node", "start-nodes", run.path, script)
        for script in (run_folder.RANKS_SCRIPT, run_folder.RESUME_RANKS_SCRIPT)
    )
    return Start(command, resume, first.env, remote=nodes[1:], ranks=ranks)


STARTERS: Final[Mapping[str, Callable[[Run, RankProgram, RankProgram], Start]]] = {
    "deepspeed": _by_deepspeed,
    "ssh": _by_ssh,
}
"""Starters by ``launch.launcher``; arguments: the ranks' program, and that of a restart."""
