"""A host's facts: the script is run by a real shell, and every way of not having Docker has its message."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tridock.cluster.settings import load_cluster
from tridock.cluster.transports import transport_of
from tridock.errors import ClusterError
from tridock.gpus import GPUS, Gpu, least_of
from tridock.ops.hosts import facts as host_facts
from tridock.ops.hosts.facts import HostState, facts_command, keys_digest, parse_facts
from tridock.remote import LocalHost

INSPECTED = {
    "Id": "c0ffee",
    "Image": "sha256:1",
    "State": {"Running": True, "ExitCode": 0, "Health": {"Status": "healthy"}},
    "Config": {"Labels": {"tridock.recipe": "abcd", "com.docker.compose.project.working_dir": "/home/ada/x"}},
}
IMAGE = {"Id": "sha256:1", "RootFS": {}}
SMI = "".join(f"nvidia-smi GPU {number}: NVIDIA A100 (UUID: GPU-{number})\n" for number in range(8))
GOOD = f"uid 1000\ngid 100\nhome /home/ada\nnvidia-smi\n{SMI}infiniband 1\n"
GOOD += f"{json.dumps(IMAGE)}\n{json.dumps(INSPECTED)}\n"


def message(text: str) -> str:
    with pytest.raises(ClusterError) as caught:
        parse_facts("gpu-1", text)
    return str(caught.value)


def with_docker(tmp_path: Path, script: str, keys: str = "~/none", home: str = "/home/ada") -> str:
    """The facts as a shell gathers them on a machine whose docker is ``script``."""
    for tool in ("sh", "id", "printf", "tail", "wc", "sha256sum", "stat", "sleep", "timeout"):
        source = next(Path(folder, tool) for folder in os.get_exec_path() if Path(folder, tool).exists())
        (tmp_path / tool).symlink_to(source)
    if script:
        (tmp_path / "docker").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "docker").chmod(0o755)
    command = facts_command("tridock:cpu", "tridock-lab", keys, f"{tmp_path}/images")
    env = {"PATH": str(tmp_path), "HOME": home}
    done = subprocess.run(command.argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
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
    places = ("keys", "images")
    names = {"tridock": "tridock:latest", "host:5000/tridock": "host:5000/tridock:latest", "a@sha256:1": "a@sha256:1"}
    assert {it: facts_command(it, "tridock-lab", *places).argv[4] for it in names} == names


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


def with_nvidia_smi(tmp_path: Path, listed: str, queried: str = "") -> HostState:
    script = f"#!/bin/sh\ncase $1 in --list-gpus) {listed};;\n*) {queried or listed};; esac\n"
    (tmp_path / "nvidia-smi").write_text(script)
    (tmp_path / "nvidia-smi").chmod(0o755)
    return parse_facts("gpu-1", with_docker(tmp_path, "echo 28.1"))


def test_the_gpu_with_the_least_memory(tmp_path: Path) -> None:
    queried = 'echo "81920, NVIDIA A100-SXM4-80GB"; echo "40536, NVIDIA A100-SXM4-40GB"'
    state = with_nvidia_smi(tmp_path, 'echo "GPU 0: A"; echo "  MIG 1g.10gb Device 0: B"; echo "GPU 1: C"', queried)
    assert state.facts.gpus == 2
    least = replace(GPUS["a100-40gb"], memory_mib=40536)
    assert state.gpu == replace(least, memory_gb_s=min(least.memory_gb_s or 0, GPUS["a100-80gb"].memory_gb_s or 0))


def test_mixed_gpus_have_the_least_memory_and_the_least_speed(tmp_path: Path) -> None:
    queried = 'echo "46068, NVIDIA L40S"; echo "40960, NVIDIA A100-SXM4-40GB"'
    state = with_nvidia_smi(tmp_path, 'echo "GPU 0: A"; echo "GPU 1: B"', queried)
    large, small = GPUS["l40s"], GPUS["a100-40gb"]
    assert state.gpu == replace(
        small, memory_gb_s=large.memory_gb_s, link_gb_s=large.link_gb_s, tflops_16=small.tflops_16,
        tflops_32=small.tflops_32, tflops_8=None, kernels=state.gpu.kernels, network=large.network,
    )  # fmt: skip
    # Of one that is not listed no rate is known.
    unknown = replace(large, name="New", memory_mib=99999, tflops_16=None)
    mixed = least_of([small, unknown])
    assert mixed is not None
    assert (mixed.memory_mib, mixed.tflops_16) == (small.memory_mib, None)


@pytest.mark.parametrize(
    ("says", "error"),
    [
        ("echo No devices were found", "No devices were found"),
        ("echo No devices were found; exit 6", "No devices were found"),
        ("echo 'Failed to initialize NVML: Driver/library version mismatch' >&2; exit 18",
         "Failed to initialize NVML: Driver/library version mismatch"),
        ("exit 127", "nothing"),
    ],
)  # fmt: skip
def test_an_nvidia_smi_that_finds_none_is_no_gpu_and_its_line_is_shown(tmp_path: Path, says: str, error: str) -> None:
    state = with_nvidia_smi(tmp_path, says)
    assert (state.facts.gpus, state.gpu, state.gpu_error) == (0, None, error)


def test_a_gpu_that_is_not_listed_has_its_memory() -> None:
    assert parse_facts("gpu-1", GOOD + "gpu 12000, Some New GPU\n").gpu == Gpu("Some New GPU", 12000)


@pytest.mark.parametrize("line", ["", "gpu [N/A], NVIDIA GB10\n", "gpu Failed to initialize NVML\n"])
def test_no_gpu_that_says_what_it_is(line: str) -> None:
    assert parse_facts("gpu-1", GOOD + line).gpu is None


def test_an_engine_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dockerd that stands still accepts every connection, and the client waits without a limit."""
    for name, script in {"docker": "exec sleep 300", "timeout": "exit 124"}.items():  # at once
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "lab").write_text("gpu-1 slots=1\n")
    with pytest.raises(ClusterError) as caught:
        host_facts.read_state(transport_of(load_cluster(tmp_path / "lab")), "gpu-1", LocalHost())
    assert str(caught.value) == (
        "gpu-1: Docker does not answer; got nothing; "
        "start Docker there (systemctl start docker); journalctl -u docker says why it hangs"
    )


