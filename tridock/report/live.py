"""Watched runs: the state of each, as data for the page and as Prometheus' metrics."""

from __future__ import annotations

import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tridock.contracts.events import Event, samples_of
from tridock.contracts.node_answers import RunUpdate
from tridock.contracts.records import Record
from tridock.contracts.run_state import RunState
from tridock.report.columns import Columns, Curve

QUANTITIES: Final = {
    "loss": ("Loss", ""),
    "lr": ("Learning rate", ""),
    "grad_norm": ("Gradient norm", ""),
    "tokens_per_second": ("Throughput", "tokens/s"),
    "samples_per_second": ("Throughput", "samples/s"),
    "step_time_s": ("Step time", "s"),
}
"""Columns that the page draws: title and unit."""
FAULTS: Final = (
    *(Event.RUN_FAILED, Event.RANK_DIED, Event.RANK_HUNG, Event.NODE_LOST, Event.LAUNCHER_ENDED, Event.HEAD_LOST),
    *(Event.CHECKPOINT_FAILED, Event.CHECKPOINT_REJECTED, Event.RUN_RESTARTED, Event.RUN_MOVED, Event.NOT_RESTARTED),
    Event.TAKEN_OVER,
)
_SHOWN_EVENTS: Final = 60
_UNSHOWN: Final = ("samples", "problem", "log_bytes")
"""Fields of events that only programs need: ``reason`` repeats a problem, and samples have their own section."""
_POINTS: Final = 800
_ROWS: Final = 20_000
"""Maximum number of a run's rows; above it the oldest half is thinned."""


@dataclass
class LiveRun:
    """The known state of a run. ``take`` adds a node's answer."""

    run_id: str
    state: RunState = RunState.READY
    exit_code: int | None = None
    offset: int = 0
    inode: int = 0
    event_count: int = 0
    age_s: float | None = None
    ranks: tuple[Any, ...] = ()
    plan: Mapping[str, Any] = field(default_factory=dict)
    events: list[Record] = field(default_factory=list)
    columns: Columns = field(default_factory=Columns)
    phases: Columns = field(default_factory=Columns)
    evaluations: dict[str, Columns] = field(default_factory=dict)
    memory: list[float] = field(default_factory=list)
    problem: str = ""
    """Why the last request for updates failed."""

    def take(self, update: RunUpdate) -> None:
        if update.replaces_earlier:
            self.columns, self.phases, self.evaluations = Columns(), Columns(), {}
        self.state, self.exit_code, self.age_s = update.state, update.exit_code, update.age_s
        self.offset, self.inode, self.event_count = update.offset, update.inode, update.event_count
        self.ranks, self.problem = update.ranks, ""
        self.plan = update.plan or self.plan
        self.events += map(dict, update.events)
        for record in update.records:
            self._add(record)
        if len(self.columns) > _ROWS:
            self.columns, self.phases = _thinned(self.columns), _thinned(self.phases)

    def _add(self, record: Mapping[str, Any]) -> None:
        iteration = record["iteration"]
        if "split" in record:
            columns = self.evaluations.setdefault(str(record["split"]), Columns())
            columns.add(iteration, {"loss": _number(record.get("loss"))})
            return
        self.columns.add(iteration, {name: _number(record[name]) for name in QUANTITIES if name in record})
        if isinstance(phases := record.get("phases"), dict):
            self.phases.add(iteration, {str(name): _number(value) for name, value in phases.items()})
        if isinstance(peaks := record.get("memory_bytes"), list):
            self.memory = [_number(peak) for peak in peaks]

    def last(self, name: str) -> float | None:
        """Returns the last finite value of a column."""
        values = self.columns.curve(name).finite
        return values[-1] if values else None

    @property
    def restarts(self) -> int:
        return sum(1 for event in self.events if event.get("event") == Event.RUN_RESTARTED)

    @property
    def samples(self) -> dict[str, Any] | None:
        """Returns the model's continuations of the prompts at the last evaluation."""
        found = samples_of(self.events)
        return {"iteration": max(found), "rows": found[max(found)]} if found else None

    @property
    def planned_memory(self) -> list[float]:
        """Returns the planned bytes of each rank; empty without a plan."""
        totals = {it["stage"]: it["total_bytes"] for it in self.plan.get("stages") or ()}
        found = [totals.get(rank.get("pp")) for rank in self.plan.get("ranks") or ()]
        return [float(size) for size in found if size is not None]

    def as_data(self) -> dict[str, Any]:
        """Returns the page's content for JSON."""
        nodes = {rank.get("rank"): rank.get("node") for rank in self.plan.get("ranks") or ()}
        curves = {name: _points(self.columns.curve(name)) for name in QUANTITIES}
        for split, columns in self.evaluations.items():
            curves[f"{split} loss"] = _points(columns.curve("loss"))
        medians = {name: self.phases.curve(name).finite[-200:] for name in self.phases.names()}
        return {
            "run": self.run_id,
            "state": str(self.state),
            "exit_code": self.exit_code,
            "problem": self.problem,
            "age_s": self.age_s,
            "layout": str(self.plan.get("layout") or ""),
            "world_size": self.plan.get("world_size"),
            "iteration": self.columns.last,
            "restarts": self.restarts,
            "curves": {name: points for name, points in curves.items() if points},
            "ranks": [
                {"rank": it.rank, "node": nodes.get(it.rank), "phase": it.phase, "iteration": it.iteration,
                 "age_s": it.age_s}
                for it in self.ranks
            ],
            "phases": {name: statistics.median(found) for name, found in medians.items() if found},
            "memory": [_finite(size) for size in self.memory],
            "planned_memory": self.planned_memory,
            "samples": self.samples,
            "events": [
                {name: value for name, value in event.items() if name not in _UNSHOWN}
                | {"fault": event.get("event") in FAULTS}
                for event in self.events[-_SHOWN_EVENTS:]
            ],
            "marks": [
                event.get("iteration", 0) for event in self.events if event.get("event") == Event.RUN_RESTARTED
            ],
        }  # fmt: skip


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _points(curve: Curve) -> list[list[float | None]]:
    if not curve.finite:
        return []
    thinned = curve.thinned(_POINTS)
    return [[x, _finite(y)] for x, y in zip(thinned.x, thinned.y, strict=True)]


