"""The twin in a folder of its own: two nodes of one slot on this machine's engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.integration.rack import PROGRAMS as COMMANDS
from tests.integration.support import ROOT, execute, own_name, succeed

NODES = ("node-1", "node-2")


@dataclass
class Twin:
    """Two nodes on this machine's engine, and the folder of the operator who uses them."""

    folder: Path
    hosts = "hostfile"

    def tridock(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.alone(arguments[0], "--hosts", self.hosts, *arguments[1:])

    def alone(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs a command that needs no cluster."""
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{COMMANDS}:{os.environ['PATH']}"}
        return execute(sys.executable, "-m", "tridock.cli", *arguments, cwd=self.folder, env=env)

    def up(self) -> None:
        done = self.tridock("up")
        assert done.returncode == 0, done.stderr

    def container(self, node: str) -> str:
        project = f"label=com.docker.compose.project.working_dir={self.folder}"
        service = f"label=com.docker.compose.service={node}"
        return succeed("docker", "ps", "--quiet", "--filter", project, "--filter", service).strip()

    def sh(self, node: str, script: str) -> str:
        return execute("docker", "exec", self.container(node), "sh", "-c", script).stdout

    def processes(self, run_id: str) -> str:
        """Of the run, on both nodes."""
        script = f'grep -lzsx "TRIDOCK_RUN_ID={run_id}" /proc/[0-9]*/environ'
        return "".join(self.sh(node, script) for node in NODES)

    def followed(self, run_id: str) -> str:
        done = self.tridock("logs", "--run", run_id, "--follow")
        assert done.returncode == 4, done.stdout + done.stderr
        return done.stderr


@contextmanager
def two_nodes(image: str, folder: Path, kind: type[Twin] = Twin) -> Iterator[Twin]:
    """Two nodes that are up, and are removed at the end. A context manager."""
    made = kind(folder)
    (folder / "hostfile").write_text("".join(f"{node} slots=1\n" for node in NODES))
    settings = f"name: {own_name()}\ntransport: compose\nimage: {image}\nenv: {{OMP_NUM_THREADS: '1'}}\n"
    (folder / "hostfile.yaml").write_text(settings)
    try:
        made.up()
        yield made
    finally:
        made.tridock("down")
