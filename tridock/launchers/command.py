"""The start of your own program: its command line, environment and scripts on every node. Pure."""

import posixpath
import shlex

from tridock.command import Command
from tridock.contracts import environment, run_folder
from tridock.contracts.devices import VISIBLE
from tridock.errors import Problem, RequestError
from tridock.launchers.programs import Place, on_node, program_of
from tridock.launchers.run import DEEPSPEED_ENV, Launcher, Run, Start

# Variables of a step with one task per node: a program would take them for its ranks.
_OF_TASKS = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_GTIDS"),
    *("SLURM_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
)


def start_command(run: Run, launcher: Launcher) -> Start:
    """Returns the scripts of the program: on the head, and on every node that it does not reach itself."""
    experiment, node = run.command, shlex.join((launcher.python, "-P", "-m", "tridock.node"))
    in_job, scripts, env = launcher.scheduler is not None, dict[str, tuple[str, str]](), _environment(run, launcher)
    first = ""
    if experiment.setup is not None:
        first = f"{shlex.join(launcher.on_nodes(run, run_folder.SETUP_SCRIPT))}\n"
        before = (
            f"export {environment.NODE}=${{SLURMD_NODENAME:-$(hostname)}}\nexec {node} set-up {shlex.quote(run.path)}"
        )
        # Nodes that share the folder take turns.
        body = f"{before if in_job else 'exec'} flock . bash -c {shlex.quote(experiment.setup)}"
        scripts[run_folder.SETUP_SCRIPT] = ("every node", body)
    for resume in (False, True) if experiment.resume_command else (False,):
        script = run_folder.RESUME_SCRIPT if resume else run_folder.LAUNCH_SCRIPT
        if not on_every_node(run, launcher, resume=resume):
            env |= {DEEPSPEED_ENV: f"{run.path}/{run_folder.DEEPSPEED_ENV}"}
            scripts[script] = ("the head", f"{first}exec {shlex.join(argv_of(run, launcher, 0, resume=resume))}")
            continue
        pattern = run_folder.node_script(script, "{node_rank}")
        scripts[script] = ("the head", f"{first}exec {shlex.join(launcher.on_nodes(run, pattern))}")
        for node_rank, (name, slots) in enumerate(run.slots.items()):
            devices = "allocated" if in_job else ",".join(map(str, slots))
            own = shlex.join(argv_of(run, launcher, node_rank, resume=resume))
            job = f"export {environment.NODE}={name}\nunset {' '.join(_OF_TASKS)}\n\n" if in_job else ""
            body = f"{job}exec {node} on-devices {devices} \\\n  {own}"
            scripts[pattern.format(node_rank=node_rank)] = (f"node {node_rank}", body)
    return Start(Command(argv_of(run, launcher, 0)), env, scripts)


def on_every_node(run: Run, launcher: Launcher, *, resume: bool = False) -> bool:
    program, _ = program_of(_argv(run, resume=resume), run.command.per)
    return program.runs_on_every_node(in_job=launcher.scheduler is not None)


def argv_of(run: Run, launcher: Launcher, node_rank: int, *, resume: bool = False) -> tuple[str, ...]:
    """Returns the command line of one node; of the head for a program that reaches the other nodes itself.

    Raises :class:`RequestError` for options that the cluster determines.
    """
    if (devices := run.command.env.get(VISIBLE)) is not None:
        todo = "leave it out: the slots are the GPUs (--slots 4, or --include NODE:0,2)"
        raise RequestError(Problem(f"env.{VISIBLE}", "chooses GPUs of a node, as the slots do", repr(devices), todo))
    hostfile, names = posixpath.join(run.path, run_folder.HOSTFILE), tuple(_environment(run, launcher))
    place = Place(
        *(run.slots, node_rank, run.master_addr, run.port, hostfile, names, launcher.python),
        in_job=launcher.scheduler is not None,
    )
    return on_node(_argv(run, resume=resume), place, run.command.per)


def _argv(run: Run, *, resume: bool) -> tuple[str, ...]:
    return (resume and run.command.resume_command) or run.command.command


def _environment(run: Run, launcher: Launcher) -> dict[str, str]:
    """Returns the variables that every rank gets in addition to the cluster's environment."""
    own = program_of(run.command.command, run.command.per)[0].env if launcher.scheduler is None else launcher.env
    env = {**own, **run.command.env}
    if "PYTHONPATH" in env:  # the image's PYTHONPATH is where its python finds tridock
        env["PYTHONPATH"] = ":".join(filter(None, (env["PYTHONPATH"], launcher.library)))
    return {
        **env,
        environment.RUN_ID: run.run_id,
        environment.RUN_FOLDER: run.path,
        "MASTER_ADDR": run.master_addr,
        "MASTER_PORT": str(run.port),
    }
