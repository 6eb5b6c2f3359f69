"""The settings beside a hostfile: how to reach its hosts and how to run the container there. Typed, no I/O.

``hostfile.yaml`` is optional: every field has a default that works for GPU hosts that ssh reaches by the
names of the hostfile.
"""

import ipaddress
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Final, Literal

from pydantic import Field, StringConstraints

from tridock.cluster.hostfile import is_address
from tridock.contracts import run_folder
from tridock.contracts.limits import LEAST_RATE, MOST_RATE
from tridock.errors import Problem, RequestError
from tridock.gpus import find_gpu
from tridock.strict_yaml import AS_TUPLE, EnvName, EnvValue, Section, validated
from tridock.tracker_settings import Notifications, Trackers
from tridock.yaml_text import parse_yaml

ClusterName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,40}$")]
Line = Annotated[str, StringConstraints(pattern=r"^[^\n\r\x00]+$")]
Port = Annotated[int, Field(ge=1, le=65535)]

IMAGE: Final = "tridock:latest"
CPU_IMAGE: Final = "tridock:cpu"
IMAGE_NAME: Final = r"^[a-z0-9][A-Za-z0-9._/:@-]*$"
Lines = Annotated[tuple[Line, ...], AS_TUPLE]
Limit = Annotated[str, StringConstraints(pattern=r"^(-1|[0-9]+)(:(-1|[0-9]+))?$")]


class Ssh(Section):
    """How your machine reaches the hosts. The defaults come from your ssh configuration."""

    user: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*\$?$")] | None = Field(
        default=None, description="User on the hosts. Default: from the ssh configuration."
    )
    port: Port | None = Field(default=None, description="Port of the hosts' sshd. Default: from the ssh configuration.")
    identity_file: Line | None = Field(
        default=None, description="Your private key. Default: those of the ssh configuration and of ssh-agent."
    )
    config_file: Line | None = Field(
        default=None, description="The ssh configuration to read. Default: ~/.ssh/config and the system's."
    )
    connect_timeout: Annotated[float, Field(gt=0, le=600)] = Field(
        default=10.0, description="Seconds to wait for a host to answer."
    )
    max_connections: Annotated[int, Field(ge=1, le=256)] = Field(
        default=8, description="Maximum number of hosts to connect to at the same time."
    )
    retries: Annotated[int, Field(ge=0, le=20)] = Field(
        default=4, description="Retries after a refused or dropped connection."
    )


def _gpu_ulimits() -> dict[str, str | int]:
    # What NVIDIA asks for: RDMA pins memory, and NCCL's threads have large stacks.
    return {"memlock": -1, "stack": 67108864}


class Container(Section):
    """How ``docker run`` starts a node."""

    network: Line = Field(default="host", description="Docker's --network.")
    ipc: Line = Field(default="host", description="Docker's --ipc.")
    shm_size: Annotated[str, StringConstraints(pattern=r"^[0-9]+[bkmgBKMG]?$")] | None = Field(
        default=None, description="Docker's --shm-size, for example 16g; only without ipc: host."
    )
    ulimits: dict[Annotated[str, StringConstraints(pattern=r"^[a-z]+$")], Limit | int] = Field(
        default_factory=_gpu_ulimits, description="Docker's --ulimit: name to limit, or to soft:hard."
    )
    gpus: Literal["auto", "all", "none"] = Field(
        default="auto", description="auto: all GPUs on hosts where nvidia-smi finds some, else none."
    )
    devices: Lines = Field(default=(), description="Docker's --device; InfiniBand devices are added where they exist.")
    mounts: Lines = Field(default=(), description="Additional mounts: source:target or source:target:ro.")
    cap_add: Lines = Field(default=("IPC_LOCK",), description="Docker's --cap-add.")
    extra_args: Lines = Field(default=(), description="Additional options for docker run.")


class Compose(Section):
    """Only with ``transport: compose``."""

    file: Line = Field(default="docker-compose.yml", description="Compose file, relative to the project folder.")
    project: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*$")] | None = Field(
        default=None, description="Compose project. Default: tridock-<name>-<hash of the folder>."
    )


class NodeSettings(Section):
    """Settings of one node."""

    address: Line | None = Field(
        default=None, description="Address at which the other nodes reach it. Default: its name in the hostfile."
    )
    listen: Lines | None = Field(default=None, description="Replaces listen above for this node.")
    env: dict[EnvName, EnvValue] = Field(default_factory=dict, description="Added to env above, which it overrides.")


