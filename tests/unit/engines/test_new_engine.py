"""An engine of which only the program and the rules are written: it is planned and started, and nothing is guessed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from tests.plan_command import document, refused
from tridock.cli import main
from tridock.engines import ENGINES, Engine, rank_program
from tridock.engines.fields import COMMON, Fields, Refused
from tridock.engines.program import Program, RankProgram
from tridock.engines.rules import Rules
from tridock.errors import Problem
from tridock.experiment import Experiment, load_experiment
from tridock.layout import Plan
from tridock.ops.runs.node_problems import too_little_memory
from tridock.ops.runs.preflight import preflight_argv
from tridock.plan import assess
from tridock.plan.assumptions import Assumptions
from tridock.plan.node_loss import fewer_replicas, other_layout

EXPERIMENT = """\
name: tiny
model: {num_layers: 2, hidden_size: 8, num_attention_heads: 2, seq_length: 16, vocab_size: 100}
batch: {micro_batch_size: 1, global_batch_size: 4}
data: {data_path: data/x}
train: {train_iters: 3}
"""
GPUS = ("--nodes", "2", "--gpus-per-node", "2", "--gpu", "a100-80gb")


class MyProgram(Program):
    checkpoints_load_on = "any layout"

    def of_rank(self, experiment: Experiment, plan: Plan, run_path: str, load: str | None) -> RankProgram:
        arguments = ("--folder", run_path, "--world", str(plan.world_size), *(() if load is None else ("--from", load)))
        return RankProgram("my_trainer", arguments, {"MINE": "1"}, {"my.json": b"{}"})


class MyRules(Rules):
    fields: ClassVar[Fields] = {**COMMON, "parallel.tensor_model_parallel_size": Refused()}

    def problems(self, experiment: Experiment) -> Iterator[Problem]:
        if experiment.model.num_layers % 2:
            yield Problem("model.num_layers", "must be even", str(experiment.model.num_layers), "add one")


@pytest.fixture(autouse=True)
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(ENGINES, "torch", Engine(MyProgram(), MyRules()))  # type: ignore[misc]  # under a known name
    Path("tiny.yaml").write_text(EXPERIMENT)
    Path("hostfile").write_text("gpu-1 slots=2\ngpu-2 slots=2\n")
    return Path("tiny.yaml")


def test_a_plan_shows_what_is_known(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", str(config), *GPUS]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("can run · TP1 PP1 DP4 · 4 ranks\n")
    for known in ("4 samples, 64 tokens", "not estimated: engine torch has no cost model", "model FLOPs"):
        assert known in shown
    assert "note: engine torch has no cost model: its memory and time are not estimated" in shown
    assert "GiB" not in shown


def test_its_json_has_no_figure_that_nobody_knows(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--config", str(config), *GPUS, "--node-mtbf", "100", "--checkpoint-gb-s", "1")
    assert (found["verdict"], len(found["ranks"]), found["world_size"]) == ("fits", 4, 4)
    assert (found["memory"]["stages"], found["checkpoint_bytes"], found["host_memory"]) == ([], None, {})
    assert (found["cost"]["estimate"], found["cost"]["traffic"]) == (None, [])
    assert found["cost"]["parameters"] > 0
    assert "goodput" not in found


@pytest.mark.parametrize("option", ["--search", "--why"])
def test_what_needs_an_estimate_says_so(config: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "engine: has no cost model: its memory and time are not estimated; got torch" in refused(
        capsys, "--config", str(config), *GPUS, option
    )


def test_its_rules_refuse(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = refused(capsys, "--config", str(config), *GPUS, "--set", "model.num_layers=3")
    assert found == "tiny.yaml: model.num_layers: must be even; got 3; add one\n"
    found = refused(capsys, "--config", str(config), *GPUS, "--set", "parallel.tensor_model_parallel_size=2")
    assert "engine torch has no such option" in found


def test_a_launch_is_prepared(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--hosts", "hostfile", "--config", str(config), "--dry-run", "--verbose"]) == 0
    shown = capsys.readouterr().out
    assert "my_trainer" in shown
    assert "--world 4" in shown
    assert "my.json" in shown
    experiment = load_experiment(config)
    assert preflight_argv(experiment, head=False) == ("preflight", "--save=runs", "--", "data/x.bin", "data/x.idx")
    plan = assess(experiment, {"gpu-1": [0, 1]}, "e").checked()
    assert list(too_little_memory(config, experiment, plan, {"gpu-1": 1})) == []
    resumed = rank_program(experiment, plan, "id", "/workspace/runs/id", resume=True)
    assert resumed.arguments[-1] == "/workspace/runs/id/checkpoints"
    assert resumed.env["MINE"] == "1"


def test_a_run_goes_on_without_a_lost_node(config: Path) -> None:
    experiment = load_experiment(config)
    for continued in (fewer_replicas, other_layout):
        found = continued(experiment, {"gpu-1": [0, 1]}, "e", Assumptions())
        assert found is not None
        assert found.laid_out.world_size == 2
