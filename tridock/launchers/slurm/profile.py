"""A job's request from a site profile (``configs/slurm/*.yaml``) and the command line, with every problem of it."""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from tridock.contracts.limits import MOST_RANKS
from tridock.errors import Problem, RequestError
from tridock.gpus import find_gpu
from tridock.launchers.slurm.ranks import CONTAINERS, RANK_LAUNCHERS, tasks_per_node
from tridock.launchers.slurm.request import Request, seconds_of
from tridock.strict_yaml import validated
from tridock.yaml_text import parse_yaml

_MOUNT: Final = re.compile(r"/[^:,]*(:/[^:,]+(:(ro|rw))?)?")


def make_request(text: str, source: str, changes: Mapping[str, object]) -> Request:
    """Parses a profile (YAML; empty for none) and applies the command line's fields, keyed by dotted names.

    Raises :class:`RequestError` with every problem.
    """
    fields = dict(parse_yaml(text, source))
    for dotted, value in changes.items():
        section, _, field = dotted.partition(".")
        given = fields.get(section)
        fields[section] = {**(given if isinstance(given, Mapping) else {}), field: value} if field else value
    request = validated(Request, fields, source)
    RequestError.raise_for(_unusable(request, source))
    return request


def _unusable(request: Request, source: str) -> Iterator[Problem]:
    container = request.container
    if request.gpus_per_node is None:
        yield Problem(f"{source}: gpus_per_node", "is missing", "", "add it, or give --gpus-per-node")
    elif request.nodes * request.gpus_per_node > MOST_RANKS:
        got = f"{request.nodes * request.gpus_per_node:,}"
        yield Problem(f"{source}: nodes", f"have more ranks than the {MOST_RANKS:,} of a run", got, "ask for fewer")
    elif request.cpus_per_node is not None and request.cpus_per_node < tasks_per_node(request):
        todo = f"give at least {tasks_per_node(request)}, one a task"
        yield Problem(f"{source}: cpus_per_node", "is less than a CPU a task", str(request.cpus_per_node), todo)
    needs_image = CONTAINERS[container.kind].needs_image
    if needs_image and container.image is None:
        yield Problem(
            f"{source}: container.image", "is missing", "", f"name the image for {container.kind}, or --image"
        )
    if needs_image and not RANK_LAUNCHERS[request.launcher].inside_step:
        todo = "use torchrun, srun or deepspeed, which start inside of it"
        what = f"starts the ranks from the first node, and cannot from within {container.kind}"
        yield Problem(f"{source}: launcher", what, request.launcher, todo)
    for mount in container.mounts:
        if not _MOUNT.fullmatch(mount):
            yield Problem(
                f"{source}: container.mounts", "is not a mount", repr(mount), "write /source, /source:/target or …:ro"
            )
    if request.time is not None and 0 < seconds_of(request.time) <= request.signal_lead:
        got, todo = f"{request.signal_lead} s", "lower signal_lead, or ask for more time"
        yield Problem(f"{source}: signal_lead", f"is no less than the time, {request.time}", got, todo)
    for option in (*request.sbatch, *request.srun):
        if not option.startswith("-"):
            field = "sbatch" if option in request.sbatch else "srun"
            yield Problem(f"{source}: {field}", "is not an option", repr(option), "write --name or --name=value")
    for name in request.env:
        if name.startswith(("TRIDOCK_", "SLURM_")):
            todo = "choose another name"
            yield Problem(f"{source}: env.{name}", "is reserved for Tridock or Slurm", repr(request.env[name]), todo)
    if request.gpu is not None:
        try:
            find_gpu(request.gpu, f"{source}: gpu")
        except RequestError as error:
            yield from error.problems