class Settings(Section):
    """The settings of one cluster."""

    name: ClusterName | None = Field(default=None, description="Name of the cluster. Default: the hostfile's name.")
    transport: Literal["ssh", "compose"] = Field(
        default="ssh", description="ssh: hosts over SSH; compose: the twin on this machine's Docker engine."
    )
    ssh: Ssh = Field(default_factory=Ssh)
    workdir: Line | None = Field(
        default=None, description="Folder of the cluster on each host. Default: ~/tridock/<name>."
    )
    image: Annotated[str, StringConstraints(pattern=IMAGE_NAME)] = Field(
        default=IMAGE,
        description=f"The image that every node runs. If your machine has only {CPU_IMAGE} (make image FLAVOR=cpu), the"
        " default is that.",
    )
    wrap: bool = Field(
        default=False,
        description="Add Tridock's layer to the image first, as tridock image wrap does: for tridock run with your own"
        " image.",
    )
    image_base: Literal["auto", "pull", "send"] = Field(
        default="auto",
        description="How hosts get the base image: pull (by digest from its registry, with their own"
        " credentials), send (from your machine), or auto (send it to the hosts that cannot pull it).",
    )
    registry: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][A-Za-z0-9._/:-]*[A-Za-z0-9]$")] | None = Field(
        default=None,
        description="Registry for the image, as host:port/path: Tridock pushes it there, and the hosts pull it.",
    )
    container: Container = Field(default_factory=Container)
    ssh_port: Annotated[int, Field(ge=1024, le=65535)] = Field(
        default=run_folder.SSH_PORT, description="Port of the nodes' sshd, which does not run as root."
    )
    listen: Lines = Field(default=(), description="Addresses that the nodes' sshd listens on. Default: all.")
    env: dict[EnvName, EnvValue] = Field(default_factory=dict, description="Environment variables of every node.")
    gpu: Line | None = Field(
        default=None,
        description="The nodes' GPU, for the plan: its name (v100-16gb, a100-80gb, h200, …) or its memory (24gib)."
        " Default: ask the hosts.",
    )
    spares: Lines = Field(
        default=(),
        description="Nodes of the hostfile on which no run starts; one replaces a node that a run has lost"
        " (restart in the experiment). --include uses a spare like any other node.",
    )
    network_gbit: Annotated[float, Field(ge=LEAST_RATE, le=MOST_RATE)] | None = Field(
        default=None,
        description="Network bandwidth of one node in Gbit/s, for the plan's times. Default: that of a DGX.",
    )
    trackers: Trackers = Field(
        default=(),
        description="Trackers to send runs to: wandb, mlflow, tensorboard, each by name or with options"
        " (docs/trackers.md); for experiments that name none.",
    )
    notify: Notifications = Field(
        default=(),
        description="Where to report the end, failures and restarts of runs: the variable or file that holds each"
        " address, in apprise's form (docs/notifications.md); for experiments that name none.",
    )
    nodes: dict[str, NodeSettings] = Field(
        default_factory=dict, description="Settings of single nodes, by name in the hostfile."
    )
    compose: Compose = Field(default_factory=Compose)


def parse_settings(text: str, source: str) -> Settings:
    """YAML to settings; every problem of the fields in one :class:`RequestError`."""
    settings = validated(Settings, dict(parse_yaml(text, source)), source)
    RequestError.raise_for(_unusable(settings, source))
    return settings


# DeepSpeed's launcher sends variables with these beginnings to the other nodes between double quotes, unescaped.
_RESENT: Final = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
_EXPANDED: Final = re.compile(r'["$`\\]')
_OWNED: Final = ("HOME", "USER", "LOGNAME", "SHELL", "PATH")
_MOUNT: Final = re.compile(r"(/[^:]*|[A-Za-z0-9][A-Za-z0-9_.-]*):/[^:]+(:(ro|rw))?")


def _unusable(settings: Settings, source: str) -> Iterator[Problem]:
    yield from _env_problems(settings.env, f"{source}: env")
    yield from _listen_problems(settings.listen, f"{source}: listen")
    for name, node in settings.nodes.items():
        where = f"{source}: nodes.{name}"
        yield from _env_problems(node.env, f"{where}.env")
        yield from _listen_problems(node.listen or (), f"{where}.listen")
        if node.address is not None and not is_address(node.address):
            todo = "give a host name or an IP address, without a port"
            yield Problem(f"{where}.address", "is not an address", repr(node.address), todo)
    if settings.gpu is not None:
        try:
            find_gpu(settings.gpu, f"{source}: gpu")
        except RequestError as error:
            yield from error.problems
    yield from _mount_problems(settings.container.mounts, f"{source}: container.mounts")


def _mount_problems(mounts: tuple[str, ...], where: str) -> Iterator[Problem]:
    for mount in mounts:
        if not _MOUNT.fullmatch(mount):
            todo = "write /source:/target or /source:/target:ro (a volume's name may stand for the source)"
            yield Problem(where, "is not a mount", repr(mount), todo)
        elif mount.split(":")[1].rstrip("/") in (run_folder.WORKSPACE, run_folder.SECRETS, run_folder.CODE):
            yield Problem(where, "covers one of Tridock's own folders", repr(mount), "choose another target")


def _env_problems(env: Mapping[str, str], where: str) -> Iterator[Problem]:
    for name, value in env.items():
        here = f"{where}.{name}"
        if name.startswith("TRIDOCK_"):
            yield Problem(here, "is reserved for Tridock", repr(value), "choose a name without TRIDOCK_")
        elif name in _OWNED:
            yield Problem(here, "is set by the image", repr(value), "remove it; use `mounts` to add programs")
        elif name.startswith(_RESENT) and _EXPANDED.search(value):
            todo = "write it without these, or set it in the experiment's env, which is quoted"
            yield Problem(here, 'has one of " $ ` \\, which DeepSpeed passes to a shell unquoted', repr(value), todo)


def _listen_problems(listen: tuple[str, ...], where: str) -> Iterator[Problem]:
    for address in listen:
        try:
            ipaddress.ip_address(address)
        except ValueError:
            todo = "give addresses of the node itself, without ports"
            yield Problem(where, "is not an IP address", repr(address), todo)
