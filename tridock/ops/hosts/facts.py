"""The facts of each host, read in one round trip: ids, home, devices, keys, Docker, image and containers."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from tridock.cluster.transports import CLUSTER_LABEL, NODE_LABEL, RECIPE_LABEL, WORKSPACE_LABELS, HostFacts, Transport
from tridock.command import Command
from tridock.contracts import environment
from tridock.errors import ClusterError, Problem
from tridock.gpus import Gpu, least_of, of_device
from tridock.ops.hosts.hosts import Hosts
from tridock.remote import Host, Outcome, raise_failures

# One POSIX script, one line a fact. An image and containers, also of other clusters, are the engine's own JSON. What
# kind of engine it is, is asked as long as there is no container of this one.
_SCRIPT = r"""
printf 'uid %s\ngid %s\nhome %s\n' "$(id -u)" "$(id -g)" "$HOME"
if command -v nvidia-smi >/dev/null 2>&1; then
  echo nvidia-smi
  nvidia-smi --list-gpus 2>&1 | while IFS= read -r line; do printf 'nvidia-smi %s\n' "$line"; done
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
if ! command -v docker >/dev/null 2>&1; then echo 'docker_missing 1'; exit 0; fi
# An engine that hangs accepts a request, and does not answer.
others=$(timeout 9 docker ps --quiet --no-trunc --filter "label=$5" 2>/dev/null)
# shellcheck disable=SC2086 - one word an id
if ! found=$(timeout 9 docker inspect --format '{{json .}}' "$1" "$2" $others 2>/dev/null) && [ -z "$found" ]; then
  error=$(timeout 9 docker version 2>&1 >/dev/null) || {
    printf 'docker_error %s\n' "$(printf '%s' "${error:-nothing}" | tail -n 1)"
    exit 0
  }
fi
engine=
case $found in
*"\"Name\":\"/$2\""*) ;;
*) case $(docker --version 2>/dev/null) in
   *odman*) engine=podman ;;
   *) engine=$(docker info --format '{{json .SecurityOptions}}' 2>/dev/null) ;;
   esac ;;
esac
printf 'docker_answered\nengine %s\n%s\n' "$engine" "$found"
"""
_UUID: Final = re.compile(r"\(UUID: (\S+)\)")
_KEY_LINE: Final = re.compile(r"[0-9a-f]{64}|\\[0-9a-f]{64}|mode")


_ENGINES: Final = (
    (
        "podman",
        "has podman under the name docker",
        "podman is not supported",
        "install Docker Engine there, or put its docker first on the PATH that ssh commands have",
    ),
    (
        "name=rootless",
        "has a rootless Docker engine",
        "its containers have neither the host's network nor your uid",
        "use the host's own engine: docker context use default there, or leave DOCKER_HOST unset",
    ),
    (
        "name=userns",
        "its Docker engine remaps users",
        "userns-remap: a node could not read its keys",
        'let the nodes do without: container.extra_args: ["--userns=host"] in the settings',
    ),
)
"""Marks of engines that cannot start a node as it has to be, and the message of each."""


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
    """The folder on the host for which it was started; None of a container that Tridock did not start."""
    image: str = ""
    """The name of its image when it was started."""
    cluster: str = ""
    node: str = ""
    user: str = ""
    """``uid:gid`` of its account on the host."""
    gpus: tuple[str, ...] | None = ()
    """The host's GPUs that it has, by number or UUID; None: all."""

    def device(self, slot: int, uuids: Sequence[str]) -> str:
        """Returns what a slot of it is on a host whose GPUs have these UUIDs: ``GPU 2``, or ``CPU slot 0``."""
        if self.gpus == ():
            return f"CPU slot {slot}"
        numbers = {it: number for it in self.gpus or () for number, uuid in enumerate(uuids) if uuid.startswith(it)}
        names = [str(numbers.get(it, it)) for it in self.gpus or ()]
        if all(map(str.isdecimal, names)):
            names.sort(key=int)  # the order in which CUDA numbers them, whatever the order they are given in
        return f"GPU {names[slot] if slot < len(names) else slot}"


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
    """What each of the host's GPUs has at least; listed ones have rates too."""
    gpu_error: str | None = None
    """What nvidia-smi says on a host where it finds no GPU."""
    local_image_id: str | None = None
    image_ids: frozenset[str] = frozenset()
    engine: Problem | None = None
    """Why the host's engine cannot start a node as it has to be. Unknown where there is a container."""
    others: tuple[Container, ...] = ()
    """The running nodes of other clusters, of any account, that are hosts over ssh."""
    uuids: tuple[str, ...] = ()
    """Of the host's GPUs, by number."""

    def has(self, image_id: str) -> bool:
        """Whether the host's image is the one that has this id here or there."""
        return image_id == self.image_id or image_id in self.image_ids

    def id_of(self, image_id: str) -> str:
        """What the host's engine calls the image with this id."""
        return self.local_image_id if self.local_image_id and self.has(image_id) else image_id


