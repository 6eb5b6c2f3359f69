"""The image and its entrypoint, in a real engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.integration.support import ROOT, Containers, execute, give, own_name, succeed

SITE_PACKAGES = "opt/venv/lib/"


def label(image: str, name: str) -> str:
    return succeed("docker", "image", "inspect", "--format", f'{{{{index .Config.Labels "{name}"}}}}', image).strip()


# ---- what is in the layers -----------------------------------------------------------------------


def keys_in_layer(layer: IO[bytes]) -> Iterator[str]:
    with tarfile.open(fileobj=layer, mode="r:") as files:
        for file in files:
            if re.search(r"(^|/)(ssh_host_|id_(rsa|ecdsa|ed25519)|authorized_keys)", file.name):
                yield file.name
            elif file.isfile() and file.size < 20_000 and not file.name.startswith(SITE_PACKAGES):
                content = files.extractfile(file)
                if content is not None and re.match(rb"\s*-----BEGIN [A-Z ]*PRIVATE KEY-----", content.read()):
                    yield file.name


def test_no_key_of_any_kind_in_any_layer(cpu_image: str, tmp_path: Path) -> None:
    found: list[str] = []
    layers, saved = 0, tmp_path / "image.tar"
    succeed("docker", "save", "--output", str(saved), cpu_image)
    with tarfile.open(saved, mode="r:") as image:
        for entry in image:
            layer = image.extractfile(entry) if entry.isfile() else None
            if layer is None or not (entry.name.endswith("layer.tar") or entry.name.startswith("blobs/")):
                continue
            with contextlib.suppress(tarfile.ReadError):  # a blob that is JSON
                found += keys_in_layer(layer)
                layers += 1
    saved.unlink()
    assert layers > 5
    assert found == []


def test_nobody_has_a_password(containers: Containers) -> None:
    shadow = containers.run("cat", "/etc/shadow", "/etc/passwd").stdout.splitlines()
    passwords = {line.split(":")[0]: line.split(":")[1] for line in shadow}
    assert {name: word for name, word in passwords.items() if word not in ("*", "!", "!*", "x")} == {}


def test_manifest_says_what_is_there(containers: Containers, cpu_image: str) -> None:
    manifest = json.loads(containers.run("cat", "/opt/tridock/manifest.json").stdout)
    program = """
import importlib.metadata as m, json, platform, subprocess, deepspeed.git_version_info as ds, torch
print(json.dumps({
    "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
    **{n.replace("-", "_"): m.version(n) for n in ("deepspeed", "megatron-core", "numpy", "tokenizers")},
    "deepspeed_ops": sorted(n for n, built in ds.installed_ops.items() if built),
    "sshd": subprocess.check_output(["dpkg-query", "-Wf", "${Version}", "openssh-server"], text=True),
    "count": len({d.metadata["Name"].lower() for d in m.distributions()}),
}))"""
    real = json.loads(containers.run("python", "-c", program).stdout.splitlines()[-1])
    assert real.pop("sshd") == manifest["debian_packages"]["openssh-server"]
    assert real.pop("count") == len(manifest["python_packages"])
    assert {name: manifest[name] for name in real} == real
    assert manifest["base_image"] == label(cpu_image, "org.opencontainers.image.base.name") == "debian:bookworm-slim"
    assert manifest["git_commit"] == label(cpu_image, "org.opencontainers.image.revision")
    assert manifest["git_commit"].removesuffix("-dirty") == succeed("git", "rev-parse", "HEAD", cwd=ROOT).strip()
    assert manifest["flavor"] == "cpu"


def test_torch_is_the_cpu_build_that_the_locks_name(containers: Containers) -> None:
    done = containers.run("python", "-c", "import torch; print(torch.__version__.split('+')[0], torch.version.cuda)")
    version = re.search(r"^torch==(.*)$", (ROOT / "locks/torch.txt").read_text(), re.MULTILINE)
    assert version is not None
    assert done.stdout.split() == [version[1], "None"]


def test_deepspeed_compiles_nothing_at_first_use(containers: Containers) -> None:
    program = """
