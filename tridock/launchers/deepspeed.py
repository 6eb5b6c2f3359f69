"""The ``deepspeed`` command line: pdsh over ssh from the head, or one node's ranks without ssh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tridock.command import Command
from tridock.contracts import run_folder
from tridock.engines import RankProgram
from tridock.launchers.quoting import for_pdsh
from tridock.launchers.run import Run, Start


def deepspeed_start(run: Run, *, remote: tuple[str, ...] = (), node_rank: int | None = None) -> Start:
    """A run that ``deepspeed`` starts; with ``node_rank``, that node's ranks only."""
    request, hostfile = run.request, f"{run.path}/{run_folder.HOSTFILE}"
    program = run.program()
    command, resume = (
        deepspeed_command(it, request.slots, hostfile, request.master_addr, request.master_port, node_rank)
        for it in (program, run.program(resume=True))
    )
    env = {**program.env, "DS_ENV_FILE": f"{run.path}/{run_folder.DEEPSPEED_ENV}"}
    return Start(command, resume, env, remote, run_folder.launch_script(node_rank or 0))


def deepspeed_command(
    program: RankProgram,
    slots: Mapping[str, Sequence[int]],
    hostfile: str,
    master_addr: str,
    master_port: int,
    node_rank: int | None = None,
) -> Command:
    """The head's command; with ``node_rank``, the command of that node, which starts its own ranks only.

    ``slots`` maps each node to the slot numbers in use; ``hostfile`` is the path of the run's own hostfile.
    On one node the ranks are this machine's, and DeepSpeed is told that it needs no ssh.
    ``--master_addr`` is always given: DeepSpeed's own guess is the first word of ``hostname -I``.
    """
    argv = ["deepspeed", "--hostfile", hostfile]
    if any(list(numbers) != list(range(len(numbers))) for numbers in slots.values()):
        argv += ["--include", "@".join(f"{node}:{','.join(map(str, numbers))}" for node, numbers in slots.items())]
    argv += ["--master_addr", master_addr, "--master_port", str(master_port)]
    arguments = program.arguments
    if len(slots) == 1 or node_rank is not None:
        argv += ["--no_ssh", "--node_rank", str(node_rank or 0)]
    else:
        # DeepSpeed's own check tries the first node only and hides ssh's message.
        argv += ["--launcher", "pdsh", "--no_ssh_check"]
        arguments = tuple(map(for_pdsh, arguments))
    return Command((*argv, "--no_local_rank", "--module", program.module, *arguments))
