"""Losses that are not finite, and steps that train nothing: what is saved, kept, taken, and how the run ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cases import thinned
from tests.distributed.ranks import Finished, Started, imports_of, losses, make_data, make_run, metrics, read_lines
from tests.distributed.test_local_disks import CORE, ENGINES, PROGRAM
from tridock.contracts.checkpoint_files import Illness, Manifest, Quantity, read_manifest
from tridock.contracts.checkpoints import saved_in
from tridock.contracts.node_answers import Evidence
from tridock.triage import diagnose
from tridock.triage.facts import facts_of

pytestmark = pytest.mark.distributed

CASES = {name: ENGINES[name] for name in ("ddp", "zero2", "zero3", "fsdp", "pipeline")} | {"megatron-core": CORE}
SOME = ("fsdp",)
SAVES = {
    "train.save": True, "train.save_interval": 1, "train.keep_checkpoints": 2, "train.log_interval": 100,
    "train.checkpoint_folder": "kept", "train.load": "kept", "optimizer.lr_decay_iters": 9,
    "optimizer.lr_warmup_iters": 0,
}  # fmt: skip
OTHER_RATE = {"train.override_checkpoint": ["optimizer.lr", "optimizer.clip_grad"]}
RUINOUS = OTHER_RATE | {"optimizer.lr": 1e30, "optimizer.clip_grad": 0.0}


def train(workspace: Path, name: str, fields: Mapping[str, Any]) -> Finished:
    folder = make_run(workspace, name, 2, **fields)
    core = fields.get("engine") == "megatron-core"
    argv = ["-m", PROGRAM["megatron-core"] if core else "tridock.train", "--run-folder", str(folder)]
    with Started(argv, folder, 2, {}, "megatron-core" if core else imports_of(folder)) as ranks:
        return ranks.wait()


def illness(folder: Path) -> Illness | None:
    manifest = read_manifest(folder)
    assert isinstance(manifest, Manifest)
    return manifest.ill


@pytest.mark.parametrize("engine", thinned(CASES, SOME))
def test_a_checkpoint_of_a_lost_training_replaces_none(tmp_path: Path, engine: str) -> None:
    """Also the one that was saved before the loss showed what its update had done."""
    make_data(tmp_path)
    fields = CASES[engine] | SAVES
    good = train(tmp_path, "good", fields | {"train.train_iters": 2})
    assert good.codes == [0, 0], good.err
    lost = train(tmp_path, "lost", fields | RUINOUS | {"train.train_iters": 9})
    assert lost.codes == [4, 4], lost.out
    assert "iteration 9: the loss is not finite" in lost.out[0] + lost.err[0]
    kept = saved_in(tmp_path / "kept")
    ill = {iteration: illness(folder) for iteration, folder in kept.items()}
    first = next(it.iteration for it in ill.values() if it is not None)
    assert ill == {first - 2: None, **dict.fromkeys(range(7, 9), Illness(Quantity.LOSS, first))}
    condemned = [it for it in read_lines(tmp_path / "runs/lost/events.jsonl") if it["event"] == "checkpoint_condemned"]
    assert [it["iteration"] for it in condemned] == [first - 1]

    resumed = train(tmp_path, "resumed", fields | {"train.train_iters": 9, "train.log_interval": 1})
    assert resumed.codes == [0, 0], resumed.err
    assert f"warning: {kept[8]} is passed over:\n{kept[8]}: was saved in ill health; got the loss of" in resumed.out[0]
    assert min(losses(tmp_path / "runs/resumed"))[0] == first - 1
    aside = (tmp_path / "kept" / f"{kept[8].name}.set-aside-1").rename(tmp_path / "iter_0000008")

    chosen = fields | OTHER_RATE | {"train.load": aside.name, "train.train_iters": 9, "train.save": False}
    explicit = train(tmp_path, "explicit", chosen)
    assert explicit.codes == [4, 4], explicit.out
    assert f"warning: {aside} was saved in ill health: the loss of iteration {first} is not finite" in explicit.out[0]


IDLE = {
    "precision": "fp16", "fp16.loss_scale": 1e12, "train.save": True, "train.save_interval": 4,
    "train.log_interval": 3,
}  # fmt: skip


@pytest.mark.parametrize("engine", thinned(CASES, SOME))
def test_a_run_whose_steps_are_all_skipped_fails(tmp_path: Path, engine: str) -> None:
    make_data(tmp_path)
    done = train(tmp_path, "idle", CASES[engine] | IDLE)
    assert done.codes == [4, 4], done.out
    (failed,) = [it for it in read_lines(tmp_path / "runs/idle/events.jsonl") if it["event"] == "run_failed"]
    assert failed["cause"] == "nothing_trained"
    assert failed["reason"] == (
        "iteration 8: no parameter was updated: every one of its 8 steps was skipped, because the gradient overflowed "
        "in fp16; got a loss scale of 1e+12; lower fp16.loss_scale, set it to 0 for a dynamic one, or use bf16 or fp32"
    )
    answer = Evidence(events=(tmp_path / "runs/idle/events.jsonl").read_text())
    assert diagnose(facts_of({"a": answer}, "a", 4)).rule == "nothing-trained"
    records = metrics(tmp_path / "runs/idle")
    assert {place[0]: record["skipped_steps"] for place, record in records.items()} == {1: 1, 3: 2, 6: 3, 8: 2}


@pytest.mark.full
def test_a_long_run_whose_steps_are_all_skipped_ends_early(tmp_path: Path) -> None:
    make_data(tmp_path)
    done = train(tmp_path, "long", IDLE | {"train.train_iters": 1000, "train.log_interval": 20})
    assert done.codes == [4, 4], done.out
    assert "iteration 60: no parameter was updated: the last 60 steps were all skipped" in done.out[0] + done.err[0]


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
