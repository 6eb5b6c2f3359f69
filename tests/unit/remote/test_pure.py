"""The parts of the remote room that contact nobody: messages, ssh's answers, scripts, fan-out over fake hosts."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.patience import STEP_S
from tridock.cluster.settings import load_cluster
from tridock.command import Command
from tridock.errors import ClusterError, Problem, RequestError
from tridock.remote import LocalHost, Outcome, connect, on_all, raise_failures
from tridock.remote.files import put_tree_command
from tridock.remote.host import Completed, Host, remedy_of, shortened
from tridock.remote.ssh import SshHost
from tridock.remote.ssh_errors import Target, connection_problem, is_transient

TARGET = Target("192.0.2.1", "2200", "ops")


# ---- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem", "transient"),
    [
        (
            "ssh: connect to host 192.0.2.1 port 2200: No route to host",
            "node-1: does not answer ssh at 192.0.2.1 port 2200; got No route to host; "
            "see that it is up, that its sshd listens at that port (ssh.port), and that no firewall stands between",
            False,
        ),
        (
            "ssh: connect to host 192.0.2.1 port 2200: Connection refused",
            "node-1: does not answer ssh at 192.0.2.1 port 2200; got Connection refused; "
            "see that it is up, that its sshd listens at that port (ssh.port), and that no firewall stands between",
            True,
        ),
        (
            "ssh: connect to host 192.0.2.7 port 22: Connection timed out\nConnection closed by UNKNOWN port 65535",
            "node-1: its jump host does not answer ssh at 192.0.2.7 port 22; got Connection timed out; "
            "see that it is up, that its sshd listens at that port (ssh.port), and that no firewall stands between",
            False,
        ),
        (
            "Connection timed out during banner exchange\nConnection to 192.0.2.1 port 2200 timed out",
            "node-1: does not answer ssh at 192.0.2.1 port 2200; got Connection timed out during banner exchange; "
            "see that it is up, that its sshd listens at that port (ssh.port), and that no firewall stands between",
            False,
        ),
        (
            "Unable to negotiate with 192.0.2.1 port 2200: no matching cipher found. Their offer: aes128-cbc",
            "node-1: opens no session as ops@192.0.2.1 port 2200; got Unable to negotiate with 192.0.2.1 port 2200: "
            "no matching cipher found. Their offer: aes128-cbc; "
            "see `ssh -p 2200 ops@192.0.2.1 -v`; MaxSessions in its sshd_config limits their number",
            False,
        ),
        (
            "ops@192.0.2.1: Permission denied (publickey,keyboard-interactive).",
            "node-1: refuses the login as ops@192.0.2.1 port 2200; "
            "got Permission denied (publickey,keyboard-interactive); "
            "make `ssh -p 2200 ops@192.0.2.1` work: ssh-copy-id, ssh-add, or ssh.user and ssh.identity_file",
            False,
        ),
        (
            "kex_exchange_identification: read: Connection reset by peer\nConnection reset by 192.0.2.1 port 2200",
            "node-1: drops connections before the login as ops@192.0.2.1 port 2200; got kex_exchange_identification: "
            "read: Connection reset by peer; see that an sshd listens there; "
            "lower ssh.max_connections, or raise MaxStartups in its sshd_config",
            True,
        ),
        ("something new", "None", False),
    ],
)
def test_what_ssh_says_is_explained(text: str, problem: str, transient: bool) -> None:
    assert str(connection_problem("node-1", TARGET, text, 1)) == problem
    assert is_transient(text) is transient


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
        ("write /x: No space left on device",
         "free some space there (docker system df shows Docker's share; df -i the inodes)"),
        ("mkdir: Read-only file system", "choose another folder there (workdir in the settings)"),
        ("Cannot connect to the Docker daemon at unix:///x.sock.", "start Docker there (systemctl start docker)"),
        ("permission denied while trying to connect to docker.sock", "add the ssh user to the docker group there"),
        ("mkdir: cannot create directory: Permission denied", "give the ssh user the right to it there"),
        ("bind: address already in use", "end or remove what has it there, or choose another"),
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


# ---- scripts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", ".."])
def test_trees_stay_in_their_folder(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^not a plain path inside a folder: {name!r}$".replace(".", r"\.")):
        put_tree_command({name: b""}, "/folder", 0o644)


def test_contents_travel_on_standard_input_only() -> None:
    secret = b"BEGIN PRIVATE KEY"
    command = put_tree_command({"id": secret}, "~/x", 0o600)
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


def test_the_script_passes_shellcheck(tmp_path: Path) -> None:
    command = put_tree_command({}, "x", 0o644)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck is not None
    path = tmp_path / "put.sh"
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


def test_ctrl_c_waits_for_what_an_action_undoes_and_ends_its_next_command() -> None:
    undone = []
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    begun = threading.Barrier(2, timer.start)

    def work(name: str, host: Host) -> None:
        begun.wait(STEP_S)
        try:
            host.run(Command.of("sleep", "9960"))
            host.run(Command.of("sleep", "9961"))
        finally:
            time.sleep(0.2)
            undone.append(name)

    with pytest.raises(KeyboardInterrupt):
        on_all({"a": LocalHost("a"), "b": LocalHost("b")}, work, cap=2)
    timer.join()
    assert sorted(undone) == ["a", "b"]


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
        full.wait(STEP_S)
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


def test_hosts_of_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "lab").write_text("a slots=1\n::1 slots=1\nc slots=1\n")
    cluster = load_cluster(tmp_path / "lab", exclude="c")
    hosts = connect(cluster)
    assert list(hosts) == ["a", "ip6---1"]
    other = hosts["ip6---1"]
    assert isinstance(other, SshHost)
    assert (other.name, other._login.address) == ("ip6---1", "::1")
    (tmp_path / "lab.yaml").write_text("transport: compose\n")
    local = connect(load_cluster(tmp_path / "lab"))
    assert [(type(host), host.name) for host in local.values()] == [(LocalHost, n) for n in ("a", "ip6---1", "c")]
