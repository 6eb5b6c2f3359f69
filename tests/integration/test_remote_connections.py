"""Connections to a real sshd on loopback that cannot be made, or that break."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.integration.sshd import USER, Sshd, fingerprint, free_port, make_key, message, public, wait_until
from tridock.command import Command
from tridock.remote.ssh import SshHost


def test_refused(tmp_path: Path) -> None:
    port = free_port()
    host = SshHost("node-7", address="127.0.0.1", port=port, retries=2)
    begin = time.monotonic()
    assert message(lambda: host.run(Command.of("true"))) == (
        f"node-7: nothing listens at 127.0.0.1 port {port}; got connection refused, 3 times; "
        "start sshd there, or give the right port (ssh.port in the settings, or Port in ~/.ssh/config)"
    )
    assert time.monotonic() - begin > 0.3


def test_refused_at_first(make_sshd: Callable[..., Sshd]) -> None:
    sshd = make_sshd()
    sshd.stop()
    timer = threading.Timer(0.8, sshd.start)
    timer.start()
    assert sshd.host(retries=6).run(Command.of("echo", "up")).stdout == b"up\n"
    timer.join()


def test_a_key_that_is_not_let_in(shared: Sshd, tmp_path: Path) -> None:
    other = make_key(tmp_path / "other")
    # A refused login is not tried again: the message would count the tries.
    assert message(lambda: shared.host(identity_file=str(other), retries=5).run(Command.of("true"))) == (
        f"node-1: refuses the login as {USER}@127.0.0.1 port {shared.port}; "
        f"got permission denied with key files {other}; make `ssh -p {shared.port} {USER}@127.0.0.1` work without a "
        "password: ssh-copy-id, ssh-add, or ssh.user and ssh.identity_file"
    )


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
        f"where known_hosts has ssh-ed25519 {fingerprint(other)}; if the host was reinstalled, remove the old key "
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
        assert message(lambda: host.run(Command.of("true"))) == (
            f"node-1: no ssh answer from 127.0.0.1 port {port}; got nothing within 1 s; "
            "check that the host is up and no firewall stands between, or raise ssh.connect_timeout"
        )


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
        "node-1: its sshd opens no session; raise MaxSessions in its sshd_config"
    )


def test_an_sshd_with_few_sessions_gets_more_connections(make_sshd: Callable[..., Sshd]) -> None:
    """Five commands wait for each other: with fewer at once none would end."""
    sshd = make_sshd("MaxSessions 2")
    host, folder = sshd.host(), sshd.folder
    script = f'touch {folder}/ran-"$1"; until [ "$(ls {folder}/ran-* | wc -l)" = 5 ]; do sleep 0.05; done'
    numbers = [str(number) for number in range(5)]
    with ThreadPoolExecutor(5) as pool:
        done = list(pool.map(lambda number: host.run(Command.of("sh", "-c", script, "wait", number), 60), numbers))
    assert [one.exit_code for one in done] == [0] * 5
    assert sshd.log.count("Accepted publickey") == 3
    assert host.run(Command.of("true")).exit_code == 0  # on one of them
    assert sshd.log.count("Accepted publickey") == 3
    host.close()


def test_commands_end_while_new_keys_are_exchanged(make_sshd: Callable[..., Sshd]) -> None:
    sshd = make_sshd("RekeyLimit 256K\nMaxSessions 10")
    host = sshd.host()
    assert host.run(Command.of("true")).exit_code == 0
    pieces = [bytes(1 << 20)] * 60
    with ThreadPoolExecutor(4) as pool:
        sent = pool.submit(host.pipe, iter(pieces), Command.of("wc", "-c"))
        codes = [pool.submit(host.run, Command.of("true"), 60) for _ in range(90)]
        assert sent.result().stdout.split() == [str(60 << 20).encode()]
        assert [done.result().exit_code for done in codes] == [0] * 90
    assert sshd.log.count("Accepted publickey") == 1


def test_the_end_of_input_that_comes_after_the_end_of_the_command(make_sshd: Callable[..., Sshd]) -> None:
    """A thread that sends it is interrupted before; meanwhile paramiko's own confirms that the command has ended."""
    sshd = make_sshd()
    host = sshd.host()
    assert host.run(Command.of("true")).exit_code == 0
    transport = host._connections[0].transport
    channel = transport.open_session()
    channel.exec_command("true")
    with channel.lock:
        late = channel._send_eof()  # builds the message
    wait_until(lambda: channel.closed, 60)
    assert host.run(Command.of("true")).exit_code == 0  # sshd has seen the confirmation
    transport._send_user_message(late)
    assert host.run(Command.of("echo", "still there")).stdout == b"still there\n"
    assert sshd.log.count("Accepted publickey") == 1
    assert "Disconnecting" not in sshd.log


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
    assert text.endswith("; check whether the host is up, then try again")
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


def test_a_connection_that_breaks_under_a_download(make_sshd: Callable[..., Sshd]) -> None:
    sshd = make_sshd()
    parts: list[bytes] = []
    breaker = break_once(sshd, lambda: sum(map(len, parts)) > 1_000_000)
    text = message(lambda: sshd.host().read_into(parts.append, Command.of("cat", "/dev/zero")))
    breaker.join()
    assert text.startswith("node-1: the connection was lost while `cat /dev/zero` ran; got ")


def break_once(sshd: Sshd, seen: Callable[[], bool]) -> threading.Thread:
    """Ends the sessions as soon as the other side starts to write."""

    def watch() -> None:
        wait_until(seen, 60)
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
    wait_until(lambda: [entry.name for entry in path.parent.iterdir()] == ["file"], 60)


def test_a_tree_that_breaks_leaves_the_old_files(make_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    sshd = make_sshd()
    host, folder = sshd.host(), tmp_path / "out"
    host.put_tree({"a": b"old", "b": b"old"}, str(folder))
    breaker = break_once(sshd, lambda: any(p.stat().st_size > 1_000_000 for p in folder.glob(".put.*/b")))
    text = message(lambda: host.put_tree({"a": b"new", "b": bytes(200_000_000)}, str(folder)))
    breaker.join()
    assert text.startswith("node-1: the connection was lost while `sh -c ")
    assert (folder / "a").read_bytes() + (folder / "b").read_bytes() == b"oldold"
    wait_until(lambda: sorted(entry.name for entry in folder.iterdir()) == ["a", "b"], 60)
