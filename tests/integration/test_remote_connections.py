"""Connections to a real sshd on loopback that cannot be made, or that break."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.sshd import (
    USER,
    Sshd,
    fingerprint,
    free_port,
    make_key,
    message,
    public,
    serving,
    wait_until,
)
from tests.patience import STEP_S
from tridock.command import Command
from tridock.remote.ssh import Login, SshHost


def test_refused(tmp_path: Path) -> None:
    port = free_port()
    host = SshHost("node-7", Login("127.0.0.1", port=port), retries=2)
    begin = time.monotonic()
    assert message(lambda: host.run(Command.of("true"))) == (
        f"node-7: does not answer ssh at 127.0.0.1 port {port}; got Connection refused, 3 times; "
        "see that it is up, that its sshd listens at that port (ssh.port), and that no firewall stands between"
    )
    assert time.monotonic() - begin > 0.3


def test_refused_at_first(make_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    sshd, tries = make_sshd(), tmp_path / "tries"
    sshd.stop()
    sshd.ssh_config.write_text(f'Match exec "echo try >>{tries}"\n{sshd.ssh_config.read_text()}')

    def start() -> None:  # after one try that was refused: it is tried again
        wait_until(lambda: tries.exists() and len(tries.read_text().splitlines()) > 1)
        sshd.start()

    with ThreadPoolExecutor() as pool:
        started = pool.submit(start)
        assert sshd.host(retries=100).run(Command.of("echo", "up")).stdout == b"up\n"
        started.result()


def test_a_key_that_is_not_let_in(shared: Sshd, tmp_path: Path) -> None:
    other = make_key(tmp_path / "other")
    # A refused login is not tried again: the message would count the tries.
    assert message(lambda: shared.host(identity_file=str(other), retries=5).run(Command.of("true"))) == (
        f"node-1: refuses the login as {USER}@127.0.0.1 port {shared.port}; "
        f"got Permission denied (publickey); make `ssh -p {shared.port} {USER}@127.0.0.1` work: "
        "ssh-copy-id, ssh-add, or ssh.user and ssh.identity_file"
    )


def test_a_user_who_is_not_let_in(shared: Sshd) -> None:
    assert message(lambda: shared.host(user="nobody-there").run(Command.of("true"))).startswith(
        f"node-1: refuses the login as nobody-there@127.0.0.1 port {shared.port}; got Permission denied "
    )


def test_an_unknown_host_key_is_never_taken_over(shared: Sshd, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.touch()
    config = tmp_path / "config"
    config.write_text(f"Host *\n UserKnownHostsFile {known}\n StrictHostKeyChecking no\n GlobalKnownHostsFile none\n")
    host = shared.host(config_file=str(config), retries=5)
    expected = (
        f"node-1: its host key is not known here; got No ED25519 host key is known for [127.0.0.1]:{shared.port}; "
        f"compare it with the host's own (ssh-keygen -l), then take it over: ssh -p {shared.port} {USER}@127.0.0.1"
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
        f"node-1: its host key has changed; got ED25519 key sent by the remote host is {fingerprint(shared.host_key)}; "
        f"if the host was reinstalled, remove the old key (ssh-keygen -R '[127.0.0.1]:{shared.port}'); "
        "if not, somebody may be in between"
    )


def test_a_name_that_cannot_be_resolved() -> None:
    assert message(lambda: SshHost("node.invalid", Login("node.invalid"), retries=5).run(Command.of("true"))) == (
        "node.invalid: its name cannot be resolved; got node.invalid: Name or service not known; "
        "correct it in the hostfile, or its HostName or ProxyJump in ~/.ssh/config"
    )


def test_a_host_that_hangs_is_not_called_a_login_shell_that_does(shared: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection of an earlier command hangs with it: only a new login tells."""
    host = shared.host(retries=0, connect_timeout=1.0)
    assert shared.host().run(Command.of("true")).exit_code == 0
    with shared.frozen(), monkeypatch.context() as short, ThreadPoolExecutor() as pool:
        short.setattr("tridock.remote.ssh._SHELL_S", 4.0)
        texts = [*pool.map(lambda _: message(lambda: host.run(Command.of("true"))), range(2))]  # two at once
    wanted = f"node-1: does not answer ssh at 127.0.0.1 port {shared.port}; got Connection timed out"
    assert [text[: len(wanted)] for text in texts] == [wanted] * 2
    assert shared.host().run(Command.of("true")).exit_code == 0


def test_a_port_that_never_speaks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        host = SshHost("node-1", Login("127.0.0.1", port=port, connect_timeout=1.0), retries=3)
        text = message(lambda: host.run(Command.of("true")))
    assert text.startswith(f"node-1: does not answer ssh at 127.0.0.1 port {port}; got Connection ")
    assert "timed out" in text


