"""Fields of runs that are lost or train nothing with any engine, and what is to be seen of such runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.distributed.ranks import Finished, metrics, read_lines
from tridock.contracts.checkpoint_files import Illness, Manifest, Quantity, read_manifest
from tridock.contracts.node_answers import Evidence
from tridock.triage import diagnose
from tridock.triage.facts import facts_of

SAVES = {
    "train.save": True, "train.save_interval": 1, "train.keep_checkpoints": 2, "train.log_interval": 100,
    "train.checkpoint_folder": "kept", "train.load": "kept", "optimizer.lr_decay_iters": 9,
    "optimizer.lr_warmup_iters": 0,
}  # fmt: skip
OTHER_RATE = {"train.override_checkpoint": ["optimizer.lr", "optimizer.clip_grad"]}
RUINOUS = OTHER_RATE | {"optimizer.lr": 1e30, "optimizer.clip_grad": 0.0}
IDLE = {
    "precision": "fp16", "fp16.loss_scale": 1e12, "train.save": True, "train.save_interval": 4,
    "train.log_interval": 3,
}  # fmt: skip


def illness(folder: Path) -> Illness | None:
    manifest = read_manifest(folder)
    assert isinstance(manifest, Manifest)
    return manifest.ill


def lost_at(done: Finished, folder: Path, kept: Mapping[int, Path]) -> int:
    """The iteration whose loss was the first one that was not finite, of a run with ``RUINOUS`` until iteration 9.

    It has kept the last checkpoint in good health, and has marked its own."""
    assert done.codes == [4, 4], done.out
    assert "iteration 9: the loss is not finite" in done.out[0] + done.err[0]
    ill = {iteration: illness(path) for iteration, path in kept.items()}
    first = next(it.iteration for it in ill.values() if it is not None)
    assert ill == {first - 2: None, **dict.fromkeys(range(7, 9), Illness(Quantity.LOSS, first))}
    condemned = [it for it in read_lines(folder / "events.jsonl") if it["event"] == "checkpoint_condemned"]
    assert [it["iteration"] for it in condemned] == [first - 1]
    return first


def passed_over(done: Finished, checkpoint: Path) -> bool:
    """Whether the run trained to its end, and took another checkpoint than this one, which is in ill health."""
    assert done.codes == [0, 0], done.out[0] + done.err[0]
    return (
        f"warning: {checkpoint} is passed over:\n{checkpoint}: was saved in ill health; got the loss of" in done.out[0]
    )


def check_idle(done: Finished, folder: Path, wider: str) -> None:
    """Checks a run of 8 steps with ``IDLE``, which fails; it is advised to use a ``wider`` precision."""
    assert done.codes == [4, 4], done.out
    (failed,) = [it for it in read_lines(folder / "events.jsonl") if it["event"] == "run_failed"]
    assert failed["cause"] == "nothing_trained"
    assert failed["reason"] == (
        "iteration 8: no parameter was updated: every one of its 8 steps was skipped, because the gradient overflowed "
        f"in fp16; got a loss scale of 1e+12; lower fp16.loss_scale, set it to 0 for a dynamic one, or use {wider}"
    )
    answer = Evidence(events=(folder / "events.jsonl").read_text())
    assert diagnose(facts_of({"a": answer}, "a", 4)).rule == "nothing-trained"
    skipped = {place[0]: record["skipped_steps"] for place, record in metrics(folder).items()}
    assert skipped == {1: 1, 3: 2, 6: 3, 8: 2}


def check_idle_for_long(done: Finished) -> None:
    """Checks a run of many steps with ``IDLE`` that logs every 20th: it ends long before its end."""
    assert done.codes == [4, 4], done.out
    assert "iteration 60: no parameter was updated: the last 60 steps were all skipped" in done.out[0] + done.err[0]
