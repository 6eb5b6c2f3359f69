"""Keys and ssh configurations: the operator's, read as ssh reads them, and the cluster's own for its nodes."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.sshd import ROOT, SSHD, USER, Sshd, free_port, make_key, message, public, wait_until
from tests.patience import STEP_S
from tridock.command import Command
from tridock.errors import RequestError
from tridock.remote.ssh import SshHost

# ---- the operator's own ----------------------------------------------------------------------------------------------


def configured(shared: Sshd, folder: Path, text: str, **changes: object) -> SshHost:
    config = folder / "config"
    config.write_text(textwrap.dedent(text))
    host: dict[str, object] = {"address": "node-1", "port": None, "identity_file": None, "config_file": str(config)}
    return shared.host("node-1", **{**host, **changes})


def test_everything_can_come_from_the_ssh_configuration(shared: Sshd, tmp_path: Path) -> None:
    (tmp_path / "more.conf").write_text(f"Host node-*\n Port {shared.port}\n IdentityFile {shared.client_key}\n")
    host = configured(
        shared, tmp_path,
        f"""
        Include {tmp_path}/*.conf
        Match host node-1 exec "true"
          HostName 127.0.0.1
        Host *
          UserKnownHostsFile /nonexistent {shared.known_hosts}
        """,
    )  # fmt: skip
    assert host.run(Command.of("echo", "in")).stdout == b"in\n"


def test_a_host_key_alias_and_hashed_names(shared: Sshd, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(f"rack-node {public(shared.host_key)}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
    assert "rack-node" not in known.read_text()
    text = f"""
        Host node-1
          HostName 127.0.0.1
          HostKeyAlias rack-node
          Port {shared.port}
          IdentityFile {shared.client_key}
          UserKnownHostsFile {known}
    """
    assert configured(shared, tmp_path, text).run(Command.of("echo", "in")).stdout == b"in\n"


def test_a_host_with_several_kinds_of_key(make_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    """Only one of them is on file: it must be the one that is asked for, as ssh does."""
    ecdsa, rsa = make_key(tmp_path / "ecdsa", "-t", "ecdsa"), make_key(tmp_path / "rsa", "-t", "rsa")
    sshd = make_sshd(f"HostKey {ecdsa}\nHostKey {rsa}")
    for key in (ecdsa, rsa, sshd.host_key):
        sshd.known_hosts.write_text(f"[127.0.0.1]:{sshd.port} {public(key)}\n")
        assert sshd.host().run(Command.of("echo", "in")).stdout == b"in\n"
    # An old key of one kind beside the right one of another.
    old = make_key(tmp_path / "old", "-t", "rsa")
    sshd.known_hosts.write_text(
        "".join(f"[127.0.0.1]:{sshd.port} {public(key)}\n" for key in (sshd.host_key, ecdsa, old))
    )
    assert sshd.host().run(Command.of("echo", "in")).stdout == b"in\n"


def jump_config(first: Sshd, last: Sshd, known: Path) -> str:
    return f"""
        Host jump
          HostName 127.0.0.1
          Port {first.port}
          IdentityFile {first.client_key}
        Host node-1
          HostName 127.0.0.1
          Port {last.port}
          IdentityFile {last.client_key}
          ProxyJump jump
        Host *
          UserKnownHostsFile {known}
          GlobalKnownHostsFile none
    """


def test_through_a_jump_host(make_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    first, last = make_sshd(name="first"), make_sshd(name="last")
    known = tmp_path / "known_hosts"
    known.write_text(first.known_hosts.read_text() + last.known_hosts.read_text())
    host = configured(last, tmp_path, jump_config(first, last, known))
    # The jump host's own key counts as much as the last one's.
    known.write_text(last.known_hosts.read_text())
    assert message(lambda: host.run(Command.of("true"))) == (
        "node-1: its jump host's host key is not known here; "
        f"got No ED25519 host key is known for [127.0.0.1]:{first.port}; "
        f"compare it with the host's own (ssh-keygen -l), then take it over: ssh -p {first.port} 127.0.0.1"
    )
    known.write_text(first.known_hosts.read_text() + last.known_hosts.read_text())
    assert host.run(Command.of("echo", "in")).stdout == b"in\n"
    assert first.log.count("Accepted publickey") == 1
    last.stop()
    text = message(lambda: host.run(Command.of("true")))
    assert text.startswith(f"node-1: its jump host cannot reach {USER}@127.0.0.1 port {last.port}; got ")
    assert text.endswith("; check that host's sshd, as seen from the jump host")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            ("HostName 127.0.0.1", "HostName jump.invalid"),
            "its jump host's name cannot be resolved; got jump.invalid: ",
        ),
        (("Port {port}", "Port 1"), "its jump host does not answer ssh at 127.0.0.1 port 1; got Connection refused; "),
        (("IdentityFile {key}", "IdentityFile none"), "its jump host refuses the login as {user}@127.0.0.1; got "),
    ],
)
def test_a_jump_hosts_fault_is_the_jump_hosts(
    make_sshd: Callable[..., Sshd], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str], says: str
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    first, last = make_sshd(name="first"), make_sshd(name="last")
    known = tmp_path / "known_hosts"
    known.write_text(first.known_hosts.read_text() + last.known_hosts.read_text())
    facts = {"port": str(first.port), "key": str(first.client_key), "user": USER}
    text = jump_config(first, last, known).replace(change[0].format(**facts), change[1], 1)
    # Another address than the jump host's, as on a real network.
    text = text.replace(
        f"HostName 127.0.0.1\n          Port {last.port}", f"HostName 127.0.0.9\n          Port {last.port}"
    )
    host = configured(last, tmp_path, text)
    assert message(lambda: host.run(Command.of("true"))).startswith(f"node-1: {says.format(**facts)}")


def test_through_a_proxy_command(shared: Sshd, tmp_path: Path) -> None:
    relay = tmp_path / "relay.py"
    relay.write_text(
        "import os, socket, sys, threading\n"
        "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def up():\n"
        "    while part := os.read(0, 65536): s.sendall(part)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while part := s.recv(65536): os.write(1, part)\n"
    )
    text = f"""
        Host node-1
          HostName 127.0.0.1
          Port {shared.port}
          IdentityFile {shared.client_key}
          UserKnownHostsFile {shared.known_hosts}
          ProxyCommand {sys.executable} {relay} %h %p
    """
    assert configured(shared, tmp_path, text).run(Command.of("echo", "in"), timeout=STEP_S).stdout == b"in\n"


def test_a_key_with_a_passphrase_needs_an_agent(
    make_sshd: Callable[..., Sshd], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sshd = make_sshd()
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    plain = tmp_path / "plain"
    shutil.copy(sshd.client_key, plain)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", sshd.client_key], check=True)
    text = message(lambda: sshd.host().run(Command.of("true")))
    assert text.startswith(f"node-1: refuses the login as {USER}@127.0.0.1 port {sshd.port}; got Permission denied ")
    assert "ssh-add" in text
    socket_path = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket_path)], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket_path))
        # The socket is there a moment before the agent listens.
        wait_until(lambda: subprocess.run(["ssh-add", "-q", plain], check=False).returncode == 0)
        assert sshd.host().run(Command.of("echo", "in")).stdout == b"in\n"
    finally:
        agent.kill()
        agent.wait()


def test_what_ssh_asks_at_the_terminal_is_asked_once(make_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    """A key's passphrase here; a password, a code or a touch go the same way. Later commands ask nothing."""
    sshd = make_sshd()
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", sshd.client_key], check=True)
    script = textwrap.dedent(f"""
        from concurrent.futures import ThreadPoolExecutor
        from tridock.command import Command
        from tridock.remote.ssh import Login, SshHost
        login = Login('127.0.0.1', port={sshd.port}, identity_file={str(sshd.client_key)!r},
                      config_file={str(sshd.ssh_config)!r})
        hosts = [SshHost(name, login) for name in 'ab']
        with ThreadPoolExecutor() as pool:
            print(list(pool.map(lambda host: host.run(Command.of('echo', 'in')).stdout, hosts)))
        print(hosts[0].run(Command.of('echo', 'again')).stdout, flush=True)
    """)
    environment = {name: value for name, value in os.environ.items() if name not in ("SSH_AUTH_SOCK", "SSH_ASKPASS")}
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, "-c", script], environment)
    said = b""
    while b"again" not in said:
        said += os.read(terminal, 4096)
        if said.endswith(b"client_key': "):
            os.write(terminal, b"secret\n")
    os.waitpid(pid, 0)
    assert b"[b'in\\n', b'in\\n']" in said
    assert said.count(b"Enter passphrase") == 1
    assert sshd.log.count("Accepted publickey") == 1


def test_files_that_the_settings_name_must_be_there(shared: Sshd, tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    for field in ("identity_file", "config_file"):
        host = shared.host(**{field: str(missing)})
        assert message(lambda host=host: host.run(Command.of("true")), RequestError) == (  # type: ignore[misc]
            f"ssh.{field}: names a file that does not exist; got {missing}; correct the path"
        )


def test_a_broken_ssh_configuration(shared: Sshd, tmp_path: Path) -> None:
    text = message(lambda: configured(shared, tmp_path, "Prot 22\n").run(Command.of("true")), RequestError)
    assert text == (
        "node-1: ssh cannot read its configuration; "
        f"got {tmp_path}/config: line 1: Bad configuration option: prot; fix what it names"
    )


def test_a_long_folder_for_temporary_files(shared: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path has at most 107 bytes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert len(tempfile.gettempdir()) > 40
    assert shared.host().run(Command.of("echo", "here")).stdout == b"here\n"


def test_a_machine_without_ssh(shared: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert message(lambda: shared.host().run(Command.of("true"))) == (
        "this machine: has no ssh; got no ssh on PATH; install OpenSSH's client (openssh-client)"
    )


# ---- the cluster's own keys ------------------------------------------------------------------------------------------


def test_the_clusters_keys_let_its_nodes_in_and_nobody_else(make_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    from tridock.cluster.keys import ssh_config
    from tridock.cluster.settings import load_cluster
    from tridock.ops.hosts.keys import KeyStore

    port = free_port()
    (tmp_path / "lab").write_text("node-1 slots=1\nnode-2 slots=1\n")
    (tmp_path / "lab.yaml").write_text(
        f"ssh_port: {port}\nnodes: {{node-1: {{address: 127.0.0.1}}, node-2: {{address: 127.0.0.2}}}}\n"
    )
    cluster = load_cluster(tmp_path / "lab", project_folder=tmp_path)
    store = KeyStore(cluster)
    secrets = {node: tmp_path / "secrets" / node for node in ("node-1", "node-2")}

    def distribute() -> None:
        for node, folder in secrets.items():
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in store.node_files(node).items():
                (folder / name).write_bytes(content)
                (folder / name).chmod(0o600)

    distribute()
    config = tmp_path / "ssh_config"
    config.write_text(ssh_config(cluster, secrets=str(secrets["node-1"])))
    sshds = [node_sshd(secrets[node], address, port, tmp_path) for node, address in
             (("node-1", "127.0.0.1"), ("node-2", "127.0.0.2"))]  # fmt: skip
    try:
        ssh = ["ssh", "-F", str(config), "-l", USER]

        def are_open() -> bool:
            lines = [[*ssh, name, "true"] for name in ("node-1", "node-2")]
            return all(subprocess.run(line, capture_output=True, check=False).returncode == 0 for line in lines)

        wait_until(are_open)
        for name in ("node-1", "node-2", "127.0.0.1", "127.0.0.2"):
            assert subprocess.check_output([*ssh, name, "echo", "in"]) == b"in\n"
        if shutil.which("pdsh"):
            environment = {**os.environ, "PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS": f"-F {config} -l {USER} %h"}
            arguments = ["pdsh", "-S", "-f", "1024", "-w", "node-1,node-2", "echo rank %n"]
            out = subprocess.check_output(arguments, env=environment, text=True)
            assert sorted(out.splitlines()) == ["node-1: rank 0", "node-2: rank 1"]
        # The same key forwards nothing.
        forward = [*ssh, "-o", "ExitOnForwardFailure=yes", "-R", "0:localhost:1", "node-1", "true"]
        assert subprocess.run(forward, capture_output=True, check=False).returncode == 255
        assert denied(secrets["node-1"], make_key(tmp_path / "stranger"), port)
        # A node that shows another node's host key.
        arguments = [*ssh, "-o", "HostName=127.0.0.1", "-o", "HostKeyAlias=node-2", "node-2", "true"]
        swapped = subprocess.run(arguments, capture_output=True, check=False, text=True)
        assert swapped.returncode == 255
        assert "Host key verification failed." in swapped.stderr
        # Rotation: a session that is open continues, a new one needs the new keys, and gets them with them.
        session = subprocess.Popen([*ssh, "node-2", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert session.stdin is not None
        assert session.stdout is not None
        session.stdin.write(b"before\n")
        session.stdin.flush()
        assert session.stdout.readline() == b"before\n"
        old = tmp_path / "old"
        shutil.copytree(secrets["node-1"], old)
        store.rotate()
        distribute()
        for sshd in sshds:
            sshd.send_signal(signal.SIGHUP)
        wait_until(are_open)
        session.stdin.write(b"after\n")
        session.stdin.close()
        assert session.stdout.read() == b"after\n"
        assert session.wait() == 0
        # The old client key is let in nowhere, and who knows only the old host keys goes nowhere.
        assert denied(secrets["node-1"], old / "id_ed25519", port)
        old_config = tmp_path / "old_config"
        old_config.write_text(ssh_config(cluster, secrets=str(old)))
        arguments = ["ssh", "-F", str(old_config), "-l", USER, "node-2", "true"]
        stale = subprocess.run(arguments, capture_output=True, check=False, text=True)
        assert stale.returncode == 255
        assert "Host key verification failed." in stale.stderr
    finally:
        for sshd in sshds:
            sshd.kill()
            sshd.wait()


def denied(secrets: Path, key: Path, port: int) -> bool:
    """Whether a node that is recognised refuses this key."""
    options = ["BatchMode=yes", "IdentitiesOnly=yes", f"UserKnownHostsFile={secrets}/known_hosts"]
    arguments = ["ssh", "-F", "/dev/null", *(word for option in options for word in ("-o", option))]
    arguments += ["-p", str(port), "-i", str(key), "-l", USER, "127.0.0.1", "true"]
    done = subprocess.run(arguments, capture_output=True, check=False, text=True)
    return done.returncode == 255 and "Permission denied (publickey)" in done.stderr


def node_sshd(secrets: Path, address: str, port: int, folder: Path) -> subprocess.Popen[bytes]:
    config = folder / f"sshd-{address}"
    config.write_text(
        f"Port {port}\nListenAddress {address}\nHostKey {secrets}/ssh_host_ed25519_key\n"
        f"AuthorizedKeysFile {secrets}/authorized_keys\nPidFile none\nStrictModes no\nUsePAM no\n"
        "AuthenticationMethods publickey\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with (folder / f"log-{address}").open("ab") as log:
        return subprocess.Popen([str(SSHD), "-D", "-e", "-f", config], stderr=log)
