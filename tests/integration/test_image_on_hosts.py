"""The image on its way to Docker hosts that help each other: what goes out from here, and a host that dies."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.rack import USER, Rack
from tests.integration.support import execute, succeed
from tridock.errors import ClusterError
from tridock.ops.hosts.session import Session
from tridock.ops.image.ensure import ensure_image

pytestmark = pytest.mark.timeout(600)

MEGABYTES = 40
CLUSTER = "three"
ARRIVES = f"/home/{USER}/tridock/{CLUSTER}"
RECEIVED = "cat /sys/class/net/eth0/statistics/rx_bytes"
OUTPUT = re.compile(r"([\d.]+) MB of layers went out from here, ([\d.]+) MB from host to host")


@pytest.fixture(scope="module")
def three(rack: Rack) -> Iterator[Rack]:
    """The two hosts and a third one."""
    rack.add("host-c")
    rack.write_ssh_config("three_config")
    try:
        yield rack
    finally:
        container = rack.hosts.pop("host-c").container
        execute("docker", "rm", "--force", "--volumes", container)
        execute("docker", "volume", "rm", "--force", container)


@pytest.fixture
def image(three: Rack) -> Iterator[Callable[[], str]]:
    """Makes a new image with a layer that no host has and that does not compress; returns its id."""
    name, folder = f"{three.name}:three", three.folder / "three"
    folder.mkdir(exist_ok=True)

    def build() -> str:
        (folder / "data").write_bytes(os.urandom(MEGABYTES * 1_000_000))
        (folder / "Dockerfile").write_text("FROM debian:bookworm-slim\nCOPY data /data\n")
        return succeed("docker", "build", "--quiet", "--tag", name, str(folder)).strip()

    yield build
    execute("docker", "image", "rm", name)
    for host in three:
        host.execute('docker image rm --force $(docker image inspect --format "{{.Id}}" "$1")', name)


def session(rack: Rack) -> Session:
    ssh = {"config_file": str(rack.folder / "three_config")}
    hostfile = rack.write_cluster(CLUSTER, image=f"{rack.name}:three", ssh=ssh)
    return Session.open(rack.project / hostfile)


def close(opened: Session) -> None:
    for host in opened.hosts.values():
        host.close()


def nothing_is_left(rack: Rack, *names: str) -> None:
    for name in names:
        assert rack[name].execute(f"ls {ARRIVES}/image.{name}").returncode == 2
        assert rack[name].execute(f"pgrep -af [i]mage.{name}").stdout == ""


def test_hosts_give_each_other_what_one_of_them_got(
    three: Rack, image: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    base = session(three)
    succeed("docker", "tag", "debian:bookworm-slim", f"{three.name}:three")
    ensure_image(base)  # so that the layer alone is missing
    wanted = image()
    capsys.readouterr()
    before = [int(host.sh(RECEIVED)) for host in three]
    assert ensure_image(session(three)) == wanted
    received = [(int(host.sh(RECEIVED)) - earlier) / 1e6 for host, earlier in zip(three, before, strict=True)]
    assert [host.image_id(f"{three.name}:three") for host in three] == [wanted] * 3
    printed = capsys.readouterr()
    found = OUTPUT.search(printed.out)
    assert found, printed
    assert [float(megabytes) for megabytes in found.groups()] == [MEGABYTES, 2 * MEGABYTES]
    assert all(MEGABYTES < megabytes < 1.2 * MEGABYTES for megabytes in received), received
    for host in three:
        assert f"{host.name}: got 1 layer of the image, {MEGABYTES}.0 MB\n" in printed.out
    nothing_is_left(three, *three.hosts)
    close(base)


def test_a_host_that_dies_in_the_middle_delays_the_others_little(
    three: Rack, image: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Its sshds are killed, that of the pieces too, once it has one; the next command brings it the rest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = image()
    victim = three["host-b"]

    def kill() -> None:
        # All there: asked from here, the last piece may have arrived before the answer.
        few = f'[ "$(ls {ARRIVES}/image.host-b/*/*.*[0-9] 2>/dev/null | wc -l)" -lt 2 ]'
        victim.sh(f"timeout 120 sh -c 'while {few}; do sleep 0.02; done' && pkill -KILL sshd; true")

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(ClusterError) as caught:
            ensure_image(session(three))
        killer.join()
    finally:
        victim.sh("/usr/sbin/sshd -E /var/log/sshd.log")
    assert [problem.where for problem in caught.value.problems] == ["host-b"]
    assert str(caught.value).startswith("host-b: the connection was lost while "), caught.value
    assert [host.image_id(f"{three.name}:three") == wanted for host in three] == [True, False, True]
    nothing_is_left(three, "host-a", "host-c")
    capsys.readouterr()
    assert ensure_image(session(three)) == wanted
    assert victim.image_id(f"{three.name}:three") == wanted
    nothing_is_left(three, *three.hosts)


def test_hosts_behind_a_firewall_get_all_from_here(
    three: Rack, image: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rule = "INPUT --protocol tcp --syn ! --destination-port 22 --jump REJECT"
    for host in three:
        host.sh(f"iptables --insert {rule}")
    try:
        wanted = image()
        capsys.readouterr()
        assert ensure_image(session(three)) == wanted
    finally:
        for host in three:
            host.sh(f"iptables --delete {rule}")
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        "the hosts cannot fetch from each other, each gets all layers from here: "
        r"ssh: connect to host [\d.]+ port \d+: Connection refused",
        line,
    )
    assert [host.image_id(f"{three.name}:three") for host in three] == [wanted] * 3
    nothing_is_left(three, *three.hosts)
