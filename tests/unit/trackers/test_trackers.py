"""Real W&B, MLflow and TensorBoard, each offline: what they hold is read back by their own code."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cases import thinned
from tests.patience import STEP_S
from tests.unit.trackers.conftest import RUN_ID, end, make_run
from tridock.contracts.trackers import Tracker

Start = Callable[..., "subprocess.Popen[str]"]
OFFLINE = {name: Tracker(name, offline=True) for name in ("wandb", "mlflow", "tensorboard")}
READ = {
    "wandb": """
import sys, json, pathlib
from tridock.trackers.wandb_tracker import history, records
rows = [r for p in sorted(pathlib.Path(sys.argv[1]).glob("wandb/*run-*/run-*.wandb")) for r in history(p)]
print(json.dumps([[r["iteration"], r["loss"]] for r in rows if "loss" in r]))
print(json.dumps([[r["valid/iteration"], r["valid/loss"]] for r in rows if "valid/iteration" in r]))
files = {p.name: p for p in pathlib.Path(sys.argv[1]).glob("wandb/*run-*/files/media/table/**/*.json")}
paths = [pathlib.Path(r["samples/text.path"]) for r in rows if "samples/text.path" in r]
print(json.dumps([row for path in paths for row in json.loads(files[path.name].read_text())["data"]]))
found = [r for p in sorted(pathlib.Path(sys.argv[1]).glob("wandb/*run-*/run-*.wandb")) for r in records(p)]
said = {u.key or u.nested_key[0]: json.loads(u.value_json) for r in found for u in r.summary.update}
kept = [r.artifact for r in found if r.HasField("artifact")]
paths = {c.path: pathlib.Path(c.local_path) for a in kept if a.type == "run" for c in a.manifest.contents}
places = [pathlib.Path(c.local_path) for a in kept for c in a.manifest.contents]
assert all(pathlib.Path(sys.argv[1]) in place.parents for place in places), places
sizes = {name: path.stat().st_size for name, path in paths.items()}
print(json.dumps([said["state"], round(said["memory/planned_gib"], 2), sizes]))
""",
    "mlflow": """
import os, sys, json
os.environ.update(MLFLOW_ALLOW_FILE_STORE="true", MLFLOW_DISABLE_TELEMETRY="true")
from mlflow.tracking import MlflowClient
client = MlflowClient("file:" + sys.argv[1] + "/mlflow")
(run,) = client.search_runs([client.get_experiment_by_name("tridock").experiment_id])
for name in ("loss", "valid/loss"):
    print(json.dumps([[m.step, m.value] for m in client.get_metric_history(run.info.run_id, name)]))
shown = [f.path for f in client.list_artifacts(run.info.run_id, "samples")]
texts = [open(client.download_artifacts(run.info.run_id, path)).read() for path in shown]
print(json.dumps([[int(path[8:-4]), *text.split(None, 1)] for path, text in zip(shown, texts)]))
print(json.dumps([run.info.run_name, run.info.status, run.data.params["experiment.model.num_layers"],
    sorted(f.path for f in client.list_artifacts(run.info.run_id)), run.data.tags.get("tridock.memory/peak_gib")]))
""",
    "tensorboard": """
import sys, json, pathlib
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1] + "/trackers/tensorboard", size_guidance={"scalars": 0})
found.Reload()
for name in ("loss", "valid/loss"):
    print(json.dumps([[e.step, round(e.value, 5)] for e in found.Scalars(name)]))
