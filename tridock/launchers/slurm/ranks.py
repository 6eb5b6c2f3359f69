"""The command that starts all ranks of a job from its first node, with arguments quoted for bash. Pure."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tridock.contracts import environment, run_folder
from tridock.contracts.devices import VISIBLE
from tridock.launchers.deepspeed import for_pdsh
from tridock.launchers.slurm.request import Request

RUN = '"$RUN"'
"""The run's folder as a variable of the script."""
_RENDEZVOUS = ('--master-addr="$MASTER_ADDR"', '--master-port="$MASTER_PORT"')
_DEEPSPEED = (
    f'--hostfile="$RUN/{run_folder.HOSTFILE}"',
    '--master_addr="$MASTER_ADDR"',
    '--master_port="$MASTER_PORT"',
)
_PDSH: Final = "--launcher=pdsh"
# Variables for a container that does not inherit the task's environment.
_TASKS_OWN = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_NODEID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "MASTER_ADDR",
    "MASTER_PORT",
    environment.RUN_ID,
    environment.WORLD_SIZE,
    environment.COLLECTIVE_TIMEOUT,
)

_ON_ALLOCATED_GPUS: Final = (
    "'gpus=${SLURM_STEP_GPUS:-${SLURM_JOB_GPUS:-${CUDA_VISIBLE_DEVICES:-all}}}; "
    """exec docker run --gpus="\\"device=$gpus\\"" "$@"'"""
)

Line = tuple[str, ...]
"""The arguments on one line of the script: options that belong together."""


@dataclass(frozen=True, slots=True)
class RankLauncher:
    lines: Callable[[Request, Sequence[str]], list[Line]]
    """Returns the command's lines, given ``module *arguments``."""
    task_per_rank: bool = False
    """Whether each rank is its own Slurm task; otherwise one task starts all ranks of its node."""
    inside_step: bool = True
    """Whether the script's srun runs it on every node, in the container; otherwise it starts on the first node."""
    label: bool = False
    """Whether each line of output starts with the number of its node."""
    quote: Callable[[str], str] = str
    """Quotes an argument of the ranks."""


@dataclass(frozen=True, slots=True)
class ContainerKind:
    srun_options: Callable[[Request], Line] = lambda _: ()
    lines: Callable[[Request, Sequence[str]], list[Line]] = lambda _request, _env: []
    """Returns the arguments between srun and the container's command; its second argument names variables to pass."""
    needs_image: bool = True


def launch_lines(request: Request, program: Sequence[str], env: Sequence[str]) -> list[Line]:
    """Returns the lines of the command as arguments quoted for bash; ``program`` (``module *arguments``) is quoted too.

    ``env`` names the ranks' variables other than those that Slurm and Tridock set.
    """
    launcher = RANK_LAUNCHERS[request.launcher]
    ranks = launcher.lines(request, program)
    if not launcher.inside_step:
        return ranks
    return [_srun(request, launcher), *CONTAINERS[request.container.kind].lines(request, env), *ranks]


def tasks_per_node(request: Request) -> int:
    """Slurm's tasks per node: one that starts the node's ranks, or one per rank."""
    return request.ranks_per_node if RANK_LAUNCHERS[request.launcher].task_per_rank else 1


def starts_over_ssh(argv: Sequence[str]) -> bool:
    """Whether a job's command starts its ranks over ssh, which does not pass on the job's environment."""
    return _PDSH in argv


def _srun(request: Request, launcher: RankLauncher) -> Line:
    argv = ["srun", f"--ntasks-per-node={request.ranks_per_node if launcher.task_per_rank else 1}"]
    if launcher.task_per_rank:
        # Ranks in blocks (0 to 3 on the first node, and so on), whatever the site's default; each sees all GPUs of its
        # node.
        argv.append("--distribution=block")
        if request.gpu_request != "none":
            argv.append("--gpu-bind=none")
    if request.cpus_per_node is not None:
        argv.append('--cpus-per-task="$SLURM_CPUS_PER_TASK"')  # srun does not inherit it since Slurm 22.05
    # The supervisor ends the other ranks after their last log lines.
    argv.append("--kill-on-bad-exit=0")
    if launcher.label and request.nodes > 1:
        argv.append("--label")
    return (*argv, *CONTAINERS[request.container.kind].srun_options(request), *map(shlex.quote, request.srun))


def _source_and_target(mount: str) -> str:
    return mount if ":" in mount else f"{mount}:{mount}"


def _pyxis(request: Request) -> Line:
    container = request.container
    mounts = ('"$WORKSPACE:$WORKSPACE"', *(shlex.quote(_source_and_target(mount)) for mount in container.mounts))
    image = f"--container-image={shlex.quote(container.image or '')}"
    folder = f"--container-workdir={RUN}"
    extra = map(shlex.quote, container.extra_args)
    return (image, f"--container-mounts={','.join(mounts)}", folder, "--no-container-mount-home", *extra)


def _apptainer(request: Request, _env: Sequence[str]) -> list[Line]:
    container = request.container
    image, extra = shlex.quote(container.image or ""), tuple(map(shlex.quote, container.extra_args))
    gpus = ("--nv",) if request.gpu_request != "none" else ()
    binds = tuple(f"--bind={shlex.quote(mount)}" for mount in container.mounts)
    # The image's code, not that of the environment that submitted the job.
    own = f"--env=PYTHONPATH={run_folder.CODE}"
    argv = ("apptainer", "exec", *gpus, '--bind="$WORKSPACE"', *binds, f"--pwd={RUN}", own)
    return [(*argv, *extra, image)]


