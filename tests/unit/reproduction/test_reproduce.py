"""A run beside the one that it repeats: what it was made of, the verdict, what is refused before anything starts."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.dataset_writer import IndexedDatasetWriter
from tests.experiments import with_fields
from tridock.cli import main
from tridock.differences import Difference
from tridock.errors import RequestError
from tridock.experiment import dump_experiment
from tridock.ops.runs.reproduce import Gate, compare_with, notes, reproduce_here
from tridock.report.run_tables import environment_table, verdict_table
from tridock.reproduction.original import environment, read_original
from tridock.reproduction.outcome import Outcome, judge

BASE: dict[str, Any] = {
    "name": "t",
    "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 16},
    "batch": {"micro_batch_size": 1, "global_batch_size": 2},
    "data": {"data_path": "data/t"},
    "precision": "fp32",
    "train": {"train_iters": 2, "save": False, "tensorboard": False},
}
MANIFEST: dict[str, Any] = {
    "run_id": "t-1",
    "created": "2026",
    "config": "a.yaml",
    "image_id": "sha256:1",
    "image_manifest": {"torch": "2.13", "patches": ["0001", "0002"]},
    "git_commit": "abc",
    "git_dirty": False,
    "data_sha256": {"data/t.idx": "aa"},
    "data_bytes": {"data/t.bin": 100, "data/t.idx": 10},
}


def a_run(folder: Path, losses: list[float | None], device: str | None = "cpu", **fields: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "experiment.yaml").write_text(dump_experiment(with_fields(BASE, fields)))
    (folder / "manifest.json").write_text(json.dumps(MANIFEST | {"run_id": folder.name}))
    (folder / "plan.json").write_text(json.dumps({"world_size": 2, "data_parallel_size": 2}))
    records = [{"iteration": number, "loss": loss} for number, loss in enumerate(losses, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if device is not None:
        (folder / "events.jsonl").write_text(json.dumps({"event": "run_finished", "device": device}) + "\n")
    return folder


def change(folder: Path, **fields: Any) -> Path:
    """The run with other fields in its manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | fields))
    return folder


def nothing(found: object, notes: object) -> None:
    """Takes the progress, and prints nothing."""


def text_of(table: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def judged(tmp_path: Path, then: list[float | None], now: list[float | None], **given: Any) -> Outcome:
    devices, tolerance = given.get("devices", ("cpu", "cpu")), given.get("tolerance")
    first, second = (
        a_run(tmp_path / name, losses, device)
        for name, losses, device in zip(("t-1", "t-2"), (then, now), devices, strict=True)
    )
    return judge(read_original(first), second, [], given.get("precision", "fp32"), tolerance)


# ---- the verdict ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "given", "verdict", "tolerance"),
    [
        ([7.0, 6.0], {}, "identical", 0.0),
        ([7.0, 6.0000001], {}, "different", 0.0),
        ([7.0, 6.0000001], {"tolerance": 1e-6}, "within tolerance", 1e-6),
        ([7.0, 6.0000001], {"devices": ("NVIDIA H200", "NVIDIA H200")}, "within tolerance", 1e-4),
        ([7.0, 6.0000001], {"devices": ("NVIDIA H200", "cpu")}, "within tolerance", 1e-4),
        ([7.0, 6.01], {"devices": ("NVIDIA H200", "NVIDIA H200")}, "different", 1e-4),
        ([7.0, 6.01], {"devices": ("NVIDIA H200", "NVIDIA H200"), "precision": "bf16"}, "within tolerance", 1e-2),
        ([7.0, 6.0], {"devices": ("NVIDIA H200", "NVIDIA H200"), "precision": "fp16"}, "identical", 1e-2),
        ([7.0, 6.0000001], {"devices": (None, "cpu")}, "different", 0.0),
        ([7.0], {}, "different", 0.0),
    ],
)
def test_the_verdict(tmp_path: Path, now: list[float | None], given: Any, verdict: str, tolerance: float) -> None:
    outcome = judged(tmp_path, [7.0, 6.0], now, **given)
    assert (outcome.verdict, outcome.tolerance) == (verdict, tolerance)


