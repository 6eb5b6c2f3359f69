"""The launcher of ``tridock launch``: DeepSpeed's pdsh from the head over the cluster's own ssh."""

from dataclasses import dataclass
from typing import ClassVar

from tridock.contracts import cluster_ssh, run_folder
from tridock.contracts.supervision import Reach
from tridock.launchers.deepspeed import deepspeed_command
from tridock.launchers.run import Run, Start


@dataclass(frozen=True, slots=True)
class Ssh:
    """Starts all ranks from the head."""

    name: ClassVar[str] = "ssh"
    scheduler: ClassVar[str | None] = None
    reach: ClassVar[Reach] = Reach((*cluster_ssh.SUPERVISOR, "{node}"), python=run_folder.PYTHON, as_one_argument=True)

    def start(self, run: Run) -> Start:
        """The ``deepspeed`` command; the supervisor reaches every node but the head."""
        request, hostfile = run.request, f"{run.path}/{run_folder.HOSTFILE}"
        program = run.program()
        command, resume = (
            deepspeed_command(it, request.slots, hostfile, request.master_addr, request.master_port)
            for it in (program, run.program(resume=True))
        )
        env = {**program.env, "DS_ENV_FILE": f"{run.path}/{run_folder.DEEPSPEED_ENV}"}
        return Start(command, resume, env, remote=tuple(request.slots)[1:])
