"""Dropout where ranks share layers: which masks are whose, and that they come again where they must."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.ranks import Started, losses, make_data, make_run, run_several

pytestmark = pytest.mark.distributed

TP, PP = (f"parallel.{name}_model_parallel_size" for name in ("tensor", "pipeline"))
DROPOUT = {"model.hidden_dropout": 0.2, "model.attention_dropout": 0.2, "model.num_layers": 4, "train.train_iters": 6}
RECOMPUTED = {"model.checkpoint_activations": True}


def test_heads_have_masks_of_their_own_and_the_rest_has_the_same(tmp_path: Path) -> None:
    with Started(["-m", "tests.distributed.masks"], tmp_path, 2, {}, "torch") as started:
        finished = started.wait()
    assert finished.codes == [0, 0], "\n".join(finished.err)
    assert json.loads(finished.out[0]) == {
        "heads_alike": False,
        "whole_alike": [True, True],
        "recomputed_heads_same": True,
        "recomputed_gradients_same": True,
        "other_seed_same": False,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    workspace = tmp_path_factory.mktemp("workspace")
    make_data(workspace)
    folders = {}
    for name, layout in {"tp2": {TP: 2}, "pp2": {PP: 2}}.items():
        saved = {"train.save": True, "train.save_interval": 3}
        folders[name] = make_run(workspace, name, 2, **DROPOUT, **layout, **saved)
        folders[f"{name}-recomputed"] = make_run(workspace, f"{name}-recomputed", 2, **DROPOUT, **layout, **RECOMPUTED)
        load = {"train.load": f"runs/{name}/checkpoints/iter_0000003"}
        folders[f"{name}-resumed"] = make_run(workspace, f"{name}-resumed", 2, **DROPOUT, **layout, **load)
    run_several(list(folders.values()), 2)
    return folders


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_recomputed_activations_meet_the_same_masks(runs: dict[str, Path], layout: str) -> None:
    assert losses(runs[f"{layout}-recomputed"]) == losses(runs[layout])


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_resumed_run_draws_what_an_uninterrupted_one_draws(runs: dict[str, Path], layout: str) -> None:
    rest = {place: loss for place, loss in losses(runs[layout]).items() if place[0] > 3}
    assert losses(runs[f"{layout}-resumed"]) == rest
