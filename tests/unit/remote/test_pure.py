"""The parts of the remote room that contact nobody: messages, ssh's answers, scripts, fan-out over fake hosts."""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import paramiko
import pytest
from paramiko.hostkeys import HostKeyEntry, HostKeys
from paramiko.ssh_exception import ChannelException, IncompatiblePeer, NoValidConnectionsError

from tridock.cluster.settings import load_cluster
from tridock.command import Command
from tridock.errors import ClusterError, Problem, RequestError
from tridock.remote import LocalHost, Outcome, connect, on_all, raise_failures, ssh_config, ssh_connection
from tridock.remote.files import get_command, put_command, put_tree_command
from tridock.remote.host import Completed, remedy_of, shortened
from tridock.remote.ssh import SshHost
from tridock.remote.ssh_config import Target, Wanted, parse, resolve
from tridock.remote.ssh_target import connection_problem, is_transient, known_keys

TARGET = Target("10.0.0.1", 2200, "ops", ("/k",), True, None, (), (), None)


# ---- messages --------------------------------------------------------------------------------------------------------


def problem(error: BaseException, attempts: int = 1) -> str:
    return str(connection_problem("node-1", TARGET, error, 10.0, attempts))


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__context__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            OSError(113, "No route to host"),
            "node-1: cannot be reached at 10.0.0.1 port 2200; got no route to host; "
            "check the address, the network between, and that the host is up",
        ),
        (
            NoValidConnectionsError({("10.0.0.1", 2200): OSError(113, "No route to host")}),
            "node-1: cannot be reached at 10.0.0.1 port 2200; got no route to host; "
            "check the address, the network between, and that the host is up",
        ),
        (
            IncompatiblePeer("Incompatible ssh peer (no acceptable kex algorithm)"),
            "node-1: its sshd and this machine have no algorithm in common; "
            "got Incompatible ssh peer (no acceptable kex algorithm); update one of the two: see ssh -v",
        ),
        (
            ChannelException(2, "Connect failed"),
            "node-1: its jump host cannot reach ops@10.0.0.1 port 2200; got Connect failed; "
            "check that host's sshd, as seen from the jump host",
        ),
        (
            paramiko.AuthenticationException("Authentication timeout."),
            "node-1: no ssh answer from 10.0.0.1 port 2200; got nothing within 10 s; "
            "check that the host is up and no firewall stands between, or raise ssh.connect_timeout",
        ),
        (
            paramiko.BadAuthenticationType("no", ["password", "keyboard-interactive"]),
            "node-1: refuses the login as ops@10.0.0.1 port 2200; "
            "got permission denied (password,keyboard-interactive) with key files /k; "
            "make `ssh -p 2200 ops@10.0.0.1` work without a password: "
            "ssh-copy-id, ssh-add, or ssh.user and ssh.identity_file",
        ),
        (
            paramiko.SSHException("something new"),
            "node-1: cannot be reached at 10.0.0.1 port 2200; got something new; "
            "check the address, the network between, and that the host is up",
        ),
    ],
)
def test_why_a_connection_failed(error: BaseException, text: str) -> None:
    assert problem(error) == text


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (ConnectionRefusedError(), True),
        (ConnectionResetError(), True),
        (EOFError(), True),
        (NoValidConnectionsError({("h", 1): ConnectionRefusedError()}), True),
        (caused(paramiko.SSHException("Error reading SSH protocol banner"), EOFError()), True),
        (caused(paramiko.SSHException("Error reading SSH protocol banner"), ConnectionResetError()), True),
        (caused(paramiko.SSHException("Error reading SSH protocol banner"), TimeoutError()), False),
        (paramiko.SSHException("Negotiation failed."), True),
        (paramiko.AuthenticationException("no"), False),
        (caused(paramiko.AuthenticationException("no"), EOFError()), False),
        (TimeoutError(), False),
        (OSError(113, "No route to host"), False),
        (paramiko.SSHException("something new"), False),
    ],
)
def test_what_is_tried_again(error: BaseException, transient: bool) -> None:
    assert is_transient(error) is transient


