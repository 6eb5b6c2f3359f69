"""A registry on this machine's loopback: the engine here pushes an image to it, and hosts pull what they lack.

In the first push it claims to have every layer, so that the engine compresses only those that it has never sent
anywhere; the manifest, which comes last, names all. What a host asks for becomes :attr:`~LoopbackRegistry.refused`: the
next push brings it, and it is served from its file.
"""

import hashlib
import http.server
import json
import re
import secrets
import threading
from collections.abc import Callable, Collection, Container, Iterator
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import parse_qs, urlsplit

LOOPBACK: Final = "127.0.0.1"
PREFIX: Final = "tridock-"
"""How the repositories' secret names begin."""
_CHUNK = 1 << 20
_TLS_HANDSHAKE = b"\x16"
_SHUTDOWN_S: Final = 0.02
"""Seconds after which the server notices that it is to end; Python's default is half a second."""
_READ: Final = re.compile(r"(/v2/[^/]+/image)/(manifests|blobs)/(sha256:[0-9a-f]{64})")
_OCI: Final = "application/vnd.oci.image.manifest.v1+json"


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class LoopbackRegistry:
    """Serves while its block runs: a repository to push to, and for each host one to pull from, all with secret names.

    Layers are files in ``folder``, named by their digests.
    """

    def __init__(
        self,
        folder: Path,
        received: Callable[[int], object],
        give_up: Callable[[], object],
        served: Callable[[str, int, int], object] = lambda *_: None,
    ) -> None:
        """``received`` is called with the bytes of each chunk of a push. ``served`` is called with a node, the bytes
        sent to it, and the bytes of a layer that it has begun to get. ``give_up`` ends the push: an engine repeats what
        fails."""
        self.folder, self.received, self.give_up, self.served = folder, received, give_up, served
        self.sizes = {path.name: path.stat().st_size for path in folder.glob("sha256:*")}
        """Bytes of layers, as far as known; an engine takes them from here into the manifest."""
        self.claimed: Container[str] | None = None
        """What it claims to have in a push besides its files; None for everything."""
        self.refused: set[str] = set()
        """What it does not claim to have."""
        self.pushed: dict[str, bytes] = {}
        """Manifests by their configuration: an engine pushes one for each platform that it has, and attestations."""
        self.published: dict[str, bytes] = {}
        """The manifests that hosts can pull, by digest."""
        self.reached: set[str] = set()
        """The nodes whose engines have asked for something."""
        self.failure: OSError | None = None
        self.path = _new_path()
        self.readers: dict[str, str] = {}
        """Nodes by the path of the repository that they pull from."""
        self.changed = threading.Condition()
        self._wanted: set[str] = set()
        self._closed = False
        self._server = _Server((LOOPBACK, 0), type("Handler", (Handler,), {"registry": self}))

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    @property
    def repository(self) -> str:
        """The repository name for `docker push`: engines allow loopback addresses without TLS."""
        return f"{LOOPBACK}:{self.port}{self.path.removeprefix('/v2')}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(_SHUTDOWN_S,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self.refuse_to_wait(tuple(self._wanted))
        self._server.shutdown()
        self._server.server_close()

    def add_reader(self, node: str, port: int) -> str:
        """Returns the name of a new repository to pull from, at a port of the node's host."""
        path = _new_path()
        self.readers[path] = node
        return f"{LOOPBACK}:{port}{path.removeprefix('/v2')}"

    def publish(self, manifest: bytes) -> str:
        """Lets hosts pull what a manifest names; returns its digest."""
        digest = digest_of(manifest)
        self.published[digest] = manifest
        return digest

    def diff_ids(self, config: str) -> list[str]:
        """Returns the layers' ids in a configuration; none until that has arrived."""
        path = self.folder / config
        return list(json.loads(path.read_bytes()).get("rootfs", {}).get("diff_ids", ())) if path.exists() else []

    def claims(self, digest: str) -> bool:
        """Whether an engine that pushes is to leave a layer out."""
        claimed = self.claimed is None or digest in self.claimed or (self.folder / digest).exists()
        return claimed and digest not in self.refused

    def fetch(self, digest: str) -> Path | None:
        """Waits for a file that a push is to bring; returns None if the engine here has no such layer."""
        path = self.folder / digest
        with self.changed:
            if not path.exists() and not self._closed:
                self._wanted.add(digest)
                self.changed.notify_all()
                self.changed.wait_for(lambda: path.exists() or digest not in self._wanted)
        return path if path.exists() else None

    def wanted(self) -> frozenset[str]:
        """Waits until somebody fetches what is not here, and returns it; nothing once the registry closes."""
        with self.changed:
            self.changed.wait_for(lambda: self._wanted or self._closed)
            return frozenset(self._wanted)

    def refuse_to_wait(self, digests: Collection[str]) -> None:
        """Ends the wait for files, whether they have come or not."""
        with self.changed:
            self._wanted.difference_update(digests)
            self.changed.notify_all()


