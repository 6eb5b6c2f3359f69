"""Layers come out of an engine by `docker push`, or by `docker save` where the engine cannot reach this machine."""

from __future__ import annotations

import gzip
import http.client
import io
import json
import random
import socket
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from tests.unit.ops.image.three_layers import CONFIG, DIFF_IDS, LAYERS
from tridock.errors import ClusterError
from tridock.ops.image.archive import ImageParts, digest_of
from tridock.ops.image.export import export_image, gzipped
from tridock.ops.image.registry import LoopbackRegistry


class Engine:
    """Pushes as dockerd does: asks for digests that it knows, sends the others in chunks, then the manifest.

    containerd sends a layer ``at_once``.
    """

    def __init__(self, registry: LoopbackRegistry, parts: ImageParts, *, at_once: bool = False) -> None:
        self.registry, self.parts, self.at_once = registry, parts, at_once
        self.sent: list[str] = []

    def ask(self, method: str, path: str, body: object = None, *, chunked: bool = False) -> http.client.HTTPResponse:
        address = self.registry.repository.partition("/")[0]
        connection = http.client.HTTPConnection(address, timeout=10)
        connection.request(method, path, body=body, encode_chunked=chunked, headers=(  # type: ignore[arg-type]
            {"Transfer-Encoding": "chunked"} if chunked else {}
        ))  # fmt: skip
        answer = connection.getresponse()
        answer.read()
        return answer

    def push(self, known: bool) -> None:
        base = self.registry.path
        for digest in (digest_of(self.parts.config), *self.parts.layers):
            if known and self.ask("HEAD", f"{base}/blobs/{digest}").status == 200:
                continue
            content = self.parts.config if digest == digest_of(self.parts.config) else self.content(digest)
            where = self.ask("POST", f"{base}/blobs/uploads/").headers["Location"]
            if not self.at_once:
                assert self.ask("PATCH", where, iter([content[:5], content[5:]]), chunked=True).status == 202
            body = content if self.at_once else None
            assert self.ask("PUT", f"{where}?digest={digest.replace(':', '%3A')}", body).status == 201
            self.sent.append(digest)
        assert self.ask("PUT", f"{base}/manifests/push", self.parts.manifest).status == 201

    def content(self, digest: str) -> bytes:
        return (self.parts.folder / digest).read_bytes()


@pytest.fixture
def received(tmp_path: Path) -> Path:
    made = tmp_path / "received"
    made.mkdir()
    return made


@pytest.mark.parametrize("at_once", [False, True], ids=["Docker", "containerd"])
def test_a_registry_takes_what_an_engine_pushes(parts: ImageParts, received: Path, at_once: bool) -> None:
    counts: list[int] = []
    with LoopbackRegistry(received, counts.append, lambda: None) as registry:
        Engine(registry, parts, at_once=at_once).push(known=False)
        assert registry.manifests_with(3) == [parts.manifest]
        assert registry.diff_ids(parts.manifest) == list(DIFF_IDS)
        assert registry.manifests_with(4) == []
    digests = {digest_of(parts.config), *parts.layers}
    assert {path.name: path.read_bytes() for path in received.iterdir()} == {
        digest: parts.config if digest == digest_of(parts.config) else (parts.folder / digest).read_bytes()
        for digest in digests
    }
    assert sum(counts) == sum(path.stat().st_size for path in received.iterdir())


def test_a_registry_asks_again_for_what_it_refuses(parts: ImageParts, received: Path) -> None:
    with LoopbackRegistry(received, lambda _: None, lambda: None) as registry:
        engine = Engine(registry, parts)
        engine.push(known=True)
        assert engine.sent == []
        registry.refused = {parts.layers[2]}
        engine.push(known=True)
        engine.push(known=True)
        assert engine.sent == [parts.layers[2]]


def test_a_registry_answers_only_who_knows_its_name(parts: ImageParts, received: Path) -> None:
    with LoopbackRegistry(received, lambda _: None, lambda: None) as registry:
        engine = Engine(registry, parts)
        for method, path in (
            ("HEAD", f"/v2/other/image/blobs/{parts.layers[0]}"), ("POST", "/v2/other/image/blobs/uploads/"),
            ("PATCH", "/v2/other/image/blobs/uploads/x"), ("PUT", "/v2/other/image/blobs/uploads/x?digest=sha256:1"),
            ("PUT", "/v2/other/image/manifests/push"), ("GET", f"{registry.path}/tags/list"),
        ):  # fmt: skip
            assert engine.ask(method, path, b"x" if method in ("PATCH", "PUT") else None).status == 404
        assert registry._server.server_address[0] == "127.0.0.1"
    assert list(received.iterdir()) == []


