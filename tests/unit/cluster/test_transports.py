"""Docker's command lines for a node, word for word."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tridock.cluster.settings import Cluster, load_cluster
from tridock.cluster.transports import ComposeTransport, HostFacts, SshTransport, transport_of
from tridock.command import Command
from tridock.errors import RequestError

FACTS = HostFacts(uid=1000, gid=100, home="/home/ada", gpus=8, infiniband=False)
IMAGE = "sha256:0123"


def cluster(tmp_path: Path, settings: str = "", hosts: str = "gpu-1 slots=8\ngpu-2 slots=8\n") -> Cluster:
    (tmp_path / "lab").write_text(hosts)
    (tmp_path / "lab.yaml").write_text(settings)
    return load_cluster(tmp_path / "lab", project_folder=tmp_path)


def test_a_gpu_node_by_default(tmp_path: Path) -> None:
    made = SshTransport(cluster(tmp_path))
    assert made.run_command("gpu-1", IMAGE, FACTS).render() == (
        "docker run --detach --name tridock-lab --label tridock.cluster=lab --label tridock.node=gpu-1 "
        f"--label tridock.recipe={made.recipe('gpu-1', IMAGE, FACTS)} "
        "--label tridock.workspace=/home/ada/tridock/lab/workspace --network host --ipc host --init "
        "--ulimit memlock=-1 --ulimit stack=67108864 --cap-add IPC_LOCK --gpus all "
        "--volume /home/ada/tridock/lab/workspace:/workspace "
        "--volume /home/ada/tridock/lab/secrets/gpu-1:/run/tridock/secrets:ro "
        "--env TRIDOCK_CLUSTER=lab --env TRIDOCK_NODE=gpu-1 --env TRIDOCK_UID=1000 --env TRIDOCK_GID=100 "
        "--env TRIDOCK_SSH_PORT=2222 sha256:0123 node"
    )


def test_never_privileged_and_nothing_secret(tmp_path: Path) -> None:
    line = SshTransport(cluster(tmp_path)).run_command("gpu-1", IMAGE, FACTS).render()
    assert "privileged" not in line
    assert "PRIVATE" not in line


def test_settings_reach_the_command(tmp_path: Path) -> None:
    settings = """\
workdir: /scratch/t
container: {network: lan, ipc: private, shm_size: 16g, ulimits: {}, gpus: none, cap_add: [], devices: [/dev/fuse],
            mounts: ['/mnt/corpus:/corpus:ro'], extra_args: [--cpus, '4']}
