"""Transports to a cluster's hosts: their names, mounts and commands. Pure: commands run elsewhere.

``transport`` in a cluster's settings names one of :data:`TRANSPORTS`; no other code compares it.
"""

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tridock.cluster.schema import Container
from tridock.cluster.settings import Cluster
from tridock.command import Command
from tridock.contracts import environment, run_folder
from tridock.contracts.devices import MIG, VISIBLE
from tridock.errors import Problem, RequestError
from tridock.project_files import project_file

CLUSTER_LABEL = "tridock.cluster"
NODE_LABEL = "tridock.node"
RECIPE_LABEL = "tridock.recipe"
WORKSPACE_LABELS = ("tridock.workspace", "com.docker.compose.project.working_dir")
"""Labels of the host folder that a container was started for: Tridock's own and Compose's."""
_COMPOSE_VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts that a host reports: the operator's ids and home, its GPUs and InfiniBand."""

    uid: int
    gid: int
    home: str
    gpus: int
    infiniband: bool


@dataclass(frozen=True)
class Transport(ABC):
    """The differences between ssh hosts and the twin, for one cluster."""

    cluster: Cluster
    separate_hosts: ClassVar[bool]
    """Whether each node has its own machine. If not, all are containers of the local Docker engine."""

    def __post_init__(self) -> None:  # noqa: B027 - most take all settings
        """Raises :class:`RequestError` for settings that have no effect."""

    @abstractmethod
    def container_name(self, node: str) -> str:
        """Returns the name of the node's container."""

    @abstractmethod
    def workspace(self, facts: HostFacts) -> str:
        """Returns the folder on the host that the container mounts as /workspace."""

    @abstractmethod
    def secrets_folder(self, node: str) -> str:
        """Returns the host folder with the node's keys; may start with ``~``. One per node: hosts may share a home."""

    @abstractmethod
    def recipe(self, node: str, image_id: str, facts: HostFacts, env: Mapping[str, str] = os.environ) -> str:
        """Returns a digest of the node's container configuration: a running container with another label is outdated.

        ``env`` is the operator's environment.
        """

    def images_file(self, node: str) -> str:
        """Returns the host's file with the ids of images sent to it; may start with ``~``. One per node."""
        return f"{self.cluster.workdir}/images.{node}"

    def lock_file(self) -> str:
        """Returns the file on the head's host that locks the cluster's nodes; may start with ``~``."""
        return f"{self.cluster.workdir}/nodes.lock"

    def host_label(self, node: str) -> str:
        return node if self.separate_hosts else "this machine"

    @abstractmethod
    def shared_memory_remedy(self) -> str:
        """Returns the remedy for too little shared memory on a node."""

    def refused_engine(self, problem: Problem | None) -> Problem | None:
        """Returns the ``problem`` of a host's engine, unless the settings solve it."""
        return None

    def secrets(self, node: str, facts: HostFacts) -> str:
        """:meth:`secrets_folder` as an absolute path."""
        return _expanded(self.secrets_folder(node), facts)

    def exec_command(
        self, node: str, facts: HostFacts, command: Command, *, interactive: bool = False, terminal: bool = False
    ) -> Command:
        """Returns ``docker exec`` as the operator's uid in the node's workspace, with the HOME of sshd's sessions.

        ``interactive``: it has input; ``terminal``: a terminal.
        """
        argv = ["docker", "exec", "--user", f"{facts.uid}:{facts.gid}"]
        if interactive or command.stdin is not None:
            argv.append("--interactive")
        if terminal:
            argv += ["--tty", "--env", "TERM"]
        argv += ["--workdir", run_folder.WORKSPACE, "--env", f"HOME=/home/{run_folder.USER}", self.container_name(node)]
        return command.inside(Command(tuple(argv)))


