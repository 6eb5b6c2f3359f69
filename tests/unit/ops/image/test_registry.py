"""What an engine pushes to the registry, and what hosts can pull from it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.patience import STEP_S
from tridock.ops.image.registry import LoopbackRegistry, digest_of

CONFIG = b'{"rootfs": {"diff_ids": ["base", "packages", "code"]}}'
LAYERS = {digest_of(content): content for content in (b"base layer", b"packages layer", b"code layer")}
BASE, PACKAGES, CODE = LAYERS


def ask(
    registry: LoopbackRegistry, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", registry.port, timeout=STEP_S)
    chunked = headers.get("Transfer-Encoding") == "chunked"
    connection.request(method, path, body=body, headers=headers, encode_chunked=chunked)  # type: ignore[arg-type]
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers


class Engine:
    """Pushes as dockerd does: asks for digests, sends the others in chunks, then the manifest, with the sizes from the
    registry's answers. containerd sends a layer ``at_once``."""

    def __init__(self, registry: LoopbackRegistry, *, at_once: bool = False) -> None:
        self.registry, self.at_once, self.sent = registry, at_once, list[str]()

    def push(self) -> dict[str, int]:
        """Returns the sizes of the layers in the manifest."""
        base, sizes = self.registry.path, dict[str, int]()
        for digest, content in {digest_of(CONFIG): CONFIG, **LAYERS}.items():
            status, _, headers = ask(self.registry, "HEAD", f"{base}/blobs/{digest}")
            sizes[digest] = int(headers["Content-Length"]) if status == 200 else len(content)
            if status == 404:
                self.send(digest, content)
        config, *layers = ({"digest": digest, "size": size} for digest, size in sizes.items())
        manifest = json.dumps({"mediaType": "m", "config": config, "layers": layers}).encode()
        assert ask(self.registry, "PUT", f"{base}/manifests/push", manifest)[0] == 201
        return {digest: size for digest, size in sizes.items() if digest in LAYERS}

    def send(self, digest: str, content: bytes) -> None:
        where = ask(self.registry, "POST", f"{self.registry.path}/blobs/uploads/")[2]["Location"]
        if not self.at_once:
            parts = iter([content[:5], content[5:]])
            assert ask(self.registry, "PATCH", where, parts, **{"Transfer-Encoding": "chunked"})[0] == 202
        body = content if self.at_once else None
        assert ask(self.registry, "PUT", f"{where}?digest={digest.replace(':', '%3A')}", body)[0] == 201
        self.sent.append(digest)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[LoopbackRegistry]:
    with LoopbackRegistry(tmp_path, lambda _: None, lambda: None) as made:
        yield made


def reader(registry: LoopbackRegistry, node: str = "gpu-1") -> str:
    return "/v2/" + registry.add_reader(node, 5000).partition("/")[2]


@pytest.mark.parametrize("at_once", [False, True], ids=["Docker", "containerd"])
def test_an_engine_sends_what_is_refused_and_the_sizes_are_known_from_then_on(
    registry: LoopbackRegistry, at_once: bool
) -> None:
    engine = Engine(registry, at_once=at_once)
    assert (engine.push(), engine.sent) == ({BASE: 0, PACKAGES: 0, CODE: 0}, [])
    registry.refused |= {digest_of(CONFIG), CODE}
    assert engine.push()[CODE] == len(LAYERS[CODE])
    assert engine.sent == [digest_of(CONFIG), CODE]
    assert (registry.folder / CODE).read_bytes() == LAYERS[CODE]
    assert registry.diff_ids(digest_of(CONFIG)) == ["base", "packages", "code"]
    assert engine.push() == {BASE: 0, PACKAGES: 0, CODE: len(LAYERS[CODE])}
    assert engine.sent == [digest_of(CONFIG), CODE]


def test_once_a_manifest_is_known_only_what_it_names_is_claimed(registry: LoopbackRegistry) -> None:
    """Else an engine would name yet another digest of a layer, which nobody can pull either."""
    registry.claimed = {BASE}
    engine = Engine(registry)
    engine.push()
    assert engine.sent == [digest_of(CONFIG), PACKAGES, CODE]


