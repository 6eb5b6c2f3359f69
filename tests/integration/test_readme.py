"""The README's commands on a bare Debian with Docker, as an ordinary user, in a fresh clone."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.documentation import blocks
from tests.integration.rack import copy_tree
from tests.integration.support import ROOT, SESSION, execute, give, own_name, succeed
from tests.integration.test_wheel import PROXIES

UID = 1000
SOCKET = Path("/var/run/docker.sock")
SHORT = "--set train.train_iters=2 --set train.eval_interval=0 --set optimizer.lr_warmup_iters=1"


@dataclass
class Machine:
    """A container with the engine of this machine, and the user's clone at the same path as here."""

    name: str
    clone: Path

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        """The line in the user's shell, in which .venv is active as soon as there is one."""
        script = f"[ ! -e .venv/bin/activate ] || . .venv/bin/activate; {line}"
        arguments = ("--workdir", str(self.clone), self.name, "bash", "-c", script)
        return execute("docker", "exec", *arguments)

    def succeed(self, line: str) -> str:
        done = self.run(line)
        assert done.returncode == 0, f"{line}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def machine(cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if not SOCKET.is_socket():
        pytest.skip(f"the engine has no {SOCKET} to share")
    name = own_name()
    made = Machine(name, copy_tree(tmp_path_factory.mktemp("readme") / name))
    succeed("git", "init", "--quiet", cwd=made.clone)
    for path in (made.clone, *made.clone.rglob("*")):
        give(path, UID)
    proxies = [word for proxy in PROXIES for word in ("--build-arg", proxy)]
    folder = str(ROOT / "tests/integration/bare_host")
    build = ("docker", "build", "--quiet", "--target", "readme", *proxies, "--tag", f"{SESSION}:readme", folder)
    succeed(*build)
    # Docker as it is installed here, and the folders in which pip finds wheels here.
    plugins = json.loads(succeed("docker", "info", "--format", "{{json .ClientInfo.Plugins}}"))
    docker = shutil.which("docker")
    assert docker is not None
    shared = [docker, *(plugin["Path"] for plugin in plugins)]
    wheels = succeed(str(ROOT / "tools/python/pip-wheel-folders.sh")).split()
    options = [word for path in (*shared, *wheels) for word in ("--volume", f"{path}:{path}:ro")]
    options += ["--volume", f"{SOCKET}:{SOCKET}", "--group-add", str(SOCKET.stat().st_gid)]
    variables = [*PROXIES, f"PIP_FIND_LINKS={' '.join(wheels)}"]
    options += [word for variable in variables for word in ("--env", variable)]
    options += ["--volume", f"{made.clone}:{made.clone}"]
    succeed("docker", "run", "--detach", "--init", "--name", name, *options, f"{SESSION}:readme")
    try:
        yield made
    finally:
        made.run("fab down --hosts hostfile; docker compose down --timeout 2")
        execute("docker", "rm", "--force", "--volumes", name)
        execute("docker", "image", "rm", f"{name}:cpu")


def lines_after(mark: str) -> list[str]:
    """The commands of the README's first shell block after a line, without comments."""
    text = (ROOT / "README.md").read_text()
    line = text.count("\n", 0, text.index(mark))
    block = next(block for block in blocks("README.md") if block.line > line and block.language == "sh")
    return [line.partition("#")[0].strip() for line in block.text.splitlines()]


def test_the_three_commands(machine: Machine) -> None:
    """On the two CPU nodes of the twin instead of two hosts with GPUs."""
    image, copy, launch = lines_after("\n## Train on your hosts\n")
    (trainer,) = lines_after("\n## In one container\n")
    assert (image, copy, launch) == ("make image", "cp hostfiles/example hostfile", "fab launch --hosts hostfile")
    assert trainer == "docker compose run trainer ds_pretrain_gpt2.sh"

    before = machine.run(launch)
    assert before.returncode == 127  # bash: fab: command not found
    built = machine.run(f"{image} FLAVOR=cpu IMAGE={machine.name}:cpu")
    assert built.returncode == 0, built.stderr[-6000:]
    assert built.stdout.splitlines()[-1] == f"{machine.name}:cpu"
    hint = "next: source .venv/bin/activate (or call ./fab), then: fab launch --hosts hostfile"
    assert built.stderr.splitlines()[-1] == hint
    machine.succeed("cp hostfiles/twin hostfile")
    settings = (ROOT / "hostfiles/twin.yaml").read_text().replace("tridock:cpu", f"{machine.name}:cpu")
    (machine.clone / "hostfile.yaml").write_text(f"{settings}name: {machine.name}\n")

    shown = machine.succeed(f"{launch} {SHORT}")
    said = "no --config: configs/demo-3d.yaml with TP2 PP2 DP1, because 4 slots are a multiple of four"
    assert shown.splitlines()[0] == said
    assert "| loss " in shown
    assert shown.splitlines()[-1].endswith(
        " is done; its folder is " + str(next((machine.clone / "runs").glob("demo*")))
    )

    shown = machine.succeed(f"CUDA_VISIBLE_DEVICES=0 {trainer.replace('run ', 'run --rm -T ')} {SHORT} </dev/null")
    assert "2 ranks on this machine" in shown
    made = [path for path in (machine.clone / "runs").iterdir() if (path / "metrics.jsonl").is_file()]
    assert {path.stat().st_uid for path in made} == {UID}
    assert len(made) == 2


def test_afterwards(machine: Machine) -> None:
    *_, fetch, down = lines_after("[all commands](docs/commands.md)")
    assert (fetch, down) == ("fab fetch --hosts hostfile", "fab down --hosts hostfile")
    shown = machine.succeed("./fab status; .venv/bin/tridock runs")  # ./hostfile is the default
    assert shown.count(" done ") == 4
    assert machine.succeed(fetch).startswith("runs/demo-")
    assert machine.succeed(down) == "removed node-1, node-2\n"
