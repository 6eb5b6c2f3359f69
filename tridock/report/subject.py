"""What a report is about: a run, from its folder here, or from a log (log_subject.py); the same facts of both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tridock.contracts import run_folder
from tridock.contracts.records import Record, check_run, read_lines, read_metrics, read_object, read_plan
from tridock.experiment import load_experiment
from tridock.plan import Plan, Rank
from tridock.report.columns import Columns, Curve
from tridock.report.megatron_log import read_phases
from tridock.report.summary import Summary, rows_of, summary_of

_LOGGED = (
    "loss",
    "lr",
    "grad_norm",
    "step_time_s",
    "tokens_per_second",
    "samples_per_second",
    "consumed_samples",
    "loss_scale",
)


@dataclass(frozen=True, slots=True)
class Subject:
    """One run in a report."""

    name: str
    source: str
    """The folder or the log that it was read from."""
    columns: Columns
    evaluations: Mapping[str, Curve]
    phases: Columns
    """Seconds of a step by phase."""
    rows: tuple[tuple[str, str], ...]
    """The summary."""
    events: Sequence[Record] = ()
    manifest: Record = field(default_factory=dict)
    experiment: Record = field(default_factory=dict)
    """A run's experiment; of a log Megatron's arguments."""
    plan_document: Record = field(default_factory=dict)
    plan: Plan | None = None
    memory: Mapping[int, float] = field(default_factory=dict)
    """The most bytes that each rank held, where that is known."""
    peak_memory: float | None = None
    """The most bytes that any rank held."""
    summary: Summary | None = None
    is_log: bool = False
    phases_add_up: bool = False
    """Whether no phase contains another: a run's own, not Megatron's timers."""
    occasions: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Seconds of what comes between steps, each time."""

    @property
    def step_time(self) -> float | None:
        """The median, in seconds, the first logged iteration left out where there are more: it pays for the start."""
        times = self.columns.curve("step_time_s").finite
        return statistics.median(times[1:] or times) if times else None


def of_run(folder: Path) -> Subject:
    """Reads a run's folder. Raises :class:`RequestError` where it is none."""
    check_run(folder)
    experiment = load_experiment(folder / run_folder.EXPERIMENT)
    iterations, evaluations = read_metrics(folder)
    document, events = read_plan(folder), read_lines(folder / run_folder.EVENTS)
    summary = summary_of(folder, experiment, iterations, evaluations, document, events)
    columns, phases = Columns(), Columns()
    for record in iterations:
        columns.add(record["iteration"], {name: _number(record[name]) for name in _LOGGED if name in record})
        if isinstance(own := record.get("phases"), dict):
            phases.add(record["iteration"], {str(name): _number(seconds) for name, seconds in own.items()})
    return Subject(
        name=summary.run_id,
        source=str(folder),
        columns=columns,
        evaluations={split: _losses(records) for split, records in evaluations.items()},
        phases=phases if phases.names() else _phases_of(folder, experiment.engine),
        phases_add_up=bool(phases.names()),
        occasions=_occasions(events),
        rows=rows_of(summary),
        events=events,
        manifest=read_object(folder / run_folder.MANIFEST),
        experiment=experiment.model_dump(mode="json"),
        plan_document=document,
        plan=plan_of(document),
        memory=_memory_by_rank(iterations, events),
        peak_memory=summary.peak_memory_bytes,
        summary=summary,
    )


def _phases_of(folder: Path, engine: str) -> Columns:
    """Runs before phases were in the metrics: Megatron v1.1.5 printed its timers from the first rank."""
    return read_phases(folder / run_folder.rank_log(0)) if engine == "megatron-deepspeed" else Columns()


def _occasions(events: Sequence[Record]) -> dict[str, list[float]]:
    """How long each evaluation and each checkpoint took."""
    found: dict[str, list[float]] = {}
    for event in events:
        name = {"evaluation": "evaluation", "checkpoint_saved": "checkpoint"}.get(str(event.get("event")))
        if name is not None and not math.isnan(seconds := _number(event.get("seconds"))):
            found.setdefault(name, []).append(seconds)
    return found


def _memory_by_rank(iterations: Sequence[Record], events: Sequence[Record]) -> dict[int, float]:
    """The last that a run has told of every rank; nothing of runs that told of the fullest alone."""
    told = [record.get("memory_bytes") for record in iterations]
    told += [event.get("peak_memory_by_rank") for event in events if event.get("event") == "run_finished"]
    known = [peaks for peaks in told if isinstance(peaks, list)]
    return dict(enumerate(_number(peak) for peak in known[-1])) if known else {}


def plan_of(document: Record) -> Plan | None:
    """The plan that a run's ``plan.json`` holds; None where it holds none that can be read."""
    try:
        ranks = tuple(_rank_of(rank) for rank in document["ranks"])
        sizes = {name: int(document[name]) for name in _SIZES if name in document}
        return Plan(ranks=ranks, **sizes) if ranks else None
    except (KeyError, TypeError, ValueError):
        return None


_SIZES = (
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "micro_batch_size",
    "global_batch_size",
    "accumulation_steps",
    "tokens_per_step",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
)


def _rank_of(entry: Mapping[str, Any]) -> Rank:
    return Rank(
        rank=int(entry["rank"]),
        node=str(entry["node"]),
        slot=int(entry["slot"]),
        local_rank=int(entry["local_rank"]),
        data_parallel_rank=int(entry["dp"]),
        pipeline_parallel_rank=int(entry["pp"]),
        tensor_parallel_rank=int(entry["tp"]),
        context_parallel_rank=int(entry["cp"]),
    )


def _losses(records: Sequence[Record]) -> Curve:
    columns = Columns()
    for record in records:
        columns.add(record["iteration"], {"loss": _number(record.get("loss"))})
    return columns.curve("loss")


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
