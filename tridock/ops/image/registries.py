"""Images that hosts pull themselves: the base image from its registry, or the image from the settings' registry."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tridock.command import Command
from tridock.errors import ClusterError, Problem
from tridock.ops.hosts.session import Session
from tridock.ops.image.archive import shared_layers
from tridock.ops.image.registry import LOOPBACK, PREFIX
from tridock.remote import Completed, LocalHost

# Names the image as usual, and records the operator's id ($4) and the host's in $3.
_PULL = r"""
set -eu
docker pull --quiet "$1" >/dev/null
docker tag "$1" "$2"
mkdir -p -- "${3%/*}"; docker image inspect --format "$4 {{.Id}}" "$2" >>"$3"
"""


@dataclass(frozen=True, slots=True)
class Base:
    """An image in a registry, by digest, and the number of leading layers that it shares."""

    reference: str
    layers: int


def base_of(diff_ids: Sequence[str]) -> Base | None:
    """Returns the operator engine's largest registry image whose layers are a prefix of the image's."""
    local = LocalHost()
    listed = local.run(Command.of("docker", "image", "ls", "--all", "--quiet", "--no-trunc"), timeout=60.0)
    ids = sorted(set(listed.stdout.decode().split()))
    lines = local.run(Command.of("docker", "image", "inspect", "--format", "{{json .}}", *ids), timeout=60.0).stdout
    found = [
        Base(image["RepoDigests"][0], len(layers))
        for image in map(json.loads, filter(None, lines.split(b"\n")))
        if image["RepoDigests"]
        and _is_in_registry(image)
        and (layers := image["RootFS"].get("Layers"))
        and shared_layers(diff_ids, [layers]) == len(layers) < len(diff_ids)
    ]
    return max(found, key=lambda base: base.layers, default=None)


def _is_in_registry(image: Mapping[str, Any]) -> bool:
    """Whether a registry may have an image with a digest: in containerd's image store those that were built here have
    one too. Since Docker 29 the engine says where an image was pulled from or pushed to.
    """
    identity = image.get("Identity") or {}
    known = [pulled["Repository"] for pulled in identity.get("Pull", ())]
    return not identity.get("Build") or not all(name.startswith(f"{LOOPBACK}/{PREFIX}") for name in known)


def pull(session: Session, reference: str, nodes: tuple[str, ...]) -> dict[str, str]:
    """Pulls an image on the hosts of ``nodes``; returns the reason for each failure."""
    command = Command.of("docker", "pull", "--quiet", reference)
    done = session.each(lambda _, host: host.run(command), only=nodes)
    return {node: _reason(result) for node, result in done.items() if result.exit_code}


def through_registry(session: Session, image_id: str, notes: Mapping[str, str]) -> None:
    """Pushes the image to the settings' registry, and makes the hosts pull it by digest.

    ``notes``: by node, the host's file of images that it was sent.
    """
    image, local = session.cluster.settings.image, LocalHost()
    repository = f"{session.cluster.settings.registry}/{image.rpartition('/')[2].partition(':')[0]}"
    name = f"{repository}:{session.cluster.name}"
    local.run(Command.of("docker", "tag", image_id, name), timeout=30.0).checked("docker")
    done = local.run(Command.of("docker", "push", name))
    if done.exit_code:
        todo = f"docker login {session.cluster.settings.registry} here, or correct registry in the settings"
        raise ClusterError(Problem(f"docker push {name}", "failed", _reason(done), todo))
    form = "{{range .RepoDigests}}{{println .}}{{end}}"
    digests = local.run(Command.of("docker", "image", "inspect", "--format", form, name)).checked(name).stdout.decode()
    reference = next(line for line in digests.split() if line.startswith(f"{repository}@"))
    results = session.each(
        lambda node, host: host.run(Command.of("sh", "-c", _PULL, "pull", reference, image, notes[node], image_id)),
        only=tuple(notes),
    )
    todo = f"docker login {session.cluster.settings.registry} there, or correct registry in the settings"
    problems = [
        Problem(node, f"cannot pull {name}", _reason(result), todo)
        for node, result in results.items()
        if result.exit_code
    ]
    if problems:
        raise ClusterError(problems, unaffected=[node for node, result in results.items() if not result.exit_code])


def _reason(done: Completed) -> str:
    return (done.stderr or done.stdout).decode(errors="replace").strip().rpartition("\n")[2]
