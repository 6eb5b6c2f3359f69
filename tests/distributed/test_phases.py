"""Where the time of a step goes, its communication, and what each rank holds, of every strategy of engine ``torch``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import check_communication, make_data, make_run, metrics, read_lines, run_several

pytest.importorskip("torch")

pytestmark = pytest.mark.distributed

PLAIN = {"data", "forward", "backward", "optimizer", "other"}
TENSOR, PIPELINE = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "ddp": ({}, PLAIN | {"gradient_sync"}),
    "fsdp": ({"parallel.strategy": "fsdp"}, PLAIN),
    "zero1": ({"parallel.strategy": "zero", "parallel.zero_stage": 1}, PLAIN | {"gradient_sync"}),
    "tp2": ({TENSOR: 2}, PLAIN),
    "pp2": ({PIPELINE: 2}, PLAIN | {"gradient_sync", "pipeline_wait"}),
}
EVERY = {"train.eval_interval": 4, "train.save": True, "train.save_interval": 4, "train.profile_iters": 2}


def test_every_strategy_tells_its_phases(tmp_path: Path) -> None:
    make_data(tmp_path)
    folders = {name: make_run(tmp_path, name, 2, **fields, **EVERY) for name, (fields, _) in CASES.items()}
    run_several(list(folders.values()), 2)
    for name, folder in folders.items():
        records = [line for (_, split), line in metrics(folder).items() if split == "train"]
        assert len(records) == 8
        for record in records[1:]:
            phases = record["phases"]
            assert set(phases) == CASES[name][1], name
            assert all(seconds >= 0 for seconds in phases.values()), name
            # Whatever a step does is in one of them; evaluations and checkpoints are in none.
            assert sum(phases.values()) == pytest.approx(record["step_time_s"], rel=0.2, abs=2e-3), name
        recorded = [record["memory_bytes"] for record in records if "memory_bytes" in record]
        assert [record["iteration"] for record in records if "memory_bytes" in record] == [1, 2, 4, 8]
        assert all(len(peaks) == 2 and min(peaks) > 2**26 for peaks in recorded), name
        occasions = ("evaluation", "checkpoint_saved")
        spent = [event["seconds"] for event in read_lines(folder / "events.jsonl") if event["event"] in occasions]
        assert len(spent) == 5  # two checkpoints, two evaluations and the test's
        check_communication(folder)
