"""The facts of each host, read in one round trip: ids, home, devices, keys, Docker, image and container."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from tridock.cluster.transports import RECIPE_LABEL, WORKSPACE_LABELS, HostFacts
from tridock.command import Command
from tridock.errors import ClusterError, Problem
from tridock.gpus import Gpu, of_device
from tridock.remote.kept import KEEP, KEPT

_HANGS = "see journalctl -u docker and dmesg there; restarting it ends the runs on it, unless live-restore is on"

# One POSIX script, one line a fact: a second round trip to a far host costs more than all of this, and on many hosts
# every process counts. An image and a container are the engine's own JSON. With arguments after the fifth the script
# also runs `docker exec` with them, if the container runs and is labelled with the folder $5.
_SCRIPT = r"""
facts() {
uid=; gid=
if [ -r /proc/self/status ]; then
  while read -r name real effective rest; do
    case $name in Uid:) uid=$effective;; Gid:) gid=$effective; break;; esac
  done </proc/self/status
fi
uid=${uid:-$(id -u)}; gid=${gid:-$(id -g)}
printf 'uid %s\ngid %s\nhome %s\n' "$uid" "$gid" "$HOME"
if command -v nvidia-smi >/dev/null 2>&1; then
  printf 'gpus %s\n' "$(nvidia-smi --list-gpus 2>/dev/null | wc -l)"
  nvidia-smi --query-gpu=memory.total,name --format=csv,noheader,nounits 2>/dev/null |
    while IFS= read -r line; do printf 'gpu %s\n' "$line"; done
fi
if [ -d /dev/infiniband ]; then echo 'infiniband 1'; fi
case $3 in '~'/*) keys=$HOME/${3#*/};; *) keys=$3;; esac
if [ -n "$keys" ] && cd "$keys" 2>/dev/null; then
  echo 'keys 1'
  sha256sum -- * 2>/dev/null
  stat -c 'mode %a %n' . * 2>/dev/null
  cd "$OLDPWD"
fi
case $4 in '~'/*) images=$HOME/${4#*/};; *) images=$4;; esac
if [ -e "$images" ]; then while read -r ids; do printf 'ids %s\n' "$ids"; done <"$images"; fi
if ! command -v docker >/dev/null 2>&1; then echo 'docker_missing 1'; return 0; fi
echo docker_asked
if ! found=$(docker inspect --format '{{json .}}' "$1" "$2" 2>/dev/null) && [ -z "$found" ]; then
  error=$(docker version 2>&1 >/dev/null) || {
    printf 'docker_error %s\n' "$(printf '%s' "$error" | tail -n 1)"
    return 0
  }
fi
printf 'docker_answered\n%s\n' "$found"
if [ "$#" -le 5 ]; then return 0; fi
case $5 in *:\"'~'/*) ours="${5%%\~*}$HOME/${5#*\~/}";; *) ours=$5;; esac
case $found in *'"Running":true'*) ;; *) return 0;; esac
case $found in *"$ours"*) ;; *) return 0;; esac
shift 5
echo answer
$run docker exec --user "$uid:$gid" "$@" </dev/null
}
facts "$@" || exit
"""
_ASKED: Final = "\ndocker_asked\n"
_ANSWER: Final = b"\nanswer\n"
_KEY_LINE: Final = re.compile(r"[0-9a-f]{64}|\\[0-9a-f]{64}|mode")


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


def facts_command(
    image: str,
    container: str,
    keys: str,
    images: str,
    workspace: tuple[str, str],
    question: Sequence[str] = (),
    *,
    keep: bool = False,
) -> Command:
    """The command that prints the facts; ``image``, ``container`` and the folder ``keys``, if any, are looked for.

    The file ``images`` lists the images that the host was sent, one a line, by all their ids. ``question`` are
    arguments of ``docker exec`` after its user. The command then ends as it, but only where the container runs and its
    label ``workspace`` has this value; else it prints no answer. Keys, images and the label's value may start with
    ``~``. With ``keep`` the shell that gathers them can be kept (:meth:`tridock.remote.Host.run`).
    """
    named = image if "@" in image or ":" in image.rpartition("/")[2] else f"{image}:latest"  # never a container's name
    label = ":".join(json.dumps(part, ensure_ascii=False) for part in workspace)
    script = f"run=\n{_SCRIPT}{KEEP}" if keep else f"run=exec\n{_SCRIPT}"
    return Command.of("sh", "-c", script, "facts", named, container, keys, images, label, *question)


def split_answer(output: bytes) -> tuple[str, bytes | None]:
    """Returns the facts and, if the question was asked, what it has printed."""
    facts, asked, answer = KEPT.sub(b"", output).partition(_ANSWER)
    return facts.decode(), answer if asked else None


def docker_hangs(name: str, text: str, limit: float) -> Problem | None:
    """Returns the problem of host ``name`` if the facts that it gave within ``limit`` seconds end before Docker's.

    An engine that hangs accepts a request, and does not answer.
    """
    if not text.endswith(_ASKED):
        return None
    return Problem(name, "Docker hangs", f"no answer within {limit:g} s", _HANGS)


def keys_digest(files: Mapping[str, bytes]) -> str:
    """Returns the digest that a host has if its keys' folder holds exactly ``files``, for nobody else to read."""
    lines = [f"{hashlib.sha256(content).hexdigest()} {name}" for name, content in files.items()]
    return _digest([*lines, "mode 700 .", *(f"mode 600 {name}" for name in files)])


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def parse_facts(name: str, text: str) -> HostState:
    """Reads the facts of host ``name``. Raises :class:`ClusterError` where Docker cannot be used there."""
    lines = list(_lines(text))
    facts = dict(lines)
    gpus = [value for name, value in lines if name == "gpu"]
    if "docker_missing" in facts:
        raise ClusterError(Problem(name, "has no Docker", "no docker on PATH", "install Docker Engine there"))
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
        inspected = [json.loads(line) for line in text.split("\n") if line.startswith("{")]
        local = next((fields["Id"] for fields in inspected if "RootFS" in fields), None)
        container = next((_container(fields) for fields in inspected if "State" in fields), None)
    except (KeyError, ValueError) as error:
        todo = "make its login shell print nothing of its own"
        raise ClusterError(Problem(name, "sent an unreadable answer", f"{error} in {text[-200:]!r}", todo)) from None
    same = {id_: ids for name, value in lines if name == "ids" for ids in [value.split()] for id_ in ids}
    if container is not None and container.image_id in same:
        container = replace(container, image_id=same[container.image_id][0])
    keys = None
    if "keys" in facts:
        keys = _digest(f"{name} {value}" for name, value in lines if _KEY_LINE.fullmatch(name))
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
    for line in text.split("\n"):  # not at other characters that end a line, which the engine's JSON may contain
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
