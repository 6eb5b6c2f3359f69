"""A small image registry on this machine's loopback, and its port brought to a host by ssh."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tridock.ops.image.registry import Handler, LoopbackRegistry

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


class Registry(LoopbackRegistry):
    """Keeps what is pushed, and gives it away; ``pulled`` counts the bytes of blobs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, lambda _: None, lambda: None)
        self.pulled = 0
        self.path = "/v2/team"
        self._server.RequestHandlerClass = type("Handler", (_Pulls,), {"registry": self})

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    @contextmanager
    def seen_on(self, ssh_config: Path, host: str) -> Iterator[None]:
        """While a host reaches it at the same address."""
        argv = [
            "ssh",
            "-F",
            str(ssh_config),
            "-o",
            "ExitOnForwardFailure=yes",
            "-R",
            f"{self.address}:{self.address}",
        ]
        # It prints a line once the port is open there.
        script = "echo open; exec sleep infinity"
        with subprocess.Popen([*argv, host, script], stdout=subprocess.PIPE) as tunnel:
            assert tunnel.stdout is not None
            assert tunnel.stdout.readline() == b"open\n"
            yield
            tunnel.terminate()


class _Pulls(Handler):
    registry: Registry

    def do_HEAD(self) -> None:  # noqa: N802
        self._give(body=False)

    def do_GET(self) -> None:  # noqa: N802
        self._give(body=True)

    def _is_ours(self, kind: str) -> bool:
        return self.path.startswith("/v2/team/") and kind in self.path

    def do_POST(self) -> None:  # noqa: N802
        self.registry.path = self.path.partition("/blobs/")[0]
        super().do_POST()

    def _give(self, *, body: bool) -> None:
        name = self.path.rpartition("/")[2]
        manifests = {f"sha256:{hashlib.sha256(one).hexdigest()}": one for one in self.registry.manifests}
        file = self.registry.folder / name
        if self.path == "/v2/":
            self._answer(200)
        elif "/manifests/" in self.path and name in manifests:
            kind = json.loads(manifests[name]).get("mediaType", MANIFEST)
            self._send(manifests[name], name, kind, body=body)
        elif "/blobs/" in self.path and file.is_file():
            self.registry.pulled += file.stat().st_size if body else 0
            self._send(file.read_bytes(), name, "application/octet-stream", body=body)
        else:
            self._answer(404)

    def _send(self, content: bytes, digest: str, kind: str, *, body: bool) -> None:
        self._answer(
            200, **{"Content-Length": str(len(content)), "Docker-Content-Digest": digest, "Content-Type": kind}
        )
        if body:
            self.wfile.write(content)