def test_an_engine_that_goes_away_in_the_middle_leaves_no_layer_and_no_traceback(
    parts: ImageParts, received: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[bool] = []
    with LoopbackRegistry(received, lambda _: None, lambda: ended.append(True)) as registry:
        host, _, port = registry.repository.partition("/")[0].partition(":")
        for body in (b"Transfer-Encoding: chunked\r\n\r\n5\r\nabc", b"Content-Length: 9\r\n\r\nabc"):
            with socket.create_connection((host, int(port))) as engine:
                engine.sendall(f"PATCH {registry.path}/blobs/uploads/x HTTP/1.1\r\n".encode() + body)
                engine.shutdown(socket.SHUT_WR)
                assert engine.recv(1) == b""
        assert (registry.failure, ended) == (None, [])
    assert [path.name for path in received.iterdir()] == ["x.part"]
    assert capfd.readouterr().err == ""


def test_an_engine_that_tries_tls_learns_at_once_that_this_is_http(received: Path) -> None:
    with LoopbackRegistry(received, lambda _: None, lambda: None) as registry:
        host, _, port = registry.repository.partition("/")[0].partition(":")
        with socket.create_connection((host, int(port)), timeout=5) as engine:
            engine.sendall(b"\x16\x03\x01 a greeting without the end of a line")
            assert engine.recv(5) == b"HTTP/"


def saved(folder: Path, names: Callable[[int], str], contents: list[bytes]) -> Path:
    """What `docker save` prints, with the layers under these names."""
    entries = {names(number): content for number, content in enumerate(contents)}
    manifest = [{"Config": "config.json", "RepoTags": ["lab"], "Layers": [names(number) for number in range(3)]}]
    entries |= {"config.json": CONFIG, "manifest.json": json.dumps(manifest).encode()}
    path = folder / "saved.tar"
    with tarfile.open(path, "w") as tar:
        for name, content in entries.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


# `docker push`: each manifest's blobs, as far as the registry lacks them, then the manifest, where the size of a layer
# that was not sent is the registry's; notes what it sent.
PUSH = """
import http.client, json, pathlib, sys
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
address, _, repository = name.rpartition(":")[0].partition("/")
def ask(method, path, body=None):
    connection = http.client.HTTPConnection(address)
    connection.request(method, path, body)
    answer = connection.getresponse()
    answer.read()
    return answer
for path in sorted(folder.glob("manifest-*")):
    manifest = json.loads(path.read_bytes())
    for named in (manifest["config"], *manifest["layers"]):
        digest = named["digest"]
        there = ask("HEAD", f"/v2/{repository}/blobs/{digest}")
        named["size"] = int(there.headers["Content-Length"])
        if there.status == 404:
            named["size"] = (folder / digest).stat().st_size
            where = ask("POST", f"/v2/{repository}/blobs/uploads/").headers["Location"]
            ask("PUT", f"{where}?digest={digest}", (folder / digest).read_bytes())
            with (folder / "sent").open("a") as sent:
                sent.write(f"{digest}\\n")
    ask("PUT", f"/v2/{repository}/manifests/{path.name}", json.dumps(manifest))
with (folder / "pushes").open("a") as pushes:
    pushes.write(".")
"""


@pytest.mark.parametrize("several", [False, True], ids=["one platform", "several"])
def test_of_an_image_for_several_platforms_this_engines_own_is_exported(
    docker: Callable[[str], None], parts: ImageParts, received: Path, tmp_path: Path, several: bool
) -> None:
    """The other one, which is pushed last, has as many layers; their configurations tell them apart."""
    (parts.folder / digest_of(parts.config)).write_bytes(parts.config)
    (parts.folder / "manifest-1").write_bytes(parts.manifest)
    if several:
        other = json.dumps({"architecture": "arm64", "rootfs": {"diff_ids": ["x", "y", "z"]}}).encode()
        (parts.folder / digest_of(other)).write_bytes(other)
        layers = [{"digest": f"sha256:{name}"} for name in "xyz"]
        manifest = {"config": {"digest": digest_of(other)}, "layers": layers}
        (parts.folder / "manifest-2").write_text(json.dumps(manifest))
    (tmp_path / "push.py").write_text(PUSH)
    docker(f'case $1 in push) exec {sys.executable} {tmp_path}/push.py {parts.folder} "$2";; esac')
    found = export_image("lab", DIFF_IDS, 1, received, lambda _: None, pytest.fail)
    assert found.config == parts.config
    sizes = [(layer["digest"], layer["size"]) for layer in json.loads(found.manifest)["layers"]]
    assert sizes[1:] == [(digest, (parts.folder / digest).stat().st_size) for digest in parts.layers[1:]]
    configs = {digest_of(parts.config), *([digest_of(other)] if several else [])}
    assert set((parts.folder / "sent").read_text().split()) == {*configs, *parts.layers[1:]}
    assert len((parts.folder / "pushes").read_text()) == (3 if several else 2)


def test_an_engine_that_pushes_another_platform_alone_saves(
    docker: Callable[[str], None], parts: ImageParts, received: Path, tmp_path: Path
) -> None:
    (parts.folder / digest_of(parts.config)).write_bytes(parts.config)
    (parts.folder / "manifest-1").write_bytes(parts.manifest)
    (tmp_path / "push.py").write_text(PUSH)
    docker(
        f'case $1 in push) exec {sys.executable} {tmp_path}/push.py {parts.folder} "$2";;'
        " save) echo no such image >&2; exit 1;; esac"
    )
    notes: list[str] = []
    with pytest.raises(ClusterError, match="no such image"):
        export_image("lab", ("x", "y", "z"), 1, received, lambda _: None, notes.append)
    assert notes == [
        "docker push cannot give single layers away (no manifest of the image came); docker save takes the whole image"
    ]


@pytest.mark.parametrize("names", [lambda n: f"{n}/layer.tar", lambda n: f"blobs/sha256/{n}"], ids=["20.10", "25"])
@pytest.mark.parametrize(
    ("packed", "zstd"), [(False, False), (True, False), (False, True)], ids=["tar", "gzip", "zstd"]
)
def test_an_engine_that_cannot_push_saves(
    docker: Callable[[str], None], tmp_path: Path, received: Path, names: Callable[[int], str], packed: bool,
    zstd: bool,
) -> None:  # fmt: skip
    file = saved(tmp_path, names, [gzip.compress(layer) if packed else layer for layer in LAYERS])
    docker(f'case $1 in push) echo "dial tcp: refused" >&2; exit 1;; save) cat {file};; esac')
    notes: list[str] = []
    parts = export_image("lab", DIFF_IDS, 1, received, lambda _: None, notes.append, zstd=zstd)
    assert notes == [
        "docker push cannot give single layers away (dial tcp: refused); docker save takes the whole image"
    ]
    assert parts.config == CONFIG
    unpack = zstandard.ZstdDecompressor().decompress if zstd else gzip.decompress
    assert [unpack((received / digest).read_bytes()) for digest in parts.layers] == list(LAYERS)
    assert {layer["mediaType"] for layer in json.loads(parts.manifest)["layers"]} == {
        f"application/vnd.oci.image.layer.v1.tar+{'zstd' if zstd else 'gzip'}"
    }
    assert parts.unpacked_size(1) == sum(map(len, LAYERS[1:]))
    assert all(digest_of((received / digest).read_bytes()) == digest for digest in parts.layers)


def test_an_engine_that_can_neither_push_nor_save(docker: Callable[[str], None], received: Path) -> None:
    docker('case $1 in push|save) echo "$1: no such image" >&2; exit 1;; esac')
    with pytest.raises(ClusterError, match=r"^docker save lab: could not be written to a file; got save: no such imag"):
        export_image("lab", DIFF_IDS, 1, received, lambda _: None, lambda _: None)


@pytest.mark.parametrize("count", [0, 1, 50])
def test_a_layer_that_is_compressed_on_all_cores_is_one_gzip_file(tmp_path: Path, count: int) -> None:
    chunks = [random.Random(number).randbytes(1000) * 30 for number in range(count)]
    packed = b"".join(gzipped(chunks))
    content = b"".join(chunks)
    unpacker = zlib.decompressobj(wbits=31)
    assert unpacker.decompress(packed) == content
    assert (unpacker.eof, unpacker.unused_data) == (True, b"")
    assert subprocess.run(["gzip", "-dc"], input=packed, capture_output=True, check=True).stdout == content
    assert len(packed) < 100 + 2000 * count
