"""The image on its way to Docker hosts, over ssh: what travels, what cannot, and what a command leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.rack import USER, Rack, RackHost, build_host_image
from tests.integration.registry import Registry
from tests.integration.support import ROOT, execute, own_name, succeed, wait_until
from tests.patience import STEP_S
from tridock.cluster.settings import load_cluster
from tridock.ops.hosts.facts import read_states
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.image.ensure import ensure_image, verify, wanted_image
from tridock.remote.ssh import SshHost

MEGABYTES = 40
CLUSTER = "pulls"
RECEIVED = "cat /sys/class/net/eth0/statistics/rx_bytes"
ENSURE = (
    "import sys; from pathlib import Path; from tridock.cluster.settings import load_cluster; "
    "from tridock.ops.hosts.hosts import Hosts; "
    "from tridock.ops.hosts.facts import read_states; "
    "from tridock.ops.image.ensure import ensure_image, wanted_image; "
    "hosts = Hosts(load_cluster(Path(sys.argv[1]))); "
    "ensure_image(hosts, wanted_image(hosts.cluster, read_states(hosts)))"
)
# The same, but host-a gets the first part of a layer and no more; then there is a file.
HELD = f"""
import sys, threading
from pathlib import Path
from tridock.ops.image.pull import Delivery

served = Delivery.served
def held(self, node, sent, layer):
    served(self, node, sent, layer)
    if node == "host-a" and sent:
        Path(sys.argv[2]).touch()
        threading.Event().wait()
Delivery.served = held
{ENSURE}
"""


@pytest.fixture(scope="module")
def hosts(docker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    """Two hosts with engines of their own."""
    build_host_image()
    made = Rack(own_name(), tmp_path_factory.mktemp("pulls"))
    (made.project / "hostfiles").mkdir(parents=True)
    (made.folder / "image").mkdir()
    try:
        made.start()
        yield made
    finally:
        made.remove()


@pytest.fixture
def build(hosts: Rack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Makes the image with other code, and perhaps other data that do not compress; returns its id."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = hosts.folder / "image"

    def make(code: str, base: str = "debian:bookworm-slim", *, data: bool = False) -> str:
        (folder / "code").write_text(code)
        if data:
            (folder / "data").write_bytes(os.urandom(MEGABYTES * 1_000_000))
        layers = "COPY data /data\n" if (folder / "data").exists() else ""
        (folder / "Dockerfile").write_text(f"FROM {base}\n{layers}COPY code /code\n")
        return succeed("docker", "build", "--quiet", "--tag", hosts.image, str(folder)).strip()

    yield make
    (folder / "data").unlink(missing_ok=True)
    execute("docker", "image", "rm", hosts.image)
    for host in hosts:
        host.execute("docker image rm --force $(docker image ls --all --quiet)")


def hosts_of(rack: Rack) -> Hosts:
    return Hosts(load_cluster(rack.project / rack.write_cluster(CLUSTER)))


def brought(rack: Rack, wanted: str) -> list[float]:
    """Brings the image to the hosts; returns the megabytes that each received."""
    before = [int(host.sh(RECEIVED)) for host in rack]
    opened = hosts_of(rack)
    ensure_image(opened, wanted_image(opened.cluster, read_states(opened)))
    verify(read_states(opened), wanted)
    assert [host.image_id(rack.image) for host in rack] == [wanted] * len(rack.hosts)
    return [(int(host.sh(RECEIVED)) - earlier) / 1e6 for host, earlier in zip(rack, before, strict=True)]


def log_out(rack: Rack) -> None:
    """The next command logs in to each host anew."""
    for host in hosts_of(rack).values():
        assert isinstance(host, SshHost)
        host.forget()


def nothing_is_left(rack: Rack, *, logged_in: bool = True) -> None:
    names = "docker image inspect --format '{{json .RepoTags}} {{json .RepoDigests}}' "
    assert execute("bash", "-c", names + rack.image).stdout.strip() in ("", f'["{rack.image}"] []')
    for host in rack:
        wait_until(lambda host=host: host.execute("pgrep --full '^docker (pull|load)'").returncode == 1, "pulls end")
        wait_until(
            lambda host=host: host.execute(names + rack.image).stdout.strip() in ("", f'["{rack.image}"] []'),
            "the name that it was pulled by is gone",
        )  # fmt: skip
        # In state 0A, LISTEN, on 127.0.0.1. ssh does not wait until sshd has closed a port.
        wait_until(
            lambda host=host: " 0100007F:" not in host.sh("grep ' 0A ' /proc/net/tcp"), "the forwarded port closes"
        )
        # The end of the connection would close it too.
        assert not logged_in or host.execute(f"pgrep --euid {USER} --exact sshd").returncode == 0, host.name


def test_a_host_gets_the_layers_that_it_lacks_and_an_edit_alone(
    hosts: Rack, build: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    first = brought(hosts, build("first", data=True))
    assert all(megabytes > MEGABYTES for megabytes in first)
    assert len(re.findall(r"^host-[ab]: got 3 layers of the image, ", capsys.readouterr().out, re.M)) == 2
    edit = brought(hosts, build("second"))
    assert max(edit) < 0.5
    printed = capsys.readouterr()
    assert (sorted(printed.out.splitlines()), printed.err) == (
        [f"{name}: got 1 layer of the image, 0.0 MB" for name in sorted(hosts.hosts)], "",
    )  # fmt: skip
    assert max(brought(hosts, build("second"))) < 0.1
    nothing_is_left(hosts)


@pytest.mark.full  # the two below
def test_hosts_that_pulled_the_base_keep_it_beside_one_that_cannot(
    hosts: Rack, build: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base image's registry has other digests of its layers than the engine here."""
    (tmp_path / "blobs").mkdir()
    with Registry(tmp_path / "blobs") as registry, registry.seen_on(hosts.folder / "ssh_config", "host-a"):
        base = f"{registry.address}/team/base@{registry.add(os.urandom(MEGABYTES * 1_000_000))}"
        succeed("docker", "pull", base)
        try:
            brought(hosts, build("first", base))
            printed = capsys.readouterr()
            assert "host-a: got 1 layer of the image, 0.0 MB\n" in printed.out
            assert f"host-b: got 2 layers of the image, {MEGABYTES}.0 MB\n" in printed.out
            assert re.search(
                r"^host-b: gets the base image from here, it cannot pull it: .*refused$", printed.err, re.M
            )
            assert registry.pulled / 1e6 == pytest.approx(2 * MEGABYTES, rel=0.01)  # here and on host-a
            assert max(brought(hosts, build("second", base))) < 0.5
            assert capsys.readouterr().err == ""
        finally:
            execute("docker", "image", "rm", "--force", hosts.image, base)
    nothing_is_left(hosts)