def _docker(request: Request, env: Sequence[str]) -> list[Line]:
    container = request.container
    image, extra = shlex.quote(container.image or ""), tuple(map(shlex.quote, container.extra_args))
    # Only the task knows which GPUs of its node it has; Docker does not use Slurm's cgroup.
    has_gpus = request.gpu_request != "none"
    run = ("bash", "-c", _ON_ALLOCATED_GPUS, "docker") if has_gpus else ("docker", "run")
    argv = (*run, "--rm", "--network=host", "--ipc=host", "--pid=host", '--user="$(id -u):$(id -g)"')
    # What NVIDIA asks for; an engine without privileges of its own refuses to raise them.
    limits = ("--ulimit=memlock=-1", "--ulimit=stack=67108864") if has_gpus else ()
    mounts = tuple(f"--volume={shlex.quote(_source_and_target(mount))}" for mount in container.mounts)
    folders = ('--volume="$WORKSPACE:$WORKSPACE"', *mounts, f"--workdir={RUN}")
    named = tuple(f"--env={name}" for name in (*_TASKS_OWN, *env))
    return [argv, *([limits] if limits else []), folders, named, (*extra, image)]


CONTAINERS: Final[Mapping[str, ContainerKind]] = {
    "none": ContainerKind(needs_image=False),
    "apptainer": ContainerKind(lines=_apptainer),
    "pyxis": ContainerKind(srun_options=_pyxis),
    "docker": ContainerKind(lines=_docker),
}
"""Container kinds by a request's ``container.kind``."""


def _torchrun(request: Request, program: Sequence[str]) -> list[Line]:
    # Only the task knows its own number.
    first = ("bash", "-c", """'exec torchrun --node-rank="$SLURM_NODEID" "$@"'""", "torchrun")
    size = (f"--nnodes={request.nodes}", f"--nproc-per-node={request.ranks_per_node}")
    return [first, (*size, *_RENDEZVOUS), ("-m", *program)]


# DeepSpeed numbers the node's GPUs from 0, whichever Slurm has allocated.
_ALLOCATED = f"${{{VISIBLE}+{environment.DEVICES}=${VISIBLE}}}"
_DEEPSPEED_ON_NODE = f"""'exec env {_ALLOCATED} deepspeed --node_rank="$SLURM_NODEID" "$@"'"""


def _deepspeed(_request: Request, program: Sequence[str]) -> list[Line]:
    first = ("bash", "-c", _DEEPSPEED_ON_NODE, "deepspeed")
    return [first, (*_DEEPSPEED, "--no_ssh"), ("--no_local_rank", "--module", *program)]


def _deepspeed_slurm(request: Request, program: Sequence[str]) -> list[Line]:
    options = [f"--ntasks-per-node={request.ranks_per_node}", "--distribution=block", "--kill-on-bad-exit=0"]
    if request.cpus_per_node is not None:
        options.append("--cpus-per-task=$SLURM_CPUS_PER_TASK")
    asked = f'--launcher_args="{" ".join([*options, *request.srun])}"'
    # It starts `python -u FILE`; -m in place of the file runs a module.
    return [("deepspeed", *_DEEPSPEED, "--launcher=slurm", "--no_ssh_check"), (asked,), ("--", "-m", *program)]


def _deepspeed_pdsh(_request: Request, program: Sequence[str]) -> list[Line]:
    return [("deepspeed", *_DEEPSPEED, _PDSH, "--no_ssh_check"), ("--no_local_rank", "--module", *program)]


# Only a node's task knows the node's number.
_NODE_SCRIPT = ("bash", "-c", f"""'exec bash "${{1//{run_folder.NODE_NUMBER}/$SLURM_NODEID}}"'""", "bash")


def _program(_request: Request, program: Sequence[str]) -> list[Line]:
    return [(*_NODE_SCRIPT, *program)]


def _mpirun(request: Request, program: Sequence[str]) -> list[Line]:
    size = (f"--ntasks={request.nodes}", "--ntasks-per-node=1")
    return [("srun", *size, "--kill-on-bad-exit=0", "--label"), (*_NODE_SCRIPT, *program)]


OWN_PROGRAM: Final = "program"
MPIRUN: Final = "mpirun"
RANK_LAUNCHERS: Final[Mapping[str, RankLauncher]] = {
    "torchrun": RankLauncher(_torchrun),
    "srun": RankLauncher(lambda _, program: [("python", "-u", "-m", *program)], task_per_rank=True),
    "deepspeed": RankLauncher(_deepspeed),
    "deepspeed-slurm": RankLauncher(_deepspeed_slurm, task_per_rank=True, inside_step=False),
    "deepspeed-pdsh": RankLauncher(_deepspeed_pdsh, inside_step=False, quote=for_pdsh),
    OWN_PROGRAM: RankLauncher(_program, label=True),
    MPIRUN: RankLauncher(_mpirun, task_per_rank=True, inside_step=False),
}
"""Rank launchers by a request's ``launcher``. The last two are for your own programs: one runs a script on every node;
the other creates only the tasks for mpirun, which starts its ranks by srun from the first node."""
