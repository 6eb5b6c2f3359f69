"""Archives hold exactly the layers that a host lacks, and can be read from any offset."""

from __future__ import annotations

import gzip
import io
import json
import tarfile

import pytest

from tests.unit.ops.image.three_layers import LAYERS
from tridock.ops.image.archive import ImageParts, shared_layers


@pytest.mark.parametrize(
    ("images", "held"),
    [
        ([], 0),
        ([("b", "c")], 0),  # the same layers above another base are other layers
        ([("a",), ("a", "b"), ("x",)], 2),
        ([("a", "b", "c", "d")], 3),
        ([("a", "x", "c")], 1),
    ],
    ids=str,
)
def test_only_a_common_beginning_is_held(images: list[tuple[str, ...]], held: int) -> None:
    assert shared_layers(("a", "b", "c"), images) == held


@pytest.mark.parametrize("held", [0, 1, 2, 3])
def test_an_archive_has_the_layers_behind_those_held(parts: ImageParts, held: int) -> None:
    content = b"".join(parts.archive("lab", held).chunks())
    files = [f"blobs/{digest.replace(':', '/')}" for digest in parts.layers]
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        read = {name: extracted.read() for name in tar.getnames() if (extracted := tar.extractfile(name))}
    assert [name for name in read if name in files] == files[held:]
    (saved,) = json.loads(read["manifest.json"])
    assert (saved["Layers"], saved["RepoTags"]) == (files, ["lab:latest"])
    assert read[saved["Config"]] == parts.config
    assert [gzip.decompress(read[name]) for name in files[held:]] == list(LAYERS[held:])
    (target,) = json.loads(read["index.json"])["manifests"]
    assert read[f"blobs/{target['digest'].replace(':', '/')}"] == parts.manifest
    assert target["annotations"] == {"io.containerd.image.name": "docker.io/library/lab:latest"}


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
    content = b"".join(parts.archive(image, 3).chunks())
    assert f'"{full}"'.encode() in content


def test_the_rest_of_an_archive_from_any_offset(parts: ImageParts) -> None:
    archive = parts.archive("lab", 1)
    whole = b"".join(archive.chunks())
    assert archive.size == len(whole)
    assert all(b"".join(archive.chunks(start)) == whole[start:] for start in range(0, len(whole) + 100, 37))


def test_layers_are_counted_as_they_arrive_whole(parts: ImageParts) -> None:
    archive = parts.archive("lab", 1)
    first, second = archive.layer_ends
    counts = [archive.layers_in(count) for count in (0, first - 1, first, second, archive.size)]
    assert counts == [0, 0, 1, 2, 2]


def test_other_layers_are_another_archive(parts: ImageParts) -> None:
    assert len({parts.archive(image, held).name for image in ("lab", "other") for held in range(4)}) == 8


def test_the_size_on_a_hosts_disk_is_known_for_gzip_and_for_plain_layers(parts: ImageParts) -> None:
    """An image store of containerd may hold layers as they are."""
    assert parts.unpacked_size(1) == sum(map(len, LAYERS[1:]))
    (parts.folder / parts.layers[2]).write_bytes(LAYERS[2])
    assert parts.unpacked_size(1) == sum(map(len, LAYERS[1:]))
