"""Hosts over a real sshd on loopback: what works, and every way in which it does not."""

from __future__ import annotations

import getpass
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tridock.command import Command
from tridock.errors import ClusterError, RequestError, TridockError
from tridock.remote import Host, LocalHost, SshHost, on_all, raise_failures

pytestmark = pytest.mark.integration

SSHD = shutil.which("sshd", path="/usr/sbin:/sbin:" + os.environ.get("PATH", ""))
USER = getpass.getuser()
ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def make_key(path: Path, *words: str) -> Path:
    if not path.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path, *words], check=True)
    return path


def public(path: Path) -> str:
    return " ".join(path.with_name(path.name + ".pub").read_text().split()[:2])


def fingerprint(path: Path) -> str:
    return subprocess.check_output(["ssh-keygen", "-l", "-f", path], text=True).split()[1]


class Sshd:
    """One sshd of the test's own; ``host()`` connects to it as an operator's configuration would."""

    def __init__(self, folder: Path, options: str = "") -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
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
        config.write_text(
            f"{self._options}\nPort {self.port}\nListenAddress 127.0.0.1\nHostKey {self.host_key}\n"
            f"AuthorizedKeysFile {self.client_key}.pub\nPidFile none\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nLogLevel VERBOSE\n"
        )
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([str(SSHD), "-D", "-e", "-f", config], stderr=log)
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return self
            time.sleep(0.05)
        raise AssertionError((self.folder / "log").read_text())

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def host(self, name: str = "node-1", **changes: object) -> SshHost:
        wanted = {
            "address": "127.0.0.1",
            "port": self.port,
            "identity_file": str(self.client_key),
            "config_file": str(self.ssh_config),
            "retries": 0,
            **changes,
        }
        return SshHost(name, **wanted)  # type: ignore[arg-type]

    def end_sessions(self) -> None:
        """As a network or a host that goes away: every connection's own process is killed."""
        assert self._process is not None
        children = subprocess.run(["pgrep", "-P", str(self._process.pid)], capture_output=True, text=True, check=False)
        for pid in children.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

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

    def make(options: str = "", name: str = "sshd") -> Sshd:
        made.append(Sshd(tmp_path / name, options).start())
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


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


# ---- what works ------------------------------------------------------------------------------------------------------


def test_a_command_arrives_word_by_word(host: Host) -> None:
    words = ["a b", "", "$HOME", "`id`", "'", '"', "\\", "*", ";", "\n", "ä", "-n", "~"]
    done = host.run(Command.of("printf", "%s\\0", *words), timeout=20)
    assert done.stdout.decode() == "".join(f"{word}\0" for word in words)
    assert (done.exit_code, done.stderr) == (0, b"")