def test_a_failed_command() -> None:
    def text(code: int, out: bytes, err: bytes) -> str:
        with pytest.raises(ClusterError) as caught:
            Completed(code, out, err, "docker load").checked("node-1")
        return str(caught.value)

    done = Completed(0, b"", b"noise")
    assert done.checked("node-1") is done
    assert text(1, b"on stdout\n", b"") == (
        "node-1: `docker load` failed with exit code 1; got on stdout; fix that there, then try again"
    )
    assert text(1, b"ignored", b"1\n2\n\n 3 \n4\n") == (
        "node-1: `docker load` failed with exit code 1; got 3 | 4; fix that there, then try again"
    )
    assert (
        text(9, b"", b"")
        == "node-1: `docker load` failed with exit code 9; got no output; fix that there, then try again"
    )
    assert text(1, b"", b"\xff\n").startswith("node-1: `docker load` failed with exit code 1; got \ufffd; ")


@pytest.mark.parametrize(
    ("text", "todo"),
    [
        ("write /x: No space left on device", "free some space there (docker system df shows Docker's share)"),
        ("Disk quota exceeded", "free some space there (docker system df shows Docker's share)"),
        ("mkdir: Read-only file system", "choose another folder there (workdir in the settings)"),
        ("Cannot connect to the Docker daemon at unix:///x.sock.", "start Docker there (systemctl start docker)"),
        ("permission denied while trying to connect to docker.sock", "add the ssh user to the docker group there"),
        ("mkdir: cannot create directory: Permission denied", "give the ssh user the right to it there"),
        ("bind: address already in use", "end what holds the port there, or choose another"),
        ("container name is already in use", "remove what has that name there, or choose another"),
        ("only part of /x arrived", "see whether the connection is sound, then try again"),
        ("anything else", "fix that there, then try again"),
    ],
)  # fmt: skip
def test_remedies(text: str, todo: str) -> None:
    assert remedy_of(1, text) == todo


def test_a_command_in_a_message_is_short_and_keeps_its_secrets() -> None:
    assert shortened(Command.of("docker", "ps")) == "docker ps"
    assert shortened(Command.of("sh", "-c", "a\n  b\n")) == "sh -c 'a b '"
    long = shortened(Command.of("echo", "x" * 200))
    assert (len(long), long[-1]) == (70, "…")
    assert shortened(Command(("login", "--token=abc"), secrets=("abc",))) == "login '--token=*****'"


# ---- what ssh -G says ------------------------------------------------------------------------------------------------


def test_reading_sshs_answer(tmp_path: Path) -> None:
    for name in ("key one", "key-2200", "known", "global"):
        (tmp_path / name).touch()
    text = (
        f"user ops\nhostname 10.0.0.1\nport 2200\nidentityfile {tmp_path}/key one\nidentityfile {tmp_path}/missing\n"
        f"identityfile {tmp_path}/key-%p\nidentityagent none\nhostkeyalias rack\n"
        f"userknownhostsfile {tmp_path}/known {tmp_path}/known2\nglobalknownhostsfile {tmp_path}/global\n"
        "proxyjump ops@a:22,b\nproxycommand none\n"
    )
    assert parse(text, "node-1") == Target(
        host="10.0.0.1", port=2200, user="ops",
        identity_files=(f"{tmp_path}/key one", f"{tmp_path}/key-2200"), use_agent=False, host_key_alias="rack",
        known_hosts_files=(f"{tmp_path}/known", f"{tmp_path}/global"), jumps=("ops@a:22", "b"), proxy_command=None,
    )  # fmt: skip


def test_reading_a_proxy_command() -> None:
    target = parse("user u\nhostname h\nport 1\nproxycommand nc -x 'a%%b' %h %p %r %n %q\n", "node-1")
    assert target.proxy_command == "nc -x 'a%b' h 1 u node-1 %q"
    assert (target.jumps, target.use_agent, target.host_key_alias) == ((), True, None)


def test_ssh_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("ssh", 15)

    monkeypatch.setattr(ssh_config.subprocess, "run", late)
    with pytest.raises(ClusterError) as caught:
        resolve("node-1", "h", Wanted())
    assert str(caught.value) == "node-1: ssh -G did not end in time; got 15 s; look at the Match lines of ~/.ssh/config"


