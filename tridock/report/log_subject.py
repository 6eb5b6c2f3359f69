"""A run that a Megatron log tells of, as a report's subject."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tridock.experiment.flops import model_flops_per_token
from tridock.experiment.schema import Model
from tridock.report.columns import Columns
from tridock.report.megatron_log import MegatronLog, read_log
from tridock.report.subject import Subject


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
    columns, told = log.columns, _global_batch(log.arguments)
    times, batches = columns.curve("step_time_s").y, columns.curve("global_batch_size").y
    if not batches and told is not None:
        batches = array("d", [told]) * len(times)
    if times and batches:
        speeds = array("d", map(_speed, batches, times))
        columns.put("samples_per_second", speeds)
        if (length := _whole(log.arguments, "seq_length")) is not None:
            columns.put("tokens_per_second", array("d", (speed * length for speed in speeds)))
    return columns


def _global_batch(arguments: Mapping[str, str]) -> int | None:
    """As the arguments name it; those of v1.1.5 name a rank's micro batch, the accumulation and the layout."""
    if (told := _whole(arguments, "global_batch_size")) is not None:
        return told
    micro, world = _whole(arguments, "batch_size"), _whole(arguments, "world_size")
    tensor = _whole(arguments, "model_parallel_size")
    if micro is None or world is None or tensor is None:
        return None
    pipeline, accumulation = _whole(arguments, "pipe_parallel_size") or 1, _whole(arguments, "gas") or 1
    return micro * accumulation * max(1, world // (tensor * pipeline))


def _speed(samples: float, seconds: float) -> float:
    return samples / seconds if samples > 0 and seconds > 0 else math.nan


def _log_rows(log: MegatronLog, columns: Columns) -> tuple[tuple[str, str], ...]:
    """The summary of a log, in the words of a run's."""
    losses, arguments = columns.curve("loss").finite, log.arguments
    layout = [
        f"{short}{_whole(arguments, name) or 1}"
        for short, names in _SIZES.items()
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


_SIZES: Final = {
    "TP": ("tensor_model_parallel_size", "model_parallel_size"),
    "PP": ("pipeline_model_parallel_size", "pipe_parallel_size"),
}
"""Today's names, and those of v1.1.5."""


def _whole(arguments: Mapping[str, str], name: str) -> int | None:
    text = arguments.get(name, "")
    return int(text) or None if text.isascii() and text.isdecimal() and len(text) < 15 else None
