"""Images that hosts pull from registries: the base image, or the whole image from the settings' registry."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tridock.command import Command
from tridock.errors import ClusterError, Problem
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.image.registry import LOOPBACK, PREFIX
from tridock.remote import Completed, Host, LocalHost

NOTE_IT: Final = r"""
case $3 in '~'/*) list=$HOME/${3#*/};; *) list=$3;; esac
mkdir -p -- "${list%/*}"; docker image inspect --format "$4 {{.Id}}" "$2" >>"$list"
"""
"""Notes the operator's id ($4) and the host's own of the image ($2) in the host's file of images ($3)."""
# In containerd's store an image may be missing in the list.
_LAYERS: Final = (
    """docker image inspect --format '{{json .RootFS.Layers}}' "$1" $(docker image ls --all --quiet) 2>&-; :"""
)
_PULL: Final = f'set -eu; docker pull --quiet "$1" >/dev/null; docker tag "$1" "$2"; {NOTE_IT}'


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
        if image["RepoDigests"] and _is_in_registry(image)
        if (layers := image["RootFS"].get("Layers")) and len(layers) < len(diff_ids)
        if layers == list(diff_ids[: len(layers)])
    ]
    return max(found, key=lambda base: base.layers, default=None)


def _is_in_registry(image: Mapping[str, Any]) -> bool:
    """Whether a registry may have an image with a digest: in containerd's image store those that were built here have
    one too. Since Docker 29 the engine says where an image was pulled from or pushed to."""
    identity = image.get("Identity") or {}
    known = [pulled["Repository"] for pulled in identity.get("Pull", ())]
    return not identity.get("Build") or not all(name.startswith(f"{LOOPBACK}/{PREFIX}") for name in known)


def pull_base(hosts: Hosts, base: Base | None, diff_ids: Sequence[str], nodes: tuple[str, ...]) -> None:
    """Makes the hosts without the image's base pull it from its registry, as ``image_base`` wants it."""
    policy = hosts.cluster.settings.image_base
    if base is None and policy == "pull":
        todo = "docker pull the base image here and build again, or set image_base: auto"
        what = "the local Docker engine has no base image from a registry"
        raise ClusterError(Problem("image_base: pull", what, "", todo))
    if base is None or policy == "send":
        return
    shared = list(diff_ids[: base.layers])
    ask = Command.of("sh", "-c", _LAYERS, "layers", hosts.cluster.settings.image)

    def lacks(_: str, host: Host) -> bool:
        images = map(json.loads, filter(None, host.run(ask, timeout=60.0).stdout.splitlines()))
        return not any(layers[: base.layers] == shared for layers in images if layers)

    lacking = tuple(node for node, it in hosts.each(lacks, only=nodes).items() if it)
    if not lacking:
        return
    pull = Command.of("docker", "pull", "--quiet", base.reference)
    note(f"{', '.join(lacking)}: docker pull {base.reference}")
    done = hosts.each(lambda _, host: host.run(pull), only=lacking)
    failed = {node: reason_of(result) for node, result in done.items() if result.exit_code}
    if failed and policy == "pull":
        todo = f"make docker pull {base.reference} work there, or set image_base: auto"
        raise ClusterError(Problem(node, "cannot pull the base image", reason, todo) for node, reason in failed.items())
    for reason in dict.fromkeys(failed.values()):
        names = ", ".join(node for node, own in failed.items() if own == reason)
        note(f"{names}: gets the base image from here, it cannot pull it: {reason}")


def sizes_in_registry(reference: str) -> dict[str, int]:
    """Returns the bytes of the layers that a registry has of an image, for all platforms; nothing without an answer."""
    done = LocalHost().run(Command.of("docker", "buildx", "imagetools", "inspect", "--raw", reference), timeout=30.0)
    if done.exit_code:
        return {}
    document, repository = json.loads(done.stdout), reference.partition("@")[0]
    sizes = {layer["digest"]: int(layer["size"]) for layer in document.get("layers", ())}
    for manifest in document.get("manifests", ()):
        sizes |= sizes_in_registry(f"{repository}@{manifest['digest']}")
    return sizes


def through_registry(hosts: Hosts, image_id: str, nodes: tuple[str, ...]) -> None:
    """Pushes the image to the settings' registry, and makes the hosts pull it by digest."""
    image, local = hosts.cluster.settings.image, LocalHost()
    repository = f"{hosts.cluster.settings.registry}/{image.rpartition('/')[2].partition(':')[0]}"
    name = f"{repository}:{hosts.cluster.name}"
    local.run(Command.of("docker", "tag", image_id, name), timeout=30.0).checked("docker")
    done = local.run(Command.of("docker", "push", name))
    if done.exit_code:
        todo = f"docker login {hosts.cluster.settings.registry} here, or correct registry in the settings"
        raise ClusterError(Problem(f"docker push {name}", "failed", reason_of(done), todo))
    form = "{{range .RepoDigests}}{{println .}}{{end}}"
    digests = local.run(Command.of("docker", "image", "inspect", "--format", form, name)).checked(name).stdout.decode()
    reference = next(line for line in digests.split() if line.startswith(f"{repository}@"))
    results = hosts.each(lambda node, host: host.run(script(hosts, node, _PULL, reference, image_id)), only=nodes)
    todo = f"docker login {hosts.cluster.settings.registry} there, or correct registry in the settings"
    problems = [
        Problem(node, f"cannot pull {name}", reason_of(result), todo)
        for node, result in results.items()
        if result.exit_code
    ]
    if problems:
        raise ClusterError(problems, unaffected=[node for node, result in results.items() if not result.exit_code])


def script(hosts: Hosts, node: str, text: str, reference: str, image_id: str) -> Command:
    """Returns the command that brings the image ``reference`` to a host and ends with :data:`NOTE_IT`."""
    image = hosts.cluster.settings.image
    return Command.of("sh", "-c", text, "image", reference, image, hosts.transport.images_file(node), image_id)


def reason_of(done: Completed) -> str:
    """Returns the last line of a failed command."""
    return (done.stderr or done.stdout).decode(errors="replace").strip().rpartition("\n")[2]


def note(text: str) -> None:
    print(text, file=sys.stderr)
