"""A job's request to Slurm: a site profile (``configs/slurm/*.yaml``), overridden by the command line."""

import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, StringConstraints

from tridock.cluster.schema import Line, Lines
from tridock.contracts.limits import MOST_RANKS, MOST_SLOTS
from tridock.strict_yaml import EnvName, EnvValue, Positive, Section

# The value of "#SBATCH --option=" ends at a space, and no shell parses it.
Plain = Annotated[str, StringConstraints(pattern=r"^[^\s\x00]+$")]


def _time(text: str) -> str:
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return "0"  # Slurm's number for it
    if not re.fullmatch("([0-9]+-)?[0-9]+(:[0-9]+){0,2}", text):
        raise ValueError("is not a time limit: 90 (minutes), 1:30:00, 2-12 (days-hours), 2-12:30:00 or UNLIMITED")
    return text


Time = Annotated[str, AfterValidator(_time)]
Memory = Annotated[str, StringConstraints(pattern=r"^[0-9]+[KMGT]?$")]

RankLauncherName = Literal["torchrun", "srun", "deepspeed", "deepspeed-slurm", "deepspeed-pdsh"]
Kind = Literal["none", "apptainer", "pyxis", "docker"]

_SECONDS: Final = (86400, 3600, 60, 1)


class SlurmContainer(Section):
    """The container that the ranks run in."""

    kind: Kind = Field(
        default="none",
        description="none (modules or a virtual environment: see setup), apptainer, pyxis (with Enroot) or docker.",
    )
    image: Plain | None = Field(
        default=None,
        description="A .sif file (apptainer), a .sqsh file or registry#image:tag (pyxis), or an image name (docker).",
    )
    mounts: Lines = Field(
        default=(), description="Folders to mount beside the workspace: /source, /source:/target or /source:/target:ro."
    )
    extra_args: Lines = Field(
        default=(), description="Additional options for apptainer exec, docker run, or srun (pyxis)."
    )


class Request(Section):
    """A job, as the site profile and the command line request it."""

    nodes: Annotated[int, Field(ge=1, le=MOST_RANKS)] = Field(default=1, description="Number of nodes.")
    gpus_per_node: Annotated[int, Field(ge=1, le=MOST_SLOTS)] | None = Field(
        default=None, description="Ranks per node, one GPU each. Required, here or on the command line."
    )
    gpu_request: Literal["gres", "gpus-per-node", "none"] = Field(
        default="gres", description="Option that requests the GPUs; none requests none (CPU ranks)."
    )
    gpu_type: Plain | None = Field(default=None, description="GPU type, as in --gres=gpu:<type>:<number>.")
    gpu: Line | None = Field(
        default=None,
        description="GPU for the plan: its name (v100-32gb, a100-80gb, …) or its memory (24gib)."
        " Default: what sinfo reports.",
    )
    cpus_per_node: Positive | None = Field(
        default=None, description="CPUs per node, divided among its tasks (--cpus-per-task)."
    )
    mem: Memory | None = Field(default=None, description="--mem: memory per node, for example 160G.")
    launcher: RankLauncherName = Field(
        default="torchrun",
        description="How the ranks start: torchrun or deepspeed (one task per node), srun (one task per rank),"
        " deepspeed-slurm or deepspeed-pdsh (DeepSpeed's own launchers, from the first node).",
    )
    partition: Plain | None = Field(default=None, description="--partition.")
    account: Plain | None = Field(default=None, description="--account.")
    qos: Plain | None = Field(default=None, description="--qos.")
    constraint: Plain | None = Field(default=None, description="--constraint: features that the nodes must have.")
    hint: Literal["compute_bound", "memory_bound", "multithread", "nomultithread"] | None = Field(
        default=None, description="--hint."
    )
    exclusive: bool = Field(default=False, description="--exclusive: no other job on the nodes.")
    time: Time | None = Field(default=None, description="--time: minutes, hours:minutes:seconds, days-hours, …")
    signal_lead: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=300,
        description="Seconds before the time limit at which the run saves and ends; Slurm may signal a minute early.",
    )
    requeue: bool = Field(
        default=True,
        description="Requeue the job after its time limit or a lost node; the run resumes from its checkpoint.",
    )
    container: SlurmContainer = Field(default_factory=SlurmContainer)
    setup: Lines = Field(
        default=(), description="Shell lines at the start of the script: module load …, source …/activate."
    )
    env: dict[EnvName, EnvValue] = Field(default_factory=dict, description="Environment variables of every rank.")
    sbatch: Lines = Field(default=(), description="Additional sbatch options, for example --mail-type=END.")
    srun: Lines = Field(
        default=(), description="Additional options for the srun that starts the ranks, for example --mpi=none."
    )
    tridock: Line = Field(default="tridock", description="The tridock command on the nodes, outside any container.")
    array_tasks: Positive | None = Field(
        default=None, description="Maximum number of tasks of a job array that run at the same time. Default: all."
    )

    @property
    def ranks_per_node(self) -> int:
        """``gpus_per_node`` of a request that :func:`~tridock.launchers.slurm.profile.make_request` has validated."""
        assert self.gpus_per_node is not None
        return self.gpus_per_node

    @property
    def slots(self) -> dict[str, range]:
        """The slots that the plan assumes before Slurm has named the nodes."""
        return {f"node-{number}": range(self.ranks_per_node) for number in range(self.nodes)}


def seconds_of(time: str) -> int:
    """Converts a time limit in Slurm's forms (``90``, ``1:30:00``, ``2-12``, ``2-12:30``) to seconds."""
    days, dash, rest = time.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    if dash:  # days-hours[:minutes[:seconds]]
        places = [int(days), *numbers]
    elif len(numbers) == 3:
        places = [0, *numbers]
    else:  # minutes[:seconds]
        places = [0, 0, *numbers]
    return sum(number * unit for number, unit in zip(places, _SECONDS, strict=False))
