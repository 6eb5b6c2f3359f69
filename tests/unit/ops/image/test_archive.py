"""Archives hold exactly the layers that a host lacks, and can be read from any offset."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from tests.unit.ops.image.three_layers import LAYERS
from tridock.ops.image.archive import Archive, ImageParts, Piece, pieces_of, shared_layers


@pytest.mark.parametrize(
    ("images", "present"),
    [
        ([], 0),
        ([("b", "c")], 0),  # the same layers above another base are other layers
        ([("a",), ("a", "b"), ("x",)], 2),
        ([("a", "b", "c", "d")], 3),
        ([("a", "x", "c")], 1),
    ],
    ids=str,
)
def test_only_common_leading_layers_are_kept(images: list[tuple[str, ...]], present: int) -> None:
    assert shared_layers(("a", "b", "c"), images) == present


INLINE = 10_000


def content_of(archive: Archive) -> bytes:
    return b"".join(part if isinstance(part, bytes) else b"".join(part.chunks()) for part in archive.files.values())


@pytest.mark.parametrize("present", [0, 1, 2, 3])
@pytest.mark.parametrize("inline", [0, 200, INLINE])
def test_an_archive_has_the_layers_after_those_present(parts: ImageParts, present: int, inline: int) -> None:
    archive = parts.archive("lab", present, inline)
    content = content_of(archive)
    files = [f"blobs/{digest.replace(':', '/')}" for digest in parts.layers]
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        read = {name: extracted.read() for name in tar.getnames() if (extracted := tar.extractfile(name))}
    assert [name for name in read if name in files] == files[present:]
    (saved,) = json.loads(read["manifest.json"])
    assert (saved["Layers"], saved["RepoTags"]) == (files, ["lab:latest"])
    assert read[saved["Config"]] == parts.config
    assert [gzip.decompress(read[name]) for name in files[present:]] == list(LAYERS[present:])
    (target,) = json.loads(read["index.json"])["manifests"]
    assert read[f"blobs/{target['digest'].replace(':', '/')}"] == parts.manifest
    assert target["annotations"] == {"io.containerd.image.name": "docker.io/library/lab:latest"}
    assert (archive.size, archive.layers) == (len(content), 3 - present)


@pytest.mark.parametrize(
    ("image", "full"),
    [
        ("lab:1", "docker.io/library/lab:1"),
        ("me/lab:1", "docker.io/me/lab:1"),
        ("host:5000/lab", "host:5000/lab:latest"),
        ("ghcr.io/me/lab:1", "ghcr.io/me/lab:1"),
    ],
)
def test_containerd_gets_the_full_name(parts: ImageParts, image: str, full: str) -> None:
    content = content_of(parts.archive(image, 3, INLINE))
    assert f'"{full}"'.encode() in content


def test_small_layers_go_with_the_headers_the_smallest_first(parts: ImageParts) -> None:
    sizes = sorted((parts.folder / layer).stat().st_size for layer in parts.layers)
    for count, inline in enumerate((0, sizes[0], sum(sizes[:2]), sum(sizes))):
        for limit in (inline, inline + sizes[0] - 1):
            archive = parts.archive("lab", 0, limit)
            assert (archive.inline_layers, len(archive.pieces)) == (count, 3 - count)


@pytest.mark.parametrize(
    ("size", "count", "last"),
    [(1, 1, 1), (4 << 20, 1, 4 << 20), ((4 << 20) + 1, 2, 1), (320 << 20, 32, 10 << 20), (4 << 30, 64, 64 << 20)],
)
def test_a_layer_is_cut_into_pieces_that_its_size_alone_decides(
    tmp_path: Path, size: int, count: int, last: int
) -> None:
    layer = tmp_path / "sha256:abc"
    with layer.open("wb") as file:
        file.truncate(size)  # a file without blocks
    pieces = pieces_of(layer)
    assert (len(pieces), pieces[-1].size, sum(piece.size for piece in pieces)) == (count, last, size)
    assert [piece.name for piece in pieces] == [f"abc.{piece.start}" for piece in pieces]


def test_a_piece_is_the_bytes_from_its_start_on(tmp_path: Path) -> None:
    layer = tmp_path / "sha256:abc"
    layer.write_bytes(b"0123456789")
    piece = Piece(layer, 3, 4)
    assert (b"".join(piece.chunks()), piece.sha256()) == (b"3456", hashlib.sha256(b"3456").hexdigest())


def test_layers_are_counted_as_they_arrive_whole(parts: ImageParts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tridock.ops.image.archive._SMALLEST_PIECE", 40)
    archive = parts.archive("lab", 1, 0)
    first, last = (
        [name for name in archive.pieces if name.startswith(layer.removeprefix("sha256:"))]
        for layer in parts.layers[1:]
    )
    assert len(first) > 1
    assert [archive.layers_in(there) for there in ([], first[1:], first, [*first, *last])] == [0, 0, 1, 2]


def test_the_size_on_a_hosts_disk_is_known_for_gzip_and_for_plain_layers(parts: ImageParts) -> None:
    """An image store of containerd may hold layers as they are."""
    assert parts.unpacked_size(1) == sum(map(len, LAYERS[1:]))
    (parts.folder / parts.layers[2]).write_bytes(LAYERS[2])
    assert parts.unpacked_size(1) == sum(map(len, LAYERS[1:]))
