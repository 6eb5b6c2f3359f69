"""Notifications: which there are, how many, and a real run's on their way to a webhook by apprise."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import STEP_S
from tests.unit.trackers.conftest import ROOT, RUN_ID, make_run
from tridock.contracts.node_answers import Space
from tridock.contracts.run_state import RunState
from tridock.contracts.supervision import Supervision
from tridock.contracts.trackers import Notification
from tridock.tracker_settings import OCCASIONS
from tridock.trackers.notify import Message, Recipient, end_message, messages

SECRET = "very-secret-path"


class Webhook(http.server.BaseHTTPRequestHandler):
    bodies: list[dict[str, str]]

    def do_POST(self) -> None:
        assert SECRET in self.path
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, str]]]]:
    handler = type("Own", (Webhook,), {"bodies": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"json://127.0.0.1:{server.server_port}/{SECRET}", handler.bodies
        server.shutdown()


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + STEP_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def trackers_of(run: Path) -> list[int]:
    """The processes that send this run's records."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"tridock.trackers" in (line := (folder / "cmdline").read_bytes()) and str(run).encode() in line:
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_a_run_that_fails_is_told_by_its_supervisor(
    python: str, webhook: tuple[str, list[dict[str, str]]], tmp_path: Path
) -> None:
    """A tracker that was killed is started again; the address is in no file of the run and on no command line."""
    address, bodies = webhook
    # This machine's own disk may be nearly full.
    occasions = tuple(occasion for occasion in OCCASIONS if occasion != "disk")
    run = make_run(tmp_path / "runs", notify=(Notification("TRIDOCK_NOTIFY_0", occasions),))
    supervision = Supervision.from_json((run / "supervision.json").read_text())
    observed = {**json.loads(supervision.to_json()), "observed": True, "hang_timeout_s": 0.0}
    (run / "supervision.json").write_text(json.dumps(observed))
    (run / "launch.sh").write_text(f"while ! test -e {tmp_path}/fail; do sleep 0.1; done; exit 7\n")
    (tmp_path / "home").mkdir()
    env = {**os.environ, "HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT), "TRIDOCK_TRACKERS_PYTHON": python}
    start = [sys.executable, "-P", "-m", "tridock.node", "start", str(run), "--secrets"]
    subprocess.run(start, input=json.dumps({"TRIDOCK_NOTIFY_0": address}), env=env, text=True, check=True)
    secrets = tmp_path / "home" / ".tridock" / "secrets" / f"{RUN_ID}.json"
    wait_until(lambda: trackers_of(run))
    assert secrets.stat().st_mode & 0o777 == 0o600
    (first,) = trackers_of(run)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: trackers_of(run) not in ([], [first]))
    (tmp_path / "fail").touch()
    wait_until(lambda: bodies)
    wait_until(lambda: not trackers_of(run))
    assert [body["title"] for body in bodies] == [f"{RUN_ID}: failed"]
    assert "exit code 7" in bodies[0]["message"]
    assert bodies[0]["message"].endswith(f"look: tridock logs --run {RUN_ID}; tridock watch {RUN_ID}")
    assert (run / "exit_code").read_text() == "4\n"
    wait_until(lambda: not secrets.exists())  # the supervisor's, whose end nothing here has waited for
    written = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert SECRET.encode() not in written
    assert b"notify" in written


EVENTS = (
    {"event": "run_started"},
    {"event": "rank_hung", "reason": "rank 3 on host-b stands still"},
    {"event": "run_restarted", "attempt": 1, "iteration": 40, "reason": "rank 3 was killed"},
)


def test_events_become_messages_with_their_reasons() -> None:
    assert [(it.occasion, it.title, it.body) for it in messages("a", EVENTS)] == [
        ("stuck", "a: stuck", "rank 3 on host-b stands still"),
        ("restarted", "a: restarted from iteration 40, restart 1", "rank 3 was killed"),
    ]
    assert [it.key for it in messages("a", EVENTS, first=2)] == ["event-2"]


@pytest.mark.parametrize(
    ("state", "occasion"),
    [("done", "finished"), ("failed", "failed"), ("lost", "failed"), ("preempted", "preempted"), ("stopped", None)],
)
def test_how_a_run_ends_is_a_message_unless_somebody_stopped_it(state: str, occasion: str | None) -> None:
    message = end_message("a", RunState(state), 1, "")
    assert (message and message.occasion) == occasion


def test_a_disk_is_nearly_full_with_less_than_a_twentieth_free() -> None:
    assert [Space(100 << 30, free << 30).is_nearly_full for free in (5, 4)] == [False, True]


def test_the_disk_of_another_node_is_told_by_its_event() -> None:
    """That of the head is asked by who sends the messages."""
    about = {"event": "disk_nearly_full", "free_bytes": 4 << 30, "total_bytes": 100 << 30}
    found = list(messages("a", [{**about, "node": "n1"}, {**about, "node": "n2"}], here="n1"))
    assert [(it.key, it.occasion, it.title) for it in found] == [("event-1", "disk", "a: the disk is nearly full")]
    assert found[0].body == "n2: 4.0 of 100.0 GiB are free; checkpoints need space: free some"


def test_above_the_limit_only_the_end_is_sent_with_the_number_that_was_held_back() -> None:
    arrived: list[tuple[str, str]] = []
    recipient = Recipient(Notification("A", OCCASIONS, 2), lambda *it: not arrived.append(it))
    for number in range(5):
        assert recipient.offer(Message(f"event-{number}", "restarted", f"t{number}", "b"), now=100.0 + number)
    recipient.offer(Message("event-0", "restarted", "t0", "b"), now=9000.0)  # sent before
    recipient.offer(Message("end-failed", "failed", "end", "b"), now=110.0)
    assert arrived == [("t0", "b"), ("t1", "b"), ("end", "b\n3 more messages were held back (per_hour).")]
    recipient.offer(Message("event-9", "restarted", "t9", "b"), now=9000.0)
    assert arrived[-1] == ("t9", "b")


def test_an_occasion_that_is_not_wanted_is_left_out_and_one_that_did_not_arrive_is_tried_again() -> None:
    answers = iter((False, True))
    recipient = Recipient(Notification("A", ("failed",)), lambda *_: next(answers))
    message = Message("end-failed", "failed", "end", "b")
    assert recipient.offer(Message("end-done", "finished", "t", "b"), 0.0)
    assert not recipient.offer(message, 0.0)
    assert recipient.offer(message, 1.0)
    assert recipient.offer(message, 2.0)


def test_a_disk_that_is_full_is_told_once_also_where_no_file_can_be_written(
    python: str, webhook: tuple[str, list[dict[str, str]]], tmp_path: Path
) -> None:
    """What it has sent is then known to the process alone, until there is room again."""
    address, bodies = webhook
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs takes root")
    try:
        run = make_run(disk, losses=3, notify=(Notification("TRIDOCK_NOTIFY_0", OCCASIONS),))
        with (disk / "filler").open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))
        argv = [python, "-P", "-m", "tridock.trackers", "notify", str(run)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TRIDOCK_NOTIFY_0": address}
        with subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True) as process:
            wait_until(lambda: bodies)
            time.sleep(3)  # it looks once a second
            (disk / "filler").unlink()
            (run / "exit_code").write_text("0\n")
            _, errors = process.communicate(timeout=STEP_S)
        assert process.returncode == 0, errors
        assert [body["title"].partition(": ")[2] for body in bodies] == ["the disk is nearly full", "finished"]
        sent = json.loads((run / ".trackers" / "notify.json").read_text())
        assert sent["TRIDOCK_NOTIFY_0"]["sent"] == ["disk", "end-done"]
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
