"""A plan that is corrected by a run's step time and peak memory."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.plan.test_narayanan import ROWS, planned
from tridock.errors import RequestError
from tridock.experiment import Experiment, dump_experiment
from tridock.gpus import GPUS
from tridock.layout.shape import LayoutShape
from tridock.plan import Assessment, Assumptions, assess
from tridock.plan.correction import MeasuredRun
from tridock.plan.from_run import correction_of
from tridock.plan.memory import tensor_bytes
from tridock.report.measured_run import read_measured_run

EXPERIMENT = planned(*ROWS[3][1:8]).experiment
SLOTS = {f"node-{number}": range(8) for number in range(32)}
A100 = Assumptions(GPUS["a100-80gb"])


def seconds(assumptions: Assumptions, experiment: Experiment = EXPERIMENT) -> float:
    cost = assess(experiment, SLOTS, "e", assumptions).cost
    assert cost is not None
    assert cost.estimate is not None
    return cost.estimate.iteration


def tensors(assessment: Assessment) -> int:
    return max(tensor_bytes(stage.terms) for stage in assessment.memory)


def measured(step_s: float, peak_bytes: int | None = None, **fields: Any) -> MeasuredRun:
    known: dict[str, Any] = {"experiment": EXPERIMENT, "slots": SLOTS, "gpu": GPUS["a100-80gb"]}
    return MeasuredRun("runs/a", **known | fields, iterations=9, step_s=step_s, peak_bytes=peak_bytes)


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.4, 25.0])
def test_the_runs_own_plan_has_its_step_time(factor: float) -> None:
    took = factor * seconds(A100)
    correction = correction_of(measured(took), A100)
    assert correction.time == pytest.approx(factor, rel=0.1)
    assert seconds(replace(A100, correction=correction)) == pytest.approx(took, rel=1e-6)


def test_a_networks_rate_that_was_given_stays() -> None:
    """What differs from the plan is then the kernels', and messages within a node."""
    slow = replace(A100, network_gbit=25.0)
    took = 1.5 * seconds(slow)
    correction = correction_of(measured(took), slow)
    corrected = replace(slow, correction=correction)
    assert correction.links == ("node",)
    assert correction.time > 1.5
    assert seconds(corrected) == pytest.approx(took, rel=1e-6)
    rates = corrected.rates(EXPERIMENT, LayoutShape(1, 1, 8))
    assert (rates.network_source, rates.network_gb_s, rates.slower) == ("given", 25 / 8, {"node": correction.time})


def test_a_step_shorter_than_its_messages() -> None:
    with pytest.raises(RequestError) as caught:
        correction_of(measured(1.0), replace(A100, network_gbit=0.01))
    assert str(caught.value) == (
        "runs/a: its step is shorter than its messages take in the plan; got 1 s; "
        "give the network's rate with --network-gbit, or leave it out"
    )


@pytest.mark.parametrize("factor", [0.9, 1.2])
def test_tensors_take_what_the_run_allocated(factor: float) -> None:
    plain = assess(EXPERIMENT, SLOTS, "e", A100)
    correction = correction_of(measured(1.0, round(factor * tensors(plain))), A100)
    assert correction.memory == pytest.approx(factor)
    corrected = assess(EXPERIMENT, SLOTS, "e", replace(A100, correction=correction))
    assert tensors(corrected) == pytest.approx(factor * tensors(plain), rel=1e-9)
    assert (corrected.worst.least_bytes > plain.worst.least_bytes) == (factor > 1)
    (term,) = {one.source for stage in corrected.memory for one in stage.terms if one.name == "measured by a run"}
    assert term == f"runs/a allocated {factor:.3g} times what its plan has"


def test_devices_without_known_rates_get_one_from_the_run() -> None:
    """On CPUs, whose process's memory says nothing of tensors."""
    unknown = Assumptions()
    correction = correction_of(measured(3000.0, gpu=None), unknown)
    assert (correction.planned_s, correction.memory) == (None, 1.0)
    corrected = replace(unknown, correction=correction)
    assert seconds(corrected) == pytest.approx(3000.0)
    samples = EXPERIMENT.batch.samples_per_step(1) // 2
    half = EXPERIMENT.model_copy(update={"batch": EXPERIMENT.batch.model_copy(update={"global_batch_size": samples})})
    assert 0.5 < seconds(corrected, half) / 3000.0 < 0.6
    assert corrected.rates(EXPERIMENT, LayoutShape(1, 1, 8)).tflops_source == "measured: runs/a"


