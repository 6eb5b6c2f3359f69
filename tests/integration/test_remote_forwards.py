"""A port of a host that leads here, over the connection that its commands share."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.sshd import Sshd, free_port, message, serving, wait_until
from tests.patience import STEP_S
from tridock.command import Command
from tridock.remote import Host
from tridock.remote.ssh import SshHost


@pytest.fixture
def served() -> Iterator[int]:
    """A port of this machine that says what it is to everybody."""
    with serving(lambda connection: connection.sendall(b"here")) as port:
        yield port


def said(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=STEP_S) as connection:
        return connection.recv(10)


def is_closed(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_port_of_the_host_leads_here_while_the_block_runs(host: Host, served: int) -> None:
    with host.forwarded(served) as port:
        assert said(port) == b"here"
        assert host.run(Command.of("echo", "in")).stdout == b"in\n"
    if isinstance(host, SshHost):
        # sshd closes it asynchronously. The end of the connection would close it too, but commands keep that up.
        wait_until(lambda: host.run(Command.of("true")).exit_code == 0 and is_closed(port))
    else:
        assert not is_closed(port)


def test_several_ports_lead_here(shared: Sshd, served: int) -> None:
    host = shared.host()
    with host.forwarded(served) as first, host.forwarded(free_port()) as second:
        assert said(first) == b"here"
        assert not is_closed(second)
    assert host.run(Command.of("echo", "in")).stdout == b"in\n"


def test_the_users_own_forwards_have_no_part_in_it(shared: Sshd, served: int, tmp_path: Path) -> None:
    own = free_port()
    shared_config = shared.ssh_config.read_text()
    config = tmp_path / "config"
    config.write_text(f"{shared_config}  RemoteForward {own} 127.0.0.1:{served}\n  ExitOnForwardFailure yes\n")
    with shared.host(config_file=str(config)).forwarded(served) as port:
        assert said(port) == b"here"
        assert is_closed(own)


@pytest.mark.parametrize(
    ("option", "config", "got"),
    [
        (
            "AllowTcpForwarding no", "",
            "remote port forwarding failed for listen port 0; allow it in its sshd_config (AllowTcpForwarding)",
        ),
        (
            "", "  ControlPath none\n",
            "its commands share no connection; leave ControlPath out of the ssh configuration",
        ),
    ],
    ids=["sshd", "ssh"],
)  # fmt: skip
def test_where_nothing_is_forwarded_the_reason_is_named(
    make_sshd: Callable[..., Sshd], served: int, option: str, config: str, got: str
) -> None:
    sshd = make_sshd(option)
    sshd.ssh_config.write_text(sshd.ssh_config.read_text() + config)

    def forward() -> None:
        with sshd.host().forwarded(served):
            pass

    assert message(forward) == f"node-1: its sshd forwards no port to this machine; got {got}"


def test_a_configuration_that_ssh_does_not_read_in_time(shared: Sshd, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f'Match exec "sleep 99"\n  Compression yes\n{shared.ssh_config.read_text()}')
    text = message(shared.host(config_file=str(config)).forwarded(1).__enter__)
    assert text.endswith(
        ": ssh does not read its configuration; got no answer within 10 s; see what its `Match exec` runs"
    )
