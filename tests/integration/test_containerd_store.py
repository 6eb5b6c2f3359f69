"""An image for a Docker host with containerd's image store: what travels, and what happens if layers are missing."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import pytest

from tests.integration.rack import HOST_DOCKER, USER, Rack, build_host_image
from tests.integration.registry import Registry
from tests.integration.support import HOST_IMAGE, ROOT, execute, own_name, succeed
from tridock.ops.hosts.session import Session
from tridock.ops.image.archive import Archive
from tridock.ops.image.ensure import ensure_image
from tridock.ops.image.prune import prune
from tridock.ops.image.transfer import Delivery, Inventory

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

IMAGE = f"{HOST_IMAGE}-containerd"
CLUSTER = "containerd"
HOST = "host-containerd"
MEGABYTES = 8
RECEIVED = "cat /sys/class/net/eth0/statistics/rx_bytes"
REMOVE_BLOB = """
for socket in /run/docker/containerd/containerd.sock /run/containerd/containerd.sock; do
  [ -S "$socket" ] && exec ctr --address "$socket" --namespace moby content rm "$1"
done"""
ALL = "docker image rm --force $(docker image ls --all --quiet)"


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    """One host with Debian 13's Docker, or the one that TRIDOCK_HOST_DOCKER names."""
    build_host_image("containerd")
    if HOST_DOCKER is None:
        variables = [name for name in ("http_proxy", "https_proxy", "no_proxy") if name in os.environ]
        arguments = [f"--build-arg={name}" for name in (*variables, f"HOST_IMAGE={HOST_IMAGE}")]
        folder = f"{ROOT}/tests/integration/containerd_host"
        succeed("docker", "build", "--quiet", *arguments, "--tag", IMAGE, folder)
    else:
        succeed("docker", "tag", HOST_IMAGE, IMAGE)
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
    name, folder = image_name(rack), rack.folder / "image"

    def make(code: str, base: str = "debian:bookworm-slim") -> str:
        (folder / "code").write_text(code)
        (folder / "Dockerfile").write_text(f"FROM {base}\nCOPY code /code\n")
        return succeed("docker", "build", "--quiet", "--tag", name, str(folder)).strip()

    yield make
    execute("docker", "image", "rm", name)
    rack[HOST].execute(ALL)


def image_name(rack: Rack) -> str:
    return f"{rack.name}:containerd"


def session(rack: Rack) -> Session:
    return Session.open(rack.project / rack.write_cluster(CLUSTER, image=image_name(rack)))


def received(rack: Rack, wanted: str) -> float:
    """Brings the image to the host, and returns the megabytes that reached it."""
    before = int(rack[HOST].sh(RECEIVED))
    assert ensure_image(session(rack)) == wanted
    return (int(rack[HOST].sh(RECEIVED)) - before) / 1e6


def is_complete(rack: Rack, code: str) -> None:
    """The image runs there, and `docker save` finds each of its layers."""
    host, image = rack[HOST], image_name(rack)
    host.sh('docker run --rm --network none "$1" grep -qxF "$2" /code', image, code)
    layers = "docker image inspect --format '{{len .RootFS.Layers}}' \"$1\""
    saved = execute("docker", "exec", host.container, "docker", "save", image, text=False)
    with tarfile.open(fileobj=BytesIO(saved.stdout)) as tar:
        blobs = [name for name in tar.getnames() if re.fullmatch(r"blobs/sha256/[0-9a-f]{64}", name)]
    assert len(blobs) == int(host.sh(layers, image)) + 2  # the manifest and the configuration
    assert host.containers() == {}
    assert host.execute(f"ls /home/{USER}/tridock/{CLUSTER}/image.{HOST}").returncode == 2


def base_in(registry: Registry, folder: Path) -> str:
    """Pushes a base image with a layer that does not compress."""
    base = f"{registry.address}/team/base:1"
    (folder / "data").write_bytes(os.urandom(MEGABYTES * 1_000_000))
    (folder / "Dockerfile").write_text("FROM debian:bookworm-slim\nCOPY data /data\n")
    succeed("docker", "build", "--quiet", "--tag", base, str(folder))
    succeed("docker", "push", base)
    return base


def test_an_edit_alone_travels_whoever_brought_the_other_layers(
    rack: Rack, build: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The base is pulled from a registry, whose digests of the layers are other ones than those of `docker save`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = rack.folder / "image"
    with Registry(folder / "blobs") as registry:
        base = base_in(registry, folder)
        try:
            with registry.seen_on(rack.folder / "ssh_config", HOST):
                wanted = build("first", base)
                assert received(rack, wanted) > MEGABYTES  # pulled, over the same network
            assert f"{HOST}: got 1 layer of the image, 0.0 MB\n" in capsys.readouterr().out
            is_complete(rack, "first")
            for code in ("second", "third"):
                wanted = build(code, base)
                assert received(rack, wanted) < 0.1
                assert "reads its image" not in capsys.readouterr().err
                is_complete(rack, code)
            assert received(rack, wanted) < 0.1
            rack[HOST].execute(ALL)
            # Brought by hand, in layers that are not compressed.
            succeed("bash", "-c", f"docker save {base} | docker exec -i {rack[HOST].container} docker load")
            wanted = build("fourth", base)
            assert received(rack, wanted) < 0.1
            is_complete(rack, "fourth")
            prune(session(rack))
            is_complete(rack, "fourth")
        finally:
            execute("docker", "image", "rm", base)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (ALL, "the image with the other layers is gone"),
        (REMOVE_BLOB, "layers of the image are missing"),
    ],
    ids=["image", "layer"],
)
def test_what_is_removed_in_the_middle_comes_again(
    rack: Rack, build: Callable[..., str], spoil: str, reason: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The image that has the other layers, or one layer, after the host was asked what it has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert received(rack, build("first")) > MEGABYTES
    wanted, begin = build("second"), Delivery.begin

    def spoiled(delivery: Delivery, archive: Archive, unpacked: int, inventory: Inventory) -> set[str]:
        there = begin(delivery, archive, unpacked, inventory)
        monkeypatch.setattr(Delivery, "begin", begin)
        rack[HOST].sh(spoil, inventory.blobs[0].digest)
        return there

    monkeypatch.setattr(Delivery, "begin", spoiled)
    capsys.readouterr()
    assert received(rack, wanted) > MEGABYTES
    text = f"{HOST}: gets the whole image, not only the layers that it lacks: {reason}\n"
    assert text in capsys.readouterr().err
    is_complete(rack, "second")