def test_the_verdict_in_a_table_and_in_the_new_runs_folder(tmp_path: Path) -> None:
    first = a_run(tmp_path / "t-1", [7.0, 6.0, None])
    second = change(a_run(tmp_path / "t-2", [7.0, 6.5, None, 4.0]), image_id="sha256:2")
    seen: list[list[Difference]] = []
    outcome = compare_with(first, second, lambda found, notes: seen.append(list(found)))
    assert seen == [[Difference("image_id", ("sha256:1", "sha256:2"))]]
    rows = [
        [cell.strip() for cell in line.split("│")[1:3]] for line in text_of(verdict_table(outcome)).splitlines()[1:]
    ]
    assert [row for row in rows if len(row) == 2] == [
        ["verdict", "different"],
        ["devices", "cpu and cpu"],
        ["tolerance", "none: bitwise equality"],
        ["environment", "1 field differs"],
        ["losses compared", "3"],
        ["losses different", "1"],
        ["first difference", "iteration 2, train: 6.0 then, 6.5 now"],
        ["largest difference", "0.5 at iteration 2"],
        ["only in the new run", "1 losses: the original ended earlier"],
    ]
    assert json.loads((second / "reproduction.json").read_text()) == {
        "version": 1,
        "verdict": "different",
        "then": "t-1",
        "now": "t-2",
        "devices": ["cpu", "cpu"],
        "tolerance": 0.0,
        "environment": [{"field": "image_id", "then": "sha256:1", "now": "sha256:2"}],
        "losses": {
            "compared": 3,
            "differing": 1,
            "first": {"iteration": 2, "split": "train", "then": 6.0, "now": 6.5, "there": True},
            "largest": 0.5,
            "largest_at": 2,
            "more": 1,
        },
        "moved": False,
    }


def test_the_first_difference_may_be_a_loss_that_is_missing_or_not_finite(tmp_path: Path) -> None:
    missing = judged(tmp_path / "a", [7.0, 6.0], [7.0])
    assert "iteration 2, train: 6.0 then, not logged now" in text_of(verdict_table(missing))
    infinite = judged(tmp_path / "b", [7.0, 6.0], [7.0, None])
    assert "iteration 2, train: 6.0 then, not finite now" in text_of(verdict_table(infinite))


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    then, same, other = (
        a_run(tmp_path / name, losses)
        for name, losses in (("t-1", [7.0, 6.0]), ("t-2", [7.0, 6.0]), ("t-3", [7.0, 6.25]))
    )
    assert main(["reproduce", str(then), "--against", str(same)]) == 0
    assert "│ no differences │" in capsys.readouterr().out
    assert main(["reproduce", str(then), "--against", str(other)]) == 4
    assert main(["reproduce", str(then), "--against", str(other), "--tolerance", "0.1"]) == 0
    assert main(["reproduce", str(then), "--against", str(other), "--tolerance", "nan"]) == 2
    assert capsys.readouterr().err == "--tolerance: is not a tolerance; got nan; give a number of 0 or more, as 1e-4\n"


# ---- the environment -----------------------------------------------------------------------------


def test_the_environment_is_compared_field_by_field(tmp_path: Path) -> None:
    original = read_original(a_run(tmp_path / "t-1", [7.0]))
    now = json.loads(
        json.dumps(MANIFEST | {"run_id": "t-2", "created": "2027", "started_by": "bob@lab", "config": "b.yaml"})
    )
    assert environment(original, now, original.plan) == []
    now["image_manifest"]["torch"] = "2.14"
    now["image_manifest"]["patches"].append("0003")
    del now["git_commit"]
    found = environment(original, now, {"world_size": 4, "data_parallel_size": 2})
    assert found == [
        Difference("image_manifest.torch", ("2.13", "2.14")),
        Difference("image_manifest.patches", ('["0001", "0002"]', '["0001", "0002", "0003"]')),
        Difference("git_commit", ("abc", "-")),
        Difference("plan.world_size", ("2", "4")),
    ]
    shown = text_of(environment_table(found))
    assert [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")] == [
        it.field for it in found
    ]