ssh_port: 2300
listen: [192.0.2.1, '2001:db8::1']
env: {NCCL_DEBUG: INFO, A: b c}
nodes: {gpu-2: {env: {A: d}}}
"""
    command = SshTransport(cluster(tmp_path, settings)).run_command("gpu-2", IMAGE, replace(FACTS, infiniband=True))
    assert command.argv[13:] == (
        "--network", "lan", "--ipc", "private", "--init", "--shm-size", "16g",
        "--device", "/dev/fuse", "--device", "/dev/infiniband",
        "--volume", "/scratch/t/workspace:/workspace", "--volume", "/scratch/t/secrets/gpu-2:/run/tridock/secrets:ro",
        "--volume", "/mnt/corpus:/corpus:ro",
        "--env", "TRIDOCK_CLUSTER=lab", "--env", "TRIDOCK_NODE=gpu-2", "--env", "TRIDOCK_UID=1000",
        "--env", "TRIDOCK_GID=100", "--env", "TRIDOCK_SSH_PORT=2300",
        "--env", "TRIDOCK_SSH_LISTEN=192.0.2.1,2001:db8::1",
        "--env", "NCCL_DEBUG=INFO", "--env", "A=d", "--cpus", "4", IMAGE, "node",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "gpus", "given"), [("auto", 0, False), ("auto", 4, True), ("all", 0, True), ("none", 4, False)]
)
def test_gpus_where_there_are_some_or_where_they_are_asked_for(
    tmp_path: Path, setting: str, gpus: int, given: bool
) -> None:
    made = cluster(tmp_path, f"container: {{gpus: {setting}}}\n")
    assert ("--gpus" in SshTransport(made).run_command("gpu-1", IMAGE, replace(FACTS, gpus=gpus)).argv) is given


def test_the_recipe_changes_with_the_image_and_the_settings_only(tmp_path: Path) -> None:
    first = SshTransport(cluster(tmp_path)).recipe("gpu-1", IMAGE, FACTS)
    assert SshTransport(cluster(tmp_path)).recipe("gpu-1", IMAGE, FACTS) == first
    assert SshTransport(cluster(tmp_path)).recipe("gpu-1", "sha256:9", FACTS) != first
    assert SshTransport(cluster(tmp_path, "env: {A: b}\n")).recipe("gpu-1", IMAGE, FACTS) != first


def test_exec_is_the_operators_with_the_home_of_ssh_sessions(tmp_path: Path) -> None:
    made = transport_of(cluster(tmp_path))
    assert made.exec_command("gpu-1", FACTS, Command.of("id", "-u")).render() == (
        "docker exec --user 1000:100 --workdir /workspace --env HOME=/home/tridock tridock-lab id -u"
    )
    assert "--interactive" in made.exec_command("gpu-1", FACTS, Command.of("cat", stdin=b"x")).argv


def test_folders_on_the_host(tmp_path: Path) -> None:
    made = transport_of(cluster(tmp_path, "workdir: ~/t\n"))
    assert made.workspace(FACTS) == "/home/ada/t/workspace"
    assert made.secrets("gpu-2", FACTS) == "/home/ada/t/secrets/gpu-2"


def test_a_twin_is_composes(tmp_path: Path) -> None:
    settings = "transport: compose\nimage: tridock:cpu\nenv: {A: $x}\nnodes: {node-2: {env: {B: '1'}}}\n"
    made = transport_of(cluster(tmp_path, settings, "node-1 slots=1\nnode-2 slots=1\n"))
    (tmp_path / "docker-compose.yml").touch()
    assert isinstance(made, ComposeTransport)
    folder = hashlib.sha256(str(tmp_path).encode()).hexdigest()[:8]  # of two clones each has a twin of its own
    assert made.container_name("node-2") == f"tridock-lab-{folder}-node-2-1"
    assert made.workspace(FACTS) == str(tmp_path)
    command = made.command(FACTS, "/s/compose.json", "up", "--detach")
    assert command.argv == (
        "docker", "compose", "--project-name", f"tridock-lab-{folder}", "--project-directory", str(tmp_path),
        "--file", f"{tmp_path}/docker-compose.yml", "--file", "/s/compose.json", "--profile", "twin", "up", "--detach",
    )  # fmt: skip
    assert command.cwd == str(tmp_path)
    assert command.env == {
        "TRIDOCK_CLUSTER": "lab", "TRIDOCK_IMAGE": "tridock:cpu", "TRIDOCK_UID": "1000", "TRIDOCK_GID": "100",
    }  # fmt: skip
    assert json.loads(made.override({"node-1": "abcd", "node-2": "ef"})) == {
        "services": {
            "node-1": {"environment": {"A": "$$x"}, "labels": {"tridock.recipe": "abcd"}},
            "node-2": {"environment": {"A": "$$x", "B": "1"}, "labels": {"tridock.recipe": "ef"}},
        }
    }


def test_containers_of_a_twin_are_set_in_composes_file(tmp_path: Path) -> None:
    transport_of(cluster(tmp_path, "transport: compose\ncontainer: {ipc: host}\n"))  # as it is by default
    with pytest.raises(RequestError) as refused:
        transport_of(cluster(tmp_path, "transport: compose\ncontainer: {mounts: ['/a:/b'], gpus: all}\n"))
    why = "has no effect with transport: compose"
    assert str(refused.value).splitlines() == [
        f"{tmp_path}/lab.yaml: container.gpus: {why}; got all; set it in docker-compose.yml",
        f"{tmp_path}/lab.yaml: container.mounts: {why}; got ('/a:/b',); set it in docker-compose.yml",
    ]


def test_a_twins_recipe_changes_with_what_compose_would_read(tmp_path: Path) -> None:
    def recipe(
        settings: str = "", node: str = "node-1", image: str = IMAGE, compose: str = "a: ${A} ${TRIDOCK_UID}",
        dotenv: str = "", facts: HostFacts = FACTS, **env: str,
    ) -> str:  # fmt: skip
        made = cluster(tmp_path, f"transport: compose\n{settings}", "node-1 slots=1\nnode-2 slots=1\n")
        (tmp_path / "docker-compose.yml").write_text(compose)
        (tmp_path / ".env").write_text(dotenv)
        return ComposeTransport(made).recipe(node, image, facts, env)

    first = recipe()
    assert recipe(UNREAD="1", TRIDOCK_UID="7") == first
    others = [
        recipe("env: {B: c}\n"), recipe(node="node-2"), recipe(image="sha256:9"), recipe(compose="a: $A"),
        recipe(dotenv="A=1"), recipe(facts=replace(FACTS, uid=7)), recipe(A="1"),
    ]  # fmt: skip
    assert len({first, *others}) == 8


@pytest.mark.parametrize(
    ("devices", "option", "listed"),
    [
        ("4,5", '"device=4,5"', None),
        ("GPU-aa,GPU-bb", '"device=GPU-aa,GPU-bb"', None),
        ("MIG-aa,MIG-bb", '"device=MIG-aa,MIG-bb"', "TRIDOCK_DEVICES=MIG-aa,MIG-bb"),
    ],
)
def test_a_node_gets_the_gpus_that_its_settings_choose(
    tmp_path: Path, devices: str, option: str, listed: str | None
) -> None:
    made = cluster(tmp_path, f"nodes: {{gpu-1: {{env: {{CUDA_VISIBLE_DEVICES: '{devices}'}}}}}}\n")
    argv = SshTransport(made).run_command("gpu-1", IMAGE, FACTS).argv
    assert argv[argv.index("--gpus") + 1] == option
    assert not [word for word in argv if word.startswith("CUDA_VISIBLE_DEVICES")]  # inside they are numbered from 0
    assert [word for word in argv if word.startswith("TRIDOCK_DEVICES")] == ([listed] if listed else [])
    other = SshTransport(made).run_command("gpu-2", IMAGE, FACTS).argv
    assert other[other.index("--gpus") + 1] == "all"


def test_a_node_whose_settings_choose_no_gpu_gets_none(tmp_path: Path) -> None:
    made = cluster(tmp_path, "env: {CUDA_VISIBLE_DEVICES: ''}\n")
    assert "--gpus" not in SshTransport(made).run_command("gpu-1", IMAGE, FACTS).argv


def test_hosts_that_share_a_home_do_not_share_their_lists_of_images(tmp_path: Path) -> None:
    made = SshTransport(cluster(tmp_path))
    files = [made.images_file(node) for node in ("gpu-1", "gpu-2")]
    assert files == ["~/tridock/lab/images.gpu-1", "~/tridock/lab/images.gpu-2"]
