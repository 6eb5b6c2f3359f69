"""torch's own timeout of collectives, in every process group of every engine: the supervisor alone judges a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cases import thinned
from tests.distributed.ranks import Finished, Started, make_run
from tests.distributed.test_local_disks import CORE, ENGINES, PROGRAM
from tests.distributed.test_megatron_v115 import PP, begin
from tests.distributed.timeouts import MARK
from tests.experiments import make_plan
from tridock.contracts.hang_limits import LIMITS, collective_minutes
from tridock.data.corpus import prepare_demo
from tridock.engines import rank_program
from tridock.experiment import load_experiment

pytestmark = pytest.mark.distributed

HANG_S = 900_000
"""Longer than the default of torch's timeout, so that it shows where that comes from."""
CASES: dict[str, dict[str, Any]] = {
    **{name: ENGINES[name] for name in ("ddp", "zero3", "fsdp", "pipeline")},
    "megatron-core": CORE | {"parallel.tensor_model_parallel_size": 2},
}
SAVES = {"train.save": True, "train.save_interval": 4, "train.async_save": True, "launch.hang_timeout": HANG_S}


def timeouts(done: Finished) -> list[list[float]]:
    assert done.codes == [0, 0], done.out[0] + done.err[0]
    return [json.loads(out.rpartition(MARK)[2]) for out in done.out]


@pytest.mark.parametrize("engine", thinned(CASES, ["fsdp", "megatron-core"]))
def test_no_group_has_a_shorter_one_than_the_hang_limits(workspace: Path, engine: str) -> None:
    folder = make_run(workspace, f"timeouts-{engine}", 2, **(CASES[engine] | SAVES))
    experiment = load_experiment(folder / "experiment.yaml")
    plan = make_plan(experiment, {"localhost": range(2)}, folder.name)
    env = rank_program(experiment.resolved(plan.data_parallel_size), plan, folder.name, str(folder)).env
    program = PROGRAM.get(engine, "tridock.train.__main__")
    argv = ["-m", "tests.distributed.timeouts", program, "all", "--run-folder", str(folder)]
    with Started(argv, folder, 2, env) as ranks:
        found = timeouts(ranks.wait())
    check(found)


def test_nor_has_one_of_megatron_v115(source: Path, tmp_path: Path) -> None:
    prepare_demo(tmp_path / "data" / "demo", vocab_size=500, report=lambda _: None, corpus_bytes=300_000)
    fields = {PP: 2, "train.train_iters": 8, "train.eval_interval": 0, **SAVES}
    _, ranks = begin(tmp_path, source, "v115", 2, "all", by="timeouts", **fields)
    with ranks:
        found = timeouts(ranks.wait())
    check(found)


def check(found: list[list[float]]) -> None:
    for seconds in found:
        assert len(seconds) > 1
        assert set(seconds) == {60.0 * collective_minutes(HANG_S)}


def test_it_is_longer_than_every_limit() -> None:
    longest = max(limit.seconds or 0.0 for limit in LIMITS.values())
    for hang_s in (0.0, 30.0, 86400.0, 1e7):
        assert 60.0 * collective_minutes(hang_s) >= 2 * max(longest, hang_s)
