"""A subject of a report: a run, read from its folder or from a Megatron log, with planned and measured figures."""

import math
import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tridock.contracts import run_folder
from tridock.contracts.events import Event
from tridock.contracts.records import Record, check_run, read_lines, read_metrics, read_object, read_plan
from tridock.engines import program_of
from tridock.errors import RequestError
from tridock.experiment import CommandExperiment, recorded_run
from tridock.experiment.model import Model
from tridock.experiment.parameters import model_flops_per_token
from tridock.plan import Assumptions, Plan
from tridock.plan.correction import Correction
from tridock.plan.from_run import correction_of
from tridock.plan.rates import GIVEN
from tridock.report.columns import Columns, Curve, number_of
from tridock.report.markup import gib
from tridock.report.measured_run import read_measured_run
from tridock.report.megatron_log import MegatronLog, read_log, read_phases
from tridock.report.plan_text import seconds
from tridock.report.summary import (
    ProgramSummary,
    Summary,
    rows_of,
    rows_of_program,
    summary_of,
    summary_of_program,
)

_LOGGED: Final = (
    *("loss", "lr", "grad_norm", "step_time_s", "tokens_per_second", "samples_per_second"),
    *("consumed_samples", "loss_scale", "skipped_steps"),
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A run with its columns, evaluations, events, plan and summary."""

    name: str
    source: str
    """Folder or log that it was read from."""
    columns: Columns
    evaluations: Mapping[str, Curve]
    phases: Columns
    """Seconds per step of each phase."""
    rows: tuple[tuple[str, str], ...]
    """Names and values of the summary."""
    events: Sequence[Record] = ()
    manifest: Record = field(default_factory=dict)
    experiment: Record = field(default_factory=dict)
    """Experiment of a run, or the arguments in a Megatron log."""
    plan_document: Record = field(default_factory=dict)
    plan: Plan | None = None
    memory: Mapping[int, float] = field(default_factory=dict)
    """Known peak memory in bytes by rank."""
    peak_memory: float | None = None
    """Highest peak memory of any rank in bytes."""
    summary: Summary | None = None
    program_summary: ProgramSummary | None = None
    """In its place, of a run of the user's own program."""
    is_log: bool = False
    phases_add_up: bool = False
    """Whether the phases of a step add up to its time. Megatron's timers contain each other."""
    correction: Correction | None = None
    """Correction of other plans by this run's measurements; None without enough of them."""
    occasions: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Duration in seconds of each evaluation and each checkpoint."""

    @property
    def step_time(self) -> float | None:
        """Median seconds over the logged iterations without the first, which includes the start of the run."""
        times = self.columns.curve("step_time_s").finite
        return statistics.median(times[1:] or times) if times else None


def of_run(folder: Path) -> Subject:
    """Reads a run folder. Raises :class:`RequestError` if it is not one."""
    check_run(folder)
    iterations, evaluations = read_metrics(folder)
    document, events = read_plan(folder), read_lines(folder / run_folder.EVENTS)
    experiment = recorded_run(folder)
    subject = Subject(
        name=folder.absolute().name,
        source=str(folder),
        columns=_columns(iterations),
        evaluations={split: _columns(records).curve("loss") for split, records in evaluations.items()},
        phases=Columns(),
        rows=(),
        events=events,
        manifest=read_object(folder / run_folder.MANIFEST),
        experiment=experiment.model_dump(mode="json"),
        plan_document=document,
    )
    if isinstance(experiment, CommandExperiment):
        program_summary = summary_of_program(folder, experiment, (iterations, evaluations), events)
        return replace(subject, rows=rows_of_program(program_summary), program_summary=program_summary)
    summary = summary_of(folder, experiment, iterations, evaluations, document, events)
    phases = Columns()
    timers = program_of(experiment).prints_timers
    for record in iterations:
        if isinstance(own := record.get("phases"), dict):
            phases.add(record["iteration"], {str(name): number_of(seconds) for name, seconds in own.items()})
    return replace(
        subject,
        phases=phases if phases.names() or not timers else read_phases(folder / run_folder.rank_log(0)),
        phases_add_up=bool(phases.names()),
        occasions=_occasions(events),
        rows=rows_of(summary),
        plan=plan_of(document),
        correction=_correction(folder, document),
        memory=_memory_by_rank(iterations, events),
        peak_memory=summary.peak_memory_bytes,
        summary=summary,
    )


def _correction(folder: Path, document: Record) -> Correction | None:
    """Returns the run's correction, with the network rate that its plan was given."""
    rates = _of(document, "cost", "rates")
    gb_s = _of(rates, "network_gb_s") if _of(rates, "network_source") == GIVEN else None
    known = Assumptions(network_gbit=8 * gb_s if gb_s is not None and _positive(gb_s) else None)
    try:
        return correction_of(read_measured_run(folder), known)
    except RequestError:
        return None


def _columns(iterations: Sequence[Record]) -> Columns:
    columns = Columns()
    for record in iterations:
        columns.add(record["iteration"], {name: number_of(record[name]) for name in _LOGGED if name in record})
    return columns


_PAUSES: Final = {Event.EVALUATION: ("evaluation", "seconds"), Event.CHECKPOINT_SAVED: ("checkpoint", "pause_seconds")}


def _occasions(events: Sequence[Record]) -> dict[str, list[float]]:
    """Returns how long training paused for each evaluation and each checkpoint."""
    found: dict[str, list[float]] = {}
    for event in events:
        name, field = _PAUSES.get(event.get("event", ""), ("", ""))
        if name and not math.isnan(seconds := number_of(event.get(field))):
            found.setdefault(name, []).append(seconds)
    return found


def _memory_by_rank(iterations: Sequence[Record], events: Sequence[Record]) -> dict[int, float]:
    """Returns the last peak memory that was recorded of every rank; nothing if only the highest was recorded."""
    recorded = [record.get("memory_bytes") for record in iterations]
    recorded += [event.get("peak_memory_by_rank") for event in events if event.get("event") == Event.RUN_FINISHED]
    known = [peaks for peaks in recorded if isinstance(peaks, list)]
    return dict(enumerate(number_of(peak) for peak in known[-1])) if known else {}


def plan_of(document: Record) -> Plan | None:
    """Returns the plan in a run's ``plan.json``, or None if there is none."""
    try:
        return Plan.of(document) if document["ranks"] else None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def of_log(path: Path) -> list[Subject]:
    """Reads a Megatron log and returns a subject per run in it. Raises :class:`RequestError` as :func:`read_log`."""
    logs = read_log(path)
    names = [path.name] if len(logs) == 1 else [f"{path.name} ({number})" for number in range(1, len(logs) + 1)]
    return [_of_log(name, path, log) for name, log in zip(names, logs, strict=True)]


def _of_log(name: str, path: Path, log: MegatronLog) -> Subject:
    columns = _with_throughput(log)
    return Subject(
        name=name,
        source=str(path),
        columns=columns,
        evaluations={split: found.curve("loss") for split, found in log.evaluations.items()},
        phases=log.phases,
        rows=_log_rows(log, columns),
        experiment=dict(log.arguments),
        memory=log.memory,
        peak_memory=max(log.memory.values(), default=None),
        is_log=True,
    )


def _with_throughput(log: MegatronLog) -> Columns:
    """Returns the columns with samples per second, and tokens per second if the log has the sequence length."""
    columns, global_batch = log.columns, _global_batch(log.arguments)
    times, batches = columns.curve("step_time_s").y, columns.curve("global_batch_size").y
    if not batches and global_batch is not None:
        batches = array("d", [global_batch]) * len(times)
    if times and batches:
        speeds = array("d", map(_speed, batches, times))
        columns.put("samples_per_second", speeds)
        if (length := _whole(log.arguments, "seq_length")) is not None:
            columns.put("tokens_per_second", array("d", (speed * length for speed in speeds)))
    return columns


def _global_batch(arguments: Mapping[str, str]) -> int | None:
    """Returns the global batch size; v1.1.5 logs the micro batch size, the accumulation steps and the layout."""
    if (size := _whole(arguments, "global_batch_size")) is not None:
        return size
    micro, world = _whole(arguments, "batch_size"), _whole(arguments, "world_size")
    tensor = _whole(arguments, "model_parallel_size")
    if micro is None or world is None or tensor is None:
        return None
    pipeline, accumulation = _whole(arguments, "pipe_parallel_size") or 1, _whole(arguments, "gas") or 1
    return micro * accumulation * max(1, world // (tensor * pipeline))


def _speed(samples: float, seconds: float) -> float:
    return samples / seconds if samples > 0 and seconds > 0 else math.nan


def _log_rows(log: MegatronLog, columns: Columns) -> tuple[tuple[str, str], ...]:
    """Returns the summary of a log, with the names of a run's summary."""
    losses, arguments = columns.curve("loss").finite, log.arguments
    layout = [
        f"{short}{_whole(arguments, name) or 1}"
        for short, names in _LOG_SIZES.items()
        for name in names
        if name in arguments
    ]
    shape = [
        f"{arguments[name]} {word}"
        for name, word in (("num_layers", "layers"), ("hidden_size", "hidden"), ("num_attention_heads", "heads"))
        if name in arguments
    ]
    times = columns.curve("step_time_s").finite
    skipped, returns = sum(columns.curve("skipped").finite), columns.returns
    rows = {
        "state": "a log" + (f"; {returns} restarts, the later iterations count" if returns else ""),
        "ranks": "-" if log.world_size is None else str(log.world_size),
        "layout": " ".join(layout) or "-",
        "model": ", ".join(shape) or "-",
        "trained": f"{columns.last:,} of {log.train_iters or 0:,} iterations",
        "tokens/s (median)": _median(columns, "tokens_per_second", ",.0f"),
        "samples/s (median)": _median(columns, "samples_per_second", ",.2f"),
        "step time (median)": f"{statistics.median(times) * 1000:,.1f} ms" if times else "-",
        "first loss": f"{losses[0]:.4f}" if losses else "-",
        "last loss": f"{losses[-1]:.4f}" if losses else "-",
        "model FLOP/s per rank": _flops(log, columns),
        "skipped iterations": f"{skipped:.0f}",
    }
    return tuple(rows.items())


def _median(columns: Columns, name: str, form: str) -> str:
    values = columns.curve(name).finite
    return format(statistics.median(values), form) if values else "-"


def _flops(log: MegatronLog, columns: Columns) -> str:
    """Returns the logged throughput, or the computed one if the log has the shape of the model."""
    if logged := columns.curve("tflops").finite:
        return f"{statistics.median(logged):.3g} TFLOP/s (as logged)"
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "padded_vocab_size")
    sizes = [_whole(log.arguments, name) for name in names]
    speeds = columns.curve("tokens_per_second").finite
    if log.world_size is None or not speeds or None in sizes:
        return "-"
    layers, hidden, heads, length, rows = (size or 0 for size in sizes)
    model = Model(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        kv_channels=_whole(log.arguments, "kv_channels"),
        seq_length=length,
    )
    return f"{statistics.median(speeds) * model_flops_per_token(model, rows) / log.world_size / 1e12:.3g} TFLOP/s"


_LOG_SIZES: Final = {
    "TP": ("tensor_model_parallel_size", "model_parallel_size"),
    "PP": ("pipeline_model_parallel_size", "pipe_parallel_size"),
}
"""Argument names of current Megatron, and those of v1.1.5."""


def _whole(arguments: Mapping[str, str], name: str) -> int | None:
    text = arguments.get(name, "")
    return int(text) or None if text.isascii() and text.isdecimal() and len(text) < 15 else None


def planned_memory_by_rank(subject: Subject) -> dict[int, float]:
    """Returns the planned bytes of each rank, those of its stage. Empty without a plan."""
    totals = {stage["stage"]: float(stage["total_bytes"]) for stage in _stages(subject)}
    ranks = subject.plan.ranks if subject.plan is not None else ()
    return {it.rank: totals[it.pipeline_parallel_rank] for it in ranks if it.pipeline_parallel_rank in totals}


def gpu_limit(subject: Subject) -> float | None:
    """Returns the memory in bytes of the GPU in the plan."""
    limit = _of(subject.plan_document, "memory", "limit_gib")
    return None if limit is None else float(limit) * 2**30


def plan_rows(subject: Subject) -> Iterator[tuple[str, str, str, str]]:
    """Yields planned and measured figures and their difference, where both are known."""
    planned = max(planned_memory_by_rank(subject).values(), default=None)
    if planned and subject.peak_memory:
        ratio = subject.peak_memory / planned
        yield "peak memory, highest rank", gib(planned), gib(subject.peak_memory), _more(ratio)
    estimate = _of(subject.plan_document, "cost", "estimate")
    time, speed = _of(estimate, "iteration"), _of(estimate, "tokens_per_second")
    if _positive(time) and subject.step_time:
        yield "step time (median)", seconds(time), seconds(subject.step_time), _more(subject.step_time / time)
    summary = subject.summary
    if summary is None:
        return
    if _positive(speed) and summary.tokens_per_second:
        measured = summary.tokens_per_second
        yield f"{summary.unit}/s (median)", f"{speed:,.0f}", f"{measured:,.0f}", _more(measured / speed)
    mfu = _of(estimate, "mfu")
    if _positive(mfu) and summary.mfu:
        yield "MFU", f"{mfu:.1%}", f"{summary.mfu:.1%}", _more(summary.mfu / mfu)


def stage_rows(subject: Subject) -> Iterator[tuple[str, str, str]]:
    """Yields each stage, its layers and the planned memory per rank."""
    for stage in _stages(subject):
        yield f"stage {stage['stage']}", str(stage.get("layers")), gib(stage["total_bytes"])


def _stages(subject: Subject) -> Sequence[Record]:
    """Returns the memory of each stage in the plan, whose form :func:`read_plan` has checked."""
    return _of(subject.plan_document, "memory", "stages") or ()


def _of(document: Any, *path: str) -> Any:
    """Returns the value at a path, or None."""
    for name in path:
        document = document.get(name) if isinstance(document, dict) else None
    return document


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _more(ratio: float) -> str:
    return f"{ratio - 1:+.1%}" if ratio < 10 else f"{ratio:,.0f} times"
