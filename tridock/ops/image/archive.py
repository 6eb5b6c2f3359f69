"""An image in parts, and archives of them for `docker load` that hold only the layers that a host lacks."""

import hashlib
import io
import json
import tarfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from pathlib import Path

_CHUNK = 1 << 20


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def shared_layers(diff_ids: Sequence[str], images: Iterable[Sequence[str]]) -> int:
    """How many leading layers of an image some image of a host has too.

    An engine knows a layer by its chain, so only a common beginning counts.
    """
    return max(
        (len(list(takewhile(lambda pair: pair[0] == pair[1], zip(diff_ids, other, strict=False)))) for other in images),
        default=0,
    )


@dataclass(frozen=True, slots=True)
class ImageParts:
    """An image's configuration, its manifest, and the folder with the compressed layers, each named by its digest."""

    config: bytes
    manifest: bytes
    folder: Path

    @property
    def ids(self) -> tuple[str, str]:
        """The image's id in Docker's own image store, and in containerd's."""
        return digest_of(self.config), digest_of(self.manifest)

    @property
    def layers(self) -> tuple[str, ...]:
        """The digests of the compressed layers, the base's first."""
        return tuple(layer["digest"] for layer in json.loads(self.manifest)["layers"])

    def unpacked_size(self, held: int) -> int:
        """About the size of the layers on a host's disk, without the first ``held``."""
        return sum(_unpacked_size(self.folder / digest) for digest in self.layers[held:])

    def archive(self, image: str, held: int) -> "Archive":
        """Becomes ``image`` on an engine that has the first ``held`` layers: `docker load` needs no file of those.

        It is a `docker save` archive and an OCI layout at once; engines with containerd's image store read the latter.
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
        sources: list[bytes | Path] = []
        for name, content in small.items():
            sources += [_header(name, len(content)), content, bytes(-len(content) % tarfile.BLOCKSIZE)]
        ends = []
        sent = tuple(dict.fromkeys(self.layers[held:]))
        for digest in sent:
            path = self.folder / digest
            size = path.stat().st_size
            sources += [_header(_path(digest), size), path, bytes(-size % tarfile.BLOCKSIZE)]
            ends.append(len(sources))
        sources.append(bytes(2 * tarfile.BLOCKSIZE))
        sizes = [source.stat().st_size if isinstance(source, Path) else len(source) for source in sources]
        totals = list(accumulate(sizes))
        name = hashlib.sha256("\n".join((tagged, config, manifest, *sent)).encode()).hexdigest()[:32]
        return Archive(name, tuple(sources), totals[-1], tuple(totals[end - 1] for end in ends))


@dataclass(frozen=True, slots=True)
class Archive:
    """A tar made while it is read; ``name`` tells apart archives of different content."""

    name: str
    sources: tuple[bytes | Path, ...]
    size: int
    layer_ends: tuple[int, ...]

    def layers_in(self, count: int) -> int:
        """How many layers the first ``count`` bytes hold."""
        return bisect_right(self.layer_ends, count)

    def chunks(self, start: int = 0) -> Iterator[bytes]:
        """Its bytes from ``start`` on."""
        for source in self.sources:
            with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as file:
                size = file.seek(0, io.SEEK_END)
                file.seek(min(start, size))
                start -= min(start, size)
                while chunk := file.read(_CHUNK):
                    yield chunk


def _full_name(image: str) -> str:
    """An image's name with its registry, as containerd wants it."""
    first, slash, _ = image.partition("/")
    if slash and (first == "localhost" or "." in first or ":" in first):
        return image
    return f"docker.io/{image}" if slash else f"docker.io/library/{image}"


def _path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _header(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size = size
    return entry.tobuf(tarfile.GNU_FORMAT)


def _unpacked_size(path: Path) -> int:
    """What gzip's trailer says, which counts up to 4 GiB; never less than the file's own size."""
    packed = path.stat().st_size
    with path.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            return packed
        file.seek(-4, io.SEEK_END)
        size = int.from_bytes(file.read(4), "little")
    return size + max(0, -(-(packed - size) // (1 << 32))) * (1 << 32)
