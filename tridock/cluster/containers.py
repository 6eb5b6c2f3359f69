"""Docker command lines for a node's container: composed here, executed on the host. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tridock.cluster.settings import Cluster
from tridock.command import Command
from tridock.contracts import run_folder

CLUSTER_LABEL = "tridock.cluster"
NODE_LABEL = "tridock.node"
RECIPE_LABEL = "tridock.recipe"
_COMPOSE_VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a host said about itself: the operator's ids and home there, and what it has for a container."""

    uid: int
    gid: int
    home: str
    gpus: int
    infiniband: bool


def container_name(cluster: Cluster, node: str) -> str:
    """The name of a node's container: one a host over ssh, Compose's own for the twin."""
    if cluster.settings.transport == "compose":
        return f"{compose_project(cluster)}-{node}-1"
    return f"tridock-{cluster.name}"


def compose_project(cluster: Cluster) -> str:
    """The Compose project of a twin; its containers and its network carry this name."""
    return cluster.settings.compose.project or f"tridock-{cluster.name}"


def workspace_on_host(cluster: Cluster, facts: HostFacts) -> str:
    """The host's folder that the container sees as /workspace: the project itself for the twin."""
    if cluster.settings.transport == "compose":
        return str(cluster.project_folder)
    return f"{_workdir(cluster, facts)}/workspace"


def secrets_folder(cluster: Cluster, node: str) -> str:
    """The host's folder with the node's keys, which may begin with ``~``; a node's own, as hosts may share a home."""
    if cluster.settings.transport == "compose":
        return str(cluster.state_folder / node)
    return f"{cluster.workdir}/secrets/{node}"


def secrets_on_host(cluster: Cluster, node: str, facts: HostFacts) -> str:
    """The same as an absolute path."""
    return _expanded(secrets_folder(cluster, node), facts)


def _workdir(cluster: Cluster, facts: HostFacts) -> str:
    return _expanded(cluster.workdir, facts)


def _expanded(path: str, facts: HostFacts) -> str:
    return facts.home + path[1:] if path == "~" or path.startswith("~/") else path


def run_command(cluster: Cluster, node: str, image_id: str, facts: HostFacts) -> Command:
    """``docker run`` for a node over ssh, with a label that tells whether a running one is still this one."""
    settings = cluster.settings.container
    words = ["--network", settings.network, "--ipc", settings.ipc, "--init"]
    if settings.shm_size is not None:
        words += ["--shm-size", settings.shm_size]
    for name, value in settings.ulimits.items():
        words += ["--ulimit", f"{name}={value}"]
    for capability in settings.cap_add:
        words += ["--cap-add", capability]
    if settings.gpus == "all" or (settings.gpus == "auto" and facts.gpus):
        words += ["--gpus", "all"]
    devices = [*settings.devices, *(["/dev/infiniband"] if facts.infiniband else [])]
    for device in dict.fromkeys(devices):
        words += ["--device", device]
    words += ["--volume", f"{workspace_on_host(cluster, facts)}:{run_folder.WORKSPACE}"]
    words += ["--volume", f"{secrets_on_host(cluster, node, facts)}:{run_folder.SECRETS}:ro"]
    for mount in settings.mounts:
        words += ["--volume", mount]
    for name, value in node_environment(cluster, node, facts).items():
        words += ["--env", f"{name}={value}"]
    words += [*settings.extra_args, image_id, "node"]
    recipe = _recipe(words)
    labels = {CLUSTER_LABEL: cluster.name, NODE_LABEL: node, RECIPE_LABEL: recipe}
    head = ["docker", "run", "--detach", "--name", container_name(cluster, node)]
    head += [word for name, value in labels.items() for word in ("--label", f"{name}={value}")]
    return Command((*head, *words))


def _recipe(ingredients: object) -> str:
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()[:16]


def recipe_of(command: Command) -> str:
    """The recipe label of a composed ``docker run``."""
    prefix = f"{RECIPE_LABEL}="
    return next(word.removeprefix(prefix) for word in command.argv if word.startswith(prefix))


def node_environment(cluster: Cluster, node: str, facts: HostFacts) -> dict[str, str]:
    """What a node's container is told: who it is, whose files it writes, where its sshd listens, the cluster's own."""
    addresses = cluster.listen_of(node)
    listen = {"TRIDOCK_SSH_LISTEN": ",".join(addresses)} if addresses else {}
    return {
        "TRIDOCK_CLUSTER": cluster.name,
        "TRIDOCK_NODE": node,
        "TRIDOCK_UID": str(facts.uid),
        "TRIDOCK_GID": str(facts.gid),
        "TRIDOCK_SSH_PORT": str(cluster.settings.ssh_port),
        **listen,
        **cluster.env_of(node),
    }


def exec_command(
    cluster: Cluster, node: str, facts: HostFacts, command: Command, *, interactive: bool = False
) -> Command:
    """``docker exec`` as the operator's uid in the node's workspace, with the home that sshd's sessions have."""
    words = ["docker", "exec", "--user", f"{facts.uid}:{facts.gid}", "--workdir", run_folder.WORKSPACE]
    words += ["--env", f"HOME=/home/{run_folder.USER}"]
    if interactive or command.stdin is not None:
        words.append("--interactive")
    return command.inside(Command((*words, container_name(cluster, node))))


def compose_recipe(
    cluster: Cluster, node: str, image_id: str, facts: HostFacts, texts: Mapping[str, str], env: Mapping[str, str]
) -> str:
    """What tells whether a twin's running container is still the one that Compose would make.

    ``texts`` are the files that Compose reads (its own and ``.env``), ``env`` the operator's environment.
    """
    asked = {name for text in texts.values() for name in _COMPOSE_VARIABLE.findall(text)}
    given = compose_command(cluster, facts, "").env
    variables = {name: {**env, **given}.get(name) for name in asked}
    return _recipe([node, image_id, cluster.env_of(node), dict(texts), variables])


def compose_override(cluster: Cluster, recipes: Mapping[str, str]) -> str:
    """A second Compose file: each node's environment from the cluster's settings, and the label with its recipe.

    Compose reads JSON as the YAML that it is; ``$`` is doubled, as Compose would expand it.
    """
    services = {
        node: {
            "environment": {name: value.replace("$", "$$") for name, value in cluster.env_of(node).items()},
            "labels": {RECIPE_LABEL: recipe},
        }
        for node, recipe in recipes.items()
    }
    return json.dumps({"services": services}, indent=2) + "\n"


def compose_command(cluster: Cluster, facts: HostFacts, override: str, *words: str) -> Command:
    """``docker compose`` on the twin's project, told whose files its containers write.

    ``override`` is the path of :func:`compose_override`'s file.
    """
    head = ["docker", "compose", "--project-name", compose_project(cluster), "--file", cluster.settings.compose.file]
    return Command(
        (*head, "--file", override, "--profile", "twin", *words),
        env={
            "TRIDOCK_CLUSTER": cluster.name,
            "TRIDOCK_IMAGE": cluster.settings.image,
            "TRIDOCK_UID": str(facts.uid),
            "TRIDOCK_GID": str(facts.gid),
        },
        cwd=str(cluster.project_folder),
    )
