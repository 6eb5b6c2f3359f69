"""A small image registry on this machine's loopback, and its port brought to a host by ssh."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tridock.ops.image.registry import Handler, LoopbackRegistry, digest_of

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

    def add(self, content: bytes) -> str:
        """Adds an image that no engine here has made, with one file in one layer; returns its digest."""
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as tar:
            entry = tarfile.TarInfo("base")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        root = {"type": "layers", "diff_ids": [digest_of(layer.getvalue())]}
        config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": root}).encode()
        parts = {digest_of(it): it for it in (config, gzip.compress(layer.getvalue(), 9, mtime=1))}
        for digest, part in parts.items():
            (self.folder / digest).write_bytes(part)
        named = [{"size": len(it), "digest": digest} for digest, it in parts.items()]
        named[0] |= {"mediaType": "application/vnd.docker.container.image.v1+json"}
        named[1] |= {"mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip"}
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": named[0], "layers": named[1:]}
        self.pushed[named[0]["digest"]] = json.dumps(manifest).encode()
        return digest_of(self.pushed[named[0]["digest"]])

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
            try:
                assert tunnel.stdout.readline() == b"open\n"
                yield
            finally:
                tunnel.terminate()


class _Pulls(Handler):
    registry: Registry

    def do_HEAD(self) -> None:  # noqa: N802
        self._give(body=False)

    def _is_push(self, kind: str) -> bool:
        return self.path.startswith("/v2/team/") and kind in self.path

    def do_POST(self) -> None:  # noqa: N802
        self.registry.path = self.path.partition("/blobs/")[0]
        super().do_POST()

    def _give(self, *, body: bool) -> None:
        name = self.path.rpartition("/")[2]
        manifests = {digest_of(one): one for one in self.registry.pushed.values()}
        file = self.registry.folder / name
        if "/manifests/" in self.path and name in manifests:
            self._send(manifests[name], name, json.loads(manifests[name]).get("mediaType", MANIFEST), body=body)
        elif "/blobs/" in self.path and file.is_file():
            with self.registry.changed:
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
