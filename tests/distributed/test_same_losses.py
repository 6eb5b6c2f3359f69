"""The same experiment gives the same losses, however the work is shared and whenever it was interrupted."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.cases import thinned
from tests.distributed.ranks import Trained, losses, make_run, metrics, run_several

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel.strategy": "ddp"},
    **{f"zero{stage}": {"parallel.strategy": "zero", "parallel.zero_stage": stage} for stage in range(4)},
}
RECOMPUTED = ("ddp", "zero2", "zero3")
PRECISIONS = ("fp32", "bf16", "fp16")
FORMATS = [f"{layout}-{precision}" for layout, precision in product(LAYOUTS, PRECISIONS)]
# Each layout and each format, and each feature with ddp, a stage that keeps gradients whole and one that does not.
SHORT = ("ddp-fp16", "zero3-bf16", "zero3-fp16")
RESUMED = ("ddp-fp32", "zero1-fp32", "zero2-fp16", "zero3-bf16")
SOME = ("ddp", "zero3")
OFFLOADED = {"zero1": ("optimizer",), "zero2": ("optimizer",), "zero3": ("optimizer", "param")}
DROPOUT = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
SAVED_AT, ITERATIONS = 5, 9

FP32_TOLERANCE = 1e-5
"""Absolute, over 8 steps: sums over ranks and micro-batches come in another order, nothing else differs."""
SHORT_TOLERANCE = 2e-2
"""bf16 and fp16: DDP keeps fp32 weights under autocast, DeepSpeed keeps the model itself in the short format."""


@pytest.fixture(scope="module")
def two_ranks(workspace: Path) -> Trained:
    """Runs on two ranks: every layout and precision, and variants of the batch."""
    usual: dict[str, Path] = {}
    others: dict[str, Path] = {}

    def add(name: str, is_usual: bool, **fields: Any) -> None:
        layout = name.partition("-")[0]
        (usual if is_usual else others)[name] = make_run(workspace, name, 2, **LAYOUTS[layout], **fields)

    for layout, precision in product(LAYOUTS, PRECISIONS):
        name = f"{layout}-{precision}"
        # Low enough a loss scale for no step to overflow.
        add(name, precision == "fp32" or name in SHORT, precision=precision, **{"fp16.initial_scale_power": 10})
    for layout in LAYOUTS:
        some = layout in SOME
        add(f"{layout}-overflow", some, precision="fp16", **{"fp16.initial_scale_power": 30, "train.train_iters": 24})
        add(f"{layout}-scale1", some, precision="fp16", **{"fp16.loss_scale": 1.0})
        add(f"{layout}-whole", some, **{"batch.micro_batch_size": 4})
        add(f"{layout}-single", some, **{"batch.micro_batch_size": 1})
        if layout != "ddp":
            add(f"{layout}-unclipped", True, **{"optimizer.clip_grad": 0.0, "batch.micro_batch_size": 4})
    for layout in RECOMPUTED:
        add(f"{layout}-recomputed", True, **{"model.checkpoint_activations": True})
    add("ddp-saved", True, **{"train.save": True, "train.save_interval": 4})
    return Trained((2, usual), (2, others))


@pytest.fixture(scope="module")
def one_rank(workspace: Path) -> dict[str, Path]:
    runs = {layout: make_run(workspace, f"one-{layout}", 1, **fields) for layout, fields in LAYOUTS.items()}
    run_several(list(runs.values()), 1)
    return runs


def assert_close(found: Path, expected: Path, tolerance: float) -> None:
    ours, theirs = losses(found), losses(expected)
    assert ours.keys() == theirs.keys()
    assert ours == pytest.approx(theirs, abs=tolerance, rel=0)


def grad_norms(folder: Path) -> list[float]:
    return [record["grad_norm"] for (_, split), record in metrics(folder).items() if split == "train"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_stages_agree(two_ranks: Trained, stage: int) -> None:
    """Bit for bit where nothing but the partition differs; accumulation and clipping sum in another order."""
    assert losses(two_ranks[f"zero{stage}-unclipped"]) == losses(two_ranks["zero0-unclipped"])
    assert_close(two_ranks[f"zero{stage}-fp32"], two_ranks["zero0-fp32"], FP32_TOLERANCE)


@pytest.mark.parametrize("stage", range(4))
def test_ddp_and_zero_agree(two_ranks: Trained, stage: int) -> None:
    assert_close(two_ranks[f"zero{stage}-fp32"], two_ranks["ddp-fp32"], FP32_TOLERANCE)
    assert grad_norms(two_ranks[f"zero{stage}-fp32"]) == pytest.approx(grad_norms(two_ranks["ddp-fp32"]), rel=1e-4)


@pytest.mark.parametrize("name", thinned([name for name in FORMATS if not name.endswith("fp32")], SHORT))
def test_short_formats_follow_fp32(two_ranks: Trained, name: str) -> None:
    assert_close(two_ranks[name], two_ranks["ddp-fp32"], SHORT_TOLERANCE)
    assert grad_norms(two_ranks[name]) == pytest.approx(grad_norms(two_ranks["ddp-fp32"]), rel=0.05)
    scales = {record.get("loss_scale", 1.0) for record in metrics(two_ranks[name]).values()}
    assert scales - {1.0} == ({1024.0} if name.endswith("fp16") else set())


@pytest.mark.parametrize("layout", thinned(LAYOUTS, SOME))
def test_an_overflow_skips_the_step_and_lowers_the_scale(two_ranks: Trained, layout: str) -> None:
    records = [record for (_, split), record in metrics(two_ranks[f"{layout}-overflow"]).items() if split == "train"]
    skipped = [record["grad_norm"] is None for record in records]
    assert skipped[:3] == [True, True, True]
    # One overflow is forgiven (hysteresis 2); every further one halves the scale.
    assert [record["loss_scale"] for record in records[:3]] == [2.0**30, 2.0**29, 2.0**28]
    untrained = losses(two_ranks[f"{layout}-fp16"])[(1, "train")]
    assert records[0]["loss"] == pytest.approx(untrained, abs=1e-3)
    assert skipped[-1] is False  # and then it trains
    assert [record["skipped_steps"] for record in records] == [int(it) for it in skipped]


@pytest.mark.parametrize("layout", thinned(LAYOUTS, SOME))
def test_a_loss_scale_of_one_trains(two_ranks: Trained, layout: str) -> None:
    """The gradient is divided by the scale that multiplied the loss, at the lowest one too."""
    assert_close(two_ranks[f"{layout}-scale1"], two_ranks[f"{layout}-fp16"], SHORT_TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_and_two_agree(one_rank: dict[str, Path], two_ranks: Trained, layout: str) -> None:
    assert_close(one_rank[layout], two_ranks[f"{layout}-fp32"], FP32_TOLERANCE)
    assert grad_norms(one_rank[layout]) == pytest.approx(grad_norms(two_ranks[f"{layout}-fp32"]), rel=1e-4)


def test_ddp_continues_on_another_number_of_ranks(workspace: Path, two_ranks: Trained) -> None:
    source = {"train.load": "runs/ddp-saved/checkpoints/iter_0000004"}
    folder = make_run(workspace, "continued", 1, **LAYOUTS["ddp"], **source)
    run_several([folder], 1)
    expected = {place: loss for place, loss in losses(two_ranks["ddp-saved"]).items() if place[0] > 4}
    assert losses(folder) == pytest.approx(expected, abs=FP32_TOLERANCE, rel=0)


def test_four_ranks_agree(workspace: Path, two_ranks: Trained) -> None:
    runs = {layout: make_run(workspace, f"four-{layout}", 4, **LAYOUTS[layout]) for layout in ("ddp", "zero2", "zero3")}
    run_several(list(runs.values()), 4)
    for layout, folder in runs.items():
        assert_close(folder, two_ranks[f"{layout}-fp32"], FP32_TOLERANCE)


@pytest.mark.parametrize("layout", thinned(LAYOUTS, SOME))
def test_accumulation_does_not_matter(two_ranks: Trained, layout: str) -> None:
    """A global batch of 8 as 1, 2 or 4 micro-batches a rank."""
    for variant in ("whole", "single"):
        assert_close(two_ranks[f"{layout}-{variant}"], two_ranks[f"{layout}-fp32"], FP32_TOLERANCE)


@pytest.mark.parametrize("layout", RECOMPUTED)
def test_recomputed_activations_do_not_matter(two_ranks: Trained, layout: str) -> None:
    assert losses(two_ranks[f"{layout}-recomputed"]) == losses(two_ranks[f"{layout}-fp32"])


@pytest.fixture(scope="module")
def offloaded(workspace: Path) -> Trained:
    """Runs with states in the host's memory, and two that continue each: with them there, and on the device.

    Stage 3 last: DeepSpeed leaves its own linear layer in the process, with sums of another order.
    """
    batches: dict[tuple[bool, str], dict[str, Path]] = defaultdict(dict)
    for layout, parts in OFFLOADED.items():
        options = {"zero_optimization": {f"offload_{part}": {"device": "cpu"} for part in parts}}
        common = {**LAYOUTS[layout], "precision": "bf16"}
        saving = {"train.save": True, "train.save_interval": 4}
        source = {"train.load": f"runs/{layout}-offloaded/checkpoints/iter_0000004"}
        for name, fields in {
            "offloaded": {**saving, "deepspeed": options},
            "resumed-offloaded": {**source, "deepspeed": options},
            "resumed-on-device": source,
        }.items():
            run = make_run(workspace, f"{layout}-{name}", 2, **common, **fields)
            batches[layout in SOME, name.partition("-")[0]][run.name] = run
    return Trained(*((2, batch) for batch in batches.values()))


@pytest.mark.parametrize("layout", thinned(OFFLOADED, SOME))
def test_states_in_the_hosts_memory_do_not_matter(two_ranks: Trained, offloaded: Trained, layout: str) -> None:
    """Sums on the host come in another order. A checkpoint continues with the same losses."""
    whole = offloaded[f"{layout}-offloaded"]
    assert_close(whole, two_ranks[f"{layout}-bf16"], SHORT_TOLERANCE)
    assert grad_norms(whole) == pytest.approx(grad_norms(two_ranks[f"{layout}-bf16"]), rel=1e-2)
    expected = {place: loss for place, loss in losses(whole).items() if place[0] > 4}
    assert losses(offloaded[f"{layout}-resumed-offloaded"]) == expected
    on_device = losses(offloaded[f"{layout}-resumed-on-device"])
    assert on_device == pytest.approx(expected, abs=SHORT_TOLERANCE, rel=0)


def test_every_field_of_a_logged_iteration(two_ranks: Trained) -> None:
    records = [record for (_, split), record in metrics(two_ranks["zero2-fp32"]).items() if split == "train"]
    assert [record["iteration"] for record in records] == list(range(1, 9))
    assert [record["consumed_samples"] for record in records] == list(range(8, 65, 8))
    for record in records:
        assert list(record) == [
            "iteration",
            "loss",
            "lr",
            "grad_norm",
            "step_time_s",
            "tokens_per_second",
            "consumed_samples",
            "loss_scale",
            "phases",
            *(["memory_bytes"] if record["iteration"] in (1, 2, 4, 8) else []),
        ]
        assert record["tokens_per_second"] == pytest.approx(8 * 16 / record["step_time_s"])
    assert records[0]["lr"] == pytest.approx(1e-2 / 3)
    assert records[-1]["lr"] == pytest.approx(1e-3)


@pytest.fixture(scope="module")
def resumed(workspace: Path) -> Trained:
    """For each layout and precision: a run, and another process's run that continues from its middle."""
    batches: dict[tuple[bool, str], dict[str, Path]] = defaultdict(dict)
    for name in FORMATS:
        layout, _, precision = name.partition("-")
        common = LAYOUTS[layout] | DROPOUT | {"precision": precision, "train.train_iters": ITERATIONS}
        # A loss scale that changes, so that its state matters: it doubles every second step.
        common |= {"fp16.initial_scale_power": 6, "fp16.loss_scale_window": 2, "train.eval_interval": 3}
        saving = {"train.save": True, "train.save_interval": SAVED_AT}
        whole, part = batches[name in RESUMED, "whole"], batches[name in RESUMED, "part"]
        whole[f"whole-{name}"] = make_run(workspace, f"whole-{name}", 2, **common, **saving)
        source = {"train.load": f"runs/whole-{name}/checkpoints/iter_000000{SAVED_AT}"}
        part[f"resumed-{name}"] = make_run(workspace, f"resumed-{name}", 2, **common, **source)
    return Trained(*((2, batch) for batch in batches.values()))