def test_known_keys_by_the_names_that_ssh_uses(tmp_path: Path) -> None:
    for name in ("a", "b"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    one, two = (" ".join((tmp_path / f"{name}.pub").read_text().split()[:2]) for name in ("a", "b"))
    known = tmp_path / "known"

    def found(text: str, **changes: Any) -> list[str]:
        known.write_text(text)
        fields = {name: getattr(TARGET, name) for name in TARGET.__slots__}
        target = Target(**{**fields, "known_hosts_files": ("/nonexistent", str(known)), **changes})
        return [f"{key.get_name()} {key.get_base64()}" for key in known_keys(target)]

    assert found(f"[10.0.0.1]:2200 {one}\n10.0.0.1 {two}\n") == [one]
    assert found(f"10.0.0.1 {two}\n") == [two], "ssh falls back on the name without its port"
    assert found(f"10.0.0.1 {two}\n", port=22) == [two]
    assert found(f"other {two}\n") == []
    assert found(f"rack {one}\n[10.0.0.1]:2200 {two}\n", host_key_alias="Rack") == [one]
    assert found("rubbish\n# note\n\n") == []


# ---- scripts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", ".."])
def test_trees_stay_in_their_folder(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^not a plain path inside a folder: {name!r}$".replace(".", r"\.")):
        put_tree_command({name: b""}, "/folder", 0o644)


def test_contents_travel_on_standard_input_only() -> None:
    secret = b"BEGIN PRIVATE KEY"
    for command in (put_command(secret, "~/x", 0o600), put_tree_command({"id": secret}, "~/x", 0o600)):
        assert secret.decode() not in str(command) + command.render() + repr(command)
        assert command.stdin is not None
        assert secret in command.stdin


def test_a_cut_tree_is_noticed(tmp_path: Path) -> None:
    """Cut between two files, a tar unpacks without a word: the last entry of ours says that all is there."""
    command = put_tree_command({"a": b"1" * 600, "b": b"2" * 600}, str(tmp_path / "x"), 0o644)
    assert command.stdin is not None
    with tarfile.open(fileobj=io.BytesIO(command.stdin)) as archive:
        cut = archive.getmembers()[1].offset
    for length in (cut, cut + 512, 0, 100):
        short = Command(command.argv, stdin=command.stdin[:length] + b"\0" * (1024 if length == cut else 0))
        done = LocalHost().run(short)
        assert done.exit_code != 0
        assert list((tmp_path / "x").iterdir()) == []
    assert (
        b"only part of the files"
        in LocalHost().run(Command(command.argv, stdin=command.stdin[:cut] + b"\0" * 1024)).stderr
    )
    assert LocalHost().run(command).exit_code == 0


def test_a_cut_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    command = put_command(b"0123456789", str(path), 0o644)
    done = LocalHost().run(Command(command.argv, stdin=b"01234"))
    assert (done.exit_code, done.stderr) == (1, f"only part of {path} arrived\n".encode())
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("file", "old")]


def test_every_script_passes_shellcheck(tmp_path: Path) -> None:
    commands = [
        put_command(b"", "x", 0o644),
        put_tree_command({}, "x", 0o644),
        get_command("x"),
    ]
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck is not None
    for number, command in enumerate(commands):
        path = tmp_path / f"{number}.sh"
        path.write_text("#!/bin/sh\n" + command.argv[2])
        done = subprocess.run([shellcheck, path], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "")


# ---- many hosts ------------------------------------------------------------------------------------------------------


class Wooden(LocalHost):
    closed = False

    def close(self) -> None:
        self.closed = True


def wooden(*names: str) -> dict[str, Wooden]:
    return {name: Wooden(name) for name in names}


def test_outcomes_keep_the_order_of_the_hosts() -> None:
    delays = {"a": 0.2, "b": 0.0, "c": 0.1}

    def work(name: str, _: Any) -> str:
        time.sleep(delays[name])
        return name.upper()

    outcomes = on_all(wooden("a", "b", "c"), work, cap=3)
    assert outcomes == {"a": Outcome("A"), "b": Outcome("B"), "c": Outcome("C")}
    assert list(outcomes) == ["a", "b", "c"]
    assert raise_failures(outcomes) == {"a": "A", "b": "B", "c": "C"}
    assert on_all({}, work, cap=3) == {}


@pytest.mark.parametrize(("cap", "most"), [(1, 1), (3, 3), (100, 8), (0, 1)])
def test_the_cap(cap: int, most: int) -> None:
    now, seen, lock, full = 0, [], threading.Lock(), threading.Event()

    def work(*_: Any) -> None:
        nonlocal now
        with lock:
            now += 1
            seen.append(now)
            if now == most:
                full.set()
        full.wait(30)
        time.sleep(0.01)
        with lock:
            now -= 1

    on_all(wooden(*"abcdefgh"), work, cap)
    assert max(seen) == most
    assert len(seen) == 8


def test_none_is_a_value() -> None:
    outcomes = on_all(wooden("a"), lambda *_: None, cap=1)
    assert outcomes["a"].ok
    assert raise_failures(outcomes) == {"a": None}


def failing(error: Exception) -> Outcome[int]:
    return Outcome(error=error)


def test_failures_of_one_kind_keep_it() -> None:
    problems = [Problem(name, "is wrong", "", "correct it") for name in "ab"]
    with pytest.raises(RequestError) as wrong:
        raise_failures({p.where: failing(RequestError(p)) for p in problems})
    assert str(wrong.value) == "a: is wrong; correct it\nb: is wrong; correct it"
    with pytest.raises(ClusterError) as mixed:
        raise_failures(
            {"a": failing(RequestError(problems[0])), "b": failing(ClusterError(problems[1])), "c": Outcome(1)}
        )
    assert str(mixed.value) == "a: is wrong; correct it\nb: is wrong; correct it\nc: no problem here; fix the others"


def test_a_bug_is_raised_as_it_is() -> None:
    def work(name: str, _: Any) -> None:
        if name == "b":
            raise KeyError(name)

    outcomes = on_all(wooden("a", "b"), work, cap=2)
    with pytest.raises(KeyError):
        raise_failures(outcomes)


def test_a_host_given_up_is_closed_and_its_place_goes_to_the_next() -> None:
    hosts, release = wooden("stuck", "next"), threading.Event()

    def work(name: str, _: Any) -> str:
        if name == "stuck":
            release.wait(20)
        return name

    outcomes = on_all(hosts, work, cap=1, timeout=0.4)
    release.set()
    assert (
        str(outcomes["stuck"].error) == "stuck: did not finish within 0.4 s; see what delays it there, then try again"
    )
    assert outcomes["next"] == Outcome("next")
    assert (hosts["stuck"].closed, hosts["next"].closed) == (True, False)


def test_hosts_of_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "lab").write_text("a slots=1\n::1 slots=1\nc slots=1\n")
    cluster = load_cluster(tmp_path / "lab", exclude="c")
    hosts = connect(cluster)
    assert list(hosts) == ["a", "ip6---1"]
    other = hosts["ip6---1"]
    assert isinstance(other, SshHost)
    assert (other.name, other.address) == ("ip6---1", "::1")
    (tmp_path / "lab.yaml").write_text("transport: compose\n")
    local = connect(load_cluster(tmp_path / "lab"))
    assert [(type(host), host.name) for host in local.values()] == [(LocalHost, n) for n in ("a", "ip6---1", "c")]


