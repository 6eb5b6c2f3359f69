"""A container of the image as a node of a cluster: its ways in, and what it needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.support import Containers, execute, inside, succeed, wait_until
from tests.patience import STEP_S

# A value that meets every quoting rule between a Dockerfile's ENV and a process: sshd's, bash's and pdsh's.
AWKWARD = r"""a  "b" 'c' \d $HOME `e` #f ; & | ( ) * é"""
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


@pytest.mark.parametrize("uid", [pytest.param(0, marks=pytest.mark.full), 4321])
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
    for arguments in (("ssh", "node-2", "env"), ("ssh", "node-2", "bash -lc env")):
        assert "TRIDOCK_RUN_ID" not in inside(twin["node-1"], *arguments)


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


@pytest.mark.full
def test_sixty_four_connections_at_once(start_twin) -> None:
    twin = start_twin()
    # Sixty-four processes for two processors: a greeting may take its time.
    script = "seq 64 | xargs -P 64 -I{} ssh -o ConnectTimeout=120 node-2 echo {} | sort -n | tr '\\n' ' '"
    assert inside(twin["node-1"], "sh", "-c", script).split() == [str(n) for n in range(1, 65)]


def test_health_follows_sshd(start_twin, containers: Containers) -> None:
    twin = start_twin()
    inside(twin["node-1"], "healthcheck.sh")
    status = ["docker", "inspect", "--format", "{{.State.Health.Status}}", twin["node-1"]]
    wait_until(lambda: succeed(*status).strip() == "healthy", "healthy")
    assert execute("docker", "exec", containers.start("sleep", "9999"), "healthcheck.sh").returncode == 0


def test_a_node_whose_sshd_does_not_greet_is_not_healthy(containers: Containers) -> None:
    # The command line of a node's first process, with no sshd behind it.
    options = ["--entrypoint", "tini"]
    name = containers.start("-s", "--", "sh", "-c", "sleep 9999", "/entrypoint.sh", "node", options=options)
    done = execute("docker", "exec", name, "healthcheck.sh")
    assert (done.returncode, done.stdout) == (1, "sshd has not been started\n")

    state = "/run/tridock/state/sshd_config"
    inside(name, "sh", "-c", f"printf 'Port 2222\nListenAddress 127.0.0.1\n' >{state}", user="root")
    done = execute("docker", "exec", name, "healthcheck.sh")
    assert (done.returncode, done.stdout) == (1, "nothing listens on 127.0.0.1 port 2222\n")

    # To everybody: Docker asks for the container's health too.
    server = (
        "import socket\ns = socket.create_server(('127.0.0.1', 2222))\nwhile True: s.accept()[0].sendall(b'hello\\n')"
    )
    succeed("docker", "exec", "--detach", name, "python", "-c", server)
    wait_until(lambda: inside(name, "ss", "-ltnH", "sport = :2222", user="root") != "", "something listens")
    done = execute("docker", "exec", name, "healthcheck.sh")
    assert (done.returncode, done.stdout) == (1, "127.0.0.1 port 2222 is not an ssh server; got 'hello'\n")


def test_the_base_images_start_up_script_runs_once(containers: Containers, tmp_path: Path) -> None:
    """As NVIDIA's, which asks nvidia-smi, and puts the libraries of a newer driver on the path."""
    script = tmp_path / "base-image.sh"
    script.write_text("echo call >>/tmp/calls\nexport LD_LIBRARY_PATH=/compat\n")
    options = ["--volume", f"{script}:/base-image.sh:ro", "--env", "TRIDOCK_BASH_ENV=/base-image.sh"]
    name = containers.start("sleep", "9999", options=options)
    # The user is there a moment later than the container.
    shell = ("docker", "exec", "--user", "tridock", name, "bash", "-c", 'echo "$LD_LIBRARY_PATH"')
    wait_until(lambda: execute(*shell).stdout == "/compat\n", "the script has run")
    inside(name, "healthcheck.sh")
    assert inside(name, "cat", "/tmp/calls") == "call\n"


