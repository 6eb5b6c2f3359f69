"""A clean clone of the working tree, in which the README's commands run."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.integration.rack import PROGRAMS, copy_tree
from tests.integration.support import execute, own_name, succeed


@dataclass
class Clone:
    """A clone of the working tree that has names of its own, beside whatever twin is up on this machine."""

    folder: Path
    name: str

    @property
    def image(self) -> str:
        return f"{self.name}:cpu"

    @property
    def twin(self) -> str:
        """The Compose project of its twin."""
        return f"tridock-{self.name}-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:8]}"

    def run(self, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("COMPOSE_", "TRIDOCK_"))}
        path = f"{self.folder}/.venv/bin:{keep['PATH']}"
        mine = {"PATH": path, "PYTHONPATH": str(self.folder), "IMAGE": self.image}
        return execute(*argv, cwd=self.folder, env={**keep, **mine, **environment})

    def succeed(self, line: str, **environment: str) -> str:
        done = self.run("bash", "-c", line, **environment)
        assert done.returncode == 0, f"{line}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def files(self) -> dict[str, tuple[int, int]]:
        """Every file with its size and time; what Python caches is no business of ours."""
        paths = (path for path in self.folder.rglob("*") if "__pycache__" not in path.parts and path.is_file())
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}

    def remove(self) -> None:
        for arguments in (["--project-name", self.twin], []):
            self.run("docker", "compose", *arguments, "--profile", "twin", "down", "--timeout", "2", "--remove-orphans")
        execute("docker", "image", "rm", self.image)


@contextmanager
def a_clone(folder: Path, image: str = "") -> Iterator[Clone]:
    """Makes the clone below ``folder``, with ``image`` as if built there; what its commands started goes at the end."""
    name = own_name()
    made = Clone(copy_tree(folder / name), name)
    settings = made.folder / "hostfiles" / "twin.yaml"
    text = settings.read_text()
    assert "image: tridock:cpu\n" in text
    settings.write_text(text.replace("image: tridock:cpu\n", f"image: {made.image}\nname: {name}\n"))
    # The packages are the same as here: only their installation is spared.
    (made.folder / ".venv").mkdir()
    (made.folder / ".venv" / "bin").symlink_to(PROGRAMS)
    for stamp in (".operator", ".extras", ".full"):
        (made.folder / ".venv" / stamp).touch()
    succeed("git", "init", "--quiet", cwd=made.folder)
    succeed("git", "add", "--all", cwd=made.folder)
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    succeed("git", *author, "commit", "--quiet", "--no-verify", "--message", "a", cwd=made.folder)
    try:
        if image:
            succeed("docker", "tag", image, made.image)
            succeed("tools/compose-env.sh", "cpu", made.image, cwd=made.folder)
        yield made
    finally:
        made.remove()
