"""The summary of a run: its figures, and their table."""

import shlex
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.table import Table

from tridock.contracts import run_folder
from tridock.contracts.events import Event
from tridock.contracts.records import Evaluations, Record, check_run, latest, read_lines, read_metrics, read_plan
from tridock.contracts.run_state import exit_code_of
from tridock.experiment import Experiment, recorded_experiment
from tridock.experiment.command import CommandExperiment
from tridock.experiment.parameters import model_flops_per_token
from tridock.gpus import of_device
from tridock.report.markup import gib


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run; None for one that it does not have yet."""

    run_id: str
    state: str
    """not started, running, finished, stopped, or ``failed: <reason>``."""
    model: str
    layout: str
    nodes: int | None
    ranks: int | None
    iterations: int
    train_iters: int
    unit: str
    """tokens, or images."""
    tokens: int
    """Number of tokens (or images) trained on."""
    tokens_per_second: float | None
    """Median over the logged iterations without the first, which includes the start of the run."""
    first_loss: float | None
    last_loss: float | None
    valid_loss: float | None
    test_loss: float | None
    seconds: float | None
    """From ``run_started`` to the last event."""
    peak_memory_bytes: int | None
    """Highest peak memory of any rank: GPU memory, or on a CPU that of the process."""
    model_tflops_per_rank: float | None = None
    """Model FLOPs (Narayanan et al., 2021, without recomputation) at the median speed, in TFLOP/s."""
    mfu: float | None = None
    """Model FLOPs utilization: the above over the dense peak of the GPU in the run's precision."""
    skipped_steps: int | None = None
    """Steps of an fp16 run that were skipped because the gradient overflowed."""


@dataclass(frozen=True, slots=True)
class ProgramSummary:
    """The figures of a run of the user's own program; None for one that is unknown."""

    run_id: str
    state: str
    """not finished, finished, stopped, or ``failed: <reason>, exit code <code>``."""
    nodes: int
    ranks: int
    command: tuple[str, ...]
    iterations: int | None
    first_loss: float | None
    last_loss: float | None
    valid_loss: float | None


def summarize(folder: Path) -> Summary:
    """Reads a run folder. Raises :class:`RequestError` if it is not one."""
    check_run(folder)
    experiment = recorded_experiment(folder)
    metrics, events = read_metrics(folder), read_lines(folder / run_folder.EVENTS)
    return summary_of(folder, experiment, *metrics, read_plan(folder), events)


def summary_of(
    folder: Path,
    experiment: Experiment,
    iterations: list[Record],
    evaluations: Evaluations,
    plan: Record,
    events: list[Record],
) -> Summary:
    """Returns the figures of a run from the records in its folder."""
    logged = [
        record.get("tokens_per_second", record.get("samples_per_second")) for record in (iterations[1:] or iterations)
    ]
    speeds = [speed for speed in logged if speed is not None]
    consumed = iterations[-1].get("consumed_samples") or 0 if iterations else 0
    speed = statistics.median(speeds) if speeds else None
    worlds = [event for event in events if event.get("event") == Event.WORLD_FORMED]
    ranks = plan.get("world_size") or latest(worlds, "world_size")
    tflops, gpu = _model_tflops(experiment, events, speed, ranks), of_device(latest(events, "device") or "")
    peak = None if gpu is None else gpu.tflops(experiment.precision)
    return Summary(
        run_id=folder.absolute().name,
        state=_state(events),
        model=_model(experiment),
        layout=_layout(experiment, plan),
        nodes=len({rank["node"] for rank in plan["ranks"]}) if plan.get("ranks") else None,
        ranks=ranks,
        iterations=iterations[-1]["iteration"] if iterations else 0,
        train_iters=experiment.train.train_iters,
        unit=experiment.model.unit,
        tokens=consumed * experiment.model.seq_length,
        tokens_per_second=speed,
        first_loss=iterations[0].get("loss") if iterations else None,
        last_loss=iterations[-1].get("loss") if iterations else None,
        valid_loss=evaluations["valid"][-1].get("loss") if "valid" in evaluations else None,
        test_loss=evaluations["test"][-1].get("loss") if "test" in evaluations else None,
        seconds=_seconds(events),
        peak_memory_bytes=latest(events, "peak_memory_bytes"),
        model_tflops_per_rank=tflops,
        mfu=None if tflops is None or peak is None else tflops / peak,
        skipped_steps=sum(skips) if (skips := _numbers(iterations, "skipped_steps")) else None,
    )


def _numbers(records: list[Record], name: str) -> list[int]:
    return [int(record[name]) for record in records if record.get(name) is not None]


def _model_tflops(experiment: Experiment, events: list[Record], speed: float | None, ranks: int | None) -> float | None:
    rows = latest(events, "padded_vocab_size")
    if rows is None or speed is None or not ranks:
        return None
    return speed * model_flops_per_token(experiment.model, rows) / ranks / 1e12


