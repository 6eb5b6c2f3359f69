"""What a report is about: a run's folder, or a run that a Megatron log tells of; the same facts of both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tridock import run_folder
from tridock.experiment import load_experiment
from tridock.experiment.flops import model_flops_per_token
from tridock.experiment.schema import Model
from tridock.plan import Plan, Rank
from tridock.records import Record, check_run, read_lines, read_metrics, read_object, read_plan
from tridock.report.columns import Columns, Curve
from tridock.report.megatron_log import MegatronLog, read_log, read_phases
from tridock.report.summary import Summary, rows_of, summary_of

_LOGGED = ("loss", "lr", "grad_norm", "step_time_s", "tokens_per_second", "consumed_samples", "loss_scale")


@dataclass(frozen=True, slots=True)
class Subject:
    """One run in a report."""

    name: str
    source: str
    """The folder or the log that it was read from."""
    columns: Columns
    evaluations: Mapping[str, Curve]
    phases: Columns
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

    @property
    def step_time(self) -> float | None:
        """The median, in seconds, the first logged iteration left out where there are more: it pays for the start."""
        times = self.columns.curve("step_time_s").finite
        return statistics.median(times[1:] or times) if times else None

    @property
    def single_points(self) -> bool:
        """Whether there is too little for a line."""
        return len(self.columns) < 2


def of_run(folder: Path) -> Subject:
    """Reads a run's folder. Raises :class:`RequestError` where it is none."""
    check_run(folder)
    experiment = load_experiment(folder / run_folder.EXPERIMENT)
    iterations, evaluations = read_metrics(folder)
    document, events = read_plan(folder), read_lines(folder / run_folder.EVENTS)
    summary = summary_of(folder, experiment, iterations, evaluations, document, events)
    columns = Columns()
    for record in iterations:
        columns.add(record["iteration"], {name: _number(record[name]) for name in _LOGGED if name in record})
    return Subject(
        name=summary.run_id,
        source=str(folder),
        columns=columns,
        evaluations={split: _losses(records) for split, records in evaluations.items()},
        phases=_phases_of(folder, experiment.engine),
        rows=rows_of(summary),
        events=events,
        manifest=read_object(folder / run_folder.MANIFEST),
        experiment=experiment.model_dump(mode="json"),
        plan_document=document,
        plan=plan_of(document),
        peak_memory=summary.peak_memory_bytes,
        summary=summary,
    )


def _phases_of(folder: Path, engine: str) -> Columns:
    """Megatron v1.1.5 prints its timers from the first rank; the other engines have none."""
    return read_phases(folder / run_folder.rank_log(0)) if engine == "megatron-deepspeed" else Columns()


def of_log(path: Path) -> list[Subject]:
    """Reads a Megatron log: a subject for each run in it. Raises :class:`RequestError` as :func:`read_log`."""
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
    """Samples, and tokens where the log has the sequence length, of a second."""
    found = Columns()
    names, length = log.columns.names(), _whole(log.arguments, "seq_length")
    curves = {name: log.columns.curve(name).y for name in names}
    batch = _whole(log.arguments, "global_batch_size")
    found.returns = log.columns.returns
    for row, iteration in enumerate(log.columns.curve(names[0]).x):
        values = {name: curve[row] for name, curve in curves.items()}
        samples, time = values.get("global_batch_size", batch or math.nan), values.get("step_time_s", math.nan)
        if samples > 0 and time > 0:
            values["samples_per_second"] = samples / time
            if length is not None:
                values["tokens_per_second"] = samples * length / time
        found.add(int(iteration), values)
    return found


def _log_rows(log: MegatronLog, columns: Columns) -> tuple[tuple[str, str], ...]:
    """The summary of a log, in the words of a run's."""
    losses, arguments = columns.curve("loss").finite, log.arguments
    layout = [
        f"{short}{arguments[name]}"
        for short, name in (("TP", "tensor_model_parallel_size"), ("PP", "pipeline_model_parallel_size"))
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
        "state": "a log" + (f"; goes back {returns} times, the later iterations count" if returns else ""),
        "ranks": "-" if log.world_size is None else str(log.world_size),
        "layout": " ".join(layout) or "-",
        "model": ", ".join(shape) or "-",
        "trained": f"{columns.last:,} of {log.train_iters or 0:,} iterations",
        "tokens/s (median)": _median(columns, "tokens_per_second", ",.0f"),
        "samples/s (median)": _median(columns, "samples_per_second", ",.2f"),
        "step time (median)": f"{statistics.median(times) * 1000:,.1f} ms" if times else "-",
        "first loss": f"{losses[0]:.4f}" if losses else "-",
        "last loss": f"{losses[-1]:.4f}" if losses else "-",
        "model FLOP/s of a rank": _flops(log, columns),
        "skipped iterations": f"{skipped:.0f}",
    }
    return tuple(rows.items())


def _median(columns: Columns, name: str, form: str) -> str:
    values = columns.curve(name).finite
    return format(statistics.median(values), form) if values else "-"


def _flops(log: MegatronLog, columns: Columns) -> str:
    """Megatron's own figure, or ours where the log has the model's shape."""
    if logged := columns.curve("tflops").finite:
        return f"{statistics.median(logged):.3g} TFLOP/s (the log's own)"
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "padded_vocab_size")
    sizes = [_whole(log.arguments, name) for name in names]
    speeds = columns.curve("tokens_per_second").finite
    if log.world_size is None or not speeds or None in sizes:
        return "-"
    layers, hidden, heads, length, rows = (size or 0 for size in sizes)
    model = Model(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, seq_length=length)
    return f"{statistics.median(speeds) * model_flops_per_token(model, rows) / log.world_size / 1e12:.3g} TFLOP/s"


def _whole(arguments: Mapping[str, str], name: str) -> int | None:
    text = arguments.get(name, "")
    return int(text) or None if text.isascii() and text.isdecimal() and len(text) < 15 else None


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
