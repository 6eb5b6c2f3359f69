"""metrics.jsonl, events.jsonl and TensorBoard's files."""

import json
import re
from pathlib import Path

from tridock.contracts.events import Event, append_event, append_line
from tridock.train.rank.metrics import Metrics


def test_events_have_time_and_name(tmp_path: Path) -> None:
    append_event(tmp_path, Event.RUN_STARTED, run="a")
    append_event(tmp_path, Event.RUN_FAILED, rank=1, reason="no")
    first, second = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first.pop("time"))
    assert first == {"event": "run_started", "run": "a"}
    assert (second["event"], second["rank"], second["reason"]) == ("run_failed", 1, "no")


def test_what_json_cannot_say_is_null(tmp_path: Path) -> None:
    append_line(tmp_path / "a", {"a": float("inf"), "b": float("nan"), "c": 1.5, "d": 3, "e": {"f": float("nan")}})
    assert (tmp_path / "a").read_text() == '{"a": null, "b": null, "c": 1.5, "d": 3, "e": {"f": null}}\n'


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    for active in (False, True):
        metrics = Metrics(tmp_path, active, tensorboard=True)
        metrics.iteration({"iteration": 1, "loss": 2.0})
        metrics.evaluation(1, "valid", 3.0)
        metrics.close()
        assert (tmp_path / "metrics.jsonl").exists() == active
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"iteration": 1, "loss": 2.0}, {"iteration": 1, "split": "valid", "loss": 3.0}]


def test_tensorboard_reads_the_same(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(tmp_path, active=True, tensorboard=True)
    for iteration in (1, 2):
        metrics.iteration({"iteration": iteration, "loss": 2.0 / iteration, "lr": 0.1})
    metrics.evaluation(2, "valid", 3.0)
    metrics.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(scalar.step, scalar.value) for scalar in board.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]
    assert set(board.Tags()["scalars"]) == {"train/loss", "train/lr", "valid/loss"}


def test_without_tensorboard(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, active=True, tensorboard=False)
    metrics.iteration({"iteration": 1, "loss": 2.0})
    metrics.close()
    assert not (tmp_path / "tensorboard").exists()


def test_a_run_that_goes_back_forgets_what_comes_after(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, active=True, tensorboard=False)
    metrics.rewind(3)
    assert not (tmp_path / "metrics.jsonl").exists()
    for iteration in (2, 4, 6):
        metrics.iteration({"iteration": iteration, "loss": 1.0})
        metrics.evaluation(iteration, "valid", 2.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 1')  # the last words of one that was killed
    Metrics(tmp_path, active=False, tensorboard=False).rewind(4)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 7
    metrics.rewind(4)
    metrics.iteration({"iteration": 5, "loss": 1.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["iteration"], "split" in line) for line in lines] == [
        (2, False), (2, True), (4, False), (4, True), (5, False),
    ]  # fmt: skip


def test_samples_of_text_are_in_tensorboard_as_they_are(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(tmp_path, active=True, tensorboard=True)
    metrics.samples(20, [{"prompt": "def f():", "text": "\n    pass"}, {"prompt": "a", "text": "b"}])
    metrics.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    (shown,) = found.Tensors("samples/0/text_summary")
    assert (shown.step, shown.tensor_proto.string_val[0]) == (20, b"    def f():\n        pass\n")
