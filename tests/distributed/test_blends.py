"""A blend of data sets: trained by ranks, resumed by another number of them, and validated on named data."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import losses, make_data, make_run, metrics, run
from tridock.contracts.records import read_metrics

pytestmark = pytest.mark.distributed

BLEND = {"data.data_path": None, "data.split": "949,50,1", "data.train_data_path": (0.7, "data/small", 0.3, "data/b")}
NAMED = {"data.valid_data_path": {"b": "data/b", "both": ("data/b", "data/small")}, "train.eval_interval": 4}


@pytest.mark.parametrize("engine", ["torch", "megatron-core"])
def test_a_blend_resumes_where_it_was_on_another_number_of_ranks(tmp_path: Path, engine: str) -> None:
    make_data(tmp_path)
    make_data(tmp_path, "b", documents=60)
    fields = {"engine": engine, **BLEND, **NAMED, "train.save": True, "train.save_interval": 4}
    whole = make_run(tmp_path, "whole", 2, **fields)
    finished = run(whole, 2)
    assert finished.codes == [0, 0], finished.err
    assert "data:  70.00% data/small: " in finished.out[0]
    assert "data:  30.00% data/b: " in finished.out[0]

    named = metrics(whole)[8, "valid"]
    assert list(named["losses"]) == ["b", "both"]
    assert named["loss"] == pytest.approx(sum(named["losses"].values()) / 2)
    assert f"valid loss after iteration 8: {named['loss']:.4f} (b {named['losses']['b']:.4f}, both " in finished.out[0]
    assert read_metrics(whole)[1]["valid"][-1] == named

    fields |= {"train.load": "runs/whole/checkpoints/iter_0000004", "train.save": False}
    continued = make_run(tmp_path, "continued", 1, **fields)
    finished = run(continued, 1)
    assert finished.codes == [0], finished.err
    again, before = losses(continued), losses(whole)
    assert set(again) == {place for place in before if place[0] > 4}
    assert again == pytest.approx({place: before[place] for place in again}, rel=1e-5)


def test_the_loss_of_a_name_is_that_of_the_data_alone(tmp_path: Path) -> None:
    make_data(tmp_path)
    make_data(tmp_path, "b", documents=60)
    alone = make_run(tmp_path, "alone", 1, **BLEND, **NAMED | {"data.valid_data_path": "data/b"})
    named = make_run(tmp_path, "named", 1, **BLEND, **NAMED)
    for folder in (alone, named):
        assert run(folder, 1).codes == [0]
    assert metrics(named)[8, "valid"]["losses"]["b"] == losses(alone)[8, "valid"]
    assert "losses" not in metrics(alone)[8, "valid"]
