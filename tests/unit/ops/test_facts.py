"""A host's facts: the script is run by a real shell, and every way of not having Docker has its message."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tridock.errors import ClusterError
from tridock.gpus import GPUS, Gpu
from tridock.ops.hosts import facts
from tridock.ops.hosts.facts import facts_command, keys_digest, parse_facts

INSPECTED = {
    "Id": "c0ffee",
    "Image": "sha256:1",
    "State": {"Running": True, "ExitCode": 0, "Health": {"Status": "healthy"}},
    "Config": {"Labels": {"tridock.recipe": "abcd", "com.docker.compose.project.working_dir": "/home/ada/x"}},
}
GOOD = "uid 1000\ngid 100\nhome /home/ada\ngpus 8\ninfiniband 1\nimage sha256:1\n"
GOOD += f"container {json.dumps(INSPECTED)}\n"


def message(text: str) -> str:
    with pytest.raises(ClusterError) as caught:
        parse_facts("gpu-1", text)
    return str(caught.value)


def with_docker(tmp_path: Path, script: str, keys: str = "~/none", home: str = "/home/ada") -> str:
    """The facts as a shell gathers them on a machine whose docker is ``script``."""
    for tool in ("sh", "id", "printf", "tail", "wc", "sha256sum", "timeout", "sleep"):
        source = next(Path(folder, tool) for folder in os.get_exec_path() if Path(folder, tool).exists())
        (tmp_path / tool).symlink_to(source)
    if script:
        (tmp_path / "docker").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "docker").chmod(0o755)
    command = facts_command("tridock:cpu", "tridock-lab", keys, f"{tmp_path}/images")
    env = {"PATH": str(tmp_path), "HOME": home}
    return subprocess.run(command.argv, env=env, capture_output=True, text=True, check=True).stdout


def test_all_facts() -> None:
    state = parse_facts("gpu-1", GOOD)
    assert (state.facts.uid, state.facts.gid, state.facts.home) == (1000, 100, "/home/ada")
    assert (state.facts.gpus, state.facts.infiniband, state.image_id) == (8, True, "sha256:1")
    assert state.container is not None
    assert (state.container.running, state.container.recipe, state.container.health) == (True, "abcd", "healthy")
    assert state.container.workspace == "/home/ada/x"


def test_an_image_is_known_by_every_id_that_it_was_sent_with(tmp_path: Path) -> None:
    """In containerd's image store it has another id than in Docker's own."""
    (tmp_path / "images").write_text("sha256:old sha256:old-there\nsha256:1 sha256:2 sha256:3\n")
    inspected = json.dumps({**INSPECTED, "Image": "sha256:old-there"})
    docker = f"case $1 in image) echo image sha256:2;; container) echo 'container {inspected}';; esac"
    state = parse_facts("gpu-1", with_docker(tmp_path, docker))
    assert (state.image_id, state.local_image_id) == ("sha256:1", "sha256:2")
    assert [state.has(f"sha256:{number}") for number in (1, 2, 3, 4)] == [True, True, True, False]
    assert [state.id_of(id_) for id_ in ("sha256:3", "sha256:4")] == ["sha256:2", "sha256:4"]
    assert state.container is not None
    assert state.container.image_id == "sha256:old"


def test_a_host_with_nothing_of_ours_yet(tmp_path: Path) -> None:
    docker = 'case $1 in version) echo 28.1;; *) echo "No such object" >&2; exit 1;; esac'
    state = parse_facts("gpu-1", with_docker(tmp_path, docker))
    assert (state.image_id, state.container, state.keys) == (None, None, None)
    assert state.facts.uid == os.getuid()


@pytest.mark.parametrize("below_home", [True, False])
def test_keys_are_known_by_their_digest(tmp_path: Path, below_home: bool) -> None:
    home = tmp_path / "home of ada"
    folder = home / "tridock" / "secrets"
    folder.mkdir(parents=True)
    files = {"id_ed25519": b"private", "authorized_keys": b"restrict\n", "Z": b""}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / ".put.half").write_bytes(b"what an interrupted transfer left")
    keys = "~/tridock/secrets" if below_home else str(folder)
    state = parse_facts("gpu-1", with_docker(tmp_path, "echo 28.1", keys, str(home)))
    assert state.keys == keys_digest(files)
    assert state.keys != keys_digest({**files, "Z": b"other"})


def test_the_gpu_with_the_least_memory(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text(
        '#!/bin/sh\ncase $1 in --list-gpus) echo "GPU 0"; echo "GPU 1";;\n'
        '*) echo "81920, NVIDIA A100-SXM4-80GB"; echo "40536, NVIDIA A100-SXM4-40GB";; esac\n'
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    state = parse_facts("gpu-1", with_docker(tmp_path, "echo 28.1"))
    assert state.facts.gpus == 2
    assert state.gpu == replace(GPUS["a100-40gb"], memory_mib=40536)


def test_a_gpu_that_is_not_listed_has_its_memory() -> None:
    assert parse_facts("gpu-1", GOOD + "gpu 12000, Some New GPU\n").gpu == Gpu("Some New GPU", 12000)


@pytest.mark.parametrize("line", ["", "gpu [N/A], NVIDIA GB10\n", "gpu Failed to initialize NVML\n"])
def test_no_gpu_that_says_what_it_is(line: str) -> None:
    assert parse_facts("gpu-1", GOOD + line).gpu is None


def test_an_engine_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dockerd that stands still accepts every connection, and the client waits without a limit."""
    monkeypatch.setattr(facts, "DOCKER_S", 1)
    assert message(with_docker(tmp_path, "exec sleep 300")) == (
        "gpu-1: Docker hangs; got no answer within 1 s; see journalctl -u docker and dmesg there; "
        "restarting it ends the runs on it, unless live-restore is on"
    )


def test_no_docker(tmp_path: Path) -> None:
    assert message(with_docker(tmp_path, "")) == (
        "gpu-1: has no Docker; got no docker on PATH; install Docker Engine there"
    )


@pytest.mark.parametrize(
    ("stderr", "remedy"),
    [
        ("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
         "start Docker there (systemctl start docker)"),
        ("permission denied while trying to connect to the Docker daemon socket",
         "add the ssh user to the docker group there"),
    ],
)  # fmt: skip
def test_docker_that_does_not_answer(tmp_path: Path, stderr: str, remedy: str) -> None:
    text = with_docker(tmp_path, f"echo 'some warning' >&2; echo '{stderr}' >&2; exit 1")
    assert message(text) == f"gpu-1: Docker does not answer; got {stderr}; {remedy}"


def test_a_login_shell_that_spoils_the_answer() -> None:
    assert message("Welcome!\n") == (
        "gpu-1: sent an unreadable answer; got 'uid' in 'Welcome!\\n'; make its login shell print nothing of its own"
    )
