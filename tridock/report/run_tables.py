"""Tables of a cluster's runs, out of what its nodes say of them (``tridock.node runs``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table


def status_table(runs: Sequence[dict[str, Any]]) -> Table:
    """The runs, oldest first: where they stand, and how long ago their last logged step was."""
    table = Table("run", "nodes", "state", "step", "loss", "speed", "last step", title="runs", title_justify="left")
    for run in runs:
        metrics = run["metrics"] or {}
        table.add_row(
            run["run_id"],
            str(len(run["nodes"]) or ""),
            run["state"],
            _step(metrics.get("iteration"), run["train_iters"]),
            _number(metrics.get("loss"), ".4f"),
            _speed(metrics),
            f"{_time(run['age_s'])} ago" if metrics and run["age_s"] is not None else "",
        )
    return table


def history_table(runs: Sequence[dict[str, Any]]) -> Table:
    """All runs in the order given: what became of each."""
    table = Table("run", "experiment", "state", "exit code", "duration", "last loss")
    for run in runs:
        table.add_row(
            run["run_id"],
            run["experiment"],
            run["state"],
            "" if run["exit_code"] is None else str(run["exit_code"]),
            _time(run["duration_s"]),
            _number((run["metrics"] or {}).get("loss"), ".4f"),
        )
    return table


def _step(iteration: int | None, last: int | None) -> str:
    if iteration is None:
        return "" if last is None else f"0/{last}"
    return str(iteration) if last is None else f"{iteration}/{last}"


def _speed(metrics: Mapping[str, Any]) -> str:
    for name, unit in (("tokens_per_second", "tokens/s"), ("samples_per_second", "samples/s")):
        if (speed := metrics.get(name)) is not None:
            return f"{speed:,.0f} {unit}"
    return ""


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _time(seconds: float | None) -> str:
    """The two largest units: ``3 s``, ``4 min 5 s``, ``2 h 10 min``, ``3 d 1 h``."""
    if seconds is None:
        return ""
    rest = int(seconds)
    words: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count or words or unit == "s":
            words.append(f"{count} {unit}")
    return " ".join(words[:2])