def test_another_layout_takes_the_factors_over() -> None:
    correction = correction_of(measured(2 * seconds(A100)), A100)
    other = EXPERIMENT.model_copy(
        update={"parallel": EXPERIMENT.parallel.model_copy(update={"tensor_model_parallel_size": 4})}
    )
    again = seconds(replace(A100, correction=correction), other)
    assert again / seconds(A100, other) == pytest.approx(2, rel=0.02)


def test_another_gpu_is_named() -> None:
    correction = correction_of(measured(10.0), A100)
    on_h100 = assess(EXPERIMENT, SLOTS, "e", replace(A100, gpu=GPUS["h100-80gb"], correction=correction))
    assert "runs/a ran on a100-80gb: its factors are taken for h100-80gb too" in on_h100.notes


# ---- the run's folder ------------------------------------------------------------------------------------------------


def write_run(
    folder: Path, times: list[float], device: str = "NVIDIA A100-SXM4-80GB", *, peak: int = 340 << 20, gpu: str = ""
) -> Path:
    folder.mkdir()
    small = Experiment.model_validate(
        {
            "name": "small",
            "model": {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 128},
            "batch": {"micro_batch_size": 2, "global_batch_size": 8},
            "data": {"data_path": "data/x"},
            "precision": "fp16" if device != "cpu" else "fp32",
            "train": {"train_iters": 10},
        }
    )
    (folder / "experiment.yaml").write_text(dump_experiment(small))
    assumptions = Assumptions(GPUS[gpu] if gpu else None)
    (folder / "plan.json").write_text(assess(small, {"a": (0, 2), "b": (0, 2)}, "e", assumptions).to_json())
    records = [{"iteration": number, "step_time_s": time} for number, time in enumerate(times, start=1)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    end = {"event": "run_finished", "device": device, "peak_memory_bytes": peak}
    (folder / "events.jsonl").write_text(f"{json.dumps(end)}\n")
    return folder


def test_the_first_iteration_does_not_count(tmp_path: Path) -> None:
    found = read_measured_run(write_run(tmp_path / "a", [9.0, 0.3, 0.1, 0.2]))
    assert (found.step_s, found.iterations, found.peak_bytes) == (0.2, 3, 340 << 20)
    assert found.gpu == GPUS["a100-80gb"]
    assert found.slots == {"a": (0, 2), "b": (0, 2)}


def test_the_memory_of_a_process_on_cpus_does_not_count(tmp_path: Path) -> None:
    found = read_measured_run(write_run(tmp_path / "a", [9.0, 0.3], "cpu", gpu="v100-16gb"))
    assert (found.gpu, found.peak_bytes) == (None, None)


def test_a_gpu_that_is_not_listed_is_that_of_the_plan(tmp_path: Path) -> None:
    found = read_measured_run(write_run(tmp_path / "a", [9.0, 0.3], "GeForce RTX 9090", gpu="v100-16gb"))
    assert found.gpu == GPUS["v100-16gb"]
    assert read_measured_run(write_run(tmp_path / "b", [9.0, 0.3], "GeForce RTX 9090")).gpu is None


def test_folders_that_measured_nothing(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", [9.0])
    torn = write_run(tmp_path / "torn", [9.0, 0.3])
    (torn / "plan.json").write_text('{"ranks": [{"node": "a"}]}')
    own = tmp_path / "own"
    own.mkdir()
    (own / "experiment.yaml").write_text("engine: command\nname: own\ncommand: [python, train.py]\n")
    messages = {
        one: "has logged too few iterations: the first includes the run's start; got 1; "
        "train at least 2 * train.log_interval iterations",
        torn: "has no plan.json, or a damaged one; give a run of tridock launch or train",
        own: "is a run of a program of its own, which has no plan; give a run of tridock launch or train",
        tmp_path / "none": "is not a run's folder; got no such folder; give runs/<run-id>",
    }
    for folder, message in messages.items():
        with pytest.raises(RequestError) as caught:
            read_measured_run(folder)
        assert str(caught.value) == f"{folder}: {message}"


def test_damaged_records_do_not_count(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [9.0, 0.3, math.inf, 1e300, -1.0, 0.5], peak=10**400)
    found = read_measured_run(folder)
    assert (found.step_s, found.iterations, found.peak_bytes) == (0.4, 2, None)