texts = [(e.step, e.tensor_proto.string_val[0].decode()) for e in found.Tensors("samples/0")]
print(json.dumps([[step, *text.split(None, 1)] for step, text in texts]))
""",
}


def read(python: str, name: str, run: Path) -> list[list[list[float]]]:
    argv = [python, "-P", "-c", READ[name], str(run)]
    env = {"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def more(run: Path, first: int, last: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"iteration": it, "loss": 100.0 - it}) + "\n" for it in range(first, last))


def sample(run: Path, *iterations: int) -> None:
    with (run / "events.jsonl").open("a") as file:
        for it in iterations:
            shown = [{"prompt": "Once", "text": f" upon\n {it} \u00fc"}]
            file.write(json.dumps({"event": "samples", "iteration": it, "samples": shown}) + "\n")


def sent(run: Path, name: str) -> dict[str, int]:
    try:
        return dict(json.loads((run / ".trackers" / f"{name}.json").read_text())["sent"])
    except FileNotFoundError:
        return {}


@pytest.mark.parametrize("name", thinned(OFFLINE, ("wandb",)))
def test_a_killed_tracker_continues_where_it_stopped(name: str, start: Start, python: str, tmp_path: Path) -> None:
    """Each point is there once, also where the run has gone back to a checkpoint in between."""
    run = make_run(tmp_path, OFFLINE[name])
    sample(run, 10, 20)
    first = start(name, run)
    (run / ".supervisor").touch()
    try:
        import fcntl

        with (run / ".supervisor").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            deadline = time.monotonic() + STEP_S
            while [sent(run, name).get(series) for series in ("train", "samples")] != [30, 20]:
                assert first.poll() is None, first.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            first.kill()
            first.communicate()
            # Back to iteration 20, in another file: what follows is repeated, and goes further.
            lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
            (run / "new").write_text("".join(lines[:20]))
            (run / "new").rename(run / "metrics.jsonl")
            more(run, 21, 41)
            sample(run, 20, 30)
            end(run)
        second = start(name, run)
        _, errors = second.communicate(timeout=STEP_S)
    finally:
        first.kill()
    assert second.returncode == 0, errors
    train, valid, shown, *about = read(python, name, run)
    assert [(step, text.split()) for step, *words in shown for text in [" ".join(words)]] == [
        (it, ["Once", "upon", str(it), "\u00fc"]) for it in (10, 20, 30)
    ]
    assert [step for step, _ in train] == list(range(1, 41))
    assert dict(train)[31] == 69.0
    # W&B's process had the last points before the return in memory only, or had written any number of them.
    assert dict(train)[21] in ((3.0, 79.0) if name == "wandb" else (3.0,))
    assert len(valid) in ((0, 1) if name == "wandb" else (1,))
    if name == "wandb":
        ((state, planned, sizes),) = about
        assert (state, planned) == ("done", 3.74)
        names = ("events.jsonl", "experiment.yaml", "manifest.json", "plan.json")
        page = (run / ".trackers" / "wandb" / "report.html").stat().st_size
        assert sizes == {**{it: (run / it).stat().st_size for it in names}, "report.html": page}
    if name == "mlflow":
        files = ["events.jsonl", "experiment.yaml", "manifest.json", "plan.json", "report.html", "samples"]
        assert about == [[RUN_ID, "FINISHED", "4", files, None]]


@pytest.mark.parametrize("name", OFFLINE)
def test_a_tracker_that_is_offline_contacts_nobody(name: str, start: Start, tmp_path: Path) -> None:
    """Neither with the run nor with figures of the library's own use."""
    run = make_run(tmp_path, OFFLINE[name], losses=3)
    end(run)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        _, errors = start(name, run, HTTPS_PROXY=address, HTTP_PROXY=address).communicate(timeout=STEP_S)
        assert f"{name}: 4 points sent" in errors
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


def test_a_finished_run_is_tracked_afterwards_once(start: Start, python: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, losses=5)
    sample(run, 5)
    end(run)
    settings = json.dumps({"name": "tensorboard", "project": "p", "entity": None, "address": None, "offline": False})
    for points in (6, 0):
        process = start("tensorboard", run, settings)
        _, errors = process.communicate(timeout=STEP_S)
        assert (process.returncode, errors.splitlines()[-1]) == (0, f"tensorboard: {points} points sent")
    train, valid, _ = read(python, "tensorboard", run)
    assert [step for step, _ in train] == [1, 2, 3, 4, 5]
    assert valid == [[5, 3.5]]


def test_a_server_that_is_away_costs_nothing_but_its_points(start: Start, tmp_path: Path) -> None:
    run = make_run(tmp_path, losses=3)
    end(run)
    settings = {"name": "mlflow", "project": "p", "entity": None, "address": "http://127.0.0.1:9", "offline": False}
    process = start("mlflow", run, json.dumps(settings), MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
    _, errors = process.communicate(timeout=STEP_S)
    assert process.returncode == 1
    last = f"mlflow: the rest waits; tridock track {run} --tracker mlflow sends it"
    assert errors.splitlines()[-2:] == ["mlflow: 0 points sent", last]
    assert "127.0.0.1" in errors
