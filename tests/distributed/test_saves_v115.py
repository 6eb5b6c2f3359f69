"""Engine megatron-deepspeed saves and resumes without the source of Megatron-LM v1.1.5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import saved_v115
from tests.distributed.ranks import Started, events, make_run, metrics, read_lines
from tridock.contracts.checkpoint_files import Manifest, read_manifest
from tridock.contracts.checkpoints import saved_in

pytestmark = pytest.mark.distributed

FILES = {
    "deepspeed": ("zero", {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"}),
    "megatron": ("ddp", {"mp_rank_00/model_optim_rng.pt"}),
}


@pytest.mark.parametrize("kind", FILES)
def test_it_saves_and_goes_on_from_what_it_saved(workspace: Path, kind: str) -> None:
    """In the background, and at the end."""
    strategy, files = FILES[kind]
    fields: dict[str, Any] = {
        "engine": "megatron-deepspeed", "parallel.strategy": strategy, "parallel.zero_stage": int(strategy == "zero"),
        "train.train_iters": saved_v115.ITERATIONS, "train.save": True, "train.save_interval": 1,
        "train.load": f"runs/{kind}/checkpoints", "train.checkpoint_folder": f"runs/{kind}/checkpoints",
    }  # fmt: skip
    folder = make_run(workspace, kind, 1, **fields)
    argv = ["-m", "tests.distributed.saved_v115", kind, str(folder)]

    def train() -> None:
        with Started(argv, folder, 1, {}, "deepspeed") as ranks:
            finished = ranks.wait()
        assert finished.codes == [0], finished.out[0] + finished.err[0]

    train()
    saved = saved_in(folder / "checkpoints")
    assert sorted(saved) == [1, 2, 3]
    assert events(folder).count("checkpoint_saved") == 3
    for iteration, checkpoint in saved.items():
        manifest = read_manifest(checkpoint)
        assert isinstance(manifest, Manifest)
        assert set(manifest.here) == files | {"latest_checkpointed_iteration.txt", "layout.json"}
        assert json.loads((checkpoint / "layout.json").read_text())["updates"] == iteration
    whole = metrics(folder)
    (saved[3] / "layout.json").write_text("damaged")
    train()
    loaded = [
        event["iteration"] for event in read_lines(folder / "events.jsonl") if event["event"] == "checkpoint_loaded"
    ]
    assert loaded == [2]
    assert metrics(folder)[3, "train"]["loss"] == whole[3, "train"]["loss"]
