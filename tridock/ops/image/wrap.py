"""Builds Tridock's layer on your own image on this machine, if it is missing or has other code."""

import hashlib
import shutil
from pathlib import Path
from typing import Final

from tridock.cluster.settings import Cluster
from tridock.command import Command
from tridock.errors import ClusterError, Problem
from tridock.ops.project import ImageOptions, build_image
from tridock.project_files import recipe_files
from tridock.remote import LocalHost

BASE: Final = "tridock.base"
CODE: Final = "tridock.code"
TITLE: Final = "org.opencontainers.image.title"
_PARTS: Final = ("Dockerfile.wrap", "entrypoint", "locks/train-cpu.txt", "tridock", "tools")
"""What ``Dockerfile.wrap`` reads."""


def wrap(image: str, name: str, ca: str = "") -> int:
    """Builds ``name``, Tridock's layer on ``image``, and returns the build's exit code.

    Labels record its inputs: the image's id, if it is already here, and a digest of Tridock's code.
    """
    labels = ((BASE, image_id(image) or ""), (CODE, _code_digest()))
    return build_image(ImageOptions("wrap", image, name, ca, labels=labels), Path())


def ensure_wrapped(cluster: Cluster) -> None:
    """Builds the cluster's image if it is Tridock's layer on another one and is missing or outdated here."""
    if cluster.wraps is None:
        return
    name, base = cluster.settings.image, image_id(cluster.wraps)
    if _label(name, CODE) == _code_digest() and base in (None, _label(name, BASE)):
        return
    if base is None:  # its id later shows whether it has changed
        pulled = LocalHost().run(Command.of("docker", "pull", "--quiet", cluster.wraps))
        if pulled.exit_code:
            reason = pulled.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            todo = "build or load it here, or log in to its registry"
            raise ClusterError(Problem(cluster.wraps, "is not on this machine and cannot be pulled", reason, todo))
    if code := wrap(cluster.wraps, name):
        todo = "the build's messages above say why"
        raise ClusterError(Problem(cluster.wraps, "cannot be wrapped", f"exit code {code}", todo))


def has_layer(image: str) -> bool:
    """Whether an image on this machine has Tridock's layer. Without Docker here, accepts the hosts' image."""
    return shutil.which("docker") is None or _label(image, TITLE) == "tridock"


def image_id(image: str) -> str | None:
    """Returns the id of an image on this machine; None if the image or Docker is missing."""
    return _inspected(image, "{{.Id}}")


def _label(image: str, label: str) -> str | None:
    """Returns an image's label (empty if unset); None if there is no image."""
    return _inspected(image, f'{{{{index .Config.Labels "{label}"}}}}')


def _inspected(image: str, form: str) -> str | None:
    done = LocalHost().run(Command.of("docker", "image", "inspect", "--format", form, image), timeout=30.0)
    return done.stdout.decode().strip() if done.exit_code == 0 else None


def _code_digest() -> str:
    digest = hashlib.sha256()
    recipe = recipe_files()
    for part in _PARTS:
        name, _, inside = part.partition("/")
        root = recipe[name] / inside if name in recipe else None
        for path in sorted((root, *root.rglob("*"))) if root else ():
            if path.is_file() and path.suffix != ".pyc":
                digest.update(f"{part} {path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
