"""A registry on this machine's loopback for one `docker push`, which makes the engine export single layers.

`docker save` writes every layer to disk first. `docker push` asks for each layer by digest once it knows that, and
compresses and sends only those that the registry lacks. In the first push this registry claims to have every layer; the
manifest, which comes last, maps layers to digests. A second push sends those that a host needs (:attr:`refused`).
"""

import http.server
import json
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import parse_qs, urlsplit

from tridock.ops.image.archive import digest_of

LOOPBACK: Final = "127.0.0.1"
PREFIX: Final = "tridock-"
"""How the repository's secret name begins."""
_CHUNK = 1 << 20
_TLS_HANDSHAKE = b"\x16"
_SHUTDOWN_S: Final = 0.02
"""Seconds after which the server notices that it is to end; Python's default is half a second."""


class LoopbackRegistry:
    """Serves one repository with a secret name while its block runs; stores layers in ``folder`` by digest."""

    def __init__(self, folder: Path, progress: Callable[[int], object], give_up: Callable[[], object]) -> None:
        """``give_up`` ends the push, as an engine retries repeatedly when a registry fails."""
        self.folder, self.progress, self.give_up = folder, progress, give_up
        self.refused: set[str] = set()
        self.manifests: list[bytes] = []
        self.failure: OSError | None = None
        self.path = f"/v2/{PREFIX}{secrets.token_hex(16)}/image"
        self._server = _Server((LOOPBACK, 0), type("Handler", (Handler,), {"registry": self}))

    @property
    def repository(self) -> str:
        """The repository name for `docker push`: engines allow loopback addresses without TLS."""
        return f"{LOOPBACK}:{self._server.server_port}{self.path.removeprefix('/v2')}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(_SHUTDOWN_S,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def manifests_with(self, layers: int) -> list[bytes]:
        """Returns the pushed manifests with this many layers: of each configuration the last, as an engine takes the
        sizes of layers that it does not send from this registry.

        An engine pushes a manifest for each platform of an image that it has, and for attestations.
        """
        named = [(json.loads(one), one) for one in self.manifests]
        return list({it["config"]["digest"]: one for it, one in named if len(it.get("layers", ())) == layers}.values())

    def diff_ids(self, manifest: bytes) -> list[str]:
        """Returns the layers' ids in the configuration that a manifest names; none until that has arrived."""
        config = self.folder / json.loads(manifest)["config"]["digest"]
        return list(json.loads(config.read_bytes()).get("rootfs", {}).get("diff_ids", ())) if config.exists() else []


class Handler(http.server.BaseHTTPRequestHandler):
    """The part of the registry's HTTP API (version 2) that a push uses."""

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
        self._answer(200 if self.path == "/v2/" else 404)

    def do_HEAD(self) -> None:
        digest = self.path.rpartition("/")[2]
        if not self._is_ours("/blobs/sha256:") or digest in self.registry.refused:
            self._answer(404)
            return
        path = self.registry.folder / digest
        size = path.stat().st_size if path.exists() else 0
        self._answer(200, **{"Content-Length": str(size), "Docker-Content-Digest": digest})

    def do_POST(self) -> None:
        if not self._is_ours("/blobs/uploads/"):
            self._answer(404)
            return
        for _ in self._body():
            pass
        self._answer(202, Location=f"{self.registry.path}/blobs/uploads/{secrets.token_hex(16)}", Range="0-0")

    def do_PATCH(self) -> None:
        if not self._is_ours("/blobs/uploads/"):
            self._answer(404)
        elif (part := self._received()) is not None:
            self._answer(202, Location=urlsplit(self.path).path, Range=f"0-{max(0, part.stat().st_size - 1)}")

    def do_PUT(self) -> None:
        if self._is_ours("/manifests/"):
            manifest = b"".join(self._body())
            self.registry.manifests.append(manifest)
            self._answer(201, **{"Docker-Content-Digest": digest_of(manifest)})
        elif not self._is_ours("/blobs/uploads/"):
            self._answer(404)
        elif (part := self._received()) is not None:
            digest = parse_qs(urlsplit(self.path).query)["digest"][0]
            part.rename(self.registry.folder / digest.replace("/", "_"))
            self.registry.refused.discard(digest)
            self._answer(201, **{"Docker-Content-Digest": digest})

    def log_message(self, *_: Any) -> None:
        pass

    def _is_ours(self, kind: str) -> bool:
        return self.path.startswith(f"{self.registry.path}{kind}")

    def _received(self) -> Path | None:
        """Appends this request's body to an upload's file and returns the file; None if the disk is full."""
        part = self.registry.folder / f"{urlsplit(self.path).path.rpartition('/')[2]}.part"
        try:
            with part.open("ab") as file:
                for chunk in self._body():
                    file.write(chunk)
                    self.registry.progress(len(chunk))
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


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """Ignores engines that close the connection: the push reports the reason."""
