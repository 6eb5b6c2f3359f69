"""The facts of each host, read in one round trip: ids, home, devices, keys, Docker, image and container."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tridock.cluster.transports import RECIPE_LABEL, WORKSPACE_LABELS, HostFacts
from tridock.command import Command
from tridock.errors import ClusterError, Problem
from tridock.gpus import Gpu, of_device

DOCKER_S = 20
"""Seconds after which a Docker engine that accepts a request without answering counts as hung."""
_HANGS = "see journalctl -u docker and dmesg there; restarting it ends the runs on it, unless live-restore is on"

# One POSIX script, one `name value` line a fact: a second round trip to a far host costs more than all of this.
_SCRIPT = r"""
printf 'uid %s\n' "$(id -u)"
printf 'gid %s\n' "$(id -g)"
printf 'home %s\n' "$HOME"
if command -v nvidia-smi >/dev/null 2>&1; then
  printf 'gpus %s\n' "$(nvidia-smi --list-gpus 2>/dev/null | wc -l)"
  nvidia-smi --query-gpu=memory.total,name --format=csv,noheader,nounits 2>/dev/null |
    while IFS= read -r line; do printf 'gpu %s\n' "$line"; done
fi
if [ -d /dev/infiniband ]; then echo 'infiniband 1'; fi
case $3 in '~'/*) keys=$HOME/${3#*/};; *) keys=$3;; esac
if cd "$keys" 2>/dev/null; then printf 'keys %s\n' "$(export LC_ALL=C; sha256sum -- * 2>/dev/null | sha256sum)"; fi
case $4 in '~'/*) images=$HOME/${4#*/};; *) images=$4;; esac
if [ -e "$images" ]; then while read -r ids; do printf 'ids %s\n' "$ids"; done <"$images"; fi
if ! command -v docker >/dev/null 2>&1; then echo 'docker_missing 1'; exit 0; fi
timeout "$5" docker image inspect --format 'image {{.Id}}' "$1" 2>/dev/null
case $? in
0) ;;
124) printf 'docker_silent %s\n' "$5"; exit 0 ;;
*)
  error=$(timeout "$5" docker version 2>&1 >/dev/null) || {
    printf 'docker_error %s\n' "$(printf '%s' "$error" | tail -n 1)"
    exit 0
  }
  ;;
esac
timeout "$5" docker container inspect --format 'container {{json .}}' "$2" 2>/dev/null
exit 0
"""


@dataclass(frozen=True, slots=True)
class Container:
    """A node's container as the engine describes it."""

    id: str
    image_id: str
    running: bool
    recipe: str | None
    exit_code: int
    health: str | None
    workspace: str | None = None
    """The folder on the host for which it was started."""


@dataclass(frozen=True, slots=True)
class HostState:
    """A host's facts, and where they exist: the image's id, the node's container, the digest of the node's keys.

    An image has one id in Docker's own image store and another in containerd's. ``image_id``, and the container's, is
    the first of those that the host was sent it with; ``local_image_id`` the one that its engine knows.
    """

    facts: HostFacts
    image_id: str | None
    container: Container | None
    keys: str | None
    gpu: Gpu | None = None
    """Of the host's GPUs the one with the least memory; a listed one has its rates too."""
    local_image_id: str | None = None
    image_ids: frozenset[str] = frozenset()

    def has(self, image_id: str) -> bool:
        """Whether the host's image is the one that has this id here or there."""
        return image_id == self.image_id or image_id in self.image_ids

    def id_of(self, image_id: str) -> str:
        """What the host's engine calls the image with this id."""
        return self.local_image_id if self.local_image_id and self.has(image_id) else image_id


def facts_command(image: str, container: str, keys: str, images: str) -> Command:
    """The command that prints the facts; ``image``, ``container`` and the folder ``keys`` are what to look for.

    The file ``images`` lists the images that the host was sent, one a line, by all their ids.
    """
    return Command.of("sh", "-c", _SCRIPT, "facts", image, container, keys, images, str(DOCKER_S))


def keys_digest(files: Mapping[str, bytes]) -> str:
    """Returns the digest that a host reports if its keys' folder holds exactly ``files``."""
    lines = "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def parse_facts(name: str, text: str) -> HostState:
    """Reads the facts of host ``name``. Raises :class:`ClusterError` where Docker cannot be used there."""
    facts = dict(_lines(text))
    gpus = [value for name, value in _lines(text) if name == "gpu"]
    if "docker_missing" in facts:
        raise ClusterError(Problem(name, "has no Docker", "no docker on PATH", "install Docker Engine there"))
    if "docker_silent" in facts:
        got = f"no answer within {facts['docker_silent']} s"
        raise ClusterError(Problem(name, "Docker hangs", got, _HANGS))
    if "docker_error" in facts:
        raise ClusterError(Problem(name, "Docker does not answer", facts["docker_error"], _docker_remedy(facts)))
    try:
        host = HostFacts(
            uid=int(facts["uid"]),
            gid=int(facts["gid"]),
            home=facts["home"],
            gpus=int(facts.get("gpus", "0")),
            infiniband="infiniband" in facts,
        )
    except (KeyError, ValueError) as error:
        todo = "make its login shell print nothing of its own"
        raise ClusterError(Problem(name, "sent an unreadable answer", f"{error} in {text[-200:]!r}", todo)) from None
    same = {id_: ids for name, value in _lines(text) if name == "ids" for ids in [value.split()] for id_ in ids}
    container = _container(json.loads(facts["container"])) if "container" in facts else None
    if container is not None and container.image_id in same:
        container = replace(container, image_id=same[container.image_id][0])
    keys = facts["keys"].split()[0] if facts.get("keys") else None
    local = facts.get("image")
    ids = same.get(local, [local]) if local else [None]
    return HostState(host, ids[0], container, keys, smallest_gpu(gpus), local, frozenset(filter(None, ids)))


def smallest_gpu(lines: Sequence[str]) -> Gpu | None:
    """Of ``nvidia-smi --query-gpu=memory.total,name --format=csv,noheader,nounits`` the one with the least memory.

    Its rates are there where it is listed. None where the driver does not answer as it should.
    """
    found = []
    for line in lines:
        memory, _, device = line.partition(", ")
        if memory.isdecimal():
            listed = of_device(device, int(memory)) or Gpu(device, 0)
            found.append(replace(listed, memory_mib=int(memory)))
    return min(found, key=lambda gpu: gpu.memory_mib, default=None)


def _lines(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        yield name, value.strip()


def _docker_remedy(facts: dict[str, str]) -> str:
    if "permission denied" in facts["docker_error"].lower():
        return "add the ssh user to the docker group there"
    return "start Docker there (systemctl start docker)"


def _container(fields: Mapping[str, Any]) -> Container:
    # The engine's own JSON: its keys are stable across the API versions that Docker supports.
    state, labels = fields["State"], fields["Config"].get("Labels") or {}
    return Container(
        id=fields["Id"],
        image_id=fields["Image"],
        running=bool(state["Running"]),
        recipe=labels.get(RECIPE_LABEL),
        exit_code=int(state["ExitCode"]),
        health=(state.get("Health") or {}).get("Status"),
        workspace=next((labels[name] for name in WORKSPACE_LABELS if name in labels), None),
    )
