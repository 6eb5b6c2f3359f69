"""Tells which layers a host's containerd image store has as blobs, which an archive for `docker load` may leave out.

That store knows a layer by the digest of its compressed bytes, and a registry's differs from one that Tridock sent.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from tridock.ops.image.archive import Blob, digest_of, shared_layers

JSON_LIMIT: Final = 1 << 20
"""The largest manifest or configuration that is read, in bytes."""


class Source(NamedTuple):
    """An image of a host, and how many of its leading layers another image shares."""

    image: str
    shared: int


def closest(diff_ids: Sequence[str], images: Mapping[str, Sequence[str]], recorded: Mapping[str, bytes]) -> Source:
    """Returns the image that shares the most layers; among equals one with a recorded manifest, which costs nothing."""
    sources = (Source(image, shared_layers(diff_ids, [layers])) for image, layers in images.items())
    return max(sources, key=lambda source: (source.shared, source.image in recorded), default=Source("", 0))


def blobs_of(manifest: bytes) -> tuple[Blob, ...]:
    """Returns the layers of a manifest, base first."""
    return tuple(Blob(*(layer[key] for key in Blob._fields)) for layer in json.loads(manifest)["layers"])


def parse_saved(listing: str, diff_ids: Sequence[str]) -> tuple[Blob, ...]:
    """Returns the blobs of the image with these layers in a listing of `docker save`; empty if it is not complete.

    The listing has a line for each file: ``blob PATH SIZE``, or ``json PATH SIZE CONTENT`` with the content in Base64.
    An image for several platforms has several manifests, of which a host has the blobs of its own.
    """
    sizes: dict[str, int] = {}
    documents: dict[str, bytes] = {}
    for line in listing.splitlines():
        kind, path, size, *content = line.split()
        digest = path.removeprefix("blobs/").replace("/", ":")
        sizes[digest] = int(size)
        if kind == "json":
            documents[digest] = base64.b64decode("".join(content))
    intact = {digest: content for digest, content in documents.items() if digest_of(content) == digest}
    for manifest in _manifests(intact, diff_ids):
        blobs = blobs_of(manifest)
        if len(blobs) == len(diff_ids) and all(sizes.get(blob.digest) == blob.size for blob in blobs):
            return blobs
    return ()


def _manifests(documents: Mapping[str, bytes], diff_ids: Sequence[str]) -> Iterator[bytes]:
    """Yields the manifests whose configuration names these layers."""
    for content in documents.values():
        document = json.loads(content)
        config = document.get("config") if isinstance(document.get("layers"), list) else None
        if isinstance(config, dict) and config.get("digest") in documents:
            layers = json.loads(documents[config["digest"]]).get("rootfs", {}).get("diff_ids")
            if layers == list(diff_ids):
                yield content