def test_no_docker(tmp_path: Path) -> None:
    assert message(with_docker(tmp_path, "")) == (
        "gpu-1: has no Docker; got no docker on PATH; install Docker Engine there"
    )


@pytest.mark.parametrize(
    ("stderr", "remedy"),
    [
        ("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
         "start Docker there (systemctl start docker); journalctl -u docker says why it hangs"),
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


@pytest.mark.parametrize(
    ("version", "info", "message"),
    [
        ("podman version 4.3.1", "", "gpu-1: has podman under the name docker; got podman is not supported; "
         "install Docker Engine there, or put its docker first on the PATH that ssh commands have"),
        ("Docker version 28.1", '["name=seccomp,profile=builtin","name=rootless","name=cgroupns"]',
         "gpu-1: has a rootless Docker engine; got its containers have neither the host's network nor your uid; "
         "use the host's own engine: docker context use default there, or leave DOCKER_HOST unset"),
        ("Docker version 28.1", '["name=userns"]',
         "gpu-1: its Docker engine remaps users; got userns-remap: a node could not read its keys; "
         'let the nodes do without: container.extra_args: ["--userns=host"] in the settings'),
        ("Docker version 28.1", '["name=seccomp,profile=builtin"]', None),
    ],
)  # fmt: skip
def test_an_engine_that_cannot_start_a_node_is_known_at_once(
    tmp_path: Path, version: str, info: str, message: str | None
) -> None:
    docker = f"case $1 in inspect) exit 1;; --version) echo '{version}';; info) echo '{info}';; *) echo 28.1;; esac"
    problem = parse_facts("gpu-1", with_docker(tmp_path, docker)).engine
    assert (None if problem is None else str(problem)) == message


def container(cluster: str, id_: str, gpus: object = None, **changes: object) -> dict[str, object]:
    """As Docker 28 describes a node that was started with ``--gpus``; without it DeviceRequests is null."""
    request = {"Driver": "", "Count": 0, "DeviceIDs": None, "Capabilities": [["gpu"]], "Options": {}}
    requests = None if gpus is None else [request | ({"Count": -1} if gpus == "all" else {"DeviceIDs": gpus})]
    labels = {"tridock.cluster": cluster, "tridock.node": "n", "tridock.workspace": "/home/eve/tridock"}
    config = {"Labels": labels, "Env": ["PATH=/bin", "TRIDOCK_UID=1002", "TRIDOCK_GID=100"]}
    made = {**INSPECTED, "Id": id_, "Name": f"/tridock-{cluster}", "Config": config}
    return {**made, "HostConfig": {"DeviceRequests": requests}, **changes}


def test_nodes_of_other_clusters_are_known(tmp_path: Path) -> None:
    """Docker is asked for them by their label, and for all of it in one look; those that have ended do not count."""
    own, other, ended = (
        container("lab", "1"), container("other", "2"), container("old", "3", State={"Running": False, "ExitCode": 0}),
    )  # fmt: skip
    found = "; ".join(f"echo '{json.dumps(it)}'" for it in (own, other, ended, own))
    docker = f"""case "$*" in
        "ps --quiet --no-trunc --filter label=tridock.cluster") echo 2; echo 3; echo 1;;
        "inspect --format {{{{json .}}}} tridock:cpu tridock-lab 2 3 1") {found};;
        *) echo "not expected: $*" >&2; exit 1;;
        esac"""
    state = parse_facts("gpu-1", with_docker(tmp_path, docker), "tridock-lab")
    assert state.container is not None
    assert (state.container.id, state.container.user) == ("1", "1002:100")
    assert [(it.id, it.cluster, it.node, it.user) for it in state.others] == [("2", "other", "n", "1002:100")]


def test_a_host_with_a_node_of_another_cluster_alone(tmp_path: Path) -> None:
    """It is not taken for this one's, and whether the engine can start this one's is asked."""
    other = json.dumps(container("other", "2"))
    docker = f"""case $1 in ps) echo 2;; inspect) echo '{other}'; exit 1;; --version) echo Docker;;
        info) echo '["name=rootless"]';; *) exit 1;; esac"""
    state = parse_facts("gpu-1", with_docker(tmp_path, docker), "tridock-lab")
    assert (state.container, [it.cluster for it in state.others]) == (None, ["other"])
    assert state.engine is not None


@pytest.mark.parametrize(
    ("gpus", "devices"),
    [
        (None, ["CPU slot 0", "CPU slot 1"]),
        ("all", ["GPU 0", "GPU 1"]),
        (["5", "2"], ["GPU 2", "GPU 5"]),  # CUDA numbers them in the host's order
        (["GPU-6", "GPU-3"], ["GPU 3", "GPU 6"]),
        (["MIG-b", "MIG-a"], ["GPU MIG-b", "GPU MIG-a"]),
    ],
)
def test_what_a_slot_is_on_its_host(gpus: object, devices: list[str]) -> None:
    facts = GOOD.replace(json.dumps(INSPECTED), json.dumps(container("lab", "1", gpus)))
    state = parse_facts("gpu-1", facts, "tridock-lab")
    assert state.container is not None
    assert [state.container.device(slot, state.uuids) for slot in (0, 1)] == devices
