"""`tridock image wrap`: Tridock's layer on an image without any Python, and a program on two nodes of it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.support import ROOT, execute, own_name, succeed

BASE = "debian:bookworm-slim"
# An image with a user of its own, whose home holds the programs and is closed to others.
OWN = f"""
FROM {BASE}
RUN useradd --create-home app && chmod 700 /home/app
USER app
RUN mkdir -p ~/venv/bin ~/.local/lib && printf '#!/bin/sh\\necho WORD\\n' >~/venv/bin/mine && chmod 755 ~/venv/bin/mine
ENV PATH=/home/app/venv/bin:$PATH
"""


def tridock(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return execute(sys.executable, "-m", "tridock.cli", *arguments, cwd=folder)


@pytest.fixture(scope="module")
def image(docker: str) -> Iterator[str]:
    """Without the cluster image: the base is all that is needed."""
    name = f"{own_name()}:wrapped"
    done = tridock(ROOT, "image", "wrap", BASE, "--tag", name)
    assert done.returncode == 0, done.stdout + done.stderr
    yield name
    execute("docker", "image", "rm", name)


@pytest.mark.full  # test_host_faults.py has such nodes
def test_a_program_runs_on_nodes_without_python(image: str, tmp_path: Path) -> None:
    assert succeed("docker", "run", "--rm", image, "bash", "-c", "command -v python3 python || echo none") == "none\n"
    assert succeed("docker", "run", "--rm", image, "py-spy", "--version").startswith("py-spy ")
    (tmp_path / "code").mkdir()
    arrived = 'grep -q "rank 0 of 2" "$TRIDOCK_RUN_FOLDER/logs/launcher.log"'
    program = f'echo "rank $RANK of $WORLD_SIZE"\n[ "$RANK" = 0 ] || until {arrived}; do sleep 0.1; done\n'
    program += "exit $((3 * RANK))\n"
    (tmp_path / "code" / "main.sh").write_text(program)
    (tmp_path / "hostfile").write_text("node-1 slots=1\nnode-2 slots=1\n")
    settings = f"name: {own_name()}\ntransport: compose\nimage: {image}\nenv: {{DS_ACCELERATOR: cpu}}\n"
    (tmp_path / "hostfile.yaml").write_text(settings)
    try:
        done = tridock(tmp_path, "run", "--hosts", "hostfile", "--workdir", "code", "--", "bash", "main.sh")
        output = done.stdout + done.stderr
        assert done.returncode == 4, output
        assert {"node-1: rank 0 of 2", "node-2: rank 1 of 2"} <= set(output.splitlines())
        found = re.search(
            r"^(bash-\S+): the run failed; got exit code \d, rank 1 on node-2 exited with code 3;", output, re.M
        )
        assert found, output
        assert (
            tridock(tmp_path, "logs", "--hosts", "hostfile", "--run", found[1], "--rank", "1").stdout == "rank 1 of 2\n"
        )
    finally:
        tridock(tmp_path, "down", "--hosts", "hostfile")


def test_an_image_of_ones_own_is_wrapped_when_it_is_named(docker: str, tmp_path: Path) -> None:
    own = f"{own_name()}-own:1"
    succeed("docker", "build", "--quiet", "--tag", own, "-", input=OWN.replace("WORD", "first"))
    (tmp_path / "hostfile").write_text("node-1 slots=2\nnode-2 slots=2\n")
    (tmp_path / "hostfile.yaml").write_text(f"name: {own_name()}\ntransport: compose\nenv: {{DS_ACCELERATOR: cpu}}\n")
    (tmp_path / "code").mkdir()
    options = ("run", "--hosts", "hostfile", "--workdir", "code", "--image", own, "--nodes", "1", "--slots", "1")
    program = ("--", "bash", "-c", "echo $RANK of $WORLD_SIZE: $(mine)")
    wrapped = f"localhost/tridock-wrapped/{own}"
    images = [own, wrapped]
    try:
        first = tridock(tmp_path, *options, *program)
        assert first.returncode == 0, first.stdout + first.stderr
        assert "0 of 1: first" in first.stdout.splitlines()
        # The operator has another uid than the image's user, but that user's programs and packages.
        as_another = ("--rm", "--env", "TRIDOCK_UID=4321", "--env", "TRIDOCK_GID=4321", wrapped)
        script = "id -u && mine && cd ~/.local/lib && touch a && pwd -P"
        assert succeed("docker", "run", *as_another, "bash", "-c", script) == "4321\nfirst\n/home/app/.local/lib\n"
        # Neither the image nor the node is made again, until the image changes.
        made = succeed("docker", "image", "inspect", "--format", "{{.Id}}", wrapped).strip()
        images.append(made)
        again = tridock(tmp_path, *options, *program)
        assert (again.returncode, again.stderr) == (0, "")
        succeed("docker", "build", "--quiet", "--tag", own, "-", input=OWN.replace("WORD", "second"))
        changed = tridock(tmp_path, *options, *program)
        assert "0 of 1: second" in changed.stdout.splitlines(), changed.stdout + changed.stderr
        assert succeed("docker", "image", "inspect", "--format", "{{.Id}}", wrapped).strip() != made
    finally:
        tridock(tmp_path, "down", "--hosts", "hostfile")
        execute("docker", "image", "rm", *images)


def test_what_cannot_be_wrapped_says_what_it_lacks(docker: str) -> None:
    name = f"{own_name()}:empty"
    succeed("docker", "build", "--quiet", "--tag", name, "-", input="FROM scratch\nLABEL a=b\n")
    done = tridock(ROOT, "image", "wrap", name, "--tag", f"{name}-wrapped")
    execute("docker", "image", "rm", name)
    assert done.returncode == 3
    assert done.stderr == f"{name}: cannot be wrapped; got no sh; use an image on Debian or Ubuntu\n"
