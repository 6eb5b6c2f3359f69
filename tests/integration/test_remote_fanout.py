"""The same thing on many hosts at once, over a real sshd on loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.integration.sshd import USER, Sshd, free_port, make_key, message, public
from tests.patience import STEP_S
from tridock.command import Command
from tridock.remote import Host, on_all, raise_failures
from tridock.remote.ssh import SshHost


class Counter:
    """A door in front of an sshd that counts who is inside at the same time."""

    def __init__(self, port: int) -> None:
        self._target, self._server = port, socket.create_server(("0.0.0.0", 0), backlog=128)
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
    addresses = [f"127.0.0.{n}" for n in range(1, 33)]  # each gets a connection of its own
    known.write_text("".join(f"[{address}]:{door.port} {public(shared.host_key)}\n" for address in addresses))
    config = tmp_path / "config"
    config.write_text(f"Host *\n UserKnownHostsFile {known}\n")
    changes = {"port": door.port, "config_file": str(config)}
    hosts = {f"node-{n:02}": shared.host(f"node-{n:02}", address=it, **changes) for n, it in enumerate(addresses)}

    # The first ones wait for as many as the cap lets in.
    full = f'touch "{tmp_path}/in-$1"; until [ "$(ls {tmp_path}/in-* | wc -l)" -ge 6 ]; do sleep 0.05; done'

    def work(name: str, host: SshHost) -> tuple[int, int]:
        try:
            script = f"date +%s%N; {full}; sleep 0.6; date +%s%N"
            done = host.run(Command.of("sh", "-c", script, "work", name), timeout=STEP_S)
            begin, end = map(int, done.stdout.split())
            return begin, end
        finally:
            host.close()

    spans = raise_failures(on_all(hosts, work, cap=6))
    assert list(spans) == list(hosts)
    assert door.all == 32
    at_once = max(sum(begin <= moment < end for begin, end in spans.values()) for moment, _ in spans.values())
    assert at_once == 6


def test_40_connections_that_an_sshd_of_few_startups_drops(make_sshd: Callable[..., Sshd]) -> None:
    sshd = make_sshd("MaxStartups 3:60:6")
    hosts = {f"node-{n:02}": sshd.host(f"node-{n:02}", retries=40) for n in range(40)}
    outcomes = on_all(hosts, lambda _, host: host.run(Command.of("true"), timeout=STEP_S).exit_code, cap=40)
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
        text = message(lambda: sshd.host(retries=1).run(Command.of("true")))
    assert text.startswith(f"node-1: drops connections before the login as {USER}@127.0.0.1 port {sshd.port}; got ")
    assert ", 2 times; see that an sshd listens there; lower ssh.max_connections, or raise MaxStartups" in text


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
        return host.run(Command.of("sh", "-c", script), timeout=STEP_S).checked(name).exit_code

    outcomes = on_all(hosts, work, cap=8)
    assert [name for name, outcome in outcomes.items() if outcome.ok] == ["fine", "fine-too"]
    assert message(lambda: raise_failures(outcomes)) == (
        f"refused: does not answer ssh at 127.0.0.1 port {port}; got Connection refused; "
        "see that it is up, that its sshd listens at that port (ssh.port), and that no firewall stands between\n"
        f"denied: refuses the login as {USER}@127.0.0.1 port {shared.port}; got Permission denied (publickey); "
        f"make `ssh -p {shared.port} {USER}@127.0.0.1` work: ssh-copy-id, ssh-add, or ssh.user and "
        "ssh.identity_file\n"
        "failing: `sh -c 'exit 3'` failed with exit code 3; got no output; fix that there, then try again\n"
        "fine, fine-too: no problem here; fix the others"
    )
