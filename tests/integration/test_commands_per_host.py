"""How many commands each subcommand runs on a host: on many hosts each of them counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import bench_hosts
from tests.integration.sshd import SSHD, Sshd, wait_until
from tridock.cli.program import main

HOSTS = 3
# On the head, and on each other host. The head also keeps the lock of `up` and `down`, the queue, a run's log, the
# rendezvous port, and starts runs and connections to all nodes.
COMMANDS = {
    "up, first": (2, 1),
    "up, again": (2, 1),
    "status": (2, 1),
    "check": (3, 1),
    "run": (4, 1),
    "logs": (2, 1),
    "stop": (1, 1),
    "keys": (1, 1),
    "down --force": (2, 1),
    "up": (2, 1),
    "down": (2, 1),
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
        before = [(sshd.log.count("Starting session"), sshd.log.count("Accepted publickey")) for sshd in sshds]
        assert main(argv, "tridock") == 0
        counts = [sshd.log.count("Starting session") - old for sshd, (old, _) in zip(sshds, before, strict=True)]
        assert len(set(counts[1:])) == 1, (what, counts)
        found[what] = tuple(counts[:2])
        for sshd, (_, old) in zip(sshds, before, strict=True):
            wait_until(lambda sshd=sshd, old=old: sshd.log.count("Accepted publickey") == old + 1)
    assert found == COMMANDS
