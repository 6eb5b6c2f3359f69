"""Notifications by mail, Matrix and Slack: apprise's own senders, to servers on loopback."""

from __future__ import annotations

import email
import email.policy
import http.server
import json
import shutil
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.patience import STEP_S
from tests.unit.trackers.conftest import RUN_ID, end, make_run
from tridock.contracts.trackers import Notification

Start = Callable[..., "subprocess.Popen[str]"]
SECRET = "xKq9VeryHidden"
TITLE = f"{RUN_ID}: failed"


@contextmanager
def serving(handler: type[socketserver.BaseRequestHandler]) -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def fail(start: Start, folder: Path, address: str, **env: str) -> Path:
    """A failed run that notifies only this address: sends the message, and checks that no file holds the secret."""
    run = make_run(folder, notify=(Notification("TRIDOCK_NOTIFY_0", ("failed",)),))
    end(run, 4)
    with start("notify", run, TRIDOCK_NOTIFY_0=address, **env) as process:
        argv = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        _, errors = process.communicate(timeout=STEP_S)
    assert process.returncode == 0, errors
    written = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert SECRET not in errors + argv.decode()
    assert SECRET.encode() not in written
    return run


class Mail(socketserver.StreamRequestHandler):
    """A server of mail that lets in who knows the password."""

    arrived: list[bytes]

    def handle(self) -> None:
        self.say("220 here")
        while line := self.rfile.readline().decode().strip():
            verb = line.split()[0].upper()
            if verb == "EHLO":
                self.say("250-here\r\n250 AUTH PLAIN")
            elif verb == "AUTH":
                self.say("235 welcome")
            elif verb == "DATA":
                self.say("354 go on")
                lines = iter(self.rfile.readline, b".\r\n")
                self.arrived.append(b"".join(lines))
                self.say("250 taken")
            elif verb == "QUIT":
                self.say("221 bye")
                return
            else:
                self.say("250 fine")

    def say(self, text: str) -> None:
        self.wfile.write(f"{text}\r\n".encode())


def test_mail_arrives_with_the_cause_and_where_to_look(start: Start, tmp_path: Path) -> None:
    arrived: list[bytes] = []
    with serving(type("Own", (Mail,), {"arrived": arrived})) as port:
        options = "smtp=127.0.0.1&mode=insecure&from=runs@example.com&to=team@example.com&format=text"
        fail(start, tmp_path, f"mailto://me:{SECRET}@127.0.0.1:{port}/?{options}")
    (content,) = arrived
    message = email.message_from_bytes(content, policy=email.policy.default)
    assert (message["Subject"], message["To"]) == (TITLE, "team@example.com")
    body = message.get_body(("plain",))
    assert body is not None
    assert f"look: tridock logs --run {RUN_ID}; tridock watch {RUN_ID}" in body.get_content()


class Web(http.server.BaseHTTPRequestHandler):
    """Takes what is posted, and says what Matrix and Slack say."""

    protocol_version = "HTTP/1.1"
    arrived: list[tuple[str, dict[str, object]]]
    certificate: Path

    def _answer(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.arrived.append((self.path, json.loads(content or b"{}")))
        room = {"room_id": "!one:here", "event_id": "$1", "joined_rooms": ["!one:here"], "user_id": "@me:here"}
        text = b"ok" if self.path.startswith("/services") else json.dumps(room).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = _answer  # noqa: N815

    def do_CONNECT(self) -> None:
        """As a proxy, it is itself the server that is asked for."""
        self.send_response(200)
        self.end_headers()
        self.close_connection = False  # asked in HTTP/1.0
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate)
        self.connection = context.wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)

    def log_message(self, *_: object) -> None:
        pass


def test_a_matrix_room_gets_the_message(start: Start, tmp_path: Path) -> None:
    arrived: list[tuple[str, dict[str, object]]] = []
    with serving(type("Own", (Web,), {"arrived": arrived})) as port:
        fail(start, tmp_path, f"matrix://{SECRET}@127.0.0.1:{port}/!one:here")
    (sent,) = [str(body["body"]) for path, body in arrived if "/send/" in path and "body" in body]
    assert TITLE in sent
    assert f"tridock watch {RUN_ID}" in sent


def test_a_slack_channel_gets_the_message(start: Start, tmp_path: Path) -> None:
    """apprise knows one address of Slack, over TLS: a proxy leads it here."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate")
    certificate = tmp_path / "certificate.pem"
    subject = ["-subj", "/CN=hooks.slack.com", "-addext", "subjectAltName=DNS:hooks.slack.com"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    files = ["-keyout", certificate, "-out", f"{certificate}.crt"]
    subprocess.run([*made, *files], check=True, capture_output=True)
    certificate.write_bytes(certificate.read_bytes() + Path(f"{certificate}.crt").read_bytes())
    arrived: list[tuple[str, dict[str, object]]] = []
    with serving(type("Own", (Web,), {"arrived": arrived, "certificate": certificate})) as port:
        proxy = {"HTTPS_PROXY": f"http://127.0.0.1:{port}", "REQUESTS_CA_BUNDLE": f"{certificate}.crt"}
        fail(start, tmp_path, f"slack://T1JJ3T3L2/A1BRTD4JD/{SECRET}TIiajkdnlazk/#runs", **proxy)
    ((path, body),) = arrived
    assert path == f"/services/T1JJ3T3L2/A1BRTD4JD/{SECRET}TIiajkdnlazk"
    assert TITLE in json.dumps(body)