def test_environment_folder_and_exit_code(host: Host, tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    script = 'echo "$X"; pwd; echo oops >&2; exit 3'
    done = host.run(Command(("sh", "-c", script), env={"X": "a 'b' $c"}, cwd=str(folder)))
    assert (done.exit_code, done.stdout.decode(), done.stderr) == (3, f"a 'b' $c\n{folder}\n", b"oops\n")


def test_bytes_go_through_unchanged_in_both_directions(host: Host) -> None:
    content = bytes(range(256)) + os.urandom(6_000_000)
    assert host.run(Command.of("cat", stdin=content), timeout=60).stdout == content
    done = host.run(Command.of("sh", "-c", "cat >&2", stdin=content), timeout=60)
    assert (done.stdout, done.stderr) == (b"", content)


def test_without_input_a_command_sees_its_end(host: Host) -> None:
    assert host.run(Command.of("cat"), timeout=10).stdout == b""


def test_a_command_that_reads_nothing_of_its_input(host: Host) -> None:
    done = host.run(Command.of("sh", "-c", "exit 5", stdin=b"x" * 20_000_000), timeout=30)
    assert done.exit_code == 5


def test_many_commands_at_once_on_one_host(host: Host) -> None:
    results: list[bytes] = []

    def work(number: int) -> None:
        results.append(host.run(Command.of("sh", "-c", f"sleep 0.2; echo {number}"), timeout=30).stdout)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [b"%d\n" % number for number in range(8)]


def test_putting_and_getting_a_file(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "it's a file"
    content = bytes(range(256)) * 10
    host.put(content, str(path), mode=0o640)
    assert path.read_bytes() == host.get(str(path)) == content
    assert path.stat().st_mode & 0o7777 == 0o640
    host.put(b"", str(path), mode=0o600)
    assert (path.read_bytes(), path.stat().st_mode & 0o7777) == (b"", 0o600)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_home_is_the_hosts_own(host: Host) -> None:
    name = f".tridock-test-{os.getpid()}"
    try:
        host.put(b"x", f"~/{name}/file")
        assert (Path.home() / name / "file").read_bytes() == b"x"
        assert host.get(f"~/{name}/file") == b"x"
    finally:
        shutil.rmtree(Path.home() / name, ignore_errors=True)


def test_a_reader_sees_the_old_file_or_the_new_one(host: Host, tmp_path: Path) -> None:
    path, contents = tmp_path / "file", (b"a" * 300_000, b"b" * 500_000)
    host.put(contents[0], str(path))
    seen, done = set(), threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.add(path.read_bytes())

    looker = threading.Thread(target=look)
    looker.start()
    for turn in range(6):
        host.put(contents[turn % 2], str(path))
    done.set()
    looker.join()
    assert seen <= set(contents)


def test_putting_where_it_cannot_be(host: Host, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert message(lambda: host.put(b"x", str(tmp_path / "folder"))) == (
        f"node-1: `write {tmp_path}/folder` failed with exit code 1; got {tmp_path}/folder is a folder; "
        "mend that there, then try again"
    )
    (tmp_path / "file").touch()
    text = message(lambda: host.put(b"x", str(tmp_path / "file" / "below")))
    assert text.startswith(f"node-1: `write {tmp_path}/file/below` failed with exit code 1; got ")
    assert [entry.name for entry in sorted(tmp_path.iterdir())] == ["file", "folder"]


def test_a_tree_in_one_go(host: Host, tmp_path: Path) -> None:
    folder = tmp_path / "run 1"
    files = {"a": b"1", "logs/deep/b c": b"2" * 100_000, "-n": b"", "it's": b"\0"}
    host.put_tree(files, str(folder), mode=0o600)
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == files
    assert {path.stat().st_mode & 0o7777 for path in folder.rglob("*") if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o7777 for path in (folder, folder / "logs")} == {0o700}
    assert abs((folder / "a").stat().st_mtime - time.time()) < 60
    inode = folder.stat().st_ino
    host.put_tree({"a": b"new"}, str(folder), mode=0o644)
    assert ((folder / "a").read_bytes(), (folder / "a").stat().st_mode & 0o7777) == (b"new", 0o644)
    assert (folder.stat().st_ino, (folder / "logs/deep/b c").exists()) == (inode, True)


def test_getting_what_is_not_there(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "nothing"
    text = message(lambda: host.get(str(path)))
    assert text == (
        f"node-1: `read {path}` failed with exit code 1; got cat: {path}: No such file or directory; "
        "mend that there, then try again"
    )


def test_output_comes_as_it_is_written(host: Host) -> None:
    stream = host.stream(Command.of("sh", "-c", "echo one; sleep 0.7; echo two >&2; sleep 0.7; exit 9"))
    seen = [(part, time.monotonic()) for part in stream]
    assert b"".join(part for part, _ in seen) == b"one\ntwo\n"
    assert seen[1][1] - seen[0][1] > 0.4
    assert stream.exit_code == 9


def test_a_stream_can_be_left(host: Host) -> None:
    stream = host.stream(Command.of("sh", "-c", "echo one; sleep 97"))
    assert next(iter(stream)) == b"one\n"
    begin = time.monotonic()
    stream.close()
    assert time.monotonic() - begin < 3.0
    assert host.run(Command.of("echo", "still here"), timeout=20).stdout == b"still here\n"


def test_a_pipe_waits_for_a_slow_reader_and_tells_how_far_it_is(host: Host) -> None:
    chunks, size = 60, 500_000
    told: list[int] = []
    early: list[int] = []
    timer = threading.Timer(1.0, lambda: early.append(sum(told)))
    timer.start()
    done = host.pipe((b"x" * size for _ in range(chunks)), Command.of("sh", "-c", "sleep 2; wc -c"), told.append)
    assert int(done.stdout) == sum(told) == chunks * size
    # What is under way is bounded by the transport's window, not by the size of the image.
    assert early[0] < chunks * size / 4


def test_a_source_that_breaks_off_is_not_taken_for_a_whole(host: Host, tmp_path: Path) -> None:
    def source() -> Iterator[bytes]:
        yield b"x" * 1000
        time.sleep(0.3)
        raise RuntimeError("disk gone")

    marker = tmp_path / "complete"
    with pytest.raises(RuntimeError, match=r"^disk gone$"):
        host.pipe(source(), Command.of("sh", "-c", f"cat >/dev/null; sleep 1; echo whole >'{marker}'"))
    if USER != "root" or isinstance(host, LocalHost):  # sshd signals no command of root's
        time.sleep(1.5)
        assert not marker.exists()


# ---- what does not: commands -----------------------------------------------------------------------------------------


def test_a_command_that_fails(host: Host) -> None:
    done = host.run(Command.of("sh", "-c", "echo one; echo two >&2; echo three >&2; exit 4"))
    assert message(lambda: done.checked("node-1")) == (
        "node-1: `sh -c 'echo one; echo two >&2; echo three >&2; exit 4'` failed with exit code 4; "
        "got two | three; mend that there, then try again"
    )


def test_a_command_that_is_not_there(host: Host) -> None:
    done = host.run(Command.of("no-such-program", "x"), timeout=10)
    assert done.exit_code == 127
    text = message(lambda: done.checked("node-1"))
    assert text.startswith("node-1: `no-such-program x` failed with exit code 127; got ")
    assert text.endswith("; install it there, or put it on the PATH that ssh commands have")


def test_a_command_that_hangs_is_ended_there_too(host: Host) -> None:
    number = f"9{os.getpid()}"
    begin = time.monotonic()
    assert message(lambda: host.run(Command.of("sleep", number), timeout=1)) == (
        f"node-1: `sleep {number}` did not end within 1 s; see what holds it up there, then try again"
    )
    assert time.monotonic() - begin < 3.0
    wait_until(lambda: not running(f"^sleep {number}$"), 6)
    assert host.run(Command.of("echo", "fine"), timeout=20).stdout == b"fine\n"


def test_a_command_that_a_signal_ends(shared: Sshd) -> None:
    command = Command.of("sh", "-c", "kill -9 $$")
    assert message(lambda: shared.host().run(command)) == (
        "node-1: `sh -c 'kill -9 $$'` was ended by a signal; "
        "look for who ended it there (dmesg, if memory ran out), then try again"
    )
    assert LocalHost().run(command).exit_code == 137


# ---- what does not: connections --------------------------------------------------------------------------------------


def test_refused(tmp_path: Path) -> None:
    port = free_port()
    host = SshHost("node-7", address="127.0.0.1", port=port, retries=2)
    begin = time.monotonic()
    assert message(lambda: host.run(Command.of("true"))) == (
        f"node-7: nothing listens at 127.0.0.1 port {port}; got connection refused, 3 times; "
        "start sshd there, or give the right port (ssh.port in the settings, or Port in ~/.ssh/config)"
    )
    assert 0.3 < time.monotonic() - begin < 5.0


def test_refused_at_first(make_sshd: Callable[..., Sshd]) -> None:
    sshd = make_sshd()
    sshd.stop()
    timer = threading.Timer(0.8, sshd.start)
    timer.start()
    assert sshd.host(retries=6).run(Command.of("echo", "up")).stdout == b"up\n"
    timer.join()


def test_a_key_that_is_not_let_in(shared: Sshd, tmp_path: Path) -> None:
    other = make_key(tmp_path / "other")
    begin = time.monotonic()
    assert message(lambda: shared.host(identity_file=str(other), retries=5).run(Command.of("true"))) == (
        f"node-1: refuses the login as {USER}@127.0.0.1 port {shared.port}; "
        f"got permission denied with key files {other}; make `ssh -p {shared.port} {USER}@127.0.0.1` work without a "
        "password: ssh-copy-id, ssh-add, or ssh.user and ssh.identity_file"
    )
    assert time.monotonic() - begin < 3.0, "a refused login is not tried again"


def test_a_user_who_is_not_let_in(shared: Sshd) -> None:
    assert message(lambda: shared.host(user="nobody-there").run(Command.of("true"))).startswith(
        f"node-1: refuses the login as nobody-there@127.0.0.1 port {shared.port}; got permission denied "
    )


def test_an_unknown_host_key_is_never_taken_over(shared: Sshd, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.touch()
    config = tmp_path / "config"
    config.write_text(f"Host *\n UserKnownHostsFile {known}\n StrictHostKeyChecking no\n GlobalKnownHostsFile none\n")
    host = shared.host(config_file=str(config), retries=5)
    expected = (
        f"node-1: its host key is not known here; got {USER}@127.0.0.1 port {shared.port}: "
        f"ssh-ed25519 {fingerprint(shared.host_key)}; compare it with the host's own (ssh-keygen -l), "
        f"then take it over: ssh -p {shared.port} {USER}@127.0.0.1"
    )
    for _ in range(2):
        assert message(lambda: host.run(Command.of("true"))) == expected
    assert known.read_text() == ""


def test_a_changed_host_key(shared: Sshd, tmp_path: Path) -> None:
    other = make_key(tmp_path / "other")
    known, config = tmp_path / "known_hosts", tmp_path / "config"
    known.write_text(f"[127.0.0.1]:{shared.port} {public(other)}\n")
    config.write_text(f"Host *\n UserKnownHostsFile {known}\n GlobalKnownHostsFile none\n")
    assert message(lambda: shared.host(config_file=str(config), retries=5).run(Command.of("true"))) == (
        f"node-1: its host key has changed; got ssh-ed25519 {fingerprint(shared.host_key)} "
        f"where known_hosts has ssh-ed25519 {fingerprint(other)}; if the host was set up anew, remove the old key "
        f"(ssh-keygen -R '[127.0.0.1]:{shared.port}'); if not, somebody may stand in between"
    )


def test_a_name_that_cannot_be_resolved() -> None:
    assert message(lambda: SshHost("node.invalid", retries=5).run(Command.of("true"))) == (
        "node.invalid: its name cannot be resolved; got node.invalid: Name or service not known; "
        "correct it in the hostfile, or give its HostName in ~/.ssh/config"
    )


def test_a_port_that_never_speaks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        host = SshHost("node-1", address="127.0.0.1", port=port, connect_timeout=1.0, retries=3)
        begin = time.monotonic()
        assert message(lambda: host.run(Command.of("true"))) == (
            f"node-1: no ssh answer from 127.0.0.1 port {port}; got nothing within 1 s; "
            "check that the host is up and no firewall stands between, or raise ssh.connect_timeout"
        )
        assert time.monotonic() - begin < 4.0


def test_an_address_that_never_answers() -> None:
    """Packets to a full backlog are dropped, as a firewall drops them."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port = server.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        time.sleep(0.2)
        host = SshHost("node-1", address="127.0.0.1", port=port, connect_timeout=1.0, retries=0)
        text = message(lambda: host.run(Command.of("true")))
        for filler in fillers:
            filler.close()
    assert text.startswith(f"node-1: no ssh answer from 127.0.0.1 port {port}; got nothing within 1 s; ")


def test_something_else_than_sshd() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n" * 60)
                time.sleep(0.1)
                connection.close()

        threading.Thread(target=answer, daemon=True).start()
        port = server.getsockname()[1]
        host = SshHost("node-1", address="127.0.0.1", port=port, connect_timeout=2.0, retries=0)
        text = message(lambda: host.run(Command.of("true")))
        server.shutdown(socket.SHUT_RDWR)
    assert text.startswith(f"node-1: cannot be reached at 127.0.0.1 port {port}; got ")
    assert text.endswith("; check the address, the network between, and that the host is up")


def test_an_sshd_that_opens_no_session(make_sshd: Callable[..., Sshd]) -> None:
    assert message(lambda: make_sshd("MaxSessions 0").host().run(Command.of("true"))) == (
        "node-1: its sshd opens no session; got connect failed; raise MaxSessions in its sshd_config"
    )


def test_an_sshd_with_which_nothing_is_in_common(make_sshd: Callable[..., Sshd]) -> None:
    assert message(
        lambda: make_sshd("Ciphers chacha20-poly1305@openssh.com").host().run(Command.of("true"))
    ).startswith("node-1: its sshd and this machine have no algorithm in common; got ")


def test_a_connection_that_breaks_under_a_command(make_sshd: Callable[..., Sshd]) -> None:
    sshd = make_sshd()
    host = sshd.host()
    timer = threading.Timer(1.0, sshd.end_sessions)
    timer.start()
    text = message(lambda: host.run(Command.of("sleep", "98")))
    assert text.startswith("node-1: the connection was lost while `sleep 98` ran; got ")
    assert text.endswith("; see whether the host is up, then try again")
    # The next use connects again.
    assert host.run(Command.of("echo", "back")).stdout == b"back\n"


def test_a_connection_that_breaks_under_a_stream(make_sshd: Callable[..., Sshd]) -> None:
    sshd = make_sshd()
    stream = sshd.host().stream(Command.of("sh", "-c", "echo one; sleep 98"))
    parts = iter(stream)
    assert next(parts) == b"one\n"
    sshd.end_sessions()
    text = message(lambda: list(parts))
    assert text.startswith("node-1: the connection was lost while `sh -c 'echo one; sleep 98'` ran; got ")


def break_once(sshd: Sshd, seen: Callable[[], bool]) -> threading.Thread:
    """Ends the sessions as soon as the other side has begun to write."""

    def watch() -> None:
        wait_until(seen, 30)
        sshd.end_sessions()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_a_put_that_breaks_leaves_the_old_file(make_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    sshd = make_sshd()
    host, path = sshd.host(), tmp_path / "out" / "file"
    host.put(b"old", str(path))
    breaker = break_once(sshd, lambda: any(p.stat().st_size > 1_000_000 for p in path.parent.glob(".put.*")))
    text = message(lambda: host.put(bytes(200_000_000), str(path)))
    breaker.join()
    assert text.startswith("node-1: the connection was lost while `sh -c ")
    assert path.read_bytes() == b"old"
    wait_until(lambda: [entry.name for entry in path.parent.iterdir()] == ["file"], 10)


def test_a_tree_that_breaks_leaves_the_old_files(make_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    sshd = make_sshd()
    host, folder = sshd.host(), tmp_path / "out"
    host.put_tree({"a": b"old", "b": b"old"}, str(folder))
    breaker = break_once(sshd, lambda: any(p.stat().st_size > 1_000_000 for p in folder.glob(".put.*/b")))
    text = message(lambda: host.put_tree({"a": b"new", "b": bytes(200_000_000)}, str(folder)))
    breaker.join()
    assert text.startswith("node-1: the connection was lost while `sh -c ")
    assert (folder / "a").read_bytes() + (folder / "b").read_bytes() == b"oldold"
    wait_until(lambda: sorted(entry.name for entry in folder.iterdir()) == ["a", "b"], 10)


# ---- the operator's ssh configuration --------------------------------------------------------------------------------


def configured(shared: Sshd, folder: Path, text: str, **changes: object) -> SshHost:
    config = folder / "config"
    config.write_text(textwrap.dedent(text))
    host: dict[str, object] = {"address": None, "port": None, "identity_file": None, "config_file": str(config)}
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
    assert host.run(Command.of("echo", "in")).stdout == b"in\n"
    assert "Accepted publickey" in first.log
    host.close()
    # The jump host's own key counts as much as the last one's.
    known.write_text(last.known_hosts.read_text())
    assert message(lambda: host.run(Command.of("true"))).startswith(
        f"node-1: its host key is not known here; got {USER}@127.0.0.1 port {first.port}: ssh-ed25519 "
    )
    known.write_text(first.known_hosts.read_text() + last.known_hosts.read_text())
    last.stop()
    assert message(lambda: host.run(Command.of("true"))) == (
        f"node-1: its jump host cannot reach {USER}@127.0.0.1 port {last.port}; got Connect failed; "
        "check that host's sshd, as seen from the jump host"
    )


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
    assert configured(shared, tmp_path, text).run(Command.of("echo", "in"), timeout=20).stdout == b"in\n"


def test_a_key_with_a_passphrase_needs_an_agent(
    make_sshd: Callable[..., Sshd], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sshd = make_sshd()
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    plain = tmp_path / "plain"
    shutil.copy(sshd.client_key, plain)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", sshd.client_key], check=True)
    text = message(lambda: sshd.host().run(Command.of("true")))
    assert text == (
        f"node-1: a key for {USER}@127.0.0.1 port {sshd.port} has a passphrase; got {sshd.client_key}; "
        "load it into an agent: ssh-add"
    )
    socket_path = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket_path)], stdout=subprocess.DEVNULL)
    try:
        wait_until(socket_path.exists)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket_path))
        subprocess.run(["ssh-add", "-q", plain], check=True)
        assert sshd.host().run(Command.of("echo", "in")).stdout == b"in\n"
    finally:
        agent.kill()
        agent.wait()


def test_files_that_the_settings_name_must_be_there(shared: Sshd, tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    for field in ("identity_file", "config_file"):
        host = shared.host(**{field: str(missing)})
        assert message(lambda host=host: host.run(Command.of("true")), RequestError) == (  # type: ignore[misc]
            f"ssh.{field}: names a file that is not there; got {missing}; correct the path"
        )


def test_a_broken_ssh_configuration(shared: Sshd, tmp_path: Path) -> None:
    text = message(lambda: configured(shared, tmp_path, "Prot 22\n").run(Command.of("true")), RequestError)
    assert text == (
        "node-1: ssh cannot read its configuration; "
        f"got {tmp_path}/config: line 1: Bad configuration option: prot; mend what it names"
    )


def test_a_machine_without_ssh(shared: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert message(lambda: shared.host().run(Command.of("true"))) == (
        "this machine: has no ssh; got no ssh on PATH; install OpenSSH's client (openssh-client)"
    )


# ---- many hosts ------------------------------------------------------------------------------------------------------


class Counter:
    """A door in front of an sshd that counts who is inside at the same time."""

    def __init__(self, port: int) -> None:
        self._target, self._server = port, socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._server.getsockname()[1]
        self.now, self.most, self.all = 0, 0, 0
        self._lock = threading.Lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            client, _ = self._server.accept()
            threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with self._lock:
            self.now, self.all = self.now + 1, self.all + 1
            self.most = max(self.most, self.now)
        server = socket.create_connection(("127.0.0.1", self._target))

        def pump(source: socket.socket, sink: socket.socket) -> None:
            try:
                while part := source.recv(65536):
                    sink.sendall(part)
                sink.shutdown(socket.SHUT_WR)
            except OSError:
                pass

        back = threading.Thread(target=pump, args=(server, client), daemon=True)
        back.start()
        pump(client, server)
        with self._lock:
            self.now -= 1


def test_32_hosts_under_a_cap(shared: Sshd, tmp_path: Path) -> None:
    door = Counter(shared.port)
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{door.port} {public(shared.host_key)}\n")
    config = tmp_path / "config"
    config.write_text(f"Host *\n UserKnownHostsFile {known}\n")
    hosts = {f"node-{n:02}": shared.host(f"node-{n:02}", port=door.port, config_file=str(config)) for n in range(32)}

    def work(_: str, host: SshHost) -> tuple[int, int]:
        try:
            done = host.run(Command.of("sh", "-c", "date +%s%N; sleep 0.6; date +%s%N"), timeout=60)
            begin, end = map(int, done.stdout.split())
            return begin, end
        finally:
            host.close()

    spans = raise_failures(on_all(hosts, work, cap=6))
    assert list(spans) == list(hosts)
    assert door.all == 32
    at_once = max(sum(begin <= moment < end for begin, end in spans.values()) for moment, _ in spans.values())
    assert 3 <= at_once <= 6
    # A connection that is closed here takes a moment to be seen as closed at the door.
    assert door.most <= 12


def test_40_connections_that_an_sshd_of_few_startups_drops(make_sshd: Callable[..., Sshd]) -> None:
    sshd = make_sshd("MaxStartups 3:60:6")
    hosts = {f"node-{n:02}": sshd.host(f"node-{n:02}", retries=12) for n in range(40)}
    outcomes = on_all(hosts, lambda _, host: host.run(Command.of("true"), timeout=60).exit_code, cap=40)
    assert raise_failures(outcomes) == dict.fromkeys(hosts, 0)
    assert "MaxStartups" in sshd.log, "nothing was dropped: this proves nothing"
    for host in hosts.values():
        host.close()


def test_an_sshd_that_drops_everyone(make_sshd: Callable[..., Sshd]) -> None:
    sshd = make_sshd("MaxStartups 1")
    # One that says nothing holds the only place.
    idle = socket.create_connection(("127.0.0.1", sshd.port))
    while idle.recv(4) != b"SSH-":  # whoever asked whether sshd was up is still being shown out
        idle.close()
        time.sleep(0.1)
        idle = socket.create_connection(("127.0.0.1", sshd.port))
    with idle:
        assert message(lambda: sshd.host(retries=1).run(Command.of("true"))) == (
            f"node-1: its sshd drops connections before the login as {USER}@127.0.0.1 port {sshd.port}; "
            "got no greeting, 2 times; lower ssh.max_connections, or raise MaxStartups in its sshd_config"
        )


def test_every_failing_host_is_named_and_the_others_too(shared: Sshd, tmp_path: Path) -> None:
    other, port = make_key(tmp_path / "other"), free_port()
    hosts: dict[str, Host] = {
        "fine": shared.host("fine"),
        "refused": shared.host("refused", port=port),
        "denied": shared.host("denied", identity_file=str(other)),
        "fine-too": shared.host("fine-too"),
        "failing": shared.host("failing"),
    }

    def work(name: str, host: Host) -> int:
        script = "exit 3" if name == "failing" else "exit 0"
        return host.run(Command.of("sh", "-c", script), timeout=20).checked(name).exit_code

    outcomes = on_all(hosts, work, cap=8)
    assert [name for name, outcome in outcomes.items() if outcome.ok] == ["fine", "fine-too"]
    assert message(lambda: raise_failures(outcomes)) == (
        f"refused: nothing listens at 127.0.0.1 port {port}; got connection refused; "
        "start sshd there, or give the right port (ssh.port in the settings, or Port in ~/.ssh/config)\n"
        f"denied: refuses the login as {USER}@127.0.0.1 port {shared.port}; got permission denied with key files "
        f"{other}; make `ssh -p {shared.port} {USER}@127.0.0.1` work without a password: ssh-copy-id, ssh-add, "
        "or ssh.user and ssh.identity_file\n"
        "failing: `sh -c 'exit 3'` failed with exit code 3; got no output; mend that there, then try again\n"
        "fine, fine-too: no problem here; mend the others"
    )


def test_a_host_that_takes_too_long_is_given_up(shared: Sshd) -> None:
    hosts: dict[str, Host] = {"quick": shared.host("quick"), "slow": shared.host("slow")}

    def work(name: str, host: Host) -> int:
        return host.run(Command.of("sleep", "30" if name == "slow" else "0")).exit_code

    begin = time.monotonic()
    outcomes = on_all(hosts, work, cap=8, timeout=2.0)
    assert time.monotonic() - begin < 6.0
    assert outcomes["quick"].value == 0
    assert str(outcomes["slow"].error) == "slow: was given up after 2 s; see what holds it up there, then try again"


@pytest.mark.parametrize(
    "work",
    [
        "on_all(hosts, lambda _, host: host.run(Command.of('sleep', '96')), cap=2)",
        "list(hosts['a'].stream(Command.of('sleep', '96')))",
        "hosts['a'].run(Command.of('sleep', '96'))",
        "hosts['a'].pipe(iter(lambda: b'x' * 1000, None), Command.of('sleep', '96'))",
    ],
)
@pytest.mark.parametrize("kind", ["ssh", "local"])
def test_ctrl_c_comes_through_at_once(shared: Sshd, kind: str, work: str) -> None:
    one = "LocalHost(name)" if kind == "local" else (
        f"SshHost(name, address='127.0.0.1', port={shared.port}, identity_file={str(shared.client_key)!r}, "
        f"config_file={str(shared.ssh_config)!r})"
    )  # fmt: skip
    script = textwrap.dedent(f"""
        import sys
        from tridock.command import Command
        from tridock.remote import LocalHost, SshHost, on_all
        hosts = {{name: {one} for name in 'abcd'}}
        for host in hosts.values():
            host.run(Command.of('true'))
        print('ready', flush=True)
        try:
            {work}
        except KeyboardInterrupt:
            sys.exit(130)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.7)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "")
    assert time.monotonic() - begin < 3.0


# ---- the cluster's own keys ------------------------------------------------------------------------------------------


def test_the_clusters_keys_let_its_nodes_in_and_nobody_else(make_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    from tridock.cluster import load_cluster
    from tridock.cluster.ssh_files import ssh_config
    from tridock.ops.key_store import KeyStore

    port = free_port()
    (tmp_path / "lab").write_text("node-1 slots=1\nnode-2 slots=1\n")
    (tmp_path / "lab.yaml").write_text(
        f"ssh_port: {port}\nnodes: {{node-1: {{address: 127.0.0.1}}, node-2: {{address: 127.0.0.2}}}}\n"
    )
    cluster = load_cluster(tmp_path / "lab", project_folder=tmp_path)
    store = KeyStore(cluster)
    store.ensure()
    config = tmp_path / "ssh_config"
    config.write_text(ssh_config(cluster, secrets=str(store.node_folder("node-1"))))
    sshds = [node_sshd(store.node_folder(node), address, port, tmp_path) for node, address in
             (("node-1", "127.0.0.1"), ("node-2", "127.0.0.2"))]  # fmt: skip
    try:
        ssh = ["ssh", "-F", str(config), "-l", USER]
        wait_until(lambda: subprocess.run([*ssh, "node-2", "true"], capture_output=True, check=False).returncode == 0)
        for name in ("node-1", "node-2", "127.0.0.1", "127.0.0.2"):
            assert subprocess.check_output([*ssh, name, "echo", "in"]) == b"in\n"
        if shutil.which("pdsh"):
            environment = {**os.environ, "PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS": f"-F {config} -l {USER} %h"}
            words = ["pdsh", "-S", "-f", "1024", "-w", "node-1,node-2", "echo rank %n"]
            out = subprocess.check_output(words, env=environment, text=True)
            assert sorted(out.splitlines()) == ["node-1: rank 0", "node-2: rank 1"]
        # The same key forwards nothing.
        forward = [*ssh, "-o", "ExitOnForwardFailure=yes", "-R", "0:localhost:1", "node-1", "true"]
        assert subprocess.run(forward, capture_output=True, check=False).returncode == 255
        assert denied(store.node_folder("node-1"), make_key(tmp_path / "stranger"), port)
        # A node that shows another node's host key.
        words = [*ssh, "-o", "HostName=127.0.0.1", "-o", "HostKeyAlias=node-2", "node-2", "true"]
        swapped = subprocess.run(words, capture_output=True, check=False, text=True)
        assert swapped.returncode == 255
        assert "Host key verification failed." in swapped.stderr
        # Rotation: a session that is open goes on, a new one needs the new keys, and gets them with them.
        session = subprocess.Popen([*ssh, "node-2", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert session.stdin is not None
        assert session.stdout is not None
        session.stdin.write(b"before\n")
        session.stdin.flush()
        assert session.stdout.readline() == b"before\n"
        old = tmp_path / "old"
        shutil.copytree(store.node_folder("node-1"), old)
        store.rotate()
        for sshd in sshds:
            sshd.send_signal(signal.SIGHUP)
        wait_until(lambda: subprocess.run([*ssh, "node-2", "true"], capture_output=True, check=False).returncode == 0)
        session.stdin.write(b"after\n")
        session.stdin.close()
        assert session.stdout.read() == b"after\n"
        assert session.wait() == 0
        # The old client key is let in nowhere, and who knows only the old host keys goes nowhere.
        assert denied(store.node_folder("node-1"), old / "id_ed25519", port)
        old_config = tmp_path / "old_config"
        old_config.write_text(ssh_config(cluster, secrets=str(old)))
        words = ["ssh", "-F", str(old_config), "-l", USER, "node-2", "true"]
        stale = subprocess.run(words, capture_output=True, check=False, text=True)
        assert stale.returncode == 255
        assert "Host key verification failed." in stale.stderr
    finally:
        for sshd in sshds:
            sshd.kill()
            sshd.wait()


def denied(secrets: Path, key: Path, port: int) -> bool:
    """Whether a node that is recognised refuses this key."""
    options = ["BatchMode=yes", "IdentitiesOnly=yes", f"UserKnownHostsFile={secrets}/known_hosts"]
    words = ["ssh", "-F", "/dev/null", *(word for option in options for word in ("-o", option))]
    words += ["-p", str(port), "-i", str(key), "-l", USER, "127.0.0.1", "true"]
    done = subprocess.run(words, capture_output=True, check=False, text=True)
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


def test_the_digest_of_a_large_transfer(shared: Sshd) -> None:
    block = os.urandom(1 << 20)
    digest = hashlib.sha256(block * 100).hexdigest()
    done = shared.host().pipe((block for _ in range(100)), Command.of("sha256sum"))
    assert done.stdout.decode().split()[0] == digest
