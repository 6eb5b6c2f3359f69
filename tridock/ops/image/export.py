"""Exports an image from the operator's engine: the layers that hosts lack, as compressed files."""

import hashlib
import json
import os
import shutil
import struct
import subprocess
import tarfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import IO

import zstandard

from tridock.command import Command
from tridock.errors import ClusterError, Problem
from tridock.ops.image.archive import COMPRESSED, ImageParts, digest_of
from tridock.ops.image.registry import LoopbackRegistry
from tridock.remote import LocalHost

_CHUNK = 1 << 20
_OCI = "application/vnd.oci.image"
_MANIFEST, _CONFIG, _LAYER = f"{_OCI}.manifest.v1+json", f"{_OCI}.config.v1+json", f"{_OCI}.layer.v1.tar"
_ZSTD_LEVEL = 3
_PUSHES = 4
"""For the manifests, the configurations and the layers that hosts lack, and one in reserve."""
_GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_LAST_BLOCK = b"\x03\x00"  # deflate's final, empty block

Progress = Callable[[int], object]
Layer = dict[str, object]


def export_image(
    image: str,
    diff_ids: Sequence[str],
    present: int,
    folder: Path,
    progress: Progress,
    note: Callable[[str], object],
    *,
    zstd: bool = False,
) -> ImageParts:
    """Writes the layers of ``image`` after the first ``present`` to ``folder``; ``progress`` gets compressed bytes.

    An engine that cannot reach this machine's loopback (remote, Docker Desktop) saves the whole image instead, and
    ``note`` is called with the reason. Its layers are then compressed here, with ``zstd`` if all hosts can load it.
    """
    local = LocalHost()
    with LoopbackRegistry(folder, progress, local.close) as registry:
        parts, reason = _push(local, image, diff_ids, present, registry)
        if registry.failure is not None:
            raise not_written(f"docker push {image}", folder, str(registry.failure))
    if parts is not None:
        return parts
    note(f"docker push cannot give single layers away ({reason}); docker save takes the whole image")
    return _save(image, folder, progress, zstd)


def _push(
    local: LocalHost, image: str, diff_ids: Sequence[str], present: int, registry: LoopbackRegistry
) -> tuple[ImageParts | None, str]:
    """Returns the parts, or None and the reason."""
    name = f"{registry.repository}:push"
    local.run(Command.of("docker", "tag", image, name), timeout=30.0).checked("docker")
    try:
        for _ in range(_PUSHES):
            done = local.run(Command.of("docker", "push", name))
            if done.exit_code:
                return None, (done.stderr or done.stdout).decode(errors="replace").strip().rpartition("\n")[2]
            found = registry.manifests_with(len(diff_ids))
            ours = [manifest for manifest in found if registry.diff_ids(manifest) == list(diff_ids)]
            likely = [json.loads(manifest) for manifest in ours or found]
            needed = {named["config"]["digest"] for named in likely}
            if len(likely) == 1:  # else the configurations must come first, as other platforms' layers are not needed
                needed |= {layer["digest"] for layer in likely[0]["layers"][present:]}
            missing = {digest for digest in needed if not (registry.folder / digest).exists()}
            if not missing:
                if not ours:
                    return None, "no manifest of the image came"
                config = (registry.folder / likely[0]["config"]["digest"]).read_bytes()
                return ImageParts(config, ours[0], registry.folder), ""
            registry.refused |= missing
        return None, "layers are missing"
    finally:
        local.run(Command.of("docker", "image", "rm", name), timeout=60.0)


