"""The cluster as ``sinfo`` reports it, and the parts of a request that it cannot satisfy. Pure."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tridock.errors import Problem, RequestError
from tridock.gpus import Gpu, find_gpu
from tridock.launchers.slurm.request import Request, seconds_of, tasks_per_node

_MIB = {"": 1, "M": 1, "K": 1 / 1024, "G": 1024, "T": 1024 * 1024}
_COUNTS = re.compile(r"\d+/(\d+)/(\d+)/(\d+)")
_GPU = re.compile(r"gpu(?::([^:(,]+))?:(\d+)")


@dataclass(frozen=True, slots=True)
class Group:
    """Identical nodes of a partition."""

    partition: str
    is_default: bool
    nodes: int
    idle: int
    other: int
    """Nodes neither idle nor allocated: down, drained, reserved."""
    gpus: int
    gpu_types: tuple[str, ...]
    memory_mib: int
    cpus: int
    limit_s: int | None
    """The partition's time limit in seconds; None if unlimited."""
    features: tuple[str, ...]

    @property
    def gpu(self) -> Gpu | None:
        """The GPU that its GRES or a feature names, if Tridock knows it."""
        # The longest name is the most specific: v100-32g, while v100 alone means the smaller one.
        for name in sorted((*self.gpu_types, *self.features), key=len, reverse=True):
            try:
                return find_gpu(name, "")
            except RequestError:
                continue
        return None


def parse_sinfo(lines: Sequence[str]) -> list[Group]:
    """Parses the lines of :func:`tridock.ops.slurm.scheduler.sinfo`."""
    groups = []
    for line in lines:
        if line.count("|") != 6 or (counts := _COUNTS.fullmatch(line.split("|")[1])) is None:
            continue
        partition, _, gres, memory, cpus, limit, features = line.split("|")
        idle, other, number = map(int, counts.groups())
        gpus = _GPU.findall(gres)
        groups.append(
            Group(
                partition.rstrip("*"),
                partition.endswith("*"),
                number,
                idle,
                other,
                sum(int(count) for _, count in gpus),
                tuple(type_ for type_, _ in gpus if type_),
                int(memory.rstrip("+")),
                int(cpus.rstrip("+")),
                seconds_of(limit) if limit[:1].isdigit() else None,
                () if features == "(null)" else tuple(features.split(",")),
            )
        )
    return groups


def gpu_of(groups: Sequence[Group], request: Request) -> Gpu | None:
    """Returns the GPU with the least memory among nodes that the job may get, if all are known."""
    found = [group.gpu for group in _meant(groups, request) if _has_features(group, request) and group.gpus]
    known = [gpu for gpu in found if gpu is not None]
    return min(known, key=lambda gpu: gpu.memory_mib) if known and len(known) == len(found) else None


def site_problems(groups: Sequence[Group], request: Request, source: str) -> Iterator[Problem]:
    """Yields the fields of the request that the nodes listed by ``sinfo`` cannot satisfy."""
    partitions = list(dict.fromkeys(group.partition for group in groups))
    if request.partition is not None:
        for name in request.partition.split(","):
            if name not in partitions:
                todo = f"use one of {', '.join(partitions)}"
                yield Problem(f"{source}: partition", "is not one of this cluster", repr(name), todo)
    meant = _meant(groups, request)
    if not meant:
        return
    where = " and ".join(dict.fromkeys(group.partition for group in meant))
    if (there := sum(group.nodes for group in meant)) < request.nodes:
        todo = f"ask for at most {there}"
        yield Problem(f"{source}: nodes", f"are more than partition {where} has", str(request.nodes), todo)
        return
    yield from _lacks(meant, request, source, where)
    limits = [group.limit_s for group in meant]
    if request.time is not None and all(limit is not None and limit < seconds_of(request.time) for limit in limits):
        longest = max(limit for limit in limits if limit is not None)
        todo = f"ask for at most {longest // 60} minutes: a run that has saved is queued again"
        yield Problem(f"{source}: time", f"is longer than partition {where} allows", request.time, todo)


def idle_nodes(groups: Sequence[Group], request: Request) -> str | None:
    """Returns a sentence on the idle nodes that satisfy the request; None if none is known.

    Nodes in two partitions count twice.
    """
    meant = _meant(groups, request)
    fit = [group for group in meant if all(has(group) for _, _, has, _ in _checks(meant, request))]
    if not fit:
        return None
    where = " and ".join(dict.fromkeys(group.partition for group in fit))
    idle, other, number = (sum(getattr(group, name) for group in fit) for name in ("idle", "other", "nodes"))
    waits = "" if idle >= request.nodes else f", so it waits for {request.nodes - idle} more"
    away = f"; {other} are down, drained or reserved" if waits and other else ""
    return f"nodes: {idle} of {number} in partition {where} are idle; the job needs {request.nodes}{waits}{away}"


def _lacks(meant: Sequence[Group], request: Request, source: str, where: str) -> Iterator[Problem]:
    """Yields the fields that too few nodes satisfy."""
    for field, value, has, todo in _checks(meant, request):
        if value is not None and (enough := sum(g.nodes for g in meant if has(g))) < request.nodes:
            what = f"{enough} nodes of partition {where} have it, and {request.nodes} are asked for"
            yield Problem(f"{source}: {field}", what, str(value), todo)


_Check = tuple[str, object, Callable[[Group], bool], str]
"""A field, its value, whether a group's nodes satisfy it, and what to request instead."""


def _checks(meant: Sequence[Group], request: Request) -> list[_Check]:
    """Returns the check of each requested field."""
    features = ", ".join(sorted({name for group in meant for name in group.features})) or "none"
    most = {
        "gpus_per_node": max(group.gpus for group in meant),
        "cpus_per_node": max(group.cpus for group in meant),
        "mem": f"{max(group.memory_mib for group in meant)}M",
    }
    checks: list[_Check] = [
        ("constraint", request.constraint, lambda g: _has_features(g, request), f"the features there are: {features}"),
        ("cpus_per_node", request.cpus_per_node, lambda g: g.cpus >= _cpus(request), _at_most(most["cpus_per_node"])),
        ("mem", request.mem, lambda g: g.memory_mib >= _mib(request), _at_most(most["mem"])),
    ]
    if request.gpu_request != "none":
        ask = request.ranks_per_node
        checks.insert(1, ("gpus_per_node", ask, lambda g: g.gpus >= ask, _at_most(most["gpus_per_node"])))
    return checks


def _at_most(value: object) -> str:
    return f"ask for at most {value}, or for fewer nodes"


def _meant(groups: Sequence[Group], request: Request) -> list[Group]:
    if request.partition is None:
        return [group for group in groups if group.is_default]
    return [group for group in groups if group.partition in request.partition.split(",")]


def _has_features(group: Group, request: Request) -> bool:
    """Whether nodes have the features; only conjunctions (``a&b``) are checked."""
    if request.constraint is None or not re.fullmatch(r"[\w.&-]+", request.constraint):
        return True
    return set(request.constraint.split("&")) <= set(group.features)


def _cpus(request: Request) -> int:
    return (request.cpus_per_node or 0) // tasks_per_node(request) * tasks_per_node(request)


def _mib(request: Request) -> float:
    match = re.fullmatch(r"(\d+)([KMGT]?)", request.mem or "0")
    assert match is not None
    return int(match[1]) * _MIB[match[2]]
