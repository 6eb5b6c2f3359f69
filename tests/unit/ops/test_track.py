"""``tridock track`` and ``tridock watch`` from the command line: folders, logs, and runs of a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.report import logs
from tests.unit.report.test_page import a_run
from tests.unit.trackers.conftest import python  # noqa: F401 - a fixture
from tests.unit.trackers.test_trackers import READ, read
from tridock.cli import main
from tridock.contracts.node_answers import RunUpdate
from tridock.contracts.run_state import RunState
from tridock.extras import install_command
from tridock.ops.runs.cluster_runs import Run
from tridock.ops.runs.watch import ask_head
from tridock.report.live import LiveRun


def test_a_log_of_megatrons_is_tracked_as_it_grows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    python: str,  # noqa: F811
) -> None:
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "pre train.log"
    for steps in (5, 8):
        log.write_text(logs.ARGUMENTS + "".join(logs.today(step, 7.0 - step / 100) for step in range(1, steps)))
        assert main(["track", "--log", str(log), "--tracker", "tensorboard", "--offline"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("pre-train-")
    assert json.loads((folder / "arguments.json").read_text())["num_layers"]
    program = (
        "import sys, json\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "found = EventAccumulator(sys.argv[1] + '/trackers/tensorboard', size_guidance={'scalars': 0})\n"
        "found.Reload()\n"
        "print(json.dumps([[e.step, round(e.value, 2)] for e in found.Scalars('loss')]))\n"
    )
    monkeypatch.setitem(READ, "log", program)
    assert read(python, "log", folder) == [[[step, round(7.0 - step / 100, 2)] for step in range(1, 8)]]


def test_a_run_names_its_own_trackers_and_options_replace_theirs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    python: str,  # noqa: F811
) -> None:
    run = a_run(tmp_path / "runs" / "demo-20261123-195500-abcd", [3.0, 2.0])
    text = (run / "experiment.yaml").read_text()
    assert "trackers: []" in text
    text = text.replace("trackers: []", f"trackers: [{{name: tensorboard, address: {tmp_path}/one}}]")
    (run / "experiment.yaml").write_text(text)
    (run / "exit_code").write_text("0\n")
    monkeypatch.chdir(tmp_path)
    assert main(["track", str(run)]) == 2
    assert capfd.readouterr().err.splitlines()[:2] == [
        f"{run} would:",
        f"  send it to tensorboard with address: {tmp_path}/one",
    ]
    assert main(["track", str(run), "--yes"]) == 0
    assert capfd.readouterr().err.endswith("tensorboard: 3 points sent\n")
    assert main(["track", str(run), "--address", "two"]) == 0
    assert capfd.readouterr().err == "tensorboard: 3 points sent\n"
    assert len(list(tmp_path.glob("one/*/events*"))) == len(list(tmp_path.glob("two/*/events*"))) == 1


def test_a_run_without_trackers_and_a_missing_library_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "a", [3.0])
    assert main(["track", str(run)]) == 2
    monkeypatch.setattr("tridock.ops.runs.track.find_python", lambda _: None)
    assert main(["track", str(run), "--tracker", "wandb"]) == 3
    assert capsys.readouterr().err.splitlines() == [
        f"{run}: its experiment has no trackers; name one: --tracker wandb, mlflow or tensorboard",
        f"wandb: is not installed; {install_command('wandb')}",
    ]


def test_the_head_of_a_run_is_asked_for_what_is_new() -> None:
    asked: list[tuple[object, ...]] = []
    records, events = ({"iteration": 3, "loss": 1.5},), ({"event": "x"},)
    update = RunUpdate(RunState.RUNNING, None, 70, 5, True, records, events, 1, (), {}, 1.0)

    class Client:
        def ask(self, *arguments: object, **_: object) -> RunUpdate:
            asked.append(arguments)
            return update

    run = LiveRun("r")
    ask = ask_head(Client(), Run("r", "node-2"))  # type: ignore[arg-type]
    for _ in range(2):
        run.take(ask(run))
    verb = ("node-2", RunUpdate, "run-update", "/workspace/runs/r")
    positions = (("--offset=0", "--inode=0", "--events=0"), ("--offset=70", "--inode=5", "--events=1"))
    assert asked == [(*verb, *position) for position in positions]
    assert (run.columns.last, run.as_data()["state"]) == (3, "running")
