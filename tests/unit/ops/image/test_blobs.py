"""Which layers a host's containerd image store has: what is chosen, and what is believed."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from tests.unit.ops.image.three_layers import CONFIG, DIFF_IDS
from tridock.ops.image.archive import Blob, ImageParts, digest_of
from tridock.ops.image.blobs import Source, blobs_of, closest, parse_saved

IMAGES = {"old": DIFF_IDS[:1], "sent": (*DIFF_IDS[:2], "x"), "built": (*DIFF_IDS[:2], "y"), "other": ("z",)}


@pytest.mark.parametrize(
    ("names", "recorded", "source"),
    [
        (["old", "built", "sent"], {}, Source("built", 2)),
        (["old", "built", "sent"], {"sent": b""}, Source("sent", 2)),
        (["built", "sent"], {"old": b""}, Source("built", 2)),  # it has no such image any more
        (["old", "built"], {"old": b""}, Source("built", 2)),  # more layers are worth a look into the store
        (["other"], {"other": b""}, Source("other", 0)),
        ([], {}, Source("", 0)),
    ],
)
def test_the_image_with_the_most_layers_is_the_source(
    names: list[str], recorded: dict[str, bytes], source: Source
) -> None:
    assert closest(DIFF_IDS, {name: IMAGES[name] for name in names}, recorded) == source


def saved(parts: ImageParts, *others: bytes, without: str = "") -> str:
    """What a host lists of `docker save`."""
    documents = [parts.config, parts.manifest, *others]
    lines = [f"blob {path(layer)} {(parts.folder / layer).stat().st_size}" for layer in parts.layers]
    lines += [f"json {path(digest_of(one))} {len(one)} {base64.b64encode(one).decode()}" for one in documents]
    lines += ["json index.json 2 e30=", "blob manifest.json 1010"]
    return "".join(f"{line}\n" for line in lines if without == "" or without not in line)


def path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


@pytest.fixture
def image(parts: ImageParts) -> ImageParts:
    """With media types, which the store needs."""
    manifest = json.loads(parts.manifest)
    layers = [{"mediaType": "gzip", **layer} for layer in manifest["layers"]]
    return ImageParts(parts.config, json.dumps({**manifest, "layers": layers}).encode(), parts.folder)


def test_the_blobs_of_a_saved_image(image: ImageParts) -> None:
    blobs = parse_saved(saved(image), DIFF_IDS)
    assert blobs == blobs_of(image.manifest)
    assert [blob.digest for blob in blobs] == list(image.layers)


def test_of_several_platforms_the_one_with_these_layers_counts(image: ImageParts) -> None:
    config = json.dumps({"rootfs": {"diff_ids": DIFF_IDS[::-1]}}).encode()
    manifest = {**json.loads(image.manifest), "config": {"digest": digest_of(config)}}
    manifest["layers"] = manifest["layers"][::-1]
    listing = saved(ImageParts(image.config, json.dumps(manifest).encode(), image.folder), config, image.manifest)
    assert parse_saved(listing, DIFF_IDS) == blobs_of(image.manifest)
    assert parse_saved(listing, DIFF_IDS[:2]) == ()


@pytest.mark.parametrize("missing", ["layer", "configuration", "manifest"])
def test_an_image_that_is_not_complete_has_no_blobs(image: ImageParts, missing: str) -> None:
    digests = {"layer": image.layers[1], "configuration": digest_of(image.config), "manifest": image.ids[1]}
    assert parse_saved(saved(image, without=digests[missing].partition(":")[2]), DIFF_IDS) == ()


def test_documents_and_layers_with_other_bytes_do_not_count(image: ImageParts) -> None:
    listing = saved(image)
    forged = base64.b64encode(image.config + b" ").decode()
    assert parse_saved(listing.replace(base64.b64encode(image.config).decode(), forged), DIFF_IDS) == ()
    size = (image.folder / image.layers[0]).stat().st_size
    assert parse_saved(listing.replace(f"{path(image.layers[0])} {size}", f"{path(image.layers[0])} 1"), DIFF_IDS) == ()


def test_a_hosts_manifest_names_its_own_blobs(image: ImageParts, tmp_path: Path) -> None:
    registrys = Blob("zstd", 7, "sha256:pulled")
    own = image.with_blobs([registrys])
    assert blobs_of(own.manifest) == (registrys, *blobs_of(image.manifest)[1:])
    assert (own.config, own.ids[0]) == (CONFIG, image.ids[0])
    assert own.manifest.count(b"\n") == 0
    archive = own.archive("lab", 1, 1 << 20)
    assert archive.manifest == own.manifest
    assert archive.layers == 2