def test_a_hangup_takes_new_host_keys_and_keeps_sessions(start_twin, secrets) -> None:
    twin = start_twin()
    session = subprocess.Popen(
        ["docker", "exec", "-i", "--user", "tridock", twin["node-1"], "ssh", "node-2", "read -r it; echo still $it"],
        stdin=subprocess.PIPE,
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
    assert session.communicate("here\n", timeout=STEP_S)[0] == "still here\n"


def test_a_node_can_be_restarted(start_twin) -> None:
    twin = start_twin(4321)
    succeed("docker", "restart", "--time", "5", twin["node-2"])
    wait_until(
        lambda: execute("docker", "exec", twin["node-2"], "healthcheck.sh").returncode == 0, "healthy after a restart"
    )
    assert inside(twin["node-1"], "ssh", "node-2", "id -un").strip() == "tridock"


def test_a_node_stops_at_once(start_twin) -> None:
    twin = start_twin()
    succeed("docker", "stop", "--time", "9999", twin["node-1"], timeout=STEP_S)


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


def own(folder: Path) -> list[str]:
    """A node with these keys, as the user who runs the tests."""
    return ["--volume", f"{folder}:/run/tridock/secrets:ro", "--env", f"TRIDOCK_UID={os.getuid()}"]


def test_no_secrets(containers: Containers) -> None:
    assert failing_node(containers) == (
        3,
        "node-1: the node's key material is missing; got no /run/tridock/secrets/ssh_host_ed25519_key; "
        "run 'tridock keys' for this cluster and mount its folder on /run/tridock/secrets\n",
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
    assert failing_node(containers, *own(folder)) == (
        3,
        "node-1: a private key is open to others; got /run/tridock/secrets/id_ed25519 with mode 640; "
        "chmod 600 it on the host\n",
    )


def test_a_folder_that_others_may_write_to(containers: Containers, secrets) -> None:
    folder = secrets("node-1")["node-1"]
    folder.chmod(0o777)
    assert failing_node(containers, *own(folder)) == (
        3,
        "node-1: others may write to the node's key material; got /run/tridock/secrets with mode 777; "
        "chmod 700 the folder and 600 its files on the host\n",
    )


def test_a_broken_host_key(containers: Containers, secrets) -> None:
    folder = secrets("node-1")["node-1"]
    (folder / "ssh_host_ed25519_key").write_text("no key\n")
    status, stderr = failing_node(containers, *own(folder))
    assert status == 3
    assert stderr == (
        "node-1: sshd refuses its configuration; "
        'got Unable to load host key "/run/tridock/secrets/ssh_host_ed25519_key": error in libcrypto | '
        "Unable to load host key: /run/tridock/secrets/ssh_host_ed25519_key | "
        "sshd: no hostkeys available -- exiting.; "
        "fix what it names ('tridock keys --rotate' replaces all keys)\n"
    )


def test_a_port_that_is_none(containers: Containers) -> None:
    assert failing_node(containers, "--env", "TRIDOCK_SSH_PORT=99999") == (
        2,
        "node-1: TRIDOCK_SSH_PORT is not a port; got 99999; set it to a number from 1 to 65535\n",
    )


def test_a_port_that_is_taken(start_twin, containers: Containers) -> None:
    twin = start_twin()
    options = ["--network", f"container:{twin['node-1']}", "--env", "TRIDOCK_NODE=node-3"]
    options += own(twin.secrets["node-1"])
    done = containers.run("node", options=options)
    assert done.returncode == 3
    assert done.stderr == (
        "node-3: sshd cannot listen on 0.0.0.0 port 2222; got Address already in use; "
        "stop what listens there ('ss -ltnp' on the host shows it), "
        "or change the cluster's ssh port or listen address\n"
    )


def test_an_address_that_is_not_this_hosts(containers: Containers, secrets) -> None:
    folder = secrets("node-1")["node-1"]
    options = [*own(folder), "--env", "TRIDOCK_SSH_LISTEN=127.0.0.1, 192.0.2.77"]
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


def test_it_listens_on_the_configured_addresses(containers: Containers, secrets) -> None:
    folder = secrets("node-1")["node-1"]
    # Without Docker's own question for its health, which may come at the same moment as the first one here.
    options = [*own(folder), "--env", "TRIDOCK_SSH_LISTEN=127.0.0.1", "--no-healthcheck"]
    name = containers.start("node", options=[*options, "--env", "TRIDOCK_SSH_PORT=2345"])
    wait_until(lambda: execute("docker", "exec", name, "healthcheck.sh").returncode == 0, "healthy")
    for _ in range(3):
        inside(name, "healthcheck.sh", user="root")
    # One greeting is in the log, however often the node's health is asked for.
    logged = lambda: execute("docker", "logs", name).stderr.splitlines()  # noqa: E731
    wait_until(lambda: len(logged()) > 2, "sshd has written of the greeting")
    log = logged()
    assert log[0] == "Server listening on 127.0.0.1 port 2345."
    assert [re.sub(r"port \d+$", "port N", line) for line in log[1:]] == [
        "kex_exchange_identification: Connection closed by remote host",
        "Connection closed by 127.0.0.1 port N",
    ]