def read_again(host: RackHost) -> None:
    """Has the host's sshd read its configuration; until it listens anew, it has the old one."""
    begun = "grep -c '^Server listening on 0.0.0.0' /var/log/sshd.log || :"
    before = int(host.sh(begun))
    host.sh("pkill -HUP --oldest sshd")
    wait_until(lambda: int(host.sh(begun)) > before, "its sshd listens again")


def test_hosts_that_cannot_pull_get_the_whole_image_and_why(
    hosts: Rack, build: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """An sshd that forwards nothing, and an engine whose loopback is another one, as of rootless Docker."""
    rule = "OUTPUT --out-interface lo --protocol tcp --syn --match owner --uid-owner 0 --jump REJECT"
    forwards, engine = hosts["host-a"], hosts["host-b"]
    forwards.sh("echo 'AllowTcpForwarding no' >>/etc/ssh/sshd_config")
    read_again(forwards)
    engine.sh(f"iptables --insert {rule}")
    log_out(hosts)
    try:
        brought(hosts, build("first"))
    finally:
        forwards.sh("sed -i /AllowTcpForwarding/d /etc/ssh/sshd_config")
        read_again(forwards)
        engine.sh(f"iptables --delete {rule}")
        log_out(hosts)
    printed = capsys.readouterr()
    assert len(re.findall(r"^host-[ab]: got the whole image, \d\d\.\d MB$", printed.out, re.M)) == 2, printed.out
    why = "gets the whole image (docker save), it cannot pull it through ssh: "
    notes = sorted(line for line in printed.err.splitlines() if why in line)
    assert notes[0] == (
        f"host-a: {why}its sshd forwards no port to this machine (remote port forwarding failed for listen port 0); "
        "allow it in its sshd_config (AllowTcpForwarding)"
    )
    assert re.fullmatch(rf"host-b: {re.escape(why)}.*connection refused", notes[1]), notes
    nothing_is_left(hosts, logged_in=False)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.full)], ids=["Ctrl-C", "killed"]
)
def test_a_command_that_ends_in_the_middle_leaves_nothing_and_the_next_one_brings_the_image(
    hosts: Rack, build: Callable[..., str], tmp_path: Path, number: signal.Signals
) -> None:
    wanted, begun = build("first", data=True), tmp_path / "begun"
    argv = [sys.executable, "-c", HELD, str(hosts.project / hosts.write_cluster(CLUSTER)), str(begun)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, env=environment, start_new_session=True, stderr=subprocess.DEVNULL) as command:
        wait_until(lambda: begun.exists() or command.poll() is not None, "a layer is on its way")
        assert hosts["host-a"].execute('pgrep --full "^docker pull"').returncode == 0
        os.killpg(command.pid, number)
        assert command.wait(timeout=STEP_S) == -number
    if number == signal.SIGINT:
        nothing_is_left(hosts, logged_in=False)
    brought(hosts, wanted)
