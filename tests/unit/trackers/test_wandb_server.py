"""Weights & Biases online: its own library, to a server on loopback that refuses it first."""

from __future__ import annotations

import gzip
import http.server
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.patience import STEP_S
from tests.unit.trackers.conftest import RUN_ID, end, make_run
from tridock.contracts.trackers import Tracker

Start = Callable[..., "subprocess.Popen[str]"]
OWNER = {"id": "e", "name": "me"}
PROJECT = {"id": "p", "name": "tridock", "entity": OWNER}
BUCKET = {"id": "b", "name": RUN_ID, "displayName": RUN_ID, "summaryMetrics": "{}", "config": "{}", "project": PROJECT}


class Server(http.server.BaseHTTPRequestHandler):
    """Says what W&B's server says to a new run, after it has refused the first requests."""

    protocol_version = "HTTP/1.1"
    refusals: list[str]
    lines: list[dict[str, Any]]

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            content = gzip.decompress(content)
        if self.refusals:
            self._answer(403, {"error": self.refusals.pop()})
        elif self.path.endswith("file_stream"):
            history = json.loads(content).get("files", {}).get("wandb-history.jsonl", {}).get("content", ())
            self.lines.extend(map(json.loads, history))
            self._answer(200, {})
        elif self.path == "/graphql":
            self._answer(200, {"data": self._data(json.loads(content))})
        else:
            self._answer(200, {})

    do_GET = do_PUT = do_POST  # noqa: N815

    def _data(self, asked: dict[str, Any]) -> dict[str, Any]:
        query = asked["query"]
        if "upsertBucket" in query:
            return {"upsertBucket": {"bucket": BUCKET, "inserted": True}}
        if "RunResumeStatus" in query:
            return {"model": {**PROJECT, "bucket": None}}
        if "createRunFiles" in query:
            place = f"http://{self.headers['Host']}/upload"
            files = [{"name": name, "uploadUrl": place} for name in asked["variables"]["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {}

    def _answer(self, code: int, content: object) -> None:
        text = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(refusals: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    lines: list[dict[str, Any]] = []
    handler = type("Own", (Server,), {"refusals": ["not yet"] * refusals, "lines": lines})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", lines
        server.shutdown()


def test_points_arrive_after_a_server_has_refused_the_run_at_the_start(start: Start, tmp_path: Path) -> None:
    with serving(refusals=1) as (address, lines):
        run = make_run(tmp_path, Tracker("wandb", address=address), losses=3)
        end(run)
        (run / "experiment.yaml").unlink()  # no report page
        process = start("wandb", run, WANDB_API_KEY="a" * 40)
        try:
            deadline = time.monotonic() + STEP_S
            while len(lines) < 4 and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            process.kill()  # this server takes no artifacts
        _, errors = process.communicate()
    assert "wandb: CommError: " in errors
    assert "is in use" not in errors
    assert [line["loss"] for line in lines if "loss" in line][:3] == [5.0, 4.9, 4.8], errors
