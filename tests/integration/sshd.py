"""An sshd of the tests' own on loopback, and the hosts that are reached through it."""

from __future__ import annotations

import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.patience import STEP_S
from tridock.errors import ClusterError, TridockError
from tridock.remote import Host, LocalHost
from tridock.remote.ssh import Login, SshHost

DOCKER = r"""#!/bin/sh
case $1 in
inspect)
  labels="{\"tridock.workspace\":\"$(cd ~ && pwd)/tridock/lab/workspace\"}"
  echo '{"Id":"1","Image":"2","Config":{"Labels":'"$labels"'},"State":{"Running":true,"ExitCode":0}}' ;;
exec) while [ "$1" != tridock-lab ]; do shift; done; shift; cd ~/tridock/lab/workspace && exec "$@" ;;
esac
"""
"""A stand-in for Docker on the host of a node of the cluster ``lab``: it runs the node's commands on the host."""

SSHD = shutil.which("sshd", path="/usr/sbin:/sbin:" + os.environ.get("PATH", ""))
USER = getpass.getuser()
ROOT = Path(__file__).parents[2]


@contextmanager
def serving(talk: Callable[[socket.socket], object]) -> Iterator[int]:
    """A port on loopback; ``talk`` is called in a thread with each connection, which is closed afterwards."""

    def serve(server: socket.socket) -> None:
        with suppress(OSError):  # until it is shut down
            while True:
                threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            talk(connection)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


_taken: list[socket.socket] = []


def free_port() -> int:
    """One that the kernel gives to nobody by itself, and no other process of the tests takes while this one lives.

    A socket that is bound, and does not listen, has it: connections are refused, and a server may listen there.
    """
    for port in random.SystemRandom().sample(range(10_000, 20_000), 100):
        with suppress(OSError):
            taken = socket.socket()
            taken.bind(("127.0.0.1", port))  # before it lets others in, so that it fails beside another's
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _taken.append(taken)
            return port
    raise AssertionError("no port is free")


def make_key(path: Path, *arguments: str) -> Path:
    if not path.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path, *arguments], check=True)
    return path


def public(path: Path) -> str:
    return " ".join(path.with_name(path.name + ".pub").read_text().split()[:2])


def fingerprint(path: Path) -> str:
    return subprocess.check_output(["ssh-keygen", "-l", "-f", path], text=True).split()[1]


class Sshd:
    """One sshd of the test's own; ``host()`` connects to it as an operator's configuration would.

    Its sessions have a home of their own: what the start-up files of this machine's user say is no part of a test.
    """

    def __init__(
        self, folder: Path, options: str = "", environment: Mapping[str, str] | None = None, *, own_home: bool = True
    ) -> None:
        self.folder, self.home = folder, folder / "home"
        self.home.mkdir(parents=True, exist_ok=True)
        self._environment = {**({"HOME": str(self.home)} if own_home else {}), **(environment or {})}
        self.port = free_port()
        self.host_key, self.client_key = make_key(folder / "host_key"), make_key(folder / "client_key")
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {public(self.host_key)}\n")
        self.ssh_config = folder / "ssh_config"
        self.ssh_config.write_text(f"Host *\n  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile none\n")
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Sshd:
        config = self.folder / "sshd_config"
        environment = " ".join(f"{name}={value}" for name, value in self._environment.items())
        config.write_text(
            f"{self._options}\n"
            + (f"SetEnv {environment}\n" if environment else "")
            + f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.host_key}\n"
            f"AuthorizedKeysFile {self.client_key}.pub\nPidFile none\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nLogLevel VERBOSE\n"
        )
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([str(SSHD), "-D", "-e", "-f", config], stderr=log)
        deadline = time.monotonic() + STEP_S
        while self._process.poll() is None and time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return self
            time.sleep(0.05)
        raise AssertionError((self.folder / "log").read_text())

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def host(self, name: str = "node-1", retries: int = 0, **changes: object) -> SshHost:
        wanted = {
            "address": "127.0.0.1",
            "port": self.port,
            "identity_file": str(self.client_key),
            "config_file": str(self.ssh_config),
            **changes,
        }
        return SshHost(name, Login(**wanted), retries)  # type: ignore[arg-type]

    def _processes(self) -> list[int]:
        """The server, then those of its connections."""
        assert self._process is not None
        found = [self._process.pid]
        for parent in found:  # a connection of a user other than root has two, one below the other
            argv = ["pgrep", "-P", str(parent), "^sshd"]
            found += map(int, subprocess.run(argv, capture_output=True, text=True, check=False).stdout.split())
        return found

    def end_sessions(self) -> None:
        """As a network or a host that goes away: every connection's own processes are killed."""
        for pid in self._processes()[1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """As a host that hangs: its kernel takes connections, and nobody answers."""
        pids = self._processes()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self.end_sessions()
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """An sshd for tests that do it no harm."""
    if SSHD is None:
        pytest.skip("no sshd on this machine")
    sshd = Sshd(tmp_path_factory.mktemp("sshd"), "MaxStartups 100\nMaxSessions 100").start()
    yield sshd
    sshd.stop()


@pytest.fixture
def make_sshd(tmp_path: Path) -> Iterator[Callable[..., Sshd]]:
    """Makes an sshd of its own options."""
    if SSHD is None:
        pytest.skip("no sshd on this machine")
    made: list[Sshd] = []

    def make(options: str = "", name: str = "sshd", environment: Mapping[str, str] | None = None) -> Sshd:
        made.append(Sshd(tmp_path / name, options, environment).start())
        return made[-1]

    yield make
    for sshd in made:
        sshd.stop()


@pytest.fixture(params=["ssh", "local"])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    """What holds for every kind of host."""
    made: Host = LocalHost("node-1") if request.param == "local" else request.getfixturevalue("shared").host()
    yield made
    made.close()


def message(action: Callable[[], object], kind: type[TridockError] = ClusterError) -> str:
    with pytest.raises(TridockError) as caught:
        action()
    assert type(caught.value) is kind
    return str(caught.value)


def running(marker: str) -> list[str]:
    found = subprocess.run(["pgrep", "-f", "--", marker], capture_output=True, text=True, check=False)
    return [pid for pid in found.stdout.split() if int(pid) != os.getpid()]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STEP_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)
