"""Megatron-LM v1.1.5: losses that are not finite, and steps that train nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cases import thinned
from tests.distributed.ill_health import (
    IDLE,
    OTHER_RATE,
    RUINOUS,
    SAVES,
    check_idle,
    check_idle_for_long,
    illness,
    lost_at,
    passed_over,
)
from tests.distributed.ranks import losses, metrics
from tests.distributed.test_megatron_v115 import LAYOUTS, PP, WARMUP, ZERO, train
from tests.distributed.test_megatron_v115 import workspace as workspace
from tridock.contracts.checkpoint_files import Illness, Quantity
from tridock.contracts.checkpoints import saved_in

pytestmark = pytest.mark.distributed

CASES: dict[str, dict[str, Any]] = {
    **{name: LAYOUTS[name][1] for name in ("ddp", "zero0", "zero2", "zero3", "pp2")},
    "pp2-zero1": {PP: 2, ZERO: 1},
}


@pytest.mark.parametrize("layout", thinned(CASES, ["ddp", "zero2"]))
def test_a_checkpoint_of_a_lost_training_replaces_none(workspace: Path, source: Path, layout: str) -> None:
    """Also the one that was saved before the loss showed what its update had done."""
    place = f"kept-{layout}"
    fields = CASES[layout] | SAVES | {
        "train.checkpoint_folder": place, "train.load": place, "train.eval_interval": 0, "optimizer.lr_decay_iters": 9,
    }  # fmt: skip
    _, good = train(workspace, source, f"good-{layout}", 2, **fields, **{"train.train_iters": 2})
    assert good.codes == [0, 0], good.out[0][-5000:]
    ruinous, lost = train(workspace, source, f"lost-{layout}", 2, **(fields | RUINOUS | {"train.train_iters": 9}))
    kept = saved_in(workspace / place)
    first = lost_at(lost, ruinous, kept)

    again = OTHER_RATE | {"train.train_iters": 9, "train.log_interval": 1}
    folder, resumed = train(workspace, source, f"resumed-{layout}", 2, **(fields | again))
    assert passed_over(resumed, kept[8])
    assert min(losses(folder))[0] == first - 1
    assert all(it["lr"] <= 2e-3 for (_, split), it in metrics(folder).items() if split == "train")


FEW = {"train.train_iters": 8, "train.eval_interval": 0}
SKIPPED: dict[str, dict[str, Any]] = {"zero1": {ZERO: 1}, "zero3": {ZERO: 3}, "pp2-zero1": CASES["pp2-zero1"]}


@pytest.mark.parametrize("layout", thinned(SKIPPED, ["zero1"]))
def test_a_run_whose_steps_are_all_skipped_fails(workspace: Path, source: Path, layout: str) -> None:
    folder, done = train(workspace, source, f"idle-{layout}", 2, **(SKIPPED[layout] | IDLE | FEW))
    check_idle(done, folder, "fp32")
    (saved,) = (folder / "checkpoints").glob("*/layout.json")
    assert json.loads(saved.read_text())["updates"] == 0
    assert illness(saved.parent) is None


@pytest.mark.full
def test_a_long_run_whose_steps_are_all_skipped_ends_early(workspace: Path, source: Path) -> None:
    more = FEW | {"train.train_iters": 1000, "train.log_interval": 20, "train.save": False}
    _, done = train(workspace, source, "long", 2, **(IDLE | {ZERO: 1} | more))
    check_idle_for_long(done)


def test_a_gradient_that_is_applied_although_it_overflowed_is_recorded(workspace: Path, source: Path) -> None:
    """Without DeepSpeed, Megatron v1.1.5 looks for no overflow at a fixed loss scale: the first step ruins all."""
    scaled = IDLE | FEW | {
        "parallel.strategy": "ddp", "train.save_interval": 1, "train.log_interval": 100, WARMUP: 1,
    }  # fmt: skip
    folder, done = train(workspace, source, "applied", 2, **(scaled | {"train.train_iters": 3}))
    assert done.codes == [4, 4], done.out[0][-5000:]
    assert "iteration 3: the loss is not finite" in done.out[0] + done.err[0]
    ill = {iteration: illness(it) for iteration, it in saved_in(folder / "checkpoints").items()}
    assert ill == {1: Illness(Quantity.GRADIENT, 1), 2: Illness(Quantity.GRADIENT, 1)}


@pytest.mark.full
def test_a_checkpoint_says_how_many_steps_have_trained(workspace: Path, source: Path) -> None:
    fields = {ZERO: 1, "train.eval_interval": 0, "train.save": True, "precision": "fp16", "optimizer.lr_decay_iters": 8}
    once = fields | {"train.train_iters": 7, "fp16.initial_scale_power": 3}
    first, done = train(workspace, source, "begun", 2, **once)
    assert done.codes == [0, 0], done.out[0][-5000:]
    (saved,) = (first / "checkpoints").glob("*/layout.json")
    assert json.loads(saved.read_text())["updates"] == 7