def render_table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Returns a table of names and values."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def rows_of(summary: Summary) -> tuple[tuple[str, str], ...]:
    """Returns the summary as names and values; an unknown value is "-"."""
    done = f"{summary.iterations:,} of {summary.train_iters:,} iterations, {summary.tokens:,} {summary.unit}"
    return (
        ("state", summary.state),
        ("nodes", _text(summary.nodes)),
        ("ranks", _text(summary.ranks)),
        ("layout", summary.layout),
        ("model", summary.model),
        ("trained", done),
        *([] if summary.skipped_steps is None else [("skipped steps", f"{summary.skipped_steps:,}")]),
        (f"{summary.unit}/s (median)", _text(summary.tokens_per_second, ",.0f")),
        ("first loss", _text(summary.first_loss, ".4f")),
        ("last loss", _text(summary.last_loss, ".4f")),
        ("validation loss", _text(summary.valid_loss, ".4f")),
        ("test loss", _text(summary.test_loss, ".4f")),
        ("model FLOP/s per rank", _flops(summary)),
        ("peak memory per rank", "-" if summary.peak_memory_bytes is None else gib(summary.peak_memory_bytes)),
        ("time", "-" if summary.seconds is None else f"{timedelta(seconds=round(summary.seconds))}"),
    )


def summary_of_program(
    folder: Path, experiment: CommandExperiment, metrics: tuple[list[Record], Evaluations], events: list[Record]
) -> ProgramSummary:
    """Returns the figures of a run of the user's own program from the records in its folder."""
    code, (iterations, evaluations), ranks = exit_code_of(folder), metrics, read_plan(folder).get("ranks", ())
    states = {None: "not finished", 0: "finished", run_folder.EXIT_STOPPED: "stopped"}
    return ProgramSummary(
        run_id=folder.absolute().name,
        state=states.get(code) or f"{_state(events)}, exit code {code}",
        nodes=len({rank["node"] for rank in ranks}),
        ranks=len(ranks),
        command=experiment.command,
        iterations=iterations[-1]["iteration"] if iterations else None,
        first_loss=iterations[0].get("loss") if iterations else None,
        last_loss=iterations[-1].get("loss") if iterations else None,
        valid_loss=evaluations["valid"][-1].get("loss") if "valid" in evaluations else None,
    )


def rows_of_program(summary: ProgramSummary) -> tuple[tuple[str, str], ...]:
    """Returns the summary as names and values; an unknown value is "-"."""
    return (
        ("state", summary.state),
        ("nodes", str(summary.nodes)),
        ("ranks", str(summary.ranks)),
        ("command", shlex.join(summary.command)),
        ("trained", "-" if summary.iterations is None else f"{summary.iterations:,} iterations"),
        ("first loss", _text(summary.first_loss, ".4f")),
        ("last loss", _text(summary.last_loss, ".4f")),
        ("validation loss", _text(summary.valid_loss, ".4f")),
    )


def _model(experiment: Experiment) -> str:
    model = experiment.model
    if model.is_vision:
        return (
            f"ResNet-50, images of {model.img_h} x {model.img_w}, {model.num_classes} classes, {experiment.precision}"
        )
    heads = f"{model.num_attention_heads} heads" + (f" of {model.kv_channels}" if model.kv_channels else "")
    return (
        f"GPT, {model.num_layers} layers, hidden {model.hidden_size}, {heads}, "
        f"sequence {model.seq_length}, {experiment.precision}"
    )


def _layout(experiment: Experiment, plan: Record) -> str:
    parallel = experiment.parallel
    strategy = f"ZeRO-{parallel.zero_stage}" if parallel.strategy == "zero" else parallel.strategy.upper()
    return f"{plan['layout']}, {strategy}" if "layout" in plan else strategy


def _state(events: list[Record]) -> str:
    """Returns the state after the last attempt; a restart is another attempt in the same folder.

    The first failure of an attempt is its reason. Failures of other ranks follow from it, or from a stop.
    """
    state = "not started"
    for event in events:
        open_ended = state in ("not started", "running")
        match event.get("event"):
            case Event.RUN_STARTED:
                state = "running"
            case Event.RUN_FINISHED:
                state = "finished"
            case Event.RUN_STOPPED:
                state = "stopped"
            case Event.RUN_PREEMPTED:
                state = "preempted"
            case Event.RUN_FAILED if open_ended:
                state = f"failed: {event.get('reason')}"
            case Event.RANK_DIED | Event.RANK_HUNG | Event.NODE_LOST if state not in ("finished", "stopped"):
                # The supervisor's finding counts, although ranks that lost this one may have failed before it.
                who = f"rank {event['rank']} on {event.get('node')}" if "rank" in event else event.get("node")
                state = f"failed: {who} {event.get('reason')}"
            case Event.LAUNCHER_ENDED if open_ended:
                state = f"failed: the launcher ended with exit code {event.get('exit_code')}"
    return state


def _seconds(events: list[Record]) -> float | None:
    starts = [number for number, event in enumerate(events) if event.get("event") == Event.RUN_STARTED]
    if not starts:
        return None
    attempt = [time for event in events[starts[-1] :] if (time := _moment(event)) is not None]
    return (max(attempt) - min(attempt)).total_seconds() if attempt else None


def _moment(event: Record) -> datetime | None:
    try:
        time = datetime.fromisoformat(str(event["time"]))
    except (KeyError, ValueError):
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _text(value: float | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def _flops(summary: Summary) -> str:
    if summary.model_tflops_per_rank is None:
        return "-"
    of = "" if summary.mfu is None else f", MFU {summary.mfu:.1%}"
    return f"{summary.model_tflops_per_rank:.3g} TFLOP/s{of}"
