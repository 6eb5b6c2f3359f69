"""`tridock exec`, `ssh` and `forward` through a real sshd on loopback, with a stand-in for Docker."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.sshd import DOCKER, Sshd, free_port, running, serving, wait_until
from tests.patience import STEP_S
from tridock.contracts.run_folder import PYTHON

TRIDOCK = (sys.executable, "-m", "tridock.cli")


@pytest.fixture
def host(make_sshd: Callable[..., Sshd], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sshd:
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "docker").write_text(DOCKER)
    (tmp_path / "programs" / "docker").chmod(0o755)
    (tmp_path / "programs" / PYTHON).symlink_to(sys.executable)
    environment = {"PATH": f"{tmp_path}/programs:{os.environ['PATH']}"}
    sshd = make_sshd("DisableForwarding yes\nMaxSessions 4", name="h0", environment=environment)
    (tmp_path / "ssh_config").write_text(
        f"Host h0\n HostName 127.0.0.1\n Port {sshd.port}\n IdentityFile {sshd.client_key}\n"
        f" UserKnownHostsFile {sshd.known_hosts}\n GlobalKnownHostsFile none\n"
    )
    (sshd.home / "tridock/lab/workspace").mkdir(parents=True)
    (tmp_path / "hostfile").write_text("h0 slots=1\n")
    settings = {"name": "lab", "ssh": {"config_file": f"{tmp_path}/ssh_config"}}
    (tmp_path / "hostfile.yaml").write_text(json.dumps(settings))
    monkeypatch.chdir(tmp_path)
    return sshd


def tridock(*arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*TRIDOCK, *arguments], input=given, capture_output=True, check=False, timeout=STEP_S)


def test_a_command_has_its_input_output_and_exit_code(host: Sshd) -> None:
    odd = "a 'b' \"c\" $d\n"
    done = tridock(
        "exec", "h0", "--", "sh", "-c", 'pwd; printf %s "$1"; cat; echo oops >&2; exit 7', "sh", odd, given=b"\0\xff"
    )
    workspace = f"{host.home}/tridock/lab/workspace\n"
    assert (done.returncode, done.stdout, done.stderr) == (7, (workspace + odd).encode() + b"\0\xff", b"oops\n")
    large = os.urandom(3_000_000)
    assert tridock("exec", "h0", "--", "cat", given=large).stdout == large


def test_at_a_terminal_it_has_one(host: Sshd) -> None:
    """Of this size, and a shell that one leaves with its exit code."""
    line = " ".join((*TRIDOCK, "exec", "h0", "--", "sh", "-c", "'tty; stty size; exit 5'"))
    done = subprocess.run(
        ["script", "-qefc", f"stty rows 33 cols 77; {line}", "typescript"],
        capture_output=True,
        check=False,
        timeout=STEP_S,
    )
    assert done.returncode == 5, done.stdout
    assert b"/dev/" in done.stdout
    assert b"33 77" in done.stdout
    shell = " ".join((*TRIDOCK, "ssh", "h0"))
    done = subprocess.run(
        ["script", "-qefc", shell, "typescript"], input=b"echo in-$((40+2))\nexit 3\n", capture_output=True,
        check=False, timeout=STEP_S,
    )  # fmt: skip
    assert (done.returncode, b"in-42" in done.stdout) == (3, True), done.stdout


def test_ctrl_c_ends_it_there(host: Sshd) -> None:
    seconds = f"98765.{os.getpid()}"
    command = ("exec", "h0", "--", "sh", "-c", f"touch begun; exec sleep {seconds}")
    with subprocess.Popen([*TRIDOCK, *command], stdin=subprocess.DEVNULL) as process:
        wait_until((host.home / "tridock/lab/workspace/begun").exists)
        process.send_signal(signal.SIGINT)
        assert process.wait(STEP_S) == 130
    wait_until(lambda: not running(f"sleep {seconds}"))


def test_what_is_refused(host: Sshd) -> None:
    done = tridock("exec", "gpu-9", "--", "true")
    assert (done.returncode, done.stderr) == (2, b"NODE: is not a node of this cluster; got gpu-9; use one of h0\n")
    for given, got in (((), "none"), (("--hosts", "hostfile", "--", "true"), "--hosts")):
        done = tridock("exec", "h0", *given)
        assert (done.returncode, done.stderr.decode()) == (
            2,
            f"COMMAND: comes last; got {got}; give options, NODE, --, COMMAND: "
            "tridock exec --hosts hostfile host-a -- nvidia-smi\n",
        )


@pytest.fixture
def served() -> Iterator[int]:
    """A port on loopback that repeats what it is sent, to its end, and then says goodbye."""

    def repeat(connection: socket.socket) -> None:
        while part := connection.recv(1 << 16):
            connection.sendall(part)
        connection.sendall(b"bye")

    with serving(repeat) as port:
        yield port


def said(port: int, sent: bytes) -> bytes:
    received = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=STEP_S) as connection:

        def send() -> None:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)

        threading.Thread(target=send, daemon=True).start()
        while part := connection.recv(1 << 16):
            received += part
    return bytes(received)


def test_a_port_of_this_machine_leads_to_one_in_the_node(host: Sshd, served: int) -> None:
    """Although sshd forwards nothing, and has fewer sessions than there are connections."""
    argv, relay = [*TRIDOCK, "forward", "h0", str(served), "0"], f"{PYTHON} -P -c .* {served}$"
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        found = re.fullmatch(rf"http://127\.0\.0\.1:(\d+) leads to port {served} of h0; Ctrl-C ends it\n", line)
        assert found, line + process.stderr.read()
        port = int(found[1])
        large = os.urandom(3_000_000)
        assert said(port, large) == large + b"bye"
        with socket.socket() as elsewhere:
            assert elsewhere.connect_ex(("127.0.0.2", port)) != 0
        connections = [socket.create_connection(("127.0.0.1", port), timeout=STEP_S) for _ in range(6)]
        for number, connection in enumerate(connections):
            connection.sendall(b"%d" % number)
        assert [connection.recv(9) for connection in connections] == [b"%d" % number for number in range(6)]
        assert len(running(relay)) >= 6
        connections[0].close()
        process.send_signal(signal.SIGINT)
        assert process.wait(STEP_S) == 0, process.stderr.read()
        assert connections[1].recv(9) == b""
        with socket.socket() as ended:
            assert ended.connect_ex(("127.0.0.1", port)) != 0
    wait_until(lambda: not running(relay))


def test_a_lost_host_ends_the_forward(host: Sshd, served: int) -> None:
    argv = [*TRIDOCK, "forward", "h0", str(served), "0"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        host.end_sessions()
        assert process.wait(STEP_S) == 3
        assert process.stderr.read().startswith("h0: ")


def test_a_port_that_cannot_be_forwarded(host: Sshd, served: int) -> None:
    closed = free_port()
    for arguments, code, text in (
        (("h0", "0"), 2, "PORT: is no port; got 0; give a number from 1 to 65535"),
        (("h0", "80", "70000"), 2, "LOCAL_PORT: is no port; got 70000; give a number from 0 to 65535"),
        (("gpu-9", "80"), 2, "NODE: is not a node of this cluster; got gpu-9; use one of h0"),
        (
            ("h0", str(closed), "0"),
            3,
            f"h0: nothing listens there on localhost; got port {closed}: Connection refused; "
            "start the program there first",
        ),
        (  # it is this machine's too
            ("h0", str(served)),
            2,
            f"LOCAL_PORT: cannot be used on this machine; got {served}: address already in use; "
            "give another after PORT; 0 is any free one",
        ),
    ):
        done = tridock("forward", *arguments)
        assert (done.returncode, done.stderr.decode()) == (code, text + "\n")
