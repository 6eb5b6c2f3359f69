"""The command that starts all ranks of a job from its first node, as words of bash. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from tridock.contracts import run_folder
from tridock.launchers.slurm.request import Request

RUN = '"$RUN"'
"""The run's folder, in the script's own words."""
_MEETING = ('--master-addr="$MASTER_ADDR"', '--master-port="$MASTER_PORT"')
_DEEPSPEED = (
    f'--hostfile="$RUN/{run_folder.HOSTFILE}"',
    '--master_addr="$MASTER_ADDR"',
    '--master_port="$MASTER_PORT"',
)
# What a container must be told that does not inherit the task's environment.
_TASKS_OWN = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_NODEID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "CUDA_VISIBLE_DEVICES",
    "MASTER_ADDR",
    "MASTER_PORT",
    run_folder.RUN_ID_VARIABLE,
    run_folder.WORLD_SIZE_VARIABLE,
)

Line = tuple[str, ...]
"""Words of one line of the script: options that belong together."""


def launch_lines(request: Request, program: Sequence[str], env: Sequence[str]) -> list[Line]:
    """The lines of the command, each a few words of bash; ``program`` is ``module *arguments``, in bash's words too.

    ``env`` are the names of what the ranks find in their environment beside what Slurm and Tridock set.
    """
    ranks = _rank_lines(request, program)
    if request.launcher in ("deepspeed-slurm", "deepspeed-pdsh"):
        return ranks
    return [_srun(request), *_container(request, env), *ranks]


def _srun(request: Request) -> Line:
    words = ["srun", f"--ntasks-per-node={1 if request.launcher != 'srun' else request.ranks_per_node}"]
    if request.launcher == "srun":
        # Rank 0 to 3 on the first node, and so on, whatever the site's default; each sees all GPUs of its node.
        words.append("--distribution=block")
        if request.gpu_request != "none":
            words.append("--gpu-bind=none")
    if request.cpus_per_node is not None:
        words.append('--cpus-per-task="$SLURM_CPUS_PER_TASK"')  # srun does not take it over since Slurm 22.05
    # The supervisor ends the others, once they have had their last words.
    words.append("--kill-on-bad-exit=0")
    container = request.container
    if container.kind == "pyxis":
        words += [f"--container-image={shlex.quote(container.image or '')}"]
        words += [f"--container-mounts={','.join(_pyxis_mounts(container.mounts))}"]
        words += [f"--container-workdir={RUN}", "--no-container-mount-home", *map(shlex.quote, container.extra_args)]
    return (*words, *map(shlex.quote, request.srun))


def _pyxis_mounts(mounts: Sequence[str]) -> list[str]:
    return [
        '"$WORKSPACE:$WORKSPACE"',
        *(shlex.quote(mount if ":" in mount else f"{mount}:{mount}") for mount in mounts),
    ]


def _container(request: Request, env: Sequence[str]) -> list[Line]:
    """What stands between srun and what runs in the container."""
    container, gpus = request.container, request.gpu_request != "none"
    image, extra = shlex.quote(container.image or ""), tuple(map(shlex.quote, container.extra_args))
    if container.kind == "apptainer":
        binds = tuple(f"--bind={shlex.quote(mount)}" for mount in container.mounts)
        # The image's own code, and not that of the environment which the job was submitted from.
        own = f"--env=PYTHONPATH={run_folder.CODE}"
        words = ("apptainer", "exec", *(("--nv",) if gpus else ()), '--bind="$WORKSPACE"', *binds, f"--pwd={RUN}", own)
        return [(*words, *extra, image)]
    if container.kind == "docker":
        words = ("docker", "run", "--rm", "--network=host", "--ipc=host", "--pid=host", '--user="$(id -u):$(id -g)"')
        limits = ("--ulimit=memlock=-1", "--ulimit=stack=67108864", *(("--gpus=all",) if gpus else ()))
        mounts = tuple(f"--volume={shlex.quote(m if ':' in m else f'{m}:{m}')}" for m in container.mounts)
        folders = ('--volume="$WORKSPACE:$WORKSPACE"', *mounts, f"--workdir={RUN}")
        named = tuple(f"--env={name}" for name in (*_TASKS_OWN, *env))
        return [words, limits, folders, named, (*extra, image)]
    return []


def _rank_lines(request: Request, program: Sequence[str]) -> list[Line]:
    ranks, nodes = request.ranks_per_node, request.nodes
    match request.launcher:
        case "srun":
            return [("python", "-u", "-m", *program)]
        case "torchrun":
            # A task's own number is known in the task alone.
            first = ("bash", "-c", """'exec torchrun --node-rank="$SLURM_NODEID" "$@"'""", "torchrun")
            return [first, (f"--nnodes={nodes}", f"--nproc-per-node={ranks}", *_MEETING), ("-m", *program)]
        case "deepspeed":
            first = ("bash", "-c", """'exec deepspeed --node_rank="$SLURM_NODEID" "$@"'""", "deepspeed")
            return [first, (*_DEEPSPEED, "--no_ssh"), ("--no_local_rank", "--module", *program)]
        case "deepspeed-slurm":
            words = [f"--ntasks-per-node={ranks}", "--distribution=block", "--kill-on-bad-exit=0"]
            if request.cpus_per_node is not None:
                words.append("--cpus-per-task=$SLURM_CPUS_PER_TASK")
            asked = f'--launcher_args="{" ".join([*words, *request.srun])}"'
            # It starts `python -u FILE`; -m in the file's place makes that a module.
            return [("deepspeed", *_DEEPSPEED, "--launcher=slurm", "--no_ssh_check"), (asked,), ("--", "-m", *program)]
        case "deepspeed-pdsh":
            return [
                ("deepspeed", *_DEEPSPEED, "--launcher=pdsh", "--no_ssh_check"),
                ("--no_local_rank", "--module", *program),
            ]
