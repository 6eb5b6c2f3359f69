"""The live page's data and its server: what it shows, to whom, and Prometheus' metrics."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import STEP_S
from tests.unit.report.test_page import a_run
from tridock.cli import main
from tridock.errors import ClusterError, Problem
from tridock.node.agent.run_update import run_update
from tridock.report.live import LiveRun, prometheus
from tridock.report.live_server import LiveServer


def live(folder: Path) -> LiveRun:
    run = LiveRun(folder.name)
    run.take(run_update(folder, 0, 0, 0))
    return run


def test_the_page_gets_the_samples_of_the_last_evaluation(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", [3.0])
    with (folder / "events.jsonl").open("a") as file:
        for iteration in (10, 20):
            shown = [{"prompt": "Once", "text": f" upon {iteration}"}]
            file.write(json.dumps({"event": "samples", "iteration": iteration, "samples": shown}) + "\n")
        file.write(json.dumps({"event": "samples", "iteration": 30, "samples": 7}) + "\n")  # of no Tridock
    data = live(folder).as_data()
    assert data["samples"] == {"iteration": 20, "rows": [("Once", " upon 20")]}
    assert "samples" not in data["events"][-2]


def test_the_page_gets_curves_marks_and_what_is_not_a_number_as_null(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", [3.0, None, 2.0])
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "run_restarted", "iteration": 2, "log_bytes": 7, "reason": "r"}) + "\n")
    data = live(folder).as_data()
    assert data["curves"]["loss"] == [[1.0, 3.0], [2.0, None], [3.0, 2.0]]
    assert data["curves"]["valid loss"] == [[3.0, 3.5]]
    assert (data["iteration"], data["restarts"], data["marks"][-1]) == (3, 2, 2)
    assert [event["event"] for event in data["events"] if event["fault"]] == [
        "rank_died", "run_restarted", "run_restarted"
    ]  # fmt: skip
    assert data["events"][-1] == {"event": "run_restarted", "iteration": 2, "reason": "r", "fault": True}
    assert len(data["planned_memory"]) == 2
    json.dumps(data, allow_nan=False)


def test_rows_of_an_endless_run_are_bounded(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", [])
    run = LiveRun("a")
    for part in range(20):
        with (folder / "metrics.jsonl").open("a") as file:
            file.writelines(f'{{"iteration": {part * 2500 + n}, "loss": {n}.5}}\n' for n in range(2500))
        run.take(run_update(folder, run.offset, run.inode, run.event_count))
    assert len(run.columns) <= 20_000
    assert (run.columns.last, len(run.as_data()["curves"]["loss"])) == (49_999, 800)


def test_prometheus_reads_the_metrics(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", [3.0, 2.5])
    (folder / ".ranks.json").write_text('[[0, "train", 2, 0.5, 30.0]]')
    lines = prometheus([live(folder)]).splitlines()
    assert 'tridock_run_state{run="a",state="ready"} 1' in lines
    assert 'tridock_loss{run="a"} 2.5' in lines
    assert 'tridock_events_total{run="a",event="run_restarted"} 1' in lines
    assert 'tridock_rank_iteration{run="a",rank="0"} 2' in lines
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len({*names})  # a family stands once
    for line in lines:
        assert line.startswith(("# HELP ", "# TYPE ")) or line.split("{")[0] in names


def test_labels_are_escaped(tmp_path: Path) -> None:
    run = live(a_run(tmp_path / "a", [1.0]))
    run.run_id = 'x"\\\n'
    assert r'tridock_loss{run="x\"\\\n"} 1' in prometheus([run]).splitlines()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    folder = a_run(tmp_path / "a", [3.0, 2.5])

    def broken(_: LiveRun) -> object:
        raise ClusterError(Problem("host-b", "does not answer", "", "see whether it is on"))

    asks = {"a": lambda run: run_update(folder, run.offset, run.inode, run.event_count), "b": broken}
    with LiveServer(asks, 0) as made:  # type: ignore[arg-type]
        made.watch()
        threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
        yield made
        made.shutdown()


def ask(server: LiveServer, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read(), dict(answer.getheaders())
    connection.close()
    return found


def test_only_the_token_opens_the_page_and_nothing_but_reading_is_answered(server: LiveServer) -> None:
    base = f"/{server.token}/"
    assert server.server_address[0] == "127.0.0.1"
    assert len(server.token) >= 24
    status, body, headers = ask(server, base)
    assert status == 200
    assert b"<h1>Runs</h1>" in body
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert ask(server, base, "HEAD")[:2] == (200, b"")
    for path in ("/", "/data", f"/{server.token[:-1]}/data", f"{base}other", f"{base}../data"):
        assert ask(server, path)[0] == 404, path
    assert ask(server, base, Host="evil.example:80")[0] == 404
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert ask(server, base, method)[0] == 501


def test_the_data_has_every_run_also_one_that_cannot_be_asked(server: LiveServer) -> None:
    deadline = time.monotonic() + STEP_S
    while True:  # each run is asked by a thread of its own, in any order
        runs = json.loads(ask(server, f"/{server.token}/data")[1])
        if len(runs) == 2 and runs[0]["iteration"] and runs[1]["problem"]:
            break
        assert time.monotonic() < deadline, runs
        time.sleep(0.02)
    assert (runs[0]["run"], runs[0]["iteration"], runs[0]["problem"]) == ("a", 2, "")
    assert runs[1]["problem"] == "host-b: does not answer; see whether it is on"
    assert b'tridock_loss{run="a"} 2.5' in ask(server, f"/{server.token}/metrics")[1]


def test_two_servers_have_two_tokens(tmp_path: Path) -> None:
    with LiveServer({}, 0) as one, LiveServer({}, 0) as two:
        assert one.token != two.token


def test_a_port_in_use_and_a_weak_token_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = a_run(tmp_path / "a", [1.0])
    with LiveServer({}, 0) as taken:
        assert main(["watch", str(folder), "--port", str(taken.server_port)]) == 2
        assert capsys.readouterr().err == (
            f"--port: {taken.server_port} cannot be used; got Address already in use; leave --port out, or give a port"
            " that is free\n"
        )
    monkeypatch.setenv("TRIDOCK_WATCH_TOKEN", "short")
    assert main(["watch", str(folder)]) == 2
    assert capsys.readouterr().err == (
        "TRIDOCK_WATCH_TOKEN: is not a valid token; got 5 characters; use at least 16 letters, digits, - and _\n"
    )


def test_grafana_asks_for_metrics_that_there_are(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    dashboard = json.loads((root / "configs" / "grafana.json").read_text())
    asked = {panel["targets"][0]["expr"].partition("{")[0] for panel in dashboard["panels"]}
    page = (root / "docs" / "watch.md").read_text()
    folder = a_run(tmp_path / "a", [3.0])
    (folder / ".ranks.json").write_text('[[0, "train", 1, 0.5, 30.0]]')
    run = live(folder)
    run.memory = [1.0]
    made = {line.split()[2] for line in prometheus([run]).splitlines() if line.startswith("# TYPE")}
    assert len(asked) == 8
    assert asked <= made
    assert [name for name in sorted(made) if f"`{name}`" not in page] == []
