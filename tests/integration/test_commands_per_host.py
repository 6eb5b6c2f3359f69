"""How many commands each subcommand runs on a host: on many hosts each of them counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import bench_hosts
from tests.integration.sshd import SSHD, Sshd
from tridock.cli.program import main

HOSTS = 3
# On the head, and on each other host. Whatever changes something claims each host first, and then asks it again. The
# head also keeps the lock, the queue, a run's log, the rendezvous port, and starts runs and connections to all nodes.
COMMANDS = {
    "up, first": (7, 6),
    "up, again": (2, 1),
    "status": (3, 2),
    "check": (4, 2),
    "run": (9, 6),
    "logs": (3, 2),
    "stop": (3, 3),
    "keys": (3, 2),
    "down --force": (4, 3),
    "up": (7, 6),
    "down": (5, 4),
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Sshd]]]:
    """A hostfile, and the sshd of each host with a stand-in for Docker."""
    if SSHD is None:
        pytest.skip("no sshd on this machine")
    try:
        hostfile = bench_hosts.start(tmp_path_factory.mktemp("lab"), HOSTS)
        yield hostfile, list(bench_hosts.STARTED)
    finally:
        while bench_hosts.STARTED:
            bench_hosts.STARTED.pop().stop()


def test_commands_on_each_host(lab: tuple[Path, list[Sshd]], monkeypatch: pytest.MonkeyPatch) -> None:
    hostfile, sshds = lab
    monkeypatch.chdir(hostfile.parent)
    found = {}
    hosts = ("--hosts", str(hostfile))
    command_lines = {**bench_hosts.commands(str(hostfile)), "up": ("up", *hosts), "down": ("down", *hosts)}
    for what, argv in command_lines.items():
        before = [sshd.log.count("Starting session") for sshd in sshds]
        assert main(argv, "tridock") == 0
        counts = [sshd.log.count("Starting session") - old for sshd, old in zip(sshds, before, strict=True)]
        assert len(set(counts[1:])) == 1, (what, counts)
        found[what] = tuple(counts[:2])
    assert found == COMMANDS
    # The next command finds the connection of the one before.
    assert [sshd.log.count("Accepted publickey") for sshd in sshds] == [1] * HOSTS
