"""The GPU of a job's nodes and the limits of its partition, from what ``sinfo`` reports. Pure."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tridock.errors import Problem, RequestError
from tridock.gpus import Gpu, find_gpu
from tridock.launchers.slurm.request import Request, seconds_of

_GPU = re.compile(r"gpu(?::([^:(,]+))?:\d+")


@dataclass(frozen=True, slots=True)
class Group:
    """Identical nodes of a partition."""

    partition: str
    is_default: bool
    has_gpus: bool
    gpu_types: tuple[str, ...]
    features: tuple[str, ...]
    limit_s: int | None
    """The longest time of a job in the partition, in seconds; None if unlimited."""
    most_nodes: int | None
    """The most nodes of a job in the partition; None if unlimited."""

    @property
    def gpu(self) -> Gpu | None:
        """The GPU that its GRES or a feature names, if Tridock knows it."""
        # The longest name is the most specific: v100-32g, while v100 alone has two sizes.
        for name in sorted((*self.gpu_types, *self.features), key=len, reverse=True):
            try:
                return find_gpu(name, "")
            except RequestError:
                continue
        return None


def parse_sinfo(lines: Sequence[str]) -> list[Group]:
    """Parses the lines of :func:`tridock.ops.slurm.scheduler.sinfo`."""
    groups = []
    for partition, gres, features, limit, nodes in (line.split("|") for line in lines if line.count("|") == 4):
        types = _GPU.findall(gres)
        named = () if features == "(null)" else tuple(features.split(","))
        own = partition.rstrip("*"), partition.endswith("*")
        most = nodes.rpartition("-")[2]
        limits = seconds_of(limit) if limit[:1].isdigit() else None, int(most) if most.isdigit() else None
        groups.append(Group(*own, bool(types), tuple(filter(None, types)), named, *limits))
    return groups


def gpu_of(groups: Sequence[Group], request: Request) -> Gpu | None:
    """Returns the GPU with the least memory among nodes that the job may get, if all are known."""
    found = [group.gpu for group in groups if group.has_gpus and _is_meant(group, request)]
    known = [gpu for gpu in found if gpu is not None]
    return min(known, key=lambda gpu: gpu.memory_mib) if known and len(known) == len(found) else None


def limit_problems(groups: Sequence[Group], request: Request, source: str) -> Iterator[Problem]:
    """Yields what no partition of the request allows: by default Slurm accepts such a job, which then waits for ever.

    (``EnforcePartLimits=NO`` in slurm.conf(5); ``sbatch --test-only`` finds nothing wrong with it either.)
    """
    meant = [group for group in groups if _is_in_partition(group, request)]
    where = " and ".join(dict.fromkeys(group.partition for group in meant))
    longest = [group.limit_s for group in meant if group.limit_s is not None]
    asked = 0 if request.time is None else seconds_of(request.time) or math.inf  # 0 is Slurm's number for no limit
    if meant and len(longest) == len(meant) and max(longest) < asked:
        todo = f"ask for at most {max(longest) // 60} minutes: a run that has saved is queued again"
        yield Problem(f"{source}: time", f"is longer than partition {where} allows", request.time or "", todo)
    most = [group.most_nodes for group in meant if group.most_nodes is not None]
    if meant and len(most) == len(meant) and max(most) < request.nodes:
        what, todo = f"are more than partition {where} gives to a job", f"ask for at most {max(most)}"
        yield Problem(f"{source}: nodes", what, str(request.nodes), todo)


def _is_in_partition(group: Group, request: Request) -> bool:
    return group.is_default if request.partition is None else group.partition in request.partition.split(",")


def _is_meant(group: Group, request: Request) -> bool:
    """Whether a job may get the nodes; of constraints only conjunctions (``a&b``) are looked at."""
    if not _is_in_partition(group, request):
        return False
    if request.constraint is None or not re.fullmatch(r"[\w.&-]+", request.constraint):
        return True
    return set(request.constraint.split("&")) <= set(group.features)
