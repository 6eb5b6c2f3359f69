"""An image's way to a host: what is there, what is missing, what resumes where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.ops.image.three_layers import DIFF_IDS
from tridock.command import Command
from tridock.errors import ClusterError
from tridock.ops.image.archive import Archive, ImageParts
from tridock.ops.image.transfer import Delivery, Inventory, parse_inventory
from tridock.remote import Completed, LocalHost

OVERLAY = 'overlay2 [["Backing Filesystem","extfs"]]'
CONTAINERD = 'overlayfs [["driver-type","io.containerd.snapshotter.v1"]]'
DOCKER = r"""
case "$1 $2" in
"info "*) printf '%s\n' "20.10.24+dfsg1 / $STORE" ;;
"image ls") [ -z "$LAYERS" ] || printf 'one\none\n' ;;
"image inspect") printf 'layers one %s\n' "$LAYERS" ;;
"load --quiet") [ -z "$FAILS" ] || { echo "$FAILS" >&2; exit 1; }; cat >"$LOADED" ;;
*) echo "not expected: $*" >&2; exit 1 ;;
esac"""


@pytest.fixture
def delivery(tmp_path: Path, docker: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> Delivery:
    docker(DOCKER)
    for name, value in {"STORE": OVERLAY, "LAYERS": "", "FAILS": "", "LOADED": str(tmp_path / "loaded")}.items():
        monkeypatch.setenv(name, value)
    return Delivery("gpu-1", LocalHost(), f"{tmp_path}/lab/image/me", f"{tmp_path}/lab/images")


def send(delivery: Delivery, parts: ImageParts, present: int = 0, inventory: Inventory | None = None) -> list[str]:
    """Brings the image as the operator's machine does alone; returns the pieces that were sent."""
    inventory, archive = inventory or delivery.inventory(), parts.archive("lab", present, 0)
    missing = archive.pieces.keys() - delivery.begin(archive, parts.unpacked_size(present), inventory)
    for name in missing:
        delivery.receive(archive.pieces[name], lambda _: None)
    assert delivery.load(archive, (*parts.ids, "sha256:here"), inventory, clear=True) == ""
    return sorted(missing)


def content_of(archive: Archive) -> bytes:
    return b"".join(part if isinstance(part, bytes) else b"".join(part.chunks()) for part in archive.parts)


def test_a_host_without_images_lacks_everything(delivery: Delivery) -> None:
    inventory = delivery.inventory()
    assert (inventory.images, inventory.layers_refused, inventory.files) == ({}, "", {})
    assert inventory.present_layers(DIFF_IDS) == 0
    assert inventory.folder is not None
    assert inventory.folder[1] > 0


