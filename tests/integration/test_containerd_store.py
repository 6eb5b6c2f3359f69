"""An image for a Docker host with containerd's image store: only what is missing travels, and the image is complete."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import pytest

from tests.integration.rack import HOST_DOCKER, Rack, build_host_image
from tests.integration.registry import Registry
from tests.integration.support import HOST_IMAGE, ROOT, execute, own_name, succeed
from tridock.cluster.settings import load_cluster
from tridock.ops.hosts.facts import read_states
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.image.ensure import ensure_image, prune, verify

pytestmark = pytest.mark.full

IMAGE = f"{HOST_IMAGE}-containerd"
CLUSTER = "containerd"
HOST = "host-containerd"
MEGABYTES = 8
RECEIVED = "cat /sys/class/net/eth0/statistics/rx_bytes"


@pytest.fixture(scope="module")
def rack(docker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    """One host with Debian 13's Docker, or the one that TRIDOCK_HOST_DOCKER names."""
    if HOST_DOCKER is None:
        build_host_image()
        variables = [name for name in ("http_proxy", "https_proxy", "no_proxy") if name in os.environ]
        arguments = [f"--build-arg={name}" for name in (*variables, f"HOST_IMAGE={HOST_IMAGE}")]
        folder = f"{ROOT}/tests/integration/containerd_host"
        succeed("docker", "build", "--quiet", *arguments, "--tag", IMAGE, folder)
    else:
        build_host_image(IMAGE, "containerd")
    made = Rack(own_name(), tmp_path_factory.mktemp("containerd"))
    (made.project / "hostfiles").mkdir(parents=True)
    (made.folder / "image/blobs").mkdir(parents=True)
    try:
        succeed("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(made.folder / "id"))
        succeed("docker", "network", "create", made.network)
        made.add(HOST, image=IMAGE)
        made.write_ssh_config()
        assert "io.containerd.snapshotter" in made[HOST].sh("docker info --format '{{json .DriverStatus}}'")
        yield made
    finally:
        made.remove()
        execute("docker", "image", "rm", IMAGE)


@pytest.fixture
def build(rack: Rack) -> Iterator[Callable[..., str]]:
    """Makes the image with other code on a base; returns its id here."""
    folder = rack.folder / "image"

    def make(code: str, base: str = "debian:bookworm-slim") -> str:
        (folder / "code").write_text(code)
        (folder / "Dockerfile").write_text(f"FROM {base}\nCOPY code /code\n")
        return succeed("docker", "build", "--quiet", "--tag", rack.image, str(folder)).strip()

    yield make
    execute("docker", "image", "rm", rack.image)
    rack[HOST].execute("docker image rm --force $(docker image ls --all --quiet)")


def hosts_of(rack: Rack) -> Hosts:
    return Hosts(load_cluster(rack.project / rack.write_cluster(CLUSTER)))


def received(rack: Rack, wanted: str) -> float:
    """Brings the image to the host, and returns the megabytes that reached it."""
    before, opened = int(rack[HOST].sh(RECEIVED)), hosts_of(rack)
    ensure_image(opened, wanted)
    verify(read_states(opened), wanted)
    return (int(rack[HOST].sh(RECEIVED)) - before) / 1e6


def is_complete(rack: Rack, code: str) -> None:
    """Docker lists the image, and saves each of its layers; the code is in the last one."""
    host, layers = rack[HOST], "docker image inspect --format '{{len .RootFS.Layers}}' \"$1\""
    assert rack.image in host.sh("docker image ls --format '{{.Repository}}:{{.Tag}}'").split()
    saved = execute("docker", "exec", host.container, "docker", "save", rack.image, text=False)
    with tarfile.open(fileobj=BytesIO(saved.stdout)) as tar:
        blobs = [name for name in tar.getnames() if re.fullmatch(r"blobs/sha256/[0-9a-f]{64}", name)]
    assert len(blobs) == int(host.sh(layers, rack.image)) + 2  # the manifest and the configuration
    copied = 'docker cp $(docker create "$1" true):/code - | tar -xO; docker rm $(docker ps --all --quiet) >&2'
    assert host.sh(copied, rack.image) == code


def test_an_edit_alone_travels_to_a_host_that_got_all_from_here(
    rack: Rack, build: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert received(rack, build("first")) > MEGABYTES
    is_complete(rack, "first")
    for code in ("second", "third"):
        wanted = build(code)
        assert received(rack, wanted) < 0.3
        is_complete(rack, code)
    assert received(rack, wanted) < 0.1
    (pruned,) = prune(hosts_of(rack)).values()
    assert len(pruned.removed) == 2
    is_complete(rack, "third")


def test_an_edit_alone_travels_to_a_host_that_pulled_the_base(
    rack: Rack, build: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose registry has other digests of its layers than the engine here: that knows them without their sizes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Registry(rack.folder / "image/blobs") as registry, registry.seen_on(rack.folder / "ssh_config", HOST):
        base = f"{registry.address}/team/base@{registry.add(os.urandom(MEGABYTES * 1_000_000))}"
        succeed("docker", "pull", base)
        try:
            assert received(rack, build("first", base)) == pytest.approx(MEGABYTES, rel=0.1)  # from the registry
            assert registry.pulled / 1e6 == pytest.approx(2 * MEGABYTES, rel=0.01)
            is_complete(rack, "first")
            assert received(rack, build("second", base)) < 0.3
            is_complete(rack, "second")
        finally:
            execute("docker", "image", "rm", "--force", rack.image, base)
