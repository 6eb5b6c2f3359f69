"""Data to the hosts: a folder of the project copied into every node's workspace."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tridock.cluster.containers import workspace_on_host
from tridock.command import Command
from tridock.errors import Problem, RequestError
from tridock.ops.session import Session
from tridock.remote import Host

_CHUNK = 1 << 20


def push(session: Session, path: Path, only: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Copies ``path`` (below the project's folder) to the same place in each workspace; returns the nodes.

    ``only`` names some of the nodes. The tree arrives beside its place and is moved file by file: a reader sees a
    whole old file or a whole new one.
    """
    project = session.cluster.project_folder
    full = (project / path).resolve()
    if not full.exists() or not full.is_relative_to(project):
        todo = f"give a file or folder below {project}"
        got = str(path) if full.exists() else f"{path}, which is not there"
        raise RequestError(Problem("--path", "cannot be pushed", got, todo))
    if session.cluster.settings.transport == "compose":
        return session.nodes  # the twin's nodes mount the project's folder itself
    relative = str(full.relative_to(project))

    def send(node: str, host: Host) -> None:
        workspace = workspace_on_host(session.cluster, session.states()[node].facts)
        # mktemp: hosts may share the folder.
        script = (
            'set -e; mkdir -p "$1"; part=$(mktemp -d "$1/.push.XXXXXX"); trap \'rm -rf "$part"\' EXIT; '
            'tar -xzf - -C "$part"; cd "$part"; '
            'find . -type f -exec sh -c \'for f; do mkdir -p "$0/$(dirname "$f")"; mv -f "$f" "$0/$f"; done\' "$1" {} +'
        )
        receive = Command.of("sh", "-c", script, "push", workspace)
        host.pipe(_archive(project, relative), receive).checked(node)

    session.each(send, only=only)
    return session.nodes


def _archive(project: Path, relative: str) -> Iterator[bytes]:
    """A gzipped tar of the tree, chunk by chunk; never whole in memory."""
    with tempfile.TemporaryFile() as words:
        argv = ["tar", "-C", str(project), "-c", "-z", "--", relative]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=words) as tar:
            out: IO[bytes] | None = tar.stdout
            assert out is not None
            while chunk := out.read(_CHUNK):
                yield chunk
        if tar.returncode:
            words.seek(0)
            todo = "make it readable"
            raise RequestError(Problem("--path", "cannot be read", words.read().decode(errors="replace").strip(), todo))
