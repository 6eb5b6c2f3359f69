"""The dynamic loss scale, compared step by step with DeepSpeed's."""

import random

import pytest
import torch

from tridock.experiment.schema import LossScale
from tridock.train.parallel.update import LossScaler

CPU = torch.device("cpu")


def test_only_fp16_scales() -> None:
    assert LossScaler(LossScale(), "bf16", CPU).scale == 1.0
    assert LossScaler(LossScale(loss_scale=8.0), "fp32", CPU).scale == 1.0
    assert LossScaler(LossScale(), "fp16", CPU).scale == 2.0**16


def test_a_fixed_scale_stays() -> None:
    scaler = LossScaler(LossScale(loss_scale=128.0), "fp16", CPU)
    scaler.update(torch.tensor(True))
    assert scaler.scale == 128.0
    scaler.restore({"scale": 4.0, "good_steps": 0, "overflows_left": 1})
    assert scaler.scale == 128.0


def test_it_never_falls_below_one() -> None:
    scaler = LossScaler(LossScale(initial_scale_power=1, hysteresis=1), "fp16", CPU)
    for _ in range(5):
        scaler.update(torch.tensor(True))
    assert scaler.scale == 1.0


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 3, 10])
def test_it_moves_as_deepspeeds(monkeypatch: pytest.MonkeyPatch, hysteresis: int, window: int) -> None:
    theirs_module = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    monkeypatch.setattr(theirs_module.dist, "get_rank", lambda: 1)  # it asks whether to log
    theirs = theirs_module.DynamicLossScaler(
        init_scale=2.0**10,
        scale_window=window,
        min_scale=1.0,
        delayed_shift=hysteresis,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=False,
    )
    ours = LossScaler(LossScale(initial_scale_power=10, loss_scale_window=window, hysteresis=hysteresis), "fp16", CPU)
    generator = random.Random(hysteresis * 100 + window)
    for step in range(400):
        overflow = generator.random() < 0.2
        theirs.update_scale(overflow)
        ours.update(torch.tensor(overflow))
        assert ours.scale == theirs.cur_scale, step


def test_it_continues_from_its_state() -> None:
    first = LossScaler(LossScale(loss_scale_window=3), "fp16", CPU)
    for overflow in (False, True, True, False, False):
        first.update(torch.tensor(overflow))
    second = LossScaler(LossScale(loss_scale_window=3), "fp16", CPU)
    second.restore(first.state())
    for overflow in (False, True, True, False):
        first.update(torch.tensor(overflow))
        second.update(torch.tensor(overflow))
        assert second.state() == first.state()