class SshTransport(Transport):
    """One container per host, reached over the operator's ssh."""

    separate_hosts = True

    def container_name(self, node: str) -> str:
        return f"tridock-{self.cluster.name}"

    def workspace(self, facts: HostFacts) -> str:
        return f"{_expanded(self.cluster.workdir, facts)}/workspace"

    def secrets_folder(self, node: str) -> str:
        return f"{self.cluster.workdir}/secrets/{node}"

    def recipe(self, node: str, image_id: str, facts: HostFacts, env: Mapping[str, str] = os.environ) -> str:
        return _hash(self._run_options(node, image_id, facts))

    def refused_engine(self, problem: Problem | None) -> Problem | None:
        options = " ".join(self.cluster.settings.container.extra_args).replace("=", " ")
        return None if problem is None or ("userns" in problem.got and "--userns host" in options) else problem

    def shared_memory_remedy(self) -> str:
        if self.cluster.settings.container.ipc == "host":
            return "enlarge the host's there: mount -o remount,size=2g /dev/shm"
        return "set container.shm_size: 2g in the settings, then tridock up"

    def run_command(self, node: str, image_id: str, facts: HostFacts) -> Command:
        """Returns ``docker run`` for the node, with its recipe as a label."""
        options = self._run_options(node, image_id, facts)
        labels = {CLUSTER_LABEL: self.cluster.name, NODE_LABEL: node, RECIPE_LABEL: _hash(options)}
        labels[WORKSPACE_LABELS[0]] = self.workspace(facts)
        argv = ["docker", "run", "--detach", "--name", self.container_name(node)]
        argv += [word for name, value in labels.items() for word in ("--label", f"{name}={value}")]
        return Command((*argv, *options))

    def _run_options(self, node: str, image_id: str, facts: HostFacts) -> list[str]:
        settings = self.cluster.settings.container
        options = ["--network", settings.network, "--ipc", settings.ipc, "--init"]
        if settings.shm_size is not None:
            options += ["--shm-size", settings.shm_size]
        for name, value in settings.ulimits.items():
            options += ["--ulimit", f"{name}={value}"]
        for capability in settings.cap_add:
            options += ["--cap-add", capability]
        if settings.gpus == "all" or (settings.gpus == "auto" and facts.gpus):
            options += self._gpu_options(node)
        devices = [*settings.devices, *(["/dev/infiniband"] if facts.infiniband else [])]
        for device in dict.fromkeys(devices):
            options += ["--device", device]
        options += ["--volume", f"{self.workspace(facts)}:{run_folder.WORKSPACE}"]
        options += ["--volume", f"{self.secrets(node, facts)}:{run_folder.SECRETS}:ro"]
        for mount in settings.mounts:
            options += ["--volume", mount]
        for name, setting in self._environment(node, facts).items():
            options += ["--env", f"{name}={setting}"]
        return [*options, *settings.extra_args, image_id, "node"]

    def _gpu_options(self, node: str) -> list[str]:
        """Returns options for all GPUs, or the node's ``CUDA_VISIBLE_DEVICES``; the container counts them from 0."""
        chosen = self.cluster.env_of(node).get(VISIBLE)
        if chosen is None:
            return ["--gpus", "all"]
        return ["--gpus", f'"device={chosen}"'] if chosen else []

    def _environment(self, node: str, facts: HostFacts) -> dict[str, str]:
        """Returns the container's environment: node name, file owner, sshd addresses, and the cluster's variables."""
        addresses = self.cluster.listen_of(node)
        listen = {environment.SSH_LISTEN: ",".join(addresses)} if addresses else {}
        env = self.cluster.env_of(node)
        devices = env.pop(VISIBLE, "")
        # A MIG slice has no index that a process can use: the ranks need its UUID.
        slices = {environment.DEVICES: devices} if devices.startswith(MIG) else {}
        return {
            environment.CLUSTER: self.cluster.name,
            environment.NODE: node,
            environment.UID: str(facts.uid),
            environment.GID: str(facts.gid),
            environment.SSH_PORT: str(self.cluster.settings.ssh_port),
            **listen,
            **slices,
            **env,
        }