class Handler(http.server.BaseHTTPRequestHandler):
    """The part of the registry's HTTP API (version 2) that a push and a pull use."""

    protocol_version = "HTTP/1.1"
    registry: LoopbackRegistry

    def handle_one_request(self) -> None:
        """Handles a request. Engines try TLS first, and plain HTTP once the response begins with ``HTTP/``."""
        if self.rfile.peek(1)[:1] == _TLS_HANDSHAKE:  # type: ignore[attr-defined]
            self.wfile.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            self.close_connection = True
        else:
            super().handle_one_request()

    def do_GET(self) -> None:
        if self.path == "/v2/":
            self._answer(200)
        else:
            self._give(body=True)

    def do_HEAD(self) -> None:
        digest = self.path.rpartition("/")[2]
        if not self._is_push("/blobs/sha256:"):
            self._give(body=False)
        elif not self.registry.claims(digest):
            self._answer(404)
        else:
            size = str(self.registry.sizes.get(digest, 0))
            self._answer(200, **{"Content-Length": size, "Docker-Content-Digest": digest})

    def do_POST(self) -> None:
        if not self._is_push("/blobs/uploads/"):
            self._answer(404)
            return
        for _ in self._body():
            pass
        self._answer(202, Location=f"{self.registry.path}/blobs/uploads/{secrets.token_hex(16)}", Range="0-0")

    def do_PATCH(self) -> None:
        if not self._is_push("/blobs/uploads/"):
            self._answer(404)
        elif (part := self._received()) is not None:
            self._answer(202, Location=urlsplit(self.path).path, Range=f"0-{max(0, part.stat().st_size - 1)}")

    def do_PUT(self) -> None:
        if self._is_push("/manifests/"):
            manifest = b"".join(self._body())
            self.registry.pushed[json.loads(manifest).get("config", {}).get("digest", "")] = manifest
            self._answer(201, **{"Docker-Content-Digest": digest_of(manifest)})
        elif not self._is_push("/blobs/uploads/"):
            self._answer(404)
        elif (part := self._received()) is not None:
            digest = parse_qs(urlsplit(self.path).query)["digest"][0]
            with self.registry.changed:
                self.registry.sizes[digest] = part.stat().st_size
                part.rename(self.registry.folder / digest.replace("/", "_"))
                self.registry.refused.discard(digest)
                self.registry.changed.notify_all()
            self._answer(201, **{"Docker-Content-Digest": digest})

    def log_message(self, *_: Any) -> None:
        pass

    def _is_push(self, kind: str) -> bool:
        return self.path.startswith(f"{self.registry.path}{kind}")

    def _give(self, *, body: bool) -> None:
        """Gives a host a manifest, or a layer as soon as it is here."""
        found = _READ.fullmatch(self.path)
        node = self.registry.readers.get(found[1]) if found else None
        if found is None or node is None:
            self._answer(404)
            return
        self.registry.reached.add(node)
        if found[2] == "blobs":
            path = self.registry.fetch(found[3])
            self._give_file(path, node, body=body) if path else self._answer(404)
        elif content := self.registry.published.get(found[3]):
            kind = {"Content-Type": json.loads(content).get("mediaType", _OCI), "Docker-Content-Digest": found[3]}
            self._answer(200, **{"Content-Length": str(len(content))}, **kind)
            self.wfile.write(content if body else b"")
        else:
            self._answer(404)

    def _give_file(self, path: Path, node: str, *, body: bool) -> None:
        """Sends a file, or its end, which a host asks for after an interruption (``Range``, RFC 9110)."""
        size = path.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked and int(asked[1]) < size else 0
        ranges = {"Content-Range": f"bytes {start}-{size - 1}/{size}"} if start else {}
        self._answer(206 if start else 200, **{"Content-Length": str(size - start)}, **ranges)
        if body:
            with path.open("rb") as file:
                file.seek(start)
                is_layer = path.name not in self.registry.pushed
                self.registry.served(node, 0, (size - start) * is_layer)
                while chunk := file.read(_CHUNK):
                    self.wfile.write(chunk)
                    self.registry.served(node, len(chunk) * is_layer, 0)

    def _received(self) -> Path | None:
        """Appends this request's body to an upload's file and returns the file; None if the disk is full."""
        part = self.registry.folder / f"{urlsplit(self.path).path.rpartition('/')[2]}.part"
        try:
            with part.open("ab") as file:
                for chunk in self._body():
                    file.write(chunk)
                    self.registry.received(len(chunk))
        except ConnectionError:
            raise
        except OSError as error:
            self.registry.failure = self.registry.failure or error
            self.registry.give_up()
            self.close_connection = True
            return None
        return part

    def _body(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            yield from self._read(int(self.headers.get("Content-Length") or 0))
            return
        # The line is empty if the engine closed the connection; parsing it fails and ends the request.
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            yield from self._read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _read(self, size: int) -> Iterator[bytes]:
        while size:
            chunk = self.rfile.read(min(size, _CHUNK))
            if not chunk:
                raise ConnectionError("the engine ended the connection")
            size -= len(chunk)
            yield chunk

    def _answer(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name, value)
        self.end_headers()


def _new_path() -> str:
    return f"/v2/{PREFIX}{secrets.token_hex(16)}/image"


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # many hosts, each with several connections

    def handle_error(self, *_: Any) -> None:
        """Ignores engines that close the connection: the push or the pull reports the reason."""
