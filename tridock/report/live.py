"""Watched runs: the state of each, as data for the page and as Prometheus' metrics."""

import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from tridock.contracts.events import FAULTS, Event, samples_of
from tridock.contracts.node_answers import RunUpdate
from tridock.contracts.records import Record
from tridock.contracts.run_state import RunState
from tridock.report.columns import Columns, Curve, number_of

QUANTITIES: Final = {
    "loss": ("Loss", "", "tridock_loss"),
    "lr": ("Learning rate", "", "tridock_learning_rate"),
    "grad_norm": ("Gradient norm", "", "tridock_gradient_norm"),
    "tokens_per_second": ("Throughput", "tokens/s", "tridock_tokens_per_second"),
    "samples_per_second": ("Throughput", "samples/s", "tridock_samples_per_second"),
    "step_time_s": ("Step time", "s", "tridock_step_time_seconds"),
    "skipped_steps": ("Skipped steps", "between two lines", "tridock_skipped_steps"),
}
"""Columns that the page draws: title, unit, and the name of the last value for Prometheus."""
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
            columns.add(iteration, {"loss": number_of(record.get("loss"))})
            return
        self.columns.add(iteration, {name: number_of(record[name]) for name in QUANTITIES if name in record})
        if isinstance(phases := record.get("phases"), dict):
            self.phases.add(iteration, {str(name): number_of(value) for name, value in phases.items()})
        if isinstance(peaks := record.get("memory_bytes"), list):
            self.memory = [number_of(peak) for peak in peaks]

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
            "ranks": [{**asdict(it), "node": nodes.get(it.rank)} for it in self.ranks],
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

Samples = Iterator[tuple[float, dict[str, str]]]
"""Values with their labels."""


def prometheus(runs: Sequence[LiveRun]) -> str:
    """Returns the metrics of all runs in Prometheus' text format, version 0.0.4."""
    return "".join(f"{line}\n" for line in _metrics(runs))


def _metrics(runs: Sequence[LiveRun]) -> Iterator[str]:
    states: Samples = ((1.0, {"run": run.run_id, "state": str(run.state)}) for run in runs)
    yield from _family("tridock_run_state", "gauge", "1 for the run's state.", states)
    last: Samples = ((run.columns.last, {"run": run.run_id}) for run in runs if run.columns.last is not None)
    yield from _family("tridock_iteration", "gauge", "Last logged iteration.", last)
    for column, (title, unit, name) in QUANTITIES.items():
        found = ((run, run.last(column)) for run in runs)
        text = f"{title}{f' in {unit}' if unit else ''} of the last logged iteration."
        yield from _family(name, "gauge", text, ((it, {"run": run.run_id}) for run, it in found if it is not None))
    restarts: Samples = ((run.restarts, {"run": run.run_id}) for run in runs)
    yield from _family("tridock_restarts_total", "counter", "Restarts of the run.", restarts)
    counts = {run.run_id: Counter(str(event.get("event")) for event in run.events) for run in runs}
    events: Samples = ((it, {"run": run, "event": name}) for run in counts for name, it in sorted(counts[run].items()))
    yield from _family("tridock_events_total", "counter", "Events of the run by name.", events)
    ranks = [({"run": run.run_id, "rank": str(rank.rank)}, rank) for run in runs for rank in run.ranks]
    text = "Last finished iteration of a rank."
    yield from _family("tridock_rank_iteration", "gauge", text, ((rank.iteration, labels) for labels, rank in ranks))
    text = "Time since the last heartbeat of a rank."
    ages: Samples = ((rank.age_s, labels) for labels, rank in ranks)
    yield from _family("tridock_rank_heartbeat_age_seconds", "gauge", text, ages)
    for name, text, column in (
        ("tridock_rank_memory_bytes", "Peak memory of a rank.", "memory"),
        ("tridock_rank_planned_memory_bytes", "Planned memory of a rank.", "planned_memory"),
    ):
        sizes = ((run, rank, size) for run in runs for rank, size in enumerate(getattr(run, column)))
        samples = ((size, {"run": run.run_id, "rank": str(rank)}) for run, rank, size in sizes)
        yield from _family(name, "gauge", text, samples)


def _family(name: str, kind: str, text: str, samples: Samples) -> Iterator[str]:
    lines = [f"{name}{{{_labels(labels)}}} {value:.12g}" for value, labels in samples if math.isfinite(value)]
    if lines:
        yield from (f"# HELP {name} {text}", f"# TYPE {name} {kind}", *lines)


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
