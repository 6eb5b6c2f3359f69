"""Splits an image into parts, and builds archives for `docker load` with only the layers that a host lacks."""

import hashlib
import io
import json
import tarfile
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, starmap, takewhile
from pathlib import Path
from typing import Final, NamedTuple

import zstandard

_CHUNK = 1 << 20
_LONGEST_ZSTD_HEADER = 18
COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""The magic bytes of compressed layers."""
_SMALLEST_PIECE, _LARGEST_PIECE = 4 << 20, 64 << 20


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def shared_layers(diff_ids: Sequence[str], images: Iterable[Sequence[str]]) -> int:
    """Returns how many leading layers of an image are also in some image of a host.

    An engine identifies a layer by its chain id, so only a common prefix counts.
    """
    return max(
        (len(list(takewhile(lambda pair: pair[0] == pair[1], zip(diff_ids, other, strict=False)))) for other in images),
        default=0,
    )


class Blob(NamedTuple):
    """A layer as a manifest names it."""

    mediaType: str  # noqa: N815 (the manifest's key)
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class ImageParts:
    """An image's configuration, its manifest, and the folder with the compressed layers, each named by its digest."""

    config: bytes
    manifest: bytes
    folder: Path

    @property
    def ids(self) -> tuple[str, str]:
        """The image's id in Docker's classic image store, and in containerd's."""
        return digest_of(self.config), digest_of(self.manifest)

    @property
    def layers(self) -> tuple[str, ...]:
        """The digests of the compressed layers, base first."""
        return tuple(layer["digest"] for layer in json.loads(self.manifest)["layers"])

    def unpacked_size(self, present: int) -> int:
        """Returns the approximate bytes of the layers on a host's disk, without the first ``present``."""
        return sum(_unpacked_size(self.folder / digest) for digest in self.layers[present:])

    def with_blobs(self, blobs: Sequence[Blob]) -> "ImageParts":
        """Returns the same image for a host whose store has these blobs as its leading layers."""
        manifest = json.loads(self.manifest)
        manifest["layers"][: len(blobs)] = [blob._asdict() for blob in blobs]
        return replace(self, manifest=json.dumps(manifest, separators=(",", ":")).encode())

    def archive(self, image: str, present: int, inline: int) -> "Archive":
        """Returns an archive that `docker load` turns into ``image`` on an engine with the first ``present`` layers.

        It is both a `docker save` archive and an OCI layout, which engines with containerd's image store read. The
        smallest layers, up to ``inline`` bytes in total, go with the headers; the others are split into pieces.
        """
        config, manifest = self.ids
        kind = json.loads(self.manifest)["mediaType"]
        tagged = image if ":" in image.rpartition("/")[2] else f"{image}:latest"
        target = {
            "mediaType": kind,
            "digest": manifest,
            "size": len(self.manifest),
            "annotations": {"io.containerd.image.name": _full_name(tagged)},
        }
        index = {"schemaVersion": 2, "manifests": [target]}
        saved = [{"Config": _path(config), "RepoTags": [tagged], "Layers": [_path(layer) for layer in self.layers]}]
        small = {
            "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
            "index.json": json.dumps(index).encode(),
            "manifest.json": json.dumps(saved).encode(),
            _path(config): self.config,
            _path(manifest): self.manifest,
        }
        sizes = {digest: (self.folder / digest).stat().st_size for digest in self.layers[present:]}
        by_size = sorted(sizes, key=lambda digest: sizes[digest])
        totals = accumulate(sizes[digest] for digest in by_size)
        small_layers = {digest for digest, total in zip(by_size, totals, strict=True) if total <= inline}
        parts: list[bytes | Piece] = []
        between = b"".join(starmap(_entry, small.items()))
        for digest, size in sizes.items():
            if digest in small_layers:
                between += _entry(_path(digest), (self.folder / digest).read_bytes())
            else:
                parts += [between + _header(_path(digest), size), *pieces_of(self.folder / digest)]
                between = bytes(-size % tarfile.BLOCKSIZE)
        parts.append(between + bytes(2 * tarfile.BLOCKSIZE))
        return Archive(tuple(parts), len(small_layers), self.manifest)


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a compressed layer from offset ``start``; the name is the same on every machine."""

    layer: Path
    start: int
    size: int

    @property
    def name(self) -> str:
        """The layer's digest, a dot and the offset, so that it has only hexadecimal digits and one dot."""
        return f"{self.layer.name.rpartition(':')[2]}.{self.start}"

    def chunks(self) -> Iterator[bytes]:
        with self.layer.open("rb") as file:
            file.seek(self.start)
            left = self.size
            while left and (chunk := file.read(min(left, _CHUNK))):
                left -= len(chunk)
                yield chunk

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk)
        return digest.hexdigest()


def pieces_of(layer: Path) -> tuple[Piece, ...]:
    """Returns a layer's file as about 32 pieces of 4 to 64 MiB. A host can pass a piece on once it is complete."""
    total = layer.stat().st_size
    size = min(max(-(-total // 32), _SMALLEST_PIECE), _LARGEST_PIECE)
    return tuple(Piece(layer, start, min(size, total - start)) for start in range(0, total, size))


@dataclass(frozen=True, slots=True)
class Archive:
    """A tar for `docker load` in byte order: this image's own bytes, and pieces of layers in between."""

    parts: tuple[bytes | Piece, ...]
    inline_layers: int
    manifest: bytes = b""

    @property
    def files(self) -> dict[str, bytes | Piece]:
        """The parts by their file names on a host; concatenated in order they are the archive."""
        return {
            f"part-{number}" if isinstance(part, bytes) else part.name: part for number, part in enumerate(self.parts)
        }

    @property
    def inline(self) -> dict[str, bytes]:
        return {name: part for name, part in self.files.items() if isinstance(part, bytes)}

    @property
    def pieces(self) -> dict[str, Piece]:
        return {name: part for name, part in self.files.items() if isinstance(part, Piece)}

    @property
    def size(self) -> int:
        return sum(len(part) if isinstance(part, bytes) else part.size for part in self.parts)

    @property
    def layers(self) -> int:
        """The number of layers in it."""
        return self.inline_layers + len({piece.layer for piece in self.pieces.values()})

    def layers_in(self, pieces: Container[str]) -> int:
        """Returns the number of complete layers that a host with these pieces has."""
        return self.layers - len({piece.layer for name, piece in self.pieces.items() if name not in pieces})


def _full_name(image: str) -> str:
    """Returns an image's name with its registry, as containerd requires."""
    first, slash, _ = image.partition("/")
    if slash and (first == "localhost" or "." in first or ":" in first):
        return image
    return f"docker.io/{image}" if slash else f"docker.io/library/{image}"


def _path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _entry(name: str, content: bytes) -> bytes:
    return _header(name, len(content)) + content + bytes(-len(content) % tarfile.BLOCKSIZE)


def _header(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size = size
    return entry.tobuf(tarfile.GNU_FORMAT)


def _unpacked_size(path: Path) -> int:
    """Returns the uncompressed size recorded in a layer's file: gzip's at the end (up to 4 GiB), zstd's at the start,
    if any.
    """
    packed = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LONGEST_ZSTD_HEADER)
        match COMPRESSED.get(start[:2]) or COMPRESSED.get(start[:4]):
            case "gzip":
                file.seek(-4, io.SEEK_END)
                size = int.from_bytes(file.read(4), "little")
                return size + max(0, -(-(packed - size) // (1 << 32))) * (1 << 32)
            case "zstd":
                return max(packed, zstandard.frame_content_size(start))
    return packed
