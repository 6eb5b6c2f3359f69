"""Profiles the last iterations of a run: a trace of each rank, and the share of communication in a step.

Exposed communication is the time with communication in flight and without computation. On a GPU NCCL's kernels run
then, and no other kernel or copy; on a CPU Gloo has unfinished operations, and the rank's own thread runs no operator.
It includes waiting for a slower rank or another pipeline stage.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from tridock.contracts.events import Event, append_event
from tridock.contracts.run_folder import PROFILE
from tridock.train.rank.process_group import Ranks

Span = tuple[float, float]
"""Start and end, in microseconds."""
_STEP: Final = "tridock::step"


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the steps' time with communication in flight, and with communication only."""

    in_flight: float
    exposed: float


def covered(spans: Iterable[Span]) -> float:
    """Returns the length of the union of spans, in microseconds."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def shares(communication: Sequence[Span], computation: Sequence[Span], steps: Sequence[Span]) -> Shares:
    """Returns the shares in non-overlapping ``steps``. Exposed = |communication or computation| - |computation|."""
    in_flight = exposed = 0.0
    for step in steps:
        sent, computed = _within(communication, step), _within(computation, step)
        in_flight += covered(sent)
        exposed += covered([*sent, *computed]) - covered(computed)
    whole = covered(steps)
    return Shares(in_flight / whole, exposed / whole)


def _within(spans: Iterable[Span], step: Span) -> list[Span]:
    """Yields the parts of the spans inside the step."""
    return [(max(first, step[0]), min(last, step[1])) for first, last in spans if first < step[1] and last > step[0]]


def shares_of(events: Sequence[Any]) -> Shares:
    """Returns the shares from the profiler's events, which have an annotation per step."""
    marks = [event for event in events if event.name == _STEP and event.device_type == DeviceType.CPU]
    own = [event for event in events if event.device_type == DeviceType.CPU]
    # Annotations also appear on the device, under their CPU names; kernels have other names.
    annotations = {event.name for event in own}
    kernels = [it for it in events if it.device_type != DeviceType.CPU and it.name not in annotations]
    if kernels:
        sent = [it for it in kernels if it.name.startswith("nccl")]
        computed = [it for it in kernels if not it.name.startswith("nccl")]
    else:
        sent = [it for it in own if it.name.startswith("gloo:")]
        # Gloo's threads run operators too, which belong to the communication.
        computed = [it for it in own if it.name.startswith("aten::") and it.thread == marks[0].thread]
    return shares(_spans(sent), _spans(computed), _spans(marks))


def _spans(events: Iterable[Any]) -> list[Span]:
    return [(event.time_range.start, event.time_range.end) for event in events]


class Profiling:
    """Profiles the last ``count`` of ``iterations``; does nothing in the others."""

    def __init__(self, count: int, iterations: int, run_folder: Path, ranks: Ranks) -> None:
        self._first, self._last = iterations - count + 1, iterations
        self._run_folder, self._ranks = run_folder, ranks
        self._profiler: profile | None = None
        self._count = 0
        self._step: record_function | None = None

    def before(self, iteration: int) -> None:
        """Starts the profiler before the first profiled step. Call it before each step."""
        if iteration < self._first:
            return
        if self._profiler is None:
            on_gpu = self._ranks.device.type == "cuda"
            self._profiler = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu])
            self._profiler.start()
        self._count += 1
        self._synchronize()
        self._step = record_function(_STEP)
        self._step.__enter__()

    def after(self, iteration: int) -> None:
        """Ends and records the profile after the last step. Call it after each step; the last call is a collective."""
        if self._step is None:
            return
        self._synchronize()
        self._step.__exit__(None, None, None)
        self._step = None
        if iteration == self._last:
            self._record()

    def _synchronize(self) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize()

    def _record(self) -> None:
        assert self._profiler is not None
        self._profiler.stop()
        own = shares_of(self._profiler.events() or [])
        folder = self._run_folder / PROFILE
        folder.mkdir(exist_ok=True)
        self._profiler.export_chrome_trace(str(folder / f"rank-{self._ranks.rank}.json.gz"))
        table = torch.zeros(self._ranks.world_size, 2, device=self._ranks.device)
        table[self._ranks.rank] = torch.tensor([own.in_flight, own.exposed])
        dist.all_reduce(table)
        if self._ranks.first:
            in_flight, exposed = table.mean(0).tolist()
            by_rank = [round(value, 4) for value in table[:, 1].tolist()]
            append_event(
                self._run_folder,
                Event.COMMUNICATION_MEASURED,
                iterations=self._count,
                exposed=round(exposed, 4),
                in_flight=round(in_flight, 4),
                exposed_by_rank=by_rank,
            )