def test_hosts_that_ask_for_the_same_layer_wait_for_one_push(registry: LoopbackRegistry) -> None:
    engine, answers, path = Engine(registry), list[bytes](), reader(registry)
    engine.push()
    hosts = [
        threading.Thread(target=lambda: answers.append(ask(registry, "GET", f"{path}/blobs/{CODE}")[1]))
        for _ in range(3)
    ]
    for host in hosts:
        host.start()
    assert registry.wanted() == {CODE}
    registry.refused |= {CODE}
    engine.push()
    for host in hosts:
        host.join(STEP_S)
    assert (answers, engine.sent) == ([LAYERS[CODE]] * 3, [CODE])


def test_a_layer_that_the_engine_does_not_bring_is_not_found(registry: LoopbackRegistry) -> None:
    answers, path = list[int](), reader(registry)
    host = threading.Thread(target=lambda: answers.append(ask(registry, "GET", f"{path}/blobs/{BASE}")[0]))
    host.start()
    registry.refuse_to_wait(registry.wanted())
    host.join(STEP_S)
    assert answers == [404]


def test_a_host_resumes_a_layer_in_the_middle(registry: LoopbackRegistry) -> None:
    Engine(registry).send(CODE, LAYERS[CODE])
    path = f"{reader(registry)}/blobs/{CODE}"
    for first, status, body in ((0, 200, b"code layer"), (5, 206, b"layer"), (10, 200, b"code layer")):
        got = ask(registry, "GET", path, Range=f"bytes={first}-")
        assert (got[0], got[1]) == (status, body)
        assert got[2]["Content-Range"] == ("bytes 5-9/10" if status == 206 else None)


def test_a_registry_answers_only_who_knows_a_name_and_a_host_only_reads(registry: LoopbackRegistry) -> None:
    Engine(registry).send(CODE, LAYERS[CODE])
    manifest, own = b'{"mediaType": "m"}', reader(registry)
    digest = registry.publish(manifest)
    assert ask(registry, "GET", f"{own}/manifests/{digest}")[:2] == (200, manifest)
    assert ask(registry, "HEAD", f"{own}/manifests/{digest}")[2]["Content-Type"] == "m"
    assert ask(registry, "GET", "/v2/")[0] == 200
    for path in ("/v2/other/image", own):
        for method, rest in (
            ("POST", "blobs/uploads/"), ("PATCH", "blobs/uploads/x"), ("PUT", "blobs/uploads/x?digest=sha256:1"),
            ("PUT", "manifests/push"), ("GET", "tags/list"), ("GET", f"manifests/{digest_of(b'')}"),
        ):  # fmt: skip
            assert ask(registry, method, f"{path}/{rest}", b"x" if method in ("PATCH", "PUT") else None)[0] == 404
    for path in ("/v2/other/image", registry.path):
        assert ask(registry, "GET", f"{path}/blobs/{CODE}")[0] == 404
    assert registry.reached == {"gpu-1"}
    assert registry._server.server_address[0] == "127.0.0.1"
    assert [path.name for path in registry.folder.iterdir()] == [CODE]


def test_an_engine_that_goes_away_in_the_middle_leaves_no_layer_and_no_traceback(
    registry: LoopbackRegistry, capfd: pytest.CaptureFixture[str]
) -> None:
    for body in (b"Transfer-Encoding: chunked\r\n\r\n5\r\nabc", b"Content-Length: 9\r\n\r\nabc"):
        with socket.create_connection(("127.0.0.1", registry.port)) as engine:
            engine.sendall(f"PATCH {registry.path}/blobs/uploads/x HTTP/1.1\r\n".encode() + body)
            engine.shutdown(socket.SHUT_WR)
            assert engine.recv(1) == b""
    assert registry.failure is None
    assert [path.name for path in registry.folder.iterdir()] == ["x.part"]
    assert capfd.readouterr().err == ""


def test_an_engine_that_tries_tls_learns_at_once_that_this_is_http(registry: LoopbackRegistry) -> None:
    with socket.create_connection(("127.0.0.1", registry.port), timeout=STEP_S) as engine:
        engine.sendall(b"\x16\x03\x01 a greeting without the end of a line")
        assert engine.recv(5) == b"HTTP/"


def test_a_full_disk_ends_the_push(registry: LoopbackRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    registry.give_up = lambda: ended.append(True)

    def full(self: Path, *_: object) -> Callable[[], object]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises((http.client.HTTPException, BrokenPipeError)):
        Engine(registry).send(CODE, LAYERS[CODE])
    assert ended == [True]
    assert registry.failure is not None
