"""What waits for the GPU in Megatron-LM v1.1.5's loop, without the wait: its timers, its sizes, its clipping."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tridock.compat import megatron_v115


class Timer:
    """Upstream's, as far as it stays."""

    def __init__(self, name: str) -> None:
        self.name_, self.elapsed_, self.started_ = name, 0.0, False

    def reset(self) -> None:
        self.elapsed_, self.started_ = 0.0, False

    def elapsed(self, reset: bool = True) -> float:
        assert not self.started_
        seconds = self.elapsed_
        if reset:
            self.reset()
        return seconds


class Event:
    """CUDA's: the device reaches it when somebody waits for it, or ``reached`` is set."""

    now = 0.0
    reached = False
    waits = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return Event.reached

    def synchronize(self) -> None:
        Event.waits += 1

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1e3


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> Any:
    made: Any = ModuleType(name)
    vars(made).update(members)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "now", 0.0)
    monkeypatch.setattr(Event, "waits", 0)
    module(monkeypatch, "megatron")
    variables = module(monkeypatch, "megatron.global_vars", _Timer=Timer)
    megatron_v115.time_by_events()
    made: Callable[[str], Any] = variables._Timer
    return made


@pytest.mark.parametrize(("reached", "waits"), [(False, 2), (True, 0)])
def test_a_timer_waits_only_where_it_is_read(
    timer: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, reached: bool, waits: int
) -> None:
    monkeypatch.setattr(Event, "reached", reached)
    forward = timer("forward")
    for seconds in (0.25, 0.5):
        forward.start()
        Event.now += seconds
        forward.stop()
        Event.now += 1.0
    assert Event.waits == 0
    assert (forward.elapsed(reset=False), forward.elapsed(), forward.elapsed()) == (0.75, 0.75, 0.0)
    assert Event.waits == waits


def test_a_timer_that_runs_goes_on(timer: Callable[[str], Any]) -> None:
    interval = timer("interval time")
    interval.start()
    Event.now += 2.0
    assert interval.elapsed() == 2.0
    Event.now += 3.0
    assert interval.started_
    assert interval.elapsed() == 3.0
    interval.reset()
    with pytest.raises(AssertionError, match="not started"):
        interval.stop()


def test_the_sizes_of_a_micro_batch_are_exchanged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def build(keys: list[str], given: Any) -> Any:
        asked.append(keys)
        return given

    for name in ("megatron", "megatron.mpu"):
        module(monkeypatch, name)
    data = module(monkeypatch, "megatron.mpu.data", _build_key_size_numel_dictionaries=build)
    megatron_v115.exchange_sizes_once()
    sizes = data._build_key_size_numel_dictionaries
    assert [sizes(["text"], 1), sizes(["text"], None), sizes(["a", "b"], 2)] == [1, 1, 2]
    assert asked == [["text"], ["a", "b"]]


@pytest.mark.parametrize(("rank", "max_norm"), [(0, 1.0), (0, 1e6), (1, 1.0)])
def test_gradients_are_clipped_as_upstream_clips_them(
    monkeypatch: pytest.MonkeyPatch, rank: int, max_norm: float
) -> None:
    """As torch does, of all weights on the first rank of a model, and of the split ones on the others."""
    reduced: list[Tensor] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda value, group: reduced.append(value))
    module(monkeypatch, "megatron")
    mpu = module(
        monkeypatch, "megatron.mpu", clip_grad_norm=None, get_model_parallel_rank=lambda: rank,
        get_model_parallel_group=lambda: "group",
    )  # fmt: skip
    module(monkeypatch, "megatron.fp16")
    fp16 = module(monkeypatch, "megatron.fp16.fp16", clip_grad_norm=None)
    weights: list[Any] = [nn.Parameter(torch.zeros(size)) for size in (3, 5, 2)]
    for number, weight in enumerate(weights):
        weight.grad, weight.model_parallel = torch.randn(len(weight)) * 4, number == 1
    before = [weight.grad.clone() for weight in weights]
    counted = before if rank == 0 else before[1:2]
    expected = torch.cat(counted).double().norm()
    megatron_v115.clip_on_the_device()
    assert mpu.clip_grad_norm is fp16.clip_grad_norm
    norm = mpu.clip_grad_norm(iter(weights), max_norm)
    assert norm.item() == pytest.approx(expected.item())
    factor = min(1.0, max_norm / (expected.item() + 1e-6))
    for weight, gradient in zip(weights, before, strict=True):
        torch.testing.assert_close(weight.grad, gradient * factor)
    assert len(reduced) == 1