import shutil, deepspeed
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.accelerator import get_accelerator
assert shutil.which("g++") is None and shutil.which("cc") is None
deepspeed.init_distributed("gloo")
for name in ("ShareMemCommBuilder", "CPUAdamBuilder", "FusedAdamBuilder", "AsyncIOBuilder"):
    get_accelerator().create_op_builder(name).load()
deepspeed.comm.destroy_process_group()
"""
    environment = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    options = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
    done = containers.run("python", "-c", program, options=options)
    assert done.returncode == 0, done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()


def test_image_is_under_two_and_a_half_gigabytes(cpu_image: str) -> None:
    size = int(succeed("docker", "image", "inspect", "--format", "{{.Size}}", cpu_image))
    print(f"{size / 1e9:.2f} GB")
    assert size < 2.5e9


# ---- who runs in it ------------------------------------------------------------------------------


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


WHO = 'touch made && echo "$(id -u):$(id -g) $(id -un) $HOME $USER" && touch "$HOME/x" && ls'


@pytest.mark.parametrize("uid", [0, pytest.param(1000, marks=pytest.mark.full), 54321])
def test_files_belong_to_the_owner_of_the_workspace(containers: Containers, workspace: Path, uid: int) -> None:
    give(workspace, uid)
    done = containers.run("bash", "-c", WHO, options=["--volume", f"{workspace}:/workspace"])
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        f"{uid}:{uid} {'tridock' if uid else 'root'} /home/tridock tridock",
        "made",
    ]
    made = (workspace / "made").stat()
    assert (made.st_uid, made.st_gid) == (uid, uid)


def test_the_operators_ids_come_before_the_workspaces(containers: Containers, workspace: Path) -> None:
    workspace.chmod(0o777)
    options = ["--volume", f"{workspace}:/workspace", "--env", "TRIDOCK_UID=4321", "--env", "TRIDOCK_GID=4322"]
    done = containers.run("bash", "-c", WHO, options=options)
    assert done.stdout.splitlines()[0] == "4321:4322 tridock /home/tridock tridock"
    made = (workspace / "made").stat()
    assert (made.st_uid, made.st_gid) == (4321, 4322)


def test_groups_of_the_container_stay(containers: Containers) -> None:
    options = ["--env", "TRIDOCK_UID=4321", "--env", "TRIDOCK_GID=4322", "--group-add", "44", "--group-add", "7777"]
    done = containers.run("sh", "-c", "id -G; getent group 44 7777", options=options)
    assert set(done.stdout.splitlines()[0].split()) == {"4322", "44", "7777"}
    assert done.stdout.splitlines()[1:] == ["video:x:44:tridock", "device7777:x:7777:tridock"]


def test_the_operators_group_may_be_roots(containers: Containers) -> None:
    done = containers.run("sh", "-c", "id -u; id -G", options=["--env", "TRIDOCK_UID=4321", "--env", "TRIDOCK_GID=0"])
    assert (done.returncode, done.stdout) == (0, "4321\n0\n"), done.stderr


def test_started_with_user_it_stays_that_user(containers: Containers, workspace: Path) -> None:
    give(workspace, 4321, 4322)
    options = ["--user", "4321:4322", "--volume", f"{workspace}:/workspace"]
    done = containers.run("sh", "-c", 'echo "$(id -u):$(id -g) $HOME $USER"; touch made "$HOME/x"', options=options)
    assert (done.stdout, done.stderr) == ("4321:4322 /tmp tridock\n", "")
    assert (workspace / "made").stat().st_uid == 4321


def test_a_uid_that_is_no_number(containers: Containers) -> None:
    done = containers.run("true", options=["--env", "TRIDOCK_UID=alice", "--env", "TRIDOCK_NODE=node-1"])
    assert done.returncode == 2
    assert done.stderr == (
        "node-1: TRIDOCK_UID is not a number; got alice; "
        "set it to what 'id' prints on the operator's machine, or leave it out\n"
    )


def test_the_commands_exit_code_is_the_containers(containers: Containers) -> None:
    assert containers.run("sh", "-c", "exit 7").returncode == 7


def test_every_program_is_on_the_path(containers: Containers) -> None:
    names = ["tridock", "ds_pretrain_gpt2.sh", "deepspeed", "pdsh", "ssh", "numactl", "ps", "ip", "python"]
    done = containers.run("sh", "-c", f"which {' '.join(names)}")
    assert len(done.stdout.splitlines()) == len(names), done.stdout
    assert containers.run("tridock", "--version").stdout.startswith("tridock ")


# ---- Compose and make ----------------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """This working tree as a fresh clone of it would be: what git knows or would add, and nothing else."""
    # Compose names its project, and the project's network, as the folder.
    folder = tmp_path / own_name()
    names = succeed("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def compose(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return execute("docker", "compose", *arguments, cwd=folder, env={**os.environ, **environment})


def test_compose_runs_a_command_in_a_fresh_clone(clone: Path, cpu_image: str) -> None:
    give(clone, 4321)
    try:
        script = 'id -u; pwd; echo made >made; echo "$DATA_PATH $GPUS_PER_NODE ${NODE_RANK-unset}"'
        given = {"TRIDOCK_IMAGE": cpu_image, "DATA_PATH": "data/my text", "GPUS_PER_NODE": "3"}
        done = compose(clone, "run", "--rm", "-T", "trainer", "sh", "-c", script, **given)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "4321\n/workspace\ndata/my text 3 unset\n"
        assert [line for line in done.stderr.splitlines() if "Network" not in line and "Container" not in line] == []
        assert (clone / "made").stat().st_uid == 4321
    finally:
        compose(clone, "down", "--remove-orphans")


def test_compose_builds_the_image_where_there_is_none(clone: Path, cpu_image: str) -> None:
    for wheel in (ROOT / "locks/wheels").glob("*.whl"):
        shutil.copy2(wheel, clone / "locks/wheels")
    try:
        arguments = ("run", "--rm", "-T", "trainer", "tridock", "--version")
        done = compose(clone, *arguments, TRIDOCK_IMAGE=f"{clone.name}:compose")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith("tridock ")
    finally:
        compose(clone, "down", "--remove-orphans")
        execute("docker", "image", "rm", "--force", f"{clone.name}:compose")


def test_compose_starts_no_node_without_keys(clone: Path, cpu_image: str) -> None:
    try:
        done = compose(clone, "--profile", "twin", "up", "--detach", "node-1", TRIDOCK_IMAGE=cpu_image)
        assert done.returncode != 0
        assert "bind source path does not exist" in done.stderr
        assert not (clone / ".tridock").exists()
    finally:
        compose(clone, "--profile", "twin", "down", "--remove-orphans")


def image_error(**variables: str) -> tuple[int, str]:
    arguments = [f"{name}={value}" for name, value in variables.items() if name != "DOCKER_HOST"]
    done = execute("make", "--no-print-directory", "image", *arguments, cwd=ROOT, env={**os.environ, **variables})
    return done.returncode, done.stderr.splitlines()[0]


def test_a_flavor_that_is_none(docker: str) -> None:
    text = "FLAVOR: neither cpu nor gpu; got tpu; write FLAVOR=cpu for the twin's image, or leave it out"
    assert image_error(FLAVOR="tpu") == (2, text)


def test_a_ca_file_that_is_not_there(docker: str) -> None:
    text = "CA: no such file, or it cannot be read; got /nowhere.pem; name a file of PEM certificates"
    assert image_error(FLAVOR="cpu", CA="/nowhere.pem") == (2, text)


def test_a_base_that_cannot_be_pulled(docker: str) -> None:
    status, stderr = image_error(FLAVOR="cpu", BASE_IMAGE="localhost:1/none:1")
    assert status == 2  # make's own, whatever the script's
    assert re.fullmatch(
        r"localhost:1/none:1: the base image cannot be pulled; got .*connection refused; "
        r"log in to its registry, or name another \(BASE_IMAGE, or --base-image\)",
        stderr,
    )


def test_no_engine(docker: str) -> None:
    status, stderr = image_error(FLAVOR="cpu", DOCKER_HOST="unix:///nowhere.sock")
    assert status == 2
    assert stderr == (
        "docker: no engine answers; got Cannot connect to the Docker daemon at unix:///nowhere.sock. "
        f"Is the docker daemon running?; start it, or run {ROOT}/tools/docker-engine.sh as root on Debian"
    )