def _thinned(columns: Columns) -> Columns:
    """Keeps every second row of all but the last quarter."""
    names = columns.names()
    curves = {name: columns.curve(name) for name in names}
    rows = len(columns)
    x = next(iter(curves.values())).x if curves else array("d")
    kept = Columns()
    for row in (*range(0, rows * 3 // 4, 2), *range(rows * 3 // 4, rows)):
        kept.add(int(x[row]), {name: curve.y[row] for name, curve in curves.items()})
    return kept


# ---- Prometheus ----

_GAUGES: Final = {
    "loss": ("tridock_loss", "Loss of the last logged iteration."),
    "lr": ("tridock_learning_rate", "Learning rate of the last logged iteration."),
    "grad_norm": ("tridock_gradient_norm", "Gradient norm of the last logged iteration."),
    "tokens_per_second": ("tridock_tokens_per_second", "Tokens per second of the last logged iteration."),
    "samples_per_second": ("tridock_samples_per_second", "Samples per second of the last logged iteration."),
    "step_time_s": ("tridock_step_time_seconds", "Duration of the last logged step."),
}


def prometheus(runs: Sequence[LiveRun]) -> str:
    """Returns the metrics of all runs in Prometheus' text format, version 0.0.4."""
    return "".join(f"{line}\n" for line in _metrics(runs))


def _metrics(runs: Sequence[LiveRun]) -> Iterator[str]:
    yield from _family(
        "tridock_run_state",
        "gauge",
        "1 for the run's state.",
        ((1.0, {"run": run.run_id, "state": str(state)}) for run in runs for state in RunState if run.state is state),
    )
    yield from _family(
        "tridock_iteration",
        "gauge",
        "Last logged iteration.",
        ((float(run.columns.last), {"run": run.run_id}) for run in runs if run.columns.last is not None),
    )
    for column, (name, text) in _GAUGES.items():
        found = ((run, run.last(column)) for run in runs)
        yield from _family(name, "gauge", text, ((it, {"run": run.run_id}) for run, it in found if it is not None))
    yield from _family(
        "tridock_restarts_total",
        "counter",
        "Restarts of the run.",
        ((float(run.restarts), {"run": run.run_id}) for run in runs),
    )
    yield from _family(
        "tridock_events_total",
        "counter",
        "Events of the run by name.",
        (
            (float(number), {"run": run.run_id, "event": name})
            for run in runs
            for name, number in sorted(Counter(str(event.get("event")) for event in run.events).items())
        ),
    )
    yield from _family(
        "tridock_rank_iteration",
        "gauge",
        "Last finished iteration of a rank.",
        ((float(it.iteration), {"run": run.run_id, "rank": str(it.rank)}) for run in runs for it in run.ranks),
    )
    yield from _family(
        "tridock_rank_heartbeat_age_seconds",
        "gauge",
        "Time since the last heartbeat of a rank.",
        ((it.age_s, {"run": run.run_id, "rank": str(it.rank)}) for run in runs for it in run.ranks),
    )
    for name, text, column in (
        ("tridock_rank_memory_bytes", "Peak memory of a rank.", "memory"),
        ("tridock_rank_planned_memory_bytes", "Planned memory of a rank.", "planned_memory"),
    ):
        sizes = ((run, rank, size) for run in runs for rank, size in enumerate(getattr(run, column)))
        samples = ((size, {"run": run.run_id, "rank": str(rank)}) for run, rank, size in sizes)
        yield from _family(name, "gauge", text, samples)


def _family(name: str, kind: str, text: str, samples: Iterator[tuple[float, dict[str, str]]]) -> Iterator[str]:
    lines = [f"{name}{{{_labels(labels)}}} {value:.12g}" for value, labels in samples if math.isfinite(value)]
    if lines:
        yield from (f"# HELP {name} {text}", f"# TYPE {name} {kind}", *lines)


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
