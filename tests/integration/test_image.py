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

from tests.integration.support import ROOT, Containers, execute, inside, succeed, wait_until

SITE_PACKAGES = "opt/venv/lib/"

# A value that meets every quoting rule between a Dockerfile's ENV and a process: sshd's, bash's and pdsh's.
AWKWARD = r"""a  "b" 'c' \d $HOME `e` #f ; & | ( ) * é"""


def label(image: str, name: str) -> str:
    return succeed("docker", "image", "inspect", "--format", f'{{{{index .Config.Labels "{name}"}}}}', image).strip()


# ---- what is in the layers -----------------------------------------------------------------------


def keys_in_layer(layer: IO[bytes]) -> Iterator[str]:
    with tarfile.open(fileobj=layer, mode="r|") as files:
        for file in files:
            if re.search(r"(^|/)(ssh_host_|id_(rsa|ecdsa|ed25519)|authorized_keys)", file.name):
                yield file.name
            elif file.isfile() and file.size < 20_000 and not file.name.startswith(SITE_PACKAGES):
                content = files.extractfile(file)
                if content is not None and re.match(rb"\s*-----BEGIN [A-Z ]*PRIVATE KEY-----", content.read()):
                    yield file.name


def test_no_key_of_any_kind_in_any_layer(cpu_image: str) -> None:
    found: list[str] = []
    process = subprocess.Popen(["docker", "save", cpu_image], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with tarfile.open(fileobj=process.stdout, mode="r|") as image:
        for entry in image:
            layer = image.extractfile(entry) if entry.isfile() else None
            if layer is None or not (entry.name.endswith("layer.tar") or entry.name.startswith("blobs/")):
                continue
            with contextlib.suppress(tarfile.ReadError):  # a blob that is JSON
                found += keys_in_layer(layer)
    assert process.wait() == 0
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
for name in ("ShareMemCommBuilder", "CPUAdamBuilder", "FusedAdamBuilder"):
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


@pytest.mark.parametrize("uid", [0, 1000, 54321])
def test_files_belong_to_the_owner_of_the_workspace(containers: Containers, workspace: Path, uid: int) -> None:
    os.chown(workspace, uid, uid)
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


def test_started_with_user_it_stays_that_user(containers: Containers, workspace: Path) -> None:
    os.chown(workspace, 4321, 4322)
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


# ---- a node --------------------------------------------------------------------------------------

ENVIRONMENT = {
    "AWKWARD": AWKWARD,
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "EMPTY": "",
    "GLOO_SOCKET_IFNAME": "eth0",
    "HF_HOME": "/workspace/.hf",
    "LD_LIBRARY_PATH": "/usr/local/lib:/opt/lib with a space",
    "NCCL_SOCKET_IFNAME": "^lo,docker0",
    "OMP_NUM_THREADS": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
# What each way in has of its own: who and where the process is, and the connection that it came by.
OWN = re.compile(r"HOME|USER|LOGNAME|SHELL|SHLVL|PWD|OLDPWD|HOSTNAME|TERM|MAIL|_|SSH_.*|TRIDOCK_NODE")


def parsed(text: str) -> dict[str, str]:
    """The shared part of what `env` printed."""
    pairs = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {name: value for name, value in pairs.items() if OWN.fullmatch(name) is None}


@pytest.mark.parametrize("uid", [0, 4321])
def test_every_way_in_has_the_same_environment(start_twin, uid: int) -> None:
    twin = start_twin(uid, environment=ENVIRONMENT)
    one = twin["node-1"]
    by_exec = parsed(inside(one, "env"))
    ways = {
        "ssh": inside(one, "ssh", "node-2", "env"),
        "ssh, a script": inside(one, "ssh", "node-2", "bash -c env"),
        "ssh, a login shell": inside(one, "ssh", "node-2", "bash -lc env"),
        "ssh, a terminal": inside(one, "ssh", "-tt", "node-2", "bash -lic env").replace("\r", ""),
        "pdsh": re.sub("^node-2: ", "", inside(one, "pdsh", "-w", "node-2", "env"), flags=re.MULTILINE),
        "exec, a login shell": inside(one, "bash", "-lc", "env"),
        "exec, an interactive login shell": inside(one, "bash", "-lic", "env"),
        "exec, an interactive shell": inside(one, "bash", "-ic", "env"),
        "exec, a login sh": inside(one, "sh", "-lc", "env"),
    }
    assert {**by_exec, **ENVIRONMENT} == by_exec
    assert by_exec["PATH"].startswith("/opt/venv/bin:/opt/tridock/entrypoint:")
    assert {way: parsed(text) for way, text in ways.items()} == dict.fromkeys(ways, by_exec)
    whoami = inside(one, "ssh", "node-2", "id -u; echo $USER $HOME")
    assert whoami.splitlines() == [str(uid), "tridock /home/tridock"]


def test_a_run_id_does_not_reach_other_sessions(start_twin) -> None:
    twin = start_twin(environment={"TRIDOCK_RUN_ID": "a-20260101-000000-0000", "TRIDOCK_WORLD_SIZE": "2"})
    for words in (("ssh", "node-2", "env"), ("ssh", "node-2", "bash -lc env")):
        assert "TRIDOCK_RUN_ID" not in inside(twin["node-1"], *words)


def test_sshd_takes_keys_and_nothing_else(start_twin) -> None:
    twin = start_twin(4321)
    settings = inside(twin["node-2"], "/usr/sbin/sshd", "-T", "-f", "/run/tridock/state/sshd_config").splitlines()
    for setting in (
        "passwordauthentication no",
        "kbdinteractiveauthentication no",
        "permitemptypasswords no",
        "authenticationmethods publickey",
        "disableforwarding yes",
        "permituserenvironment no",
        "usepam no",
        "allowusers tridock",
        "hostkey /run/tridock/secrets/ssh_host_ed25519_key",
        "strictmodes yes",
        "port 2222",
    ):
        assert setting in settings
    stranger = "ssh-keygen -q -t ed25519 -N '' -f /tmp/k && ssh -i /tmp/k -o IdentitiesOnly=yes -F none -p 2222"
    stranger += " -o UserKnownHostsFile=/run/tridock/secrets/known_hosts tridock@node-2 true"
    done = execute("docker", "exec", "--user", "tridock", twin["node-1"], "sh", "-c", stranger)
    assert done.returncode == 255
    assert "tridock@node-2: Permission denied (publickey)." in done.stderr


def test_sshd_runs_as_the_operator(start_twin) -> None:
    twin = start_twin(4321)
    assert inside(twin["node-1"], "ps", "-o", "user=", "-C", "sshd").split() == ["tridock"]


def test_sixty_four_connections_at_once(start_twin) -> None:
    twin = start_twin()
    script = "seq 64 | xargs -P 64 -I{} ssh node-2 echo {} | sort -n | tr '\\n' ' '"
    assert inside(twin["node-1"], "sh", "-c", script).split() == [str(n) for n in range(1, 65)]


def test_health_follows_sshd(start_twin, containers: Containers) -> None:
    twin = start_twin()
    inside(twin["node-1"], "healthcheck.sh")
    status = ["docker", "inspect", "--format", "{{.State.Health.Status}}", twin["node-1"]]
    wait_until(lambda: succeed(*status).strip() == "healthy", "healthy")
    assert execute("docker", "exec", containers.start("sleep", "60"), "healthcheck.sh").returncode == 0


def test_a_node_whose_sshd_does_not_greet_is_not_healthy(containers: Containers) -> None:
    # The command line of a node's first process, with no sshd behind it.
    options = ["--entrypoint", "tini"]
    name = containers.start("-s", "--", "sh", "-c", "sleep 60", "/entrypoint.sh", "node", options=options)
    done = execute("docker", "exec", name, "healthcheck.sh")
    assert (done.returncode, done.stdout) == (1, "sshd has not been started\n")

    state = "/run/tridock/state/sshd_config"
    inside(name, "sh", "-c", f"printf 'Port 2222\nListenAddress 127.0.0.1\n' >{state}", user="root")
    done = execute("docker", "exec", name, "healthcheck.sh")
    assert (done.returncode, done.stdout) == (1, "nothing listens on 127.0.0.1 port 2222\n")

    server = "import socket; s = socket.create_server(('127.0.0.1', 2222)); s.accept()[0].sendall(b'hello\\n')"
    succeed("docker", "exec", "--detach", name, "python", "-c", server)
    wait_until(lambda: inside(name, "ss", "-ltnH", "sport = :2222", user="root") != "", "something listens")
    done = execute("docker", "exec", name, "healthcheck.sh")
    assert (done.returncode, done.stdout) == (1, "127.0.0.1 port 2222 is not an ssh server; got 'hello'\n")


def test_a_hangup_takes_new_host_keys_and_keeps_sessions(start_twin, secrets) -> None:
    twin = start_twin()
    session = subprocess.Popen(
        ["docker", "exec", "--user", "tridock", twin["node-1"], "ssh", "node-2", "sleep 3; echo still here"],
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: "Accepted publickey" in execute("docker", "logs", twin["node-2"]).stderr, "logged in")
    new = secrets("node-1", "node-2")
    for node in ("node-1", "node-2"):
        for file in new[node].iterdir():
            shutil.copy(file, twin.secrets[node] / file.name)
    inside(twin["node-2"], "sh", "-c", "kill -HUP $(cat /run/tridock/state/sshd.pid)")
    wait_until(
        lambda: execute("docker", "exec", "--user", "tridock", twin["node-1"], "ssh", "node-2", "true").returncode == 0,
        "the new keys open the door",
    )
    assert session.communicate(timeout=20)[0] == "still here\n"


def test_a_node_can_be_restarted(start_twin) -> None:
    twin = start_twin(4321)
    succeed("docker", "restart", "--time", "5", twin["node-2"])
    wait_until(
        lambda: execute("docker", "exec", twin["node-2"], "healthcheck.sh").returncode == 0, "healthy after a restart"
    )
    assert inside(twin["node-1"], "ssh", "node-2", "id -un").strip() == "tridock"


def test_a_node_stops_at_once(start_twin) -> None:
    twin = start_twin()
    succeed("docker", "stop", "--time", "20", twin["node-1"], timeout=10)


def test_a_node_started_with_user(containers: Containers, secrets, tmp_path: Path) -> None:
    folder = secrets("node-1", uid=4321)["node-1"]
    passwd = tmp_path / "passwd"
    passwd.write_text("root:x:0:0::/root:/bin/bash\ntridock:*:4321:4321::/home/tridock:/bin/bash\n")
    options = ["--user", "4321:4321", "--hostname", "node-1", "--volume", f"{folder}:/run/tridock/secrets:ro"]
    name = containers.start("node", options=[*options, "--volume", f"{passwd}:/etc/passwd:ro"])
    wait_until(lambda: execute("docker", "exec", name, "healthcheck.sh").returncode == 0, "healthy")
    assert inside(name, "ssh", "node-1", "id -u", user="4321:4321").strip() == "4321"


# ---- what a node needs, and says when it is not there --------------------------------------------


def failing_node(containers: Containers, *options: str) -> tuple[int, str]:
    done = containers.run("node", options=["--hostname", "box", "--env", "TRIDOCK_NODE=node-1", *options])
    return done.returncode, done.stderr


def test_no_secrets(containers: Containers) -> None:
    assert failing_node(containers) == (
        3,
        "node-1: the node's key material is missing; got no /run/tridock/secrets/ssh_host_ed25519_key; "
        "run 'fab keys' for this cluster and mount its folder on /run/tridock/secrets\n",
    )


def test_secrets_of_somebody_else(containers: Containers, secrets) -> None:
    folder = secrets("node-1", uid=4321)["node-1"]
    mount = ["--volume", f"{folder}:/run/tridock/secrets:ro", "--env", "TRIDOCK_GID=4322"]
    assert failing_node(containers, *mount, "--env", "TRIDOCK_UID=4322") == (
        3,
        "node-1: the node's key material cannot be read by uid 4322; got /run/tridock/secrets of uid 4321; "
        "give the folder to the operator, or set TRIDOCK_UID to its owner\n",
    )
    assert failing_node(containers, *mount, "--env", "TRIDOCK_UID=0") == (
        3,
        "node-1: the node's key material belongs to somebody else; got /run/tridock/secrets of uid 4321; "
        "give the folder to the operator, or set TRIDOCK_UID to its owner\n",
    )


def test_a_private_key_open_to_others(containers: Containers, secrets) -> None:
    folder = secrets("node-1")["node-1"]
    (folder / "id_ed25519").chmod(0o640)
    assert failing_node(containers, "--volume", f"{folder}:/run/tridock/secrets:ro") == (
        3,
        "node-1: a private key is open to others; got /run/tridock/secrets/id_ed25519 with mode 640; "
        "chmod 600 it on the host\n",
    )


def test_a_folder_that_others_may_write_to(containers: Containers, secrets) -> None:
    folder = secrets("node-1")["node-1"]
    folder.chmod(0o777)
    assert failing_node(containers, "--volume", f"{folder}:/run/tridock/secrets:ro") == (
        3,
        "node-1: others may write to the node's key material; got /run/tridock/secrets with mode 777; "
        "chmod 700 the folder and 600 its files on the host\n",
    )


def test_a_broken_host_key(containers: Containers, secrets) -> None:
    folder = secrets("node-1")["node-1"]
    (folder / "ssh_host_ed25519_key").write_text("no key\n")
    status, words = failing_node(containers, "--volume", f"{folder}:/run/tridock/secrets:ro")
    assert status == 3
    assert words == (
        "node-1: sshd refuses its configuration; "
        'got Unable to load host key "/run/tridock/secrets/ssh_host_ed25519_key": error in libcrypto | '
        "Unable to load host key: /run/tridock/secrets/ssh_host_ed25519_key | "
        "sshd: no hostkeys available -- exiting.; "
        "mend what it names ('fab keys --rotate' makes all keys anew)\n"
    )


def test_a_port_that_is_none(containers: Containers) -> None:
    assert failing_node(containers, "--env", "TRIDOCK_SSH_PORT=99999") == (
        2,
        "node-1: TRIDOCK_SSH_PORT is not a port; got 99999; set it to a number from 1 to 65535\n",
    )


def test_a_port_that_is_taken(start_twin, containers: Containers) -> None:
    twin = start_twin()
    options = ["--network", f"container:{twin['node-1']}", "--env", "TRIDOCK_NODE=node-3"]
    options += ["--volume", f"{twin.secrets['node-1']}:/run/tridock/secrets:ro"]
    done = containers.run("node", options=options)
    assert done.returncode == 3
    assert done.stderr == (
        "node-3: sshd cannot listen on 0.0.0.0 port 2222; got Address already in use; "
        "stop what listens there ('ss -ltnp' on the host shows it), "
        "or change the cluster's ssh port or listen address\n"
    )


def test_an_address_that_is_not_this_hosts(containers: Containers, secrets) -> None:
    folder = secrets("node-1")["node-1"]
    options = ["--volume", f"{folder}:/run/tridock/secrets:ro", "--env", "TRIDOCK_SSH_LISTEN=127.0.0.1, 192.0.2.77"]
    assert failing_node(containers, *options) == (
        3,
        "node-1: sshd cannot listen on 192.0.2.77 port 2222; got Cannot assign requested address; "
        "stop what listens there ('ss -ltnp' on the host shows it), "
        "or change the cluster's ssh port or listen address\n",
    )


def test_a_node_started_with_a_user_that_has_no_name(containers: Containers) -> None:
    assert failing_node(containers, "--user", "4321") == (
        2,
        "node-1: sshd needs a passwd entry named tridock for the user it runs as; got uid 4321; "
        "start the container as root (it drops to the uid in TRIDOCK_UID by itself), "
        "or mount an /etc/passwd with that entry\n",
    )


def test_it_listens_where_it_is_told(containers: Containers, secrets) -> None:
    folder = secrets("node-1")["node-1"]
    options = ["--volume", f"{folder}:/run/tridock/secrets:ro", "--env", "TRIDOCK_SSH_LISTEN=127.0.0.1"]
    name = containers.start("node", options=[*options, "--env", "TRIDOCK_SSH_PORT=2345"])
    wait_until(lambda: execute("docker", "exec", name, "healthcheck.sh").returncode == 0, "healthy")
    for _ in range(3):
        inside(name, "healthcheck.sh", user="root")
    # One greeting is in the log, however often the node's health is asked for.
    log = execute("docker", "logs", name).stderr.splitlines()
    assert log[0] == "Server listening on 127.0.0.1 port 2345."
    assert [re.sub(r"port \d+$", "port N", line) for line in log[1:]] == [
        "kex_exchange_identification: Connection closed by remote host",
        "Connection closed by 127.0.0.1 port N",
    ]


# ---- Compose and make ----------------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """This working tree as a fresh clone of it would be: what git knows or would add, and nothing else."""
    folder = tmp_path / "clone"
    names = succeed("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def compose(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return execute("docker", "compose", *words, cwd=folder, env={**os.environ, **environment})


def test_compose_runs_a_command_in_a_fresh_clone(clone: Path, cpu_image: str) -> None:
    os.chown(clone, 4321, 4321)
    try:
        done = compose(clone, "run", "--rm", "-T", "trainer", "sh", "-c", "id -u; pwd; echo made >made")
        assert done.returncode == 0, done.stderr
        assert done.stdout == "4321\n/workspace\n"
        assert [line for line in done.stderr.splitlines() if "Network" not in line and "Container" not in line] == []
        assert (clone / "made").stat().st_uid == 4321
    finally:
        compose(clone, "down", "--remove-orphans")


def test_compose_builds_the_image_where_there_is_none(clone: Path, cpu_image: str) -> None:
    for wheel in (ROOT / "locks/wheels").glob("*.whl"):
        shutil.copy2(wheel, clone / "locks/wheels")
    try:
        words = ("run", "--rm", "-T", "trainer", "tridock", "--version")
        done = compose(clone, *words, TRIDOCK_IMAGE="tridock:compose-test")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith("tridock ")
    finally:
        compose(clone, "down", "--remove-orphans")
        execute("docker", "image", "rm", "--force", "tridock:compose-test")


def test_compose_starts_no_node_without_keys(clone: Path, cpu_image: str) -> None:
    try:
        done = compose(clone, "--profile", "twin", "up", "--detach", "node-1")
        assert done.returncode != 0
        assert "bind source path does not exist" in done.stderr
        assert not (clone / ".tridock").exists()
    finally:
        compose(clone, "--profile", "twin", "down", "--remove-orphans")


def image_error(**variables: str) -> tuple[int, str]:
    words = [f"{name}={value}" for name, value in variables.items() if name != "DOCKER_HOST"]
    done = execute("make", "--no-print-directory", "image", *words, cwd=ROOT, env={**os.environ, **variables})
    return done.returncode, done.stderr.splitlines()[0]


def test_a_flavor_that_is_none(docker: str) -> None:
    words = "FLAVOR: neither cpu nor gpu; got tpu; write FLAVOR=cpu for the twin's image, or leave it out"
    assert image_error(FLAVOR="tpu") == (2, words)


def test_a_ca_file_that_is_not_there(docker: str) -> None:
    words = "CA: no such file, or it cannot be read; got /nowhere.pem; name a file of PEM certificates"
    assert image_error(FLAVOR="cpu", CA="/nowhere.pem") == (2, words)


def test_a_base_that_cannot_be_pulled(docker: str) -> None:
    status, words = image_error(FLAVOR="cpu", BASE_IMAGE="localhost:1/none:1")
    assert status == 2  # make's own, whatever the script's
    assert re.fullmatch(
        r"localhost:1/none:1: the base image cannot be pulled; got .*connection refused; "
        r"log in to its registry, or name another with BASE_IMAGE",
        words,
    )


def test_no_engine(docker: str) -> None:
    status, words = image_error(FLAVOR="cpu", DOCKER_HOST="unix:///nowhere.sock")
    assert status == 2
    assert words == (
        "docker: no engine answers; got Cannot connect to the Docker daemon at unix:///nowhere.sock. "
        "Is the docker daemon running?; start it, or run tools/docker-engine.sh as root on Debian"
    )
