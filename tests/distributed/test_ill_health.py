"""Losses that are not finite, and steps that train nothing: what is saved, kept, taken, and how the run ends."""

from __future__ import annotations

from collections.abc import Mapping
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
    lost_at,
    passed_over,
)
from tests.distributed.ranks import Finished, Started, imports_of, losses, make_data, make_run
from tests.distributed.test_local_disks import CORE, ENGINES, PROGRAM
from tridock.contracts.checkpoints import saved_in

pytestmark = pytest.mark.distributed

CASES = {name: ENGINES[name] for name in ("ddp", "zero2", "zero3", "fsdp", "pipeline")} | {"megatron-core": CORE}
SOME = ("fsdp",)


def train(workspace: Path, name: str, fields: Mapping[str, Any]) -> Finished:
    folder = make_run(workspace, name, 2, **fields)
    core = fields.get("engine") == "megatron-core"
    argv = ["-m", PROGRAM["megatron-core"] if core else "tridock.train", "--run-folder", str(folder)]
    with Started(argv, folder, 2, {}, "megatron-core" if core else imports_of(folder)) as ranks:
        return ranks.wait()


@pytest.mark.parametrize("engine", thinned(CASES, SOME))
def test_a_checkpoint_of_a_lost_training_replaces_none(tmp_path: Path, engine: str) -> None:
    """Also the one that was saved before the loss showed what its update had done."""
    make_data(tmp_path)
    fields = CASES[engine] | SAVES
    good = train(tmp_path, "good", fields | {"train.train_iters": 2})
    assert good.codes == [0, 0], good.err
    lost = train(tmp_path, "lost", fields | RUINOUS | {"train.train_iters": 9})
    kept = saved_in(tmp_path / "kept")
    first = lost_at(lost, tmp_path / "runs/lost", kept)

    resumed = train(tmp_path, "resumed", fields | {"train.train_iters": 9, "train.log_interval": 1})
    assert passed_over(resumed, kept[8])
    assert min(losses(tmp_path / "runs/resumed"))[0] == first - 1
    aside = (tmp_path / "kept" / f"{kept[8].name}.set-aside-1").rename(tmp_path / "iter_0000008")

    chosen = fields | OTHER_RATE | {"train.load": aside.name, "train.train_iters": 9, "train.save": False}
    explicit = train(tmp_path, "explicit", chosen)
    assert explicit.codes == [4, 4], explicit.out
    assert f"warning: {aside} was saved in ill health: the loss of iteration {first} is not finite" in explicit.out[0]


@pytest.mark.parametrize("engine", thinned(CASES, SOME))
def test_a_run_whose_steps_are_all_skipped_fails(tmp_path: Path, engine: str) -> None:
    make_data(tmp_path)
    check_idle(train(tmp_path, "idle", CASES[engine] | IDLE), tmp_path / "runs/idle", "bf16 or fp32")


@pytest.mark.full
def test_a_long_run_whose_steps_are_all_skipped_ends_early(tmp_path: Path) -> None:
    make_data(tmp_path)
    check_idle_for_long(train(tmp_path, "long", IDLE | {"train.train_iters": 1000, "train.log_interval": 20}))


@pytest.mark.full
def test_the_end_of_a_trained_run_may_be_skipped(tmp_path: Path) -> None:
    """A resume whose single step overflows is no failure; what it continues has trained."""
    make_data(tmp_path)
    saved = {"train.save": True, "precision": "fp16", "optimizer.lr_decay_iters": 8}
    first = train(tmp_path, "first", saved | {"train.train_iters": 7, "fp16.loss_scale": 8.0})
    assert first.codes == [0, 0], first.err
    load = {"train.load": "runs/first/checkpoints", "train.override_checkpoint": ["fp16.loss_scale"]}
    done = train(tmp_path, "rest", saved | load | {"fp16.loss_scale": 1e12})
    assert done.codes == [0, 0], done.err
    assert "step skipped: the gradient overflowed" in done.out[0]
