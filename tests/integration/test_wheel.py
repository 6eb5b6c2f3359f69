"""The wheel alone, on a bare Debian, as an ordinary user, from an empty folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.integration.support import ROOT, SESSION, execute, own_name, succeed
from tridock import __version__

LARGEST_MB = 150
HOME = "/home/ada"
PROXIES = [name for name in ("http_proxy", "https_proxy", "no_proxy") if name in os.environ]


@dataclass
class Machine:
    container: str

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        line = f"PATH={HOME}/venv/bin:$PATH; {command}"
        return execute("docker", "exec", self.container, "bash", "-c", line)

    def succeed(self, command: str) -> str:
        done = self.run(command)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def machine(cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """With the wheel in a virtual environment. (The image is not used; its build has found or made the same base.)"""
    dist = tmp_path_factory.mktemp("dist")
    succeed(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(dist), cwd=ROOT)
    (wheel,) = dist.iterdir()
    image, made = f"{SESSION}:bare", Machine(own_name())
    arguments = [word for name in PROXIES for word in ("--build-arg", name)]
    folder = str(ROOT / "tests/integration/bare_host")
    succeed("docker", "build", "--quiet", "--target", "wheel", *arguments, "--tag", image, folder)
    variables = [word for name in PROXIES for word in ("--env", name)]
    succeed("docker", "run", "--detach", "--init", *variables, "--name", made.container, image)
    try:
        succeed("docker", "cp", str(wheel), f"{made.container}:/tmp/{wheel.name}")
        made.succeed(f"python3 -m venv {HOME}/venv && pip install --quiet /tmp/{wheel.name}")
        yield made
    finally:
        execute("docker", "rm", "--force", "--volumes", made.container)


@pytest.mark.full
def test_it_is_small(machine: Machine) -> None:
    size = int(machine.succeed(f"du --summarize --block-size 1MB {HOME}/venv").split()[0])
    assert size < LARGEST_MB


def test_commands_work_from_an_empty_folder(machine: Machine) -> None:
    assert machine.succeed("tridock --version") == f"tridock {__version__}\n"
    plan = json.loads(machine.succeed("tridock plan configs/demo.yaml --nodes 2 --gpus-per-node 4 --json"))
    assert (plan["verdict"], plan["world_size"]) == ("fits", 8)
    assert machine.succeed("ls -A") == ""
    refused = machine.run("tridock plan configs/demo.yaml --nodes 2 --set batch.global_batch_size=3")
    assert refused.returncode == 2
    assert "batch.global_batch_size: must be " in refused.stdout + refused.stderr
    missing = machine.run("tridock data demo")
    todo = rf"{HOME}/venv/bin/python[\d.]* -m pip install '/tmp/tridock-{__version__}-py3-none-any.whl\[data\]'"
    assert missing.returncode == 3
    assert re.fullmatch(rf"numpy: is not installed; {todo}\n", missing.stderr), missing.stderr


def test_a_project_of_ones_own(machine: Machine) -> None:
    printed = machine.succeed("tridock init mine")
    assert printed.splitlines()[-1] == "next: cd mine && cp hostfiles/example hostfile, and name your hosts in it"
    shown = machine.succeed("cd mine && cp hostfiles/example hostfile && fab launch --hosts hostfile --dry-run")
    assert "deepspeed --hostfile" in shown
    no_docker = machine.run("cd mine && tridock image --flavor cpu")
    assert no_docker.returncode == 3
    assert no_docker.stderr == (
        "docker: no such command; install Docker, "
        f"or run {HOME}/.cache/tridock/image/tools/docker-engine.sh as root on Debian\n"
    )