def test_what_weakens_the_comparison(tmp_path: Path) -> None:
    folder = change(a_run(tmp_path / "t-1", [7.0]), git_dirty=True, data_sha256=None, data_bytes=None)
    (folder / "before-1").mkdir()
    assert notes(read_original(folder)) == [
        "the run's manifest does not say what its data was: whether it is the same is not known",
        "the run's code had changes that its commit does not hold",
        "the run moved to other nodes: its first losses are from another layout",
    ]
    assert notes(read_original(a_run(tmp_path / "t-2", [7.0]))) == []


def gate(folder: Path, *, force: bool = False) -> Gate:
    return Gate(read_original(folder), nothing, force)


@pytest.mark.parametrize(
    ("section", "value", "where", "was", "got"),
    [
        ("data_sha256", {"data/t.idx": "bb"}, "data/t.idx", "aa", "bb"),
        ("data_bytes", {"data/t.bin": 101, "data/t.idx": 10}, "data/t.bin", "100", "101"),
    ],
)
def test_other_data_is_refused_unless_forced(
    tmp_path: Path, section: str, value: Mapping[str, Any], where: str, was: str, got: str
) -> None:
    folder = a_run(tmp_path / "t-1", [7.0])
    now = MANIFEST | {section: value}
    with pytest.raises(RequestError) as caught:
        gate(folder).pass_through(now, {"world_size": 2, "data_parallel_size": 2})
    assert str(caught.value) == (
        f"{where}: is not the data that the run has read: {section} was {was}; got {got}; "
        "restore that data, or compare anyway with --force"
    )
    forced = gate(folder, force=True)
    forced.pass_through(now, {"world_size": 2, "data_parallel_size": 2})
    assert [it.field for it in forced.differing] == [f"{section}.{where}"]


def test_data_that_only_one_of_both_knows_is_not_refused(tmp_path: Path) -> None:
    folder = change(a_run(tmp_path / "t-1", [7.0]), data_sha256={"data/old.idx": "aa"}, data_bytes="all")
    gate(folder).pass_through(MANIFEST, {"world_size": 2, "data_parallel_size": 2})


# ---- what is refused before anything starts ------------------------------------------------------


def test_a_run_that_cannot_be_done_again(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "t-1", [])
    (folder / "plan.json").unlink()
    with pytest.raises(RequestError) as caught:
        reproduce_here(folder, tmp_path, nothing, nothing)
    assert str(caught.value) == (
        f"{folder}/metrics.jsonl: has no losses to compare with; got no logged iteration; "
        "name a run that has logged losses\n"
        f"{folder}/plan.json: does not record the number of ranks; got no world_size; "
        "fetch the run's folder whole: tridock fetch"
    )
    with pytest.raises(RequestError) as caught:
        reproduce_here(tmp_path / "none", tmp_path, nothing, nothing)
    assert str(caught.value) == f"{tmp_path}/none: is not a run's folder; got no such folder; give runs/<run-id>"


def test_nothing_is_started_on_other_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the node's own fingerprints of real files."""
    with IndexedDatasetWriter(tmp_path / "data" / "t", 7) as writer:
        writer.add_document([1, 2, 3] * 20)
    folder = a_run(tmp_path / "runs" / "t-1", [7.0, 6.0], **{"model.vocab_size": 8})
    assert main(["reproduce", str(folder), "--workspace", str(tmp_path)]) == 2
    done = capsys.readouterr()
    refused = [line.partition(";")[0] for line in done.err.splitlines()]
    assert refused == [
        "data/t.idx: is not the data that the run has read: data_sha256 was aa",
        "data/t.bin: is not the data that the run has read: data_bytes was 100",
        "data/t.idx: is not the data that the run has read: data_bytes was 10",
    ]
    assert "data_sha256.data/t.idx" in done.out
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["t-1"]
