"""The phases of a step: every moment in one of them, on a clock whose time is known."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from tridock.train.rank import phases
from tridock.train.rank.phases import Phases, step_seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at it takes a second."""
    seconds = itertools.count()
    monkeypatch.setattr(phases.time, "perf_counter", lambda: float(next(seconds)))


def on_cpu() -> Phases:
    return Phases(torch.device("cpu"))


def test_what_is_inside_is_not_the_outers() -> None:
    found = on_cpu()
    with found.inside("backward"), found.inside("gradient_sync"):
        pass
    assert found.read() == {"other": 2.0, "backward": 2.0, "gradient_sync": 1.0}
    assert found.read() == {"other": 1.0}


def test_a_phase_ends_with_an_error() -> None:
    found = on_cpu()

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        found.around("forward", fails)()
    assert found.read() == {"other": 2.0, "forward": 1.0}


def test_an_evaluation_is_whole() -> None:
    found = on_cpu()
    with found.inside("evaluation"), found.inside("forward"):
        pass
    assert found.read() == {"other": 2.0, "evaluation": 1.0}


def test_the_backward_pass_is_followed_by_the_exchange_once_the_last_gradient_is_there() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    found = on_cpu()
    found.sync_follows([model[0].weight])
    with found.inside("backward"):
        model(torch.ones(1, 2)).sum().backward()
    # Entering, the hook, leaving, reading.
    assert found.read() == {"other": 2.0, "backward": 1.0, "gradient_sync": 1.0}
    model(torch.ones(1, 2)).sum().backward()  # elsewhere it is nobody's
    assert found.read() == {"other": 1.0}


def test_a_gpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are read once they are over; the others are left for the next reading."""
    moments, over = itertools.count(), [-1]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.moment = next(moments)

        def query(self) -> bool:
            return self.moment <= over[0]

        def elapsed_time(self, end: Event) -> float:
            return 1000.0 * (end.moment - self.moment)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    found = Phases(torch.device("cuda", 0))
    assert found.read() == {}  # 0
    with found.inside("forward"):  # 1 and 2
        pass
    over[0] = 1
    assert found.read() == {"other": 1.0}  # 3
    over[0] = 4
    assert found.read() == {"forward": 1.0, "other": 2.0}  # 4


def test_of_a_step() -> None:
    seconds = {"forward": 3.0, "evaluation": 9.0, "checkpoint": 9.0, "other": 0.00000049}
    assert step_seconds(seconds, 2) == {"forward": 1.5, "other": 2e-7}