def test_a_host_names_the_layers_that_it_has(delivery: Delivery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERS", f'["{DIFF_IDS[0]}","{DIFF_IDS[1]}","sha256:other"]')
    assert delivery.inventory().present_layers(DIFF_IDS) == 2


def test_an_unknown_image_store_gets_the_whole_image() -> None:
    inventory = parse_inventory(f'store \nlayers one ["{DIFF_IDS[0]}"]\n')
    assert inventory.layers_refused == "its docker info names no storage driver"
    assert inventory.present_layers(DIFF_IDS) == 0


@pytest.mark.parametrize(
    ("version", "takes"),
    [
        ("20.10.24+dfsg1", False),
        ("22.06.0-beta", False),
        ("23.0.6", True),
        ("29.1.0", True),
        ("", False),
        ("4.9", False),
    ],
)
def test_dockers_since_23_take_zstd(version: str, takes: bool) -> None:
    assert parse_inventory(f"version {version}\nstore {OVERLAY}\n").zstd is takes


def test_the_layers_that_are_missing_are_loaded(delivery: Delivery, parts: ImageParts, tmp_path: Path) -> None:
    assert len(send(delivery, parts, present=1)) == 2
    assert (tmp_path / "loaded").read_bytes() == content_of(parts.archive("lab", 1, 0))
    assert not (tmp_path / "lab/image").exists()
    assert (tmp_path / "lab/images").read_text().split() == [*parts.ids, "sha256:here"]


class Dropped(LocalHost):
    """A host whose connection ends before all of a piece is sent."""

    def pipe(self, chunks: Iterator[bytes], command: Command, **options: object) -> Completed:  # type: ignore[override]
        return super().pipe([b"".join(chunks)[:-1]], command, **options)  # type: ignore[arg-type]


def test_an_interrupted_transfer_continues_with_the_next_piece(
    delivery: Delivery, parts: ImageParts, tmp_path: Path
) -> None:
    archive = parts.archive("lab", 0, 0)
    first, *others = archive.pieces.values()
    delivery.begin(archive, 0, delivery.inventory())
    delivery.receive(first, lambda _: None)
    with pytest.raises(ClusterError, match=r"^gpu-1: `receive the image` failed .* got only part of the image arrived"):
        replace(delivery, host=Dropped()).receive(others[0], lambda _: None)
    assert send(delivery, parts) == sorted(piece.name for piece in others)
    assert (tmp_path / "loaded").read_bytes() == content_of(archive)


def test_pieces_of_another_image_go_and_another_operators_stay(
    delivery: Delivery, parts: ImageParts, tmp_path: Path
) -> None:
    folder = tmp_path / "lab/image"
    for name in ("me/old.0", "me/old.0.123.part", "you/old.0"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    archive = parts.archive("lab", 0, 0)
    delivery.begin(archive, 0, delivery.inventory())
    assert {path.name for path in (folder / "me").iterdir()} == {*archive.inline, "order"}
    send(delivery, parts)
    assert [path.name for path in folder.iterdir()] == ["you"]


def test_a_piece_of_the_wrong_size_comes_again(delivery: Delivery, parts: ImageParts) -> None:
    archive = parts.archive("lab", 0, 0)
    first = next(iter(archive.pieces))
    Path(delivery.folder).mkdir(parents=True)
    Path(delivery.folder, first).write_bytes(b"x")
    assert delivery.begin(archive, 0, delivery.inventory()) == set()


def test_a_host_fetches_a_piece_with_a_command_and_checks_it(
    delivery: Delivery, parts: ImageParts, tmp_path: Path
) -> None:
    archive = parts.archive("lab", 0, 0)
    delivery.begin(archive, 0, delivery.inventory())
    piece = next(iter(archive.pieces.values()))
    there = tmp_path / piece.name
    give = ("sh", "-c", f'cat {tmp_path}/"$0"')
    assert delivery.fetch(piece, piece.sha256(), give) == f"cat: {there}: No such file or directory"
    there.write_bytes(b"other bytes")
    assert delivery.fetch(piece, piece.sha256(), give) == "other bytes arrived"
    assert delivery.fetch(piece, piece.sha256(), ("sh", "-c", "exit 7")) == "exit code 7"
    assert {path.name for path in Path(delivery.folder).iterdir()} == {*archive.inline, "order"}
    there.write_bytes(b"".join(piece.chunks()))
    assert delivery.fetch(piece, piece.sha256(), give) is None
    assert Path(delivery.folder, piece.name).read_bytes() == there.read_bytes()


def test_an_archive_that_docker_refuses_is_not_kept(
    delivery: Delivery, parts: ImageParts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAILS", "no space left on device")
    with pytest.raises(ClusterError) as caught:
        send(delivery, parts)
    assert str(caught.value) == (
        "gpu-1: `docker load --quiet` failed with exit code 1; got no space left on device; "
        "free some space there (docker system df shows Docker's share)"
    )
    assert not (tmp_path / "lab/image").exists()


def test_a_small_disk_is_refused_before_sending(delivery: Delivery, parts: ImageParts, tmp_path: Path) -> None:
    size, unpacked = parts.archive("lab", 0, 0).size, parts.unpacked_size(0)
    inventory = Inventory({}, "", {}, ("/home", size), ("/docker", size + unpacked - 1))
    with pytest.raises(ClusterError) as caught:
        send(delivery, parts, inventory=inventory)
    assert str(caught.value) == (
        "gpu-1: has too little disk space for the image; got 0 MB to store, 0 MB free on /docker; "
        "free some space there (docker system df shows Docker's share)"
    )
    one_disk = Inventory({}, "", {}, ("/", 2 * size + unpacked - 1), ("/", 2 * size + unpacked - 1))
    with pytest.raises(ClusterError, match="too little disk space"):
        send(delivery, parts, inventory=one_disk)
    assert not (tmp_path / "loaded").exists()
    send(delivery, parts, inventory=Inventory({}, "", {}, ("/", 2 * size + unpacked), None))