@pytest.mark.parametrize("name", thinned(FORMATS, RESUMED))
def test_a_resumed_run_continues_the_very_same_losses(resumed: Trained, name: str) -> None:
    whole, part = (metrics(resumed[f"{which}-{name}"]) for which in ("whole", "resumed"))
    timing = {"step_time_s", "tokens_per_second", "phases", "memory_bytes"}
    expected = {place: record for place, record in whole.items() if place[0] > SAVED_AT}
    assert {place[0] for place in part} == set(range(SAVED_AT + 1, ITERATIONS + 1))
    assert {place[1] for place in part} == {"train", "valid", "test"}
    assert part.keys() == expected.keys()
    for place, record in part.items():
        for field in record.keys() - timing:
            assert record[field] == expected[place][field], (place, field)
    if name.endswith("fp16"):
        assert len({record["loss_scale"] for (_, split), record in part.items() if split == "train"}) > 1


def test_a_checkpoint_names_what_it_holds(resumed: Trained) -> None:
    whole = resumed["whole-zero1-fp32"]
    assert sorted(path.name for path in (whole / "checkpoints").iterdir() if path.is_dir()) == [
        f"iter_000000{SAVED_AT}",
        f"iter_000000{ITERATIONS}",
    ]
    assert (whole / "checkpoints/latest").read_text() == f"iter_000000{ITERATIONS}"
