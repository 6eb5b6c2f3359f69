"""A host's facts: the script is run by a real shell, and every way of not having Docker has its message."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tridock.errors import ClusterError
from tridock.gpus import GPUS, Gpu
from tridock.ops.hosts import session
from tridock.ops.hosts.facts import facts_command, keys_digest, parse_facts, split_answer
from tridock.ops.hosts.session import Session
from tridock.remote import LocalHost

INSPECTED = {
    "Id": "c0ffee",
    "Image": "sha256:1",
    "State": {"Running": True, "ExitCode": 0, "Health": {"Status": "healthy"}},
    "Config": {"Labels": {"tridock.recipe": "abcd", "com.docker.compose.project.working_dir": "/home/ada/x"}},
}
IMAGE = {"Id": "sha256:1", "RootFS": {}}
GOOD = "uid 1000\ngid 100\nhome /home/ada\ngpus 8\ninfiniband 1\n"
GOOD += f"{json.dumps(IMAGE)}\n{json.dumps(INSPECTED)}\n"


def message(text: str) -> str:
    with pytest.raises(ClusterError) as caught:
        parse_facts("gpu-1", text)
    return str(caught.value)


def with_docker(
    tmp_path: Path,
    script: str,
    keys: str = "~/none",
    home: str = "/home/ada",
    question: tuple[str, ...] = (),
    fails: int = 0,
) -> str:
    """The facts as a shell gathers them on a machine whose docker is ``script``."""
    for tool in ("sh", "id", "printf", "tail", "wc", "sha256sum", "stat", "sleep"):
        source = next(Path(folder, tool) for folder in os.get_exec_path() if Path(folder, tool).exists())
        (tmp_path / tool).symlink_to(source)
    if script:
        (tmp_path / "docker").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "docker").chmod(0o755)
    workspace = ("tridock.workspace", "~/tridock/lab/workspace")
    command = facts_command("tridock:cpu", "tridock-lab", keys, f"{tmp_path}/images", workspace, question)
    env = {"PATH": str(tmp_path), "HOME": home}
    done = subprocess.run(command.argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == fails, done.stderr
    return done.stdout


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
    docker = f"echo '{json.dumps({**IMAGE, 'Id': 'sha256:2'})}'; echo '{inspected}'"
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
    assert (state.facts.uid, state.facts.gid) == (os.getuid(), os.getgid())


def test_an_image_or_a_container_alone(tmp_path: Path) -> None:
    for found in (IMAGE, INSPECTED):
        docker = f"case $1 in version) exit 1;; *) echo '{json.dumps(found)}'; exit 1;; esac"
        state = parse_facts("gpu-1", with_docker(tmp_path, docker))
        assert (state.image_id is None, state.container is None) == (found is INSPECTED, found is IMAGE)
        for tool in tmp_path.iterdir():
            tool.unlink()


def test_an_image_is_never_taken_for_a_container() -> None:
    """Without a tag both may have the same name, and docker inspect prefers containers."""
    places = ("keys", "images", ("tridock.workspace", "/w"))
    names = {"tridock": "tridock:latest", "host:5000/tridock": "host:5000/tridock:latest", "a@sha256:1": "a@sha256:1"}
    assert {it: facts_command(it, "tridock-lab", *places).argv[4] for it in names} == names


@pytest.mark.parametrize(
    ("workspace", "running", "asked"),
    [
        ("/home/ada/tridock/lab/workspace", True, True),
        ("/home/ada/tridock/lab/workspace", False, False),
        ("/home/eve/tridock/lab/workspace", True, False),
        (None, True, False),
    ],
)
def test_a_question_is_asked_only_in_a_running_node_of_this_folder(
    tmp_path: Path, workspace: str | None, running: bool, asked: bool
) -> None:
    labels = {} if workspace is None else {"tridock.workspace": workspace}
    found = {**INSPECTED, "State": {**INSPECTED["State"], "Running": running}, "Config": {"Labels": labels}}  # type: ignore[dict-item]
    shown = json.dumps(found, separators=(",", ":"))
    docker = f"case $1 in exec) echo \"$@\"; exit 7;; *) echo '{shown}';; esac"
    command = ("--workdir", "/workspace", "tridock-lab", "runs")
    facts, answer = split_answer(with_docker(tmp_path, docker, question=command, fails=7 if asked else 0).encode())
    container = parse_facts("gpu-1", facts).container
    assert container is not None
    assert (container.workspace, container.running) == (workspace, running)
    said = f"exec --user {os.getuid()}:{os.getgid()} --workdir /workspace tridock-lab runs\n"
    assert answer == (said.encode() if asked else None)


@pytest.mark.parametrize("below_home", [True, False])
def test_keys_are_known_by_their_digest(tmp_path: Path, below_home: bool) -> None:
    home = tmp_path / "home of ada"
    folder = home / "tridock" / "secrets"
    folder.mkdir(parents=True)
    files = {"id_ed25519": b"private", "authorized_keys": b"restrict\n", "Z": b""}
    folder.chmod(0o700)
    for name, content in files.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o600)
    (folder / ".put.half").write_bytes(b"what an interrupted transfer left")
    keys = "~/tridock/secrets" if below_home else str(folder)
    state = parse_facts("gpu-1", with_docker(tmp_path, "echo 28.1", keys, str(home)))
    assert state.keys == keys_digest(files)
    assert state.keys != keys_digest({**files, "Z": b"other"})
    assert state.keys != keys_digest({name: files[name] for name in ("id_ed25519", "Z")})


def test_keys_that_others_can_read_are_not_right(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir(mode=0o700)
    (folder / "id_ed25519").touch(0o600)
    (tmp_path / "bin").mkdir()
    found = []
    for path, mode in ((folder, 0o700), (folder / "id_ed25519", 0o640), (folder, 0o750)):
        path.chmod(mode)
        text = with_docker(tmp_path / "bin", "echo 28.1", str(folder))
        found.append(parse_facts("gpu-1", text).keys == keys_digest({"id_ed25519": b""}))
        for tool in (tmp_path / "bin").iterdir():
            tool.unlink()
    assert found == [True, False, False]


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
    monkeypatch.setattr(session, "FACTS_TIMEOUT_S", 1)
    (tmp_path / "docker").write_text("#!/bin/sh\nexec sleep 300\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "lab").write_text("gpu-1 slots=1\n")
    with pytest.raises(ClusterError) as caught:
        Session.open(tmp_path / "lab").read_state("gpu-1", LocalHost())
    assert str(caught.value) == (
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