def facts_command(image: str, container: str, keys: str, images: str) -> Command:
    """The command that prints the facts; ``image``, ``container`` and the folder ``keys`` are looked for.

    The file ``images`` lists the images that the host was sent, one a line, by all their ids. Keys and images may start
    with ``~``.
    """
    named = image if "@" in image or ":" in image.rpartition("/")[2] else f"{image}:latest"  # never a container's name
    return Command.of("sh", "-c", _SCRIPT, "facts", named, container, keys, images, CLUSTER_LABEL)


def keys_digest(files: Mapping[str, bytes]) -> str:
    """Returns the digest that a host has if its keys' folder holds exactly ``files``, for nobody else to read."""
    lines = [f"{hashlib.sha256(content).hexdigest()} {name}" for name, content in files.items()]
    return _digest([*lines, "mode 700 .", *(f"mode 600 {name}" for name in files)])


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def parse_facts(name: str, text: str, own: str = "") -> HostState:
    """Reads the facts of host ``name``, whose node is the container ``own``.

    Raises :class:`ClusterError` where Docker cannot be used there.
    """
    lines = list(_lines(text))
    facts = dict(lines)
    gpus = [value for name, value in lines if name == "gpu"]
    smi = [value for name, value in lines if name == "nvidia-smi"]
    listed = [line for line in smi if line.split(" ")[0] == "GPU"]
    gpu_error = " ".join(filter(None, smi)) or "nothing" if smi and not listed else None
    if "docker_missing" in facts:
        raise ClusterError(Problem(name, "has no Docker", "no docker on PATH", "install Docker Engine there"))
    if "docker_error" in facts:
        todo = "start Docker there (systemctl start docker); journalctl -u docker says why it hangs"
        if "permission denied" in facts["docker_error"].lower():
            todo = "add the ssh user to the docker group there"
        raise ClusterError(Problem(name, "Docker does not answer", facts["docker_error"], todo))
    try:
        host = HostFacts(
            uid=int(facts["uid"]),
            gid=int(facts["gid"]),
            home=facts["home"],
            gpus=len(listed),
            infiniband="infiniband" in facts,
        )
        inspected = [json.loads(line) for line in text.split("\n") if line.startswith("{")]
        local = next((fields["Id"] for fields in inspected if "RootFS" in fields), None)
        containers = [(it.get("Name", f"/{own}") == f"/{own}", _container(it)) for it in inspected if "State" in it]
        container = next((it for is_own, it in containers if is_own), None)
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
    gpu = None if gpu_error else least_gpu(gpus)
    engine = next(
        (Problem(name, what, got, todo) for mark, what, got, todo in _ENGINES if mark in facts.get("engine", "")), None
    )
    others = tuple(it for is_own, it in containers if not is_own and it.running and it.user)
    uuids = tuple(_UUID.findall("\n".join(listed)))
    known = frozenset(filter(None, ids))
    return HostState(host, ids[0], container, keys, gpu, gpu_error, local, known, engine, others, uuids)