def test_host_keys_are_found_as_ssh_finds_them_and_only_theirs_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [paramiko.ECDSAKey.generate() for _ in range(4)]
    hashed = HostKeys.hash_host("[hashed]:2222")
    lines = [
        "# a comment", "", "nonsense", f"plain {keys[0].get_name()} not-base64!",
        f"plain,10.0.0.1 {keys[0].get_name()} {keys[0].get_base64()} its comment",
        f"{hashed} {keys[1].get_name()} {keys[1].get_base64()}",
        f"[other]:22 {keys[2].get_name()} {keys[2].get_base64()}",
        *(f"host-{number} {keys[3].get_name()} {keys[3].get_base64()}" for number in range(50)),
    ]  # fmt: skip
    file = tmp_path / "known_hosts"
    file.write_text("\n".join(lines) + "\n")
    parsed: list[str] = []
    real = HostKeyEntry.from_line
    monkeypatch.setattr(HostKeyEntry, "from_line", lambda line, *_: parsed.append(line) or real(line))

    def known(host: str, port: int) -> list[str]:
        target = Target(host, port, "ada", (), False, None, (str(file), f"{file}.missing"), (), None)
        return [key.get_base64() for key in known_keys(target)]

    assert known("plain", 22) == known("10.0.0.1", 22) == known("PLAIN", 2222) == [keys[0].get_base64()]
    assert known("hashed", 2222) == [keys[1].get_base64()]
    assert known("hashed", 22) == known("unknown", 22) == []
    assert len(parsed) < 10
    file.write_text(f"plain {keys[2].get_name()} {keys[2].get_base64()}\n")
    os.utime(file, ns=(1, 1))
    assert known("plain", 22) == [keys[2].get_base64()]


def test_a_connection_neither_holds_back_packets_nor_acknowledgements() -> None:
    """paramiko's own sockets would: each command takes 40 ms longer then."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as plain:
        plain.settimeout(7.0)
        with ssh_connection._prompt(plain) as sock, server.accept()[0] as peer:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            assert sock.gettimeout() == 7.0
            peer.sendall(b"SSH")
            assert sock.recv(10) == b"SSH"
    ours, theirs = socket.socketpair()  # as of a ProxyCommand
    with ours, theirs:
        assert ssh_connection._prompt(ours) is ours