def _save(image: str, folder: Path, progress: Progress, zstd: bool) -> ImageParts:
    """Compresses the layers while `docker save` writes them; every Docker release writes a manifest.json."""
    layers: dict[str, Layer] = {}
    small: dict[str, bytes] = {}
    with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as save:
        assert save.stdout is not None
        assert save.stderr is not None
        try:
            with tarfile.open(fileobj=save.stdout, mode="r|") as saved:
                for entry in filter(tarfile.TarInfo.isfile, saved):
                    content = saved.extractfile(entry)
                    assert content is not None
                    start = content.read(_CHUNK)
                    if entry.size <= _CHUNK:
                        small[entry.name] = start
                    if entry.name.endswith(".tar") or entry.name.startswith("blobs/"):
                        size = entry.size if zstd else None
                        layers[entry.name] = _compress(chain([start], _chunks(content)), folder, progress, size)
        except (OSError, tarfile.TarError) as error:
            save.kill()
            reason = save.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise not_written(f"docker save {image}", folder, reason or str(error)) from None
    (item,) = json.loads(small["manifest.json"])
    config = small[item["Config"]]
    diff_ids = json.loads(config)["rootfs"]["diff_ids"]
    # A layer that occurs twice in an image is in the archive once.
    known = {diff: layers[path] for diff, path in zip(diff_ids, item["Layers"], strict=True) if path in layers}
    return ImageParts(config, _manifest(config, [known[diff] for diff in diff_ids]), folder)


def _manifest(config: bytes, layers: Sequence[Layer]) -> bytes:
    named = {"mediaType": _CONFIG, "size": len(config), "digest": digest_of(config)}
    return json.dumps({"schemaVersion": 2, "mediaType": _MANIFEST, "config": named, "layers": layers}).encode()


def _compress(content: Iterable[bytes], folder: Path, progress: Progress, size: int | None) -> Layer:
    """Writes a compressed layer under its digest, and returns its manifest entry.

    Uses zstd if ``size`` is given, else gzip; leaves compressed layers unchanged.
    """
    chunks = iter(content)
    first = next(chunks)
    chunks = chain([first], chunks)
    kind = next((name for magic, name in COMPRESSED.items() if first.startswith(magic)), None)
    if kind is None:
        kind, chunks = ("gzip", gzipped(chunks)) if size is None else ("zstd", _zstd(chunks, size))
    digest, written = hashlib.sha256(), 0
    part = folder / "saved.part"
    with part.open("wb") as file:
        for packed in chunks:
            file.write(packed)
            digest.update(packed)
            written += len(packed)
            progress(len(packed))
    name = f"sha256:{digest.hexdigest()}"
    part.rename(folder / name)
    return {"mediaType": f"{_LAYER}+{kind}", "size": written, "digest": name}


def _zstd(chunks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Yields a zstd frame with its content size, compressed on all cores."""
    packer = zstandard.ZstdCompressor(_ZSTD_LEVEL, threads=-1).compressobj(size)
    for chunk in chunks:
        yield packer.compress(chunk)
    yield packer.flush()


def gzipped(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields a gzip file (RFC 1952) of the chunks, each deflated separately on all cores, as zlib releases the GIL."""
    yield _GZIP_HEADER
    checksum = size = 0
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[bytes]] = deque()
        for chunk in chunks:
            checksum, size = zlib.crc32(chunk, checksum), size + len(chunk)
            waiting.append(pool.submit(_deflated, chunk))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        for packed in waiting:
            yield packed.result()
    yield _LAST_BLOCK + struct.pack("<LL", checksum, size % (1 << 32))


def _deflated(chunk: bytes) -> bytes:
    """Returns byte-aligned deflate blocks that refer to no earlier data."""
    packer = zlib.compressobj(1, wbits=-zlib.MAX_WBITS)
    return packer.compress(chunk) + packer.flush(zlib.Z_FULL_FLUSH)


def _chunks(content: IO[bytes]) -> Iterator[bytes]:
    while chunk := content.read(_CHUNK):
        yield chunk


def not_written(what: str, folder: Path, reason: str) -> ClusterError:
    """Returns the error for layers that do not fit on this machine's disk."""
    free = f"{shutil.disk_usage(folder).free / 1e9:.1f} GB free in {folder}"
    todo = "free some space there, or set XDG_CACHE_HOME to a larger disk"
    return ClusterError(Problem(what, "could not be written to a file", f"{reason}, {free}", todo))
