"""What a training's steps show of its health: what is ill, and what trains nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.unit.train.experiments import experiment
from tridock.contracts.checkpoint_files import Entry, Illness, Manifest, Quantity, read_manifest
from tridock.contracts.checkpoints import MANIFEST, newest
from tridock.errors import Problem
from tridock.train.rank import process_group
from tridock.train.rank.health import IDLE_STEPS, Health, Seen

CPU = torch.device("cpu")
Steps = Sequence[tuple[float, float]]
GOOD, SKIPPED, ZERO, LOST, APPLIED = (2.0, 1.0), (2.0, math.inf), (2.0, 0.0), (math.nan, math.inf), (2.0, math.nan)


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TRIDOCK_WORLD_SIZE"):
            patch.setenv(name, "")
            patch.delenv(name)
        patch.setenv("DS_ACCELERATOR", "cpu")
        process_group.join()
        yield
        process_group.leave()


def health(start: int = 0, before: int | None = 0, **fields: object) -> Health:
    return Health(experiment(**fields), start, before, CPU)


def seen(steps: Steps, watched: Health | None = None) -> Seen:
    watched = watched or health()
    for loss, norm in steps:
        watched.add(torch.tensor(loss), torch.tensor(norm) if norm else norm)
    return watched.look()


@pytest.mark.parametrize(
    ("steps", "ill", "condemned"),
    [
        ([GOOD] * 3, None, None),
        ([GOOD, SKIPPED, SKIPPED], None, None),
        ([GOOD, GOOD, LOST, LOST], Illness(Quantity.LOSS, 3), 2),
        ([LOST], Illness(Quantity.LOSS, 1), 0),
        ([GOOD, LOST, GOOD], None, None),
        ([GOOD, APPLIED, GOOD], Illness(Quantity.GRADIENT, 2), None),
        ([GOOD, APPLIED, LOST], Illness(Quantity.GRADIENT, 2), 2),
        ([GOOD] * 200 + [LOST] * 100, Illness(Quantity.LOSS, 201), 200),
        ([GOOD, APPLIED] + [GOOD] * 300, Illness(Quantity.GRADIENT, 2), None),
    ],
)
def test_what_is_ill(steps: Steps, ill: Illness | None, condemned: int | None) -> None:
    found = seen(steps)
    assert (found.iteration, found.ill) == (len(steps), ill)
    assert [number for number in range(len(steps) + 1) if found.condemns(number)] == (
        [] if condemned is None else [condemned]
    )


def test_steps_are_counted_once_however_often_it_looks() -> None:
    watched = health()
    for number in range(1, 200):
        found = seen([(GOOD, SKIPPED, ZERO)[number % 3]], watched)
        assert found == watched.look()
    assert (found.updates, found.skipped, found.zeros, found.taken_until) == (66, 67, 66, 198)
    assert watched.updates(found) == 66
    assert health(before=None).updates(found) is None
    assert health(before=5).updates(found) == 71


FP16 = {"precision": "fp16"}
FIXED = {**FP16, "fp16.loss_scale": 1e12}


def reason(steps: Steps, scale: float = 1.0, start: int = 0, before: int | None = 0, **fields: object) -> str:
    watched = health(start, before, **fields)
    problem = watched.idleness(seen(steps, watched), scale)
    assert problem is None or problem.cause == "nothing_trained"
    return "" if problem is None else str(problem)


def test_a_run_that_trains_nothing_is_a_failure_at_its_end() -> None:
    assert reason([ZERO] * 9) == ""
    start = "iteration 10: no parameter was updated: "
    assert reason([ZERO] * 10).startswith(f"{start}every one of its 10 steps had a gradient of 0; check the data")
    assert reason([APPLIED] * 4 + [ZERO] * 6).startswith(
        f"{start}of its 10 steps 6 were with a gradient of 0, 4 were with a gradient that is not finite; "
    )
    assert reason([SKIPPED] * 10, 1e12, **FIXED) == (
        f"{start}every one of its 10 steps was skipped, because the gradient overflowed in fp16; "
        "got a loss scale of 1e+12; lower fp16.loss_scale, set it to 0 for a dynamic one, or use bf16 or fp32"
    )
    assert "; lower fp16.initial_scale_power, train longer" in reason([SKIPPED] * 10, 64.0, **FP16)
    assert reason([GOOD] * 10) == ""


@pytest.mark.parametrize("before", [None, 3])
def test_the_short_rest_of_a_trained_run_may_be_idle(before: int | None) -> None:
    assert reason([SKIPPED] * 10, 64.0, before=before, **FP16) == ""
    many = {"train.train_iters": IDLE_STEPS, **FP16}
    assert "was skipped" in reason([SKIPPED] * IDLE_STEPS, 64.0, before=before, **many)


def test_skips_at_a_scale_that_cannot_fall_end_a_run_early() -> None:
    fields = {"train.train_iters": 1000}
    assert reason([SKIPPED] * (IDLE_STEPS - 1), 1e12, **fields, **FIXED) == ""
    assert "the last 50 steps were all skipped" in reason([SKIPPED] * IDLE_STEPS, 1e12, **fields, **FIXED)
    assert reason([*[SKIPPED] * 60, GOOD], 1e12, **fields, **FIXED) == ""
    watched = health(**fields, **FP16)
    for scale, ends in ((2.0, False), (1.0, False), (1.0, True)):
        # It counts from the first look that finds the smallest scale.
        assert bool(watched.idleness(seen([SKIPPED] * IDLE_STEPS, watched), scale)) is ends
    assert watched.idleness(seen([SKIPPED], watched), 2.0) is None


def test_the_newest_healthy_one_is_what_a_restart_takes(tmp_path: Path) -> None:
    entries = {"a": Entry(1, "ab")}
    for iteration, ill in ((1, None), (2, None), (3, Illness(Quantity.LOSS, 3))):
        folder = tmp_path / f"iter_{iteration:07d}"
        folder.mkdir()
        (folder / MANIFEST).write_bytes(Manifest(entries, {"b": Entry(2, "cd")}, ill).to_bytes())
    assert newest(tmp_path) == (2, tmp_path / "iter_0000002")
    found = read_manifest(tmp_path / "iter_0000003")
    assert isinstance(found, Manifest)
    assert found.ill == found.with_more({"b": Entry(2, "cd")}).ill == Illness(Quantity.LOSS, 3)
    for iteration in (1, 2):
        (tmp_path / f"iter_{iteration:07d}" / MANIFEST).unlink()
    assert newest(tmp_path) == (3, tmp_path / "iter_0000003")
    text = (tmp_path / "iter_0000003" / MANIFEST).read_text().replace('"loss"', '"mood"')
    (tmp_path / "iter_0000003" / MANIFEST).write_text(text)
    assert isinstance(read_manifest(tmp_path / "iter_0000003"), Problem)
