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
from tridock.ops.image.transfer import Delivery, Stock, parse_stock
from tridock.remote import Completed, LocalHost

OVERLAY = 'overlay2 [["Backing Filesystem","extfs"]]'
CONTAINERD = 'overlayfs [["driver-type","io.containerd.snapshotter.v1"]]'
DOCKER = r"""
case "$1 $2" in
"info "*) printf '%s\n' "/ $STORE" ;;
"image ls") [ -z "$LAYERS" ] || printf 'one\none\n' ;;
"image inspect") printf 'layers %s\n' "$LAYERS" ;;
"load --quiet") [ -z "$FAILS" ] || { echo "$FAILS" >&2; exit 1; }; cat >"$LOADED" ;;
*) echo "not expected: $*" >&2; exit 1 ;;
esac"""


@pytest.fixture
def delivery(tmp_path: Path, docker: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> Delivery:
    docker(DOCKER)
    for name, value in {"STORE": OVERLAY, "LAYERS": "", "FAILS": "", "LOADED": str(tmp_path / "loaded")}.items():
        monkeypatch.setenv(name, value)
    return Delivery("gpu-1", LocalHost(), f"{tmp_path}/lab/image", f"{tmp_path}/lab/images", "me", "sha256:here")


def show(_node: str, _archive: Archive, _start: int) -> Callable[[int], object]:
    return lambda _count: None


def test_a_host_without_images_lacks_everything(delivery: Delivery) -> None:
    stock = delivery.stock()
    assert (stock.images, stock.whole, stock.parts, stock.held(DIFF_IDS)) == ((), "", {}, 0)
    assert stock.folder is not None
    assert stock.folder[1] > 0


def test_a_host_names_the_layers_that_it_has(delivery: Delivery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERS", f'["{DIFF_IDS[0]}","{DIFF_IDS[1]}","sha256:other"]')
    assert delivery.stock().held(DIFF_IDS) == 2


@pytest.mark.parametrize(
    ("store", "reason"),
    [(CONTAINERD, "its Docker uses containerd's image store"), ("", "its docker info names no storage driver")],
)
def test_other_image_stores_get_the_whole_image(store: str, reason: str) -> None:
    stock = parse_stock(f'store {store}\nlayers ["{DIFF_IDS[0]}"]\n')
    assert (stock.whole, stock.held(DIFF_IDS)) == (reason, 0)


def test_the_layers_that_are_missing_are_loaded(delivery: Delivery, parts: ImageParts, tmp_path: Path) -> None:
    delivery.send(parts, 1, delivery.stock(), "lab", show)
    assert (tmp_path / "loaded").read_bytes() == b"".join(parts.archive("lab", 1).chunks())
    assert not (tmp_path / "lab/image").exists()
    assert (tmp_path / "lab/images").read_text().split() == [*parts.ids, "sha256:here"]


class Dropped(LocalHost):
    """A host whose connection ends before all is sent; counts what is."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.sent = limit, 0

    def pipe(self, chunks: Iterator[bytes], command: Command, **options: object) -> Completed:  # type: ignore[override]
        content = b"".join(chunks)[: self.limit]
        self.sent += len(content)
        return super().pipe([content], command, **options)  # type: ignore[arg-type]


def test_what_was_cut_off_goes_on_where_it_was(delivery: Delivery, parts: ImageParts, tmp_path: Path) -> None:
    host = Dropped(3000)
    cut = replace(delivery, host=host)
    archive = parts.archive("lab", 0)
    with pytest.raises(ClusterError, match=r"^gpu-1: `receive the image` failed .* got only part of the image arrived"):
        cut.send(parts, 0, cut.stock(), "lab", show)
    assert cut.stock().parts == {f"{archive.name}.me.part": 3000}
    host.limit = archive.size
    cut.send(parts, 0, cut.stock(), "lab", show)
    assert host.sent == archive.size
    assert (tmp_path / "loaded").read_bytes() == b"".join(archive.chunks())


def test_a_part_of_another_image_goes_and_another_operators_stays(
    delivery: Delivery, parts: ImageParts, tmp_path: Path
) -> None:
    folder = tmp_path / "lab/image"
    folder.mkdir(parents=True)
    for name in ("old.me.part", "old.you.part"):
        (folder / name).write_bytes(b"x")
    delivery.send(parts, 0, delivery.stock(), "lab", show)
    assert [path.name for path in folder.iterdir()] == ["old.you.part"]


def test_an_archive_that_docker_refuses_is_not_kept(
    delivery: Delivery, parts: ImageParts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAILS", "no space left on device")
    with pytest.raises(ClusterError) as caught:
        delivery.send(parts, 0, delivery.stock(), "lab", show)
    assert str(caught.value) == (
        "gpu-1: `docker load --quiet` failed with exit code 1; got no space left on device; "
        "free some space there (docker system df shows Docker's share)"
    )
    assert not (tmp_path / "lab/image").exists()


def test_a_small_disk_is_refused_before_sending(delivery: Delivery, parts: ImageParts, tmp_path: Path) -> None:
    size, unpacked = parts.archive("lab", 0).size, parts.unpacked_size(0)
    stock = Stock((), "", {}, ("/home", size), ("/docker", size + unpacked - 1))
    with pytest.raises(ClusterError) as caught:
        delivery.send(parts, 0, stock, "lab", show)
    assert str(caught.value) == (
        "gpu-1: has too little room for the image; got 0 MB to store, 0 MB free on /docker; "
        "free some space there (docker system df shows Docker's share)"
    )
    one_disk = Stock((), "", {}, ("/", 2 * size + unpacked - 1), ("/", 2 * size + unpacked - 1))
    with pytest.raises(ClusterError, match="too little room"):
        delivery.send(parts, 0, one_disk, "lab", show)
    assert not (tmp_path / "loaded").exists()
    delivery.stock()
    delivery.send(parts, 0, Stock((), "", {}, ("/", 2 * size + unpacked), None), "lab", show)