def least_gpu(lines: Sequence[str]) -> Gpu | None:
    """Returns what each GPU of ``nvidia-smi --query-gpu=memory.total,name --format=csv,noheader,nounits`` has at least.

    Rates are there where all are listed. None where the driver does not answer as it should.
    """
    found = []
    for line in lines:
        memory, _, device = line.partition(", ")
        if memory.isdecimal():
            listed = of_device(device, int(memory)) or Gpu(device, 0)
            found.append(replace(listed, memory_mib=int(memory)))
    return least_of(found)


def _lines(text: str) -> Iterator[tuple[str, str]]:
    for line in text.split("\n"):  # not at other characters that end a line, which the engine's JSON may contain
        name, _, value = line.partition(" ")
        yield name, value.strip()


def _container(fields: Mapping[str, Any]) -> Container:
    # The engine's own JSON: its keys are stable across the API versions that Docker supports.
    state, labels = fields["State"], fields["Config"].get("Labels") or {}
    env = dict(it.split("=", 1) for it in fields["Config"].get("Env") or () if "=" in it)
    asked = fields.get("HostConfig", {}).get("DeviceRequests") or ()
    gpus = tuple(id_ for it in asked for id_ in it.get("DeviceIDs") or ())
    return Container(
        id=fields["Id"],
        image_id=fields["Image"],
        running=bool(state["Running"]),
        recipe=labels.get(RECIPE_LABEL),
        exit_code=int(state["ExitCode"]),
        health=(state.get("Health") or {}).get("Status"),
        workspace=next((labels[name] for name in WORKSPACE_LABELS if name in labels), None),
        image=fields["Config"].get("Image") or "another image",
        cluster=labels.get(CLUSTER_LABEL, ""),
        node=labels.get(NODE_LABEL, ""),
        user=f"{env[environment.UID]}:{env[environment.GID]}" if {environment.UID, environment.GID} <= {*env} else "",
        gpus=gpus or (None if asked else ()),
    )


States = Mapping[str, HostState]
"""By node name, in the hosts' order."""

FACTS_TIMEOUT_S: Final = 30.0


def read_states(hosts: Hosts) -> States:
    """Asks every host. Raises :class:`ClusterError` with those that do not answer, as of :func:`read_state`."""
    return raise_failures(ask_states(hosts))


def ask_states(hosts: Hosts) -> dict[str, Outcome[HostState]]:
    """As :func:`read_states`, with a host's error in place of its state."""
    return hosts.try_each(partial(read_state, hosts.transport))


def read_state(transport: Transport, node: str, host: Host) -> HostState:
    """Asks a host. Raises :class:`ClusterError` if Docker cannot be used, or its container is another folder's."""
    command = facts_command(
        transport.cluster.settings.image,
        transport.container_name(node),
        transport.secrets_folder(node),
        transport.images_file(node),
    )
    facts = host.run(command, timeout=FACTS_TIMEOUT_S).checked(node).stdout.decode()
    where = transport.host_label(node)
    try:
        state = parse_facts(where, facts, transport.container_name(node))
    except ClusterError:
        host.forget()  # a new group of the user's holds from the next login on
        raise
    if (problem := transport.refused_engine(state.engine)) is not None:
        raise ClusterError(problem)
    if (container := state.container) is None:
        return state
    ours, user = transport.workspace(state.facts), f"{state.facts.uid}:{state.facts.gid}"
    if transport.separate_hosts and container.user not in ("", user):
        got = f"uid:gid {container.user}, and yours are {user}"
    elif container.workspace is None:
        got = f"one of {container.image}, which Tridock did not start"
    elif container.workspace != ours:
        got = f"that of {container.workspace}, and this one's is {ours}"
    else:
        return state
    what = f"its container {transport.container_name(node)} is not this cluster's"
    todo = "use its folder (workdir) or account (ssh.user), or give this cluster another name: rename its hostfile"
    raise ClusterError(Problem(where, what, got, todo))
