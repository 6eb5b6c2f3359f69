"""An image's way to a host: what is there, what is missing, what resumes where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.ops.image.three_layers import DIFF_IDS
from tridock.command import Command
from tridock.errors import ClusterError
from tridock.ops.image.archive import Archive, Blob, ImageParts, digest_of
from tridock.ops.image.blobs import blobs_of
from tridock.ops.image.transfer import Delivery, Inventory, parse_inventory
from tridock.remote import Completed, LocalHost

OVERLAY = 'overlay2 [["Backing Filesystem","extfs"]]'
CONTAINERD = 'overlayfs [["driver-type","io.containerd.snapshotter.v1"]]'
DOCKER = r"""
case "$1 $2" in
"info "*) printf '%s\n' "20.10.24+dfsg1 / $STORE" ;;
"image ls") [ -z "$LAYERS" ] || printf 'one\none\n' ;;
"image inspect") printf 'layers one %s\n' "$LAYERS" ;;
"save one") cat -- "$SAVED" ;;
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
    try:
        assert delivery.load(archive, (*parts.ids, "sha256:here"), inventory) == ""
    finally:
        delivery.clear()
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


@pytest.mark.parametrize("fails", [False, True], ids=["loaded", "refused"])
def test_small_layers_go_straight_to_docker_load(
    delivery: Delivery, parts: ImageParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Nothing is written beside Docker's own files, and what an interrupted command has left is removed."""
    leftover = tmp_path / "lab/image/me/order"
    leftover.parent.mkdir(parents=True)
    leftover.write_text("old.0\n")
    archive, inventory = parts.archive("lab", 1, 1 << 20), delivery.inventory()
    assert delivery.begin(archive, 0, inventory) == set()
    assert [path.name for path in leftover.parent.iterdir()] == ["order"]
    if fails:
        monkeypatch.setenv("FAILS", "unexpected EOF")
        with pytest.raises(ClusterError, match=r"^gpu-1: `docker load --quiet` failed .* got unexpected EOF"):
            delivery.load(archive, ["sha256:here"], inventory)
    else:
        assert delivery.load(archive, ["sha256:here"], inventory) == ""
        assert (tmp_path / "loaded").read_bytes() == content_of(archive)
    assert not (tmp_path / "lab/image").exists()
    assert (tmp_path / "lab/images").exists() is not fails


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


@pytest.fixture
def image(parts: ImageParts) -> ImageParts:
    """With media types, which containerd's image store needs."""
    manifest = json.loads(parts.manifest)
    layers = [{"mediaType": "gzip", **layer} for layer in manifest["layers"]]
    return replace(parts, manifest=json.dumps({**manifest, "layers": layers}).encode())


def test_containerds_store_is_asked_once_for_the_blobs_of_an_image_brought_by_others(
    delivery: Delivery, image: ImageParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "saved").write_bytes(content_of(image.archive("lab", 0, 1 << 20)))
    variables = {"STORE": CONTAINERD, "LAYERS": json.dumps(DIFF_IDS), "SAVED": str(tmp_path / "saved")}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    notes: list[str] = []
    inventory = delivery.inventory((*DIFF_IDS[:2], "sha256:edited"), notes.append)
    assert (inventory.source, inventory.blobs) == ("one", blobs_of(image.manifest)[:2])
    assert notes == ["gpu-1: reads its image one once, to see which layers its store has"]
    assert inventory.present_layers(DIFF_IDS) == 2
    assert delivery.inventory(("sha256:other",)).blobs == ()
    (tmp_path / "saved").write_bytes(content_of(image.archive("lab", 1, 1 << 20)))
    inventory = delivery.inventory(DIFF_IDS)
    assert inventory.layers_refused == "docker save one gives no layers there: a part of the image is missing"
    assert inventory.present_layers(DIFF_IDS) == 0
    (tmp_path / "saved").unlink()
    refused = delivery.inventory(DIFF_IDS).layers_refused
    assert refused.startswith(f"docker save one gives no layers there: cat: {tmp_path}/saved: No such file")


STORE = r"""
case "$1 $2" in
"info "*) printf '%s\n' "$RELEASE / $STORE" ;;
"image ls") cat -- "$IMAGES" ;;
"image inspect") [ "$3" = --format ] || exec grep -qxF -- "$3" "$IMAGES"
  while read -r id; do printf 'layers %s %s\n' "$id" "$LAYERS"; done <"$IMAGES" ;;
"version "*) echo linux/amd64 ;;
"load --quiet") echo "$*" >>"$CALLS"; cat >"$LOADED"
  if [ -n "$COMPLETE" ]; then echo "$ID" >>"$IMAGES"; elif [ -n "$SAYS" ]; then echo "$SAYS" >&2; exit 1; fi ;;
"create "*) [ "$6" = "$ID" ] || exit 1 ;;
"rm "*) ;;
*) echo "not expected: $*" >&2; exit 1 ;;
esac"""


CHECKED = " --platform=linux/amd64"
# What `docker load --platform` said of an archive without a layer that the store lacked.
OF_28 = "requested platform (linux/amd64) found, but some content is missing: content digest: not found"
OF_29 = "image lab was loaded, but doesn't provide the requested platform ([linux/amd64])"


@pytest.mark.parametrize(
    ("release", "checked", "says"),
    [("26.1.5", "", ""), ("28.5.2", CHECKED, OF_28), ("29.7.2", CHECKED, OF_29)],
    ids=["26", "28", "29"],
)
def test_a_store_keeps_what_it_was_sent_for_the_next_edit(
    delivery: Delivery, image: ImageParts, docker: Callable[[str], None], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, release: str, checked: str, says: str,
) -> None:  # fmt: skip
    whole = image.with_blobs(()).archive("lab", 0, 1 << 20)
    docker(STORE)
    files = {name: str(tmp_path / name.lower()) for name in ("IMAGES", "CALLS", "LOADED")}
    values = {"RELEASE": release, "STORE": CONTAINERD, "LAYERS": json.dumps(DIFF_IDS), "COMPLETE": "yes", "SAYS": says}
    for name, value in {**files, **values, "ID": digest_of(whole.manifest)}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "images").touch()

    inventory = delivery.inventory(DIFF_IDS)
    delivery.begin(whole, 0, inventory)
    assert delivery.load(whole, ["id"], inventory) == ""
    inventory = delivery.inventory((*DIFF_IDS[:2], "sha256:edited"))
    assert (inventory.source, inventory.blobs) == (digest_of(whole.manifest), blobs_of(whole.manifest)[:2])

    edit = image.with_blobs((Blob("zstd", 7, "sha256:pulled"),)).archive("lab", 2, 1 << 20)
    monkeypatch.setenv("ID", digest_of(edit.manifest))
    monkeypatch.setenv("COMPLETE", "")
    delivery.begin(edit, 0, inventory)
    assert delivery.load(edit, ["id"], inventory) == "layers of the image are missing"
    monkeypatch.setenv("COMPLETE", "yes")
    delivery.begin(edit, 0, inventory)
    assert delivery.load(edit, ["id"], inventory) == ""
    assert (tmp_path / "calls").read_text().splitlines() == ["load --quiet", *[f"load --quiet{checked}"] * 2]

    (tmp_path / "images").write_text(f"{digest_of(edit.manifest)}\n")
    delivery.begin(edit, 0, inventory)
    assert delivery.load(edit, ["id"], inventory) == "the image with the other layers is gone"
    assert not (tmp_path / "lab/image").exists()
    assert set(delivery.inventory(DIFF_IDS).manifests) == {digest_of(edit.manifest)}
    assert [path.name for path in tmp_path.glob("lab/images.manifests/*")] == [digest_of(edit.manifest)[7:]]


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