class ComposeTransport(Transport):
    """The twin: Compose starts every node on this machine's Docker engine."""

    separate_hosts = False

    def __post_init__(self) -> None:
        own, usual, file = self.cluster.settings.container, Container(), self.cluster.settings.compose.file
        changed = {name: value for name, value in own if value != getattr(usual, name)}
        if changed:
            where, what = f"{self.cluster.hostfile_path}.yaml: container", "has no effect with transport: compose"
            raise RequestError(
                [Problem(f"{where}.{name}", what, str(value), f"set it in {file}") for name, value in changed.items()]
            )

    @property
    def project(self) -> str:
        """The Compose project, which prefixes containers and network. Each folder has its own twin."""
        folder = hashlib.sha256(str(self.cluster.project_folder).encode()).hexdigest()[:8]
        return self.cluster.settings.compose.project or f"tridock-{self.cluster.name}-{folder}"

    def container_name(self, node: str) -> str:
        return f"{self.project}-{node}-1"

    def workspace(self, facts: HostFacts) -> str:
        return str(self.cluster.project_folder)

    def secrets_folder(self, node: str) -> str:
        return str(self.cluster.state_folder / node)

    def lock_file(self) -> str:
        return str(self.cluster.state_folder / "nodes.lock")

    def recipe(self, node: str, image_id: str, facts: HostFacts, env: Mapping[str, str] = os.environ) -> str:
        """Returns a digest of the files that Compose reads and the variables they reference."""
        paths = {"file": self.compose_file, ".env": self.cluster.project_folder / ".env"}
        texts = {name: path.read_text() for name, path in paths.items() if path.is_file()}
        asked = {name for text in texts.values() for name in _COMPOSE_VARIABLE.findall(text)}
        given = self.command(facts, "").env
        variables = {name: {**env, **given}.get(name) for name in asked}
        return _hash([node, image_id, self.cluster.env_of(node), texts, variables])

    @property
    def compose_file(self) -> Path:
        return project_file(Path(self.cluster.settings.compose.file), self.cluster.project_folder)

    def shared_memory_remedy(self) -> str:
        return f"set shm_size: 2g in {self.cluster.settings.compose.file}, then tridock up"

    def override(self, recipes: Mapping[str, str]) -> str:
        """Returns a second Compose file: each node's environment from the settings, and its recipe as a label.

        The file is JSON, a subset of YAML; ``$`` is doubled because Compose expands it.
        """
        services = {
            node: {
                "environment": {name: value.replace("$", "$$") for name, value in self.cluster.env_of(node).items()},
                "labels": {RECIPE_LABEL: recipe},
            }
            for node, recipe in recipes.items()
        }
        return json.dumps({"services": services}, indent=2) + "\n"

    def command(self, facts: HostFacts, override: str, *arguments: str) -> Command:
        """Returns ``docker compose`` for the twin; its containers write as the operator.

        ``override`` is the path of :meth:`override`'s output.
        """
        folder = str(self.cluster.project_folder)
        argv = ["docker", "compose", "--project-name", self.project, "--project-directory", folder]
        argv += ["--file", str(self.compose_file), "--file", override]
        return Command(
            (*argv, "--profile", "twin", *arguments),
            env={
                environment.CLUSTER: self.cluster.name,
                environment.IMAGE: self.cluster.settings.image,
                environment.UID: str(facts.uid),
                environment.GID: str(facts.gid),
            },
            cwd=folder,
        )


TRANSPORTS: Mapping[str, type[SshTransport] | type[ComposeTransport]] = {
    "ssh": SshTransport,
    "compose": ComposeTransport,
}
"""Transports by the settings' ``transport``."""


def transport_of(cluster: Cluster) -> SshTransport | ComposeTransport:
    return TRANSPORTS[cluster.settings.transport](cluster)


def _expanded(path: str, facts: HostFacts) -> str:
    return facts.home + path[1:] if path == "~" or path.startswith("~/") else path


def _hash(ingredients: object) -> str:
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()[:16]
