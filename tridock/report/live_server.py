"""The live page: a server on this machine's loopback that shows runs and changes nothing."""

import hmac
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from tridock.contracts.node_answers import RunUpdate
from tridock.errors import RequestError, TridockError
from tridock.report.live import QUANTITIES, LiveRun, prometheus
from tridock.report.markup import element, escape
from tridock.report.theme import style

Ask = Callable[[LiveRun], RunUpdate]
"""Requests a run's updates from its node."""
ADDRESS: Final = "127.0.0.1"
_NAMES: Final = (ADDRESS, "localhost")
_POLL_S: Final = 2.0
_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


class LiveServer(ThreadingHTTPServer):
    """Serves the runs of ``asks`` under a random path; :meth:`watch` keeps them up to date."""

    daemon_threads = True

    def __init__(self, asks: Mapping[str, Ask], port: int = 0, token: str | None = None) -> None:
        self.runs = {run_id: LiveRun(run_id) for run_id in asks}
        self._asks = asks
        self.token = token or secrets.token_urlsafe(18)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._data = b"[]"
        todo = "leave --port out, or give a port that is free"
        with RequestError.in_place_of(OSError, "--port", f"{port} cannot be used", todo):
            super().__init__((ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def watch(self) -> None:
        """Starts a thread for each run that asks for updates every two seconds, during the run and after it."""
        for run_id, ask in self._asks.items():
            threading.Thread(target=self._follow, args=(self.runs[run_id], ask), daemon=True).start()

    def _follow(self, run: LiveRun, ask: Ask) -> None:
        while True:
            try:
                update = ask(run)
                with self._lock:
                    run.take(update)
            except TridockError as error:
                run.problem = str(error)
            with self._lock:  # another run's thread must not change the data meanwhile
                self._data = json.dumps([it.as_data() for it in self.runs.values()]).encode()
            if self._ended.wait(_POLL_S):
                return

    def server_close(self) -> None:
        self._ended.set()
        super().server_close()

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """Returns the content type and body of a path below the token; None for an unknown path."""
        with self._lock:
            if path == "":
                return "text/html; charset=utf-8", self.page.encode()
            if path == "data":
                return "application/json", self._data
            if path == "metrics":
                return _TEXT, prometheus(list(self.runs.values())).encode()
        return None

    @cached_property
    def nonce(self) -> str:
        return secrets.token_urlsafe(12)

    @cached_property
    def page(self) -> str:
        """Returns the page's HTML; its script fetches ``data``."""
        title = "Runs" if len(self.runs) > 1 else next(iter(self.runs), "Runs")
        here = Path(__file__)
        sections = "".join(
            f'<section id="{name}" aria-labelledby="h-{name}"><h2 id="h-{name}">{heading}</h2>'
            f'<div id="{name}-content"></div></section>'
            for name, heading in _SECTIONS.items()
        )
        links = "".join(f'<a href="#{name}">{escape(heading)}</a>' for name, heading in _SECTIONS.items())
        settings = json.dumps({"quantities": QUANTITIES, "poll_s": _POLL_S})
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
            '<meta name="referrer" content="no-referrer">'
            f"{element('title', title)}<style>{style()}{here.with_name('live.css').read_text()}</style></head>\n"
            f'<body><a class="skip" href="#summary">To the summary</a><header>{element("h1", title)}'
            f'<p class="soft" id="moment">Waiting for the first records.</p><nav>{links}</nav></header>'
            f'<main>{sections}</main><p id="spoken" class="spoken" aria-live="polite"></p>'
            f'<script type="application/json" id="settings">{settings}</script>'
            f'<script nonce="{self.nonce}">{here.with_name("live.js").read_text()}</script></body></html>\n'
        )

    @property
    def policy(self) -> str:
        """Returns the page's content security policy: the browser may load only the page's own data."""
        return (
            f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{self.nonce}'; connect-src 'self';"
            " img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
        )


_SECTIONS: Final = {
    "summary": "Summary",
    "charts": "Charts",
    "samples": "Samples",
    "ranks": "Ranks",
    "phases": "Phases of a step",
    "memory": "Memory",
    "events": "Events",
}


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._reply(with_body=True)

    def do_HEAD(self) -> None:
        self._reply(with_body=False)

    def _reply(self, *, with_body: bool) -> None:
        name = (self.headers.get("Host") or "").rpartition(":")[0]
        _, token, *rest = *self.path.partition("?")[0].split("/", 2), ""
        # A foreign page whose domain resolves to this address sends another Host.
        is_ours = name in _NAMES and hmac.compare_digest(token.encode(), self.server.token.encode())
        if is_ours and (found := self.server.answer(rest[0])) is not None:
            self._send(200, *found, with_body)
        else:
            self._send(404, "text/plain; charset=utf-8", b"no such page\n", with_body)

    def _send(self, code: int, kind: str, body: bytes, with_body: bool) -> None:
        self.send_response(code)
        for header, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": self.server.policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }.items():
            self.send_header(header, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Logs nothing: the terminal shows only the address."""