def test_an_address_that_never_answers() -> None:
    """Packets to a full backlog are dropped, as a firewall drops them."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port = server.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        time.sleep(0.2)
        host = SshHost("node-1", Login("127.0.0.1", port=port, connect_timeout=1.0), retries=0)
        text = message(lambda: host.run(Command.of("true")))
        for filler in fillers:
            filler.close()
    assert text.startswith(f"node-1: does not answer ssh at 127.0.0.1 port {port}; got Connection timed out; ")


def test_something_else_than_sshd() -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n" * 60)
        time.sleep(0.1)

    with serving(answer) as port:
        host = SshHost("node-1", Login("127.0.0.1", port=port, connect_timeout=STEP_S), retries=0)
        text = message(lambda: host.run(Command.of("true")))
    assert text.startswith(f"node-1: drops connections before the login as {USER}@127.0.0.1 port {port}; got ")
    assert text.endswith(
        "; see that an sshd listens there; lower ssh.max_connections, or raise MaxStartups in its sshd_config"
    )


def test_an_sshd_that_opens_no_session(make_sshd: Callable[..., Sshd]) -> None:
    text = message(lambda: make_sshd("MaxSessions 0").host().run(Command.of("true")))
    assert text.startswith("node-1: opens no session as ")
    assert "MaxSessions" in text


def test_an_sshd_with_few_sessions_gets_more_connections(make_sshd: Callable[..., Sshd]) -> None:
    """Five commands wait for each other: with fewer at once none would end."""
    sshd = make_sshd("MaxSessions 2")
    host, folder = sshd.host(), sshd.folder
    script = f'touch {folder}/ran-"$1"; until [ "$(ls {folder}/ran-* | wc -l)" = 5 ]; do sleep 0.05; done'
    numbers = [str(number) for number in range(5)]
    with ThreadPoolExecutor(5) as pool:
        done = list(pool.map(lambda number: host.run(Command.of("sh", "-c", script, "wait", number), STEP_S), numbers))
    assert [one.exit_code for one in done] == [0] * 5
    logins = sshd.log.count("Accepted publickey")
    assert 3 <= logins <= 5  # two commands on the shared connection, each further one on its own

    def is_shared() -> bool:  # sshd may still be closing the sessions that have ended
        before = sshd.log.count("Accepted publickey")
        assert host.run(Command.of("true")).exit_code == 0
        return sshd.log.count("Accepted publickey") == before

    wait_until(is_shared)
    host.close()


def test_commands_end_while_new_keys_are_exchanged(make_sshd: Callable[..., Sshd]) -> None:
    sshd = make_sshd("RekeyLimit 256K\nMaxSessions 100")  # sshd may still be closing those that have ended
    host = sshd.host()
    assert host.run(Command.of("true")).exit_code == 0
    pieces = [bytes(1 << 20)] * 60
    with ThreadPoolExecutor(4) as pool:
        sent = pool.submit(host.pipe, iter(pieces), Command.of("wc", "-c"))
        codes = [pool.submit(host.run, Command.of("true"), STEP_S) for _ in range(90)]
        assert sent.result().stdout.split() == [str(60 << 20).encode()]
        assert [done.result().exit_code for done in codes] == [0] * 90
    assert sshd.log.count("Accepted publickey") == 1


def test_an_sshd_with_which_nothing_is_in_common(make_sshd: Callable[..., Sshd]) -> None:
    text = message(lambda: make_sshd("Ciphers aes128-cbc").host().run(Command.of("true")))
    assert "; got Unable to negotiate with 127.0.0.1 port " in text


def test_a_connection_that_breaks_under_a_command(make_sshd: Callable[..., Sshd]) -> None:
    sshd = make_sshd()
    host = sshd.host()
    with host.start(Command.of("sleep", "9998"), lambda _: None) as process:  # it has begun
        sshd.end_sessions()
        text = message(process.wait)
    assert text.startswith("node-1: the connection was lost while `sleep 9998` ran; got ")
    assert text.endswith("; check whether the host is up, then try again")
    # The next use connects again.
    assert host.run(Command.of("echo", "back")).stdout == b"back\n"


def test_a_connection_that_breaks_under_a_stream(make_sshd: Callable[..., Sshd]) -> None:
    sshd = make_sshd()
    stream = sshd.host().stream(Command.of("sh", "-c", "echo one; sleep 9998"))
    parts = iter(stream)
    assert next(parts) == b"one\n"
    sshd.end_sessions()
    text = message(lambda: list(parts))
    assert text.startswith("node-1: the connection was lost while `sh -c 'echo one; sleep 9998'` ran; got ")


def test_a_connection_that_breaks_under_a_download(make_sshd: Callable[..., Sshd]) -> None:
    sshd = make_sshd()
    parts: list[bytes] = []
    breaker = break_once(sshd, lambda: sum(map(len, parts)) > 1_000_000)
    text = message(lambda: sshd.host().read_into(parts.append, Command.of("cat", "/dev/zero")))
    breaker.join()
    assert text.startswith("node-1: the connection was lost while `cat /dev/zero` ran; got ")


def break_once(sshd: Sshd, seen: Callable[[], bool]) -> threading.Thread:
    """Ends the sessions as soon as something is seen, such as what the other side writes."""

    def watch() -> None:
        wait_until(seen)
        sshd.end_sessions()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


# Blocks inside the second file until $GO exists.
HELD_TAR = """#!/bin/sh
{ head -c 2000000; until [ -e "$GO" ]; do sleep 0.05; done; cat; } | /bin/tar "$@"
"""


def test_a_tree_that_breaks_leaves_the_old_files(make_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    programs, go, folder = tmp_path / "programs", tmp_path / "go", tmp_path / "out"
    programs.mkdir()
    (programs / "tar").write_text(HELD_TAR)
    (programs / "tar").chmod(0o755)
    sshd = make_sshd(environment={"PATH": f"{programs}:{os.environ['PATH']}", "GO": str(go)})
    host = sshd.host()
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).write_bytes(b"old")
    breaker = break_once(sshd, lambda: any(p.stat().st_size > 1_000_000 for p in folder.glob(".put.*/b")))
    text = message(lambda: host.put_tree({"a": b"new", "b": bytes(20_000_000)}, str(folder)))
    breaker.join()
    go.touch()
    assert text.startswith("node-1: the connection was lost while `sh -c ")
    assert (folder / "a").read_bytes() + (folder / "b").read_bytes() == b"oldold"
    wait_until(lambda: sorted(entry.name for entry in folder.iterdir()) == ["a", "b"])
