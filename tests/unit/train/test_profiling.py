"""What counts as communication that nothing overlaps, on events whose times are known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from torch.autograd import DeviceType

from tridock.train.rank.profiling import Shares, covered, shares, shares_of


def event(name: str, start: float, end: float, thread: int = 1, *, gpu: bool = False) -> SimpleNamespace:
    kind = DeviceType.CUDA if gpu else DeviceType.CPU
    return SimpleNamespace(name=name, thread=thread, device_type=kind, time_range=SimpleNamespace(start=start, end=end))


STEPS = [event("tridock::step", 0, 100), event("tridock::step", 200, 300)]


@pytest.mark.parametrize(
    ("spans", "long"),
    [([], 0.0), ([(0, 2), (5, 6)], 3.0), ([(0, 9), (2, 3), (8, 10)], 10.0), ([(4, 5), (0, 1), (0, 1)], 2.0)],
)
def test_what_spans_cover(spans: list[tuple[float, float]], long: float) -> None:
    assert covered(spans) == long


def test_shares_of_steps() -> None:
    """Between 50 and 60 nothing is computed, from 90 on again; what lies between the steps is not theirs."""
    sent, computed = [(40.0, 70.0), (90.0, 210.0)], [(0.0, 50.0), (60.0, 90.0), (200.0, 300.0)]
    assert shares(sent, computed, [(0.0, 100.0), (200.0, 300.0)]) == Shares(in_flight=0.25, exposed=0.1)


def test_on_a_cpu_it_is_gloos_against_the_ranks_own_thread() -> None:
    events = [
        *STEPS,
        event("gloo:all_reduce", 40, 80, thread=7),
        event("aten::div_", 40, 80, thread=7),  # Gloo's own, of the sum that becomes a mean
        event("aten::mm", 0, 60),
        event("autograd::engine::evaluate_function: AddmmBackward0", 0, 100),  # holds the waiting too
        event("c10d::allreduce_", 40, 41),
    ]
    assert shares_of(events) == Shares(in_flight=0.2, exposed=0.1)


def test_on_a_gpu_it_is_its_kernels() -> None:
    events = [
        *STEPS,
        event("aten::mm", 0, 100),  # the CPU's time does not matter
        event("nccl:all_reduce", 10, 11),
        event("tridock::step", 0, 100, gpu=True),  # annotations stand on the device too
        event("nccl:all_reduce", 40, 90, gpu=True),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40, 90, gpu=True),
        event("ampere_sgemm_128x64_tn", 0, 60, gpu=True),
        event("Memcpy DtoD (Device -> Device)", 70, 80, gpu=True),
    ]
    assert shares_of(events) == Shares(in_flight=0.25, exposed=0.1)
