"""Tables for a terminal: the runs of a cluster, and the result of a reproduction."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from tridock.contracts.node_answers import QueuedRun, RunInfo
from tridock.differences import Difference
from tridock.report.markup import gib, printable
from tridock.report.summary import render_table
from tridock.reproduction.outcome import Outcome, Point


def status_table(runs: Sequence[RunInfo]) -> Table:
    """Returns a table of runs, oldest first, with the state and progress of each and the age of its last step."""
    table = Table("run", "nodes", "state", "step", "loss", "speed", "last step", title="runs", title_justify="left")
    for run in runs:
        metrics = run.metrics or {}
        table.add_row(
            run.run_id,
            str(len(run.nodes) or ""),
            run.state,
            _step(metrics.get("iteration"), run.train_iters),
            _number(metrics.get("loss"), ".4f"),
            _speed(metrics),
            f"{_time(run.age_s, units=1)} ago" if metrics and run.age_s is not None else "",
        )
    return table


def neighbours_table(rows: Sequence[tuple[str, str, str, str]]) -> Table:
    """Returns a table of other clusters' runs: cluster, run, who started it, and the devices that it uses."""
    table = Table("cluster", "run", "started by", "uses", title="other clusters on these hosts", title_justify="left")
    for row in rows:
        table.add_row(*(escape(printable(text)) for text in row))
    return table


def queue_table(queued: Sequence[QueuedRun]) -> Table:
    """Returns a table of the queued runs, in the order in which they start."""
    table = Table("queued run", "since (UTC)", "slots", "waits for", title="queue", title_justify="left")
    for run in queued:
        slots = "; ".join(f"{node}: {','.join(map(str, numbers))}" for node, numbers in run.slots.items())
        since = datetime.fromtimestamp(run.since, UTC)
        table.add_row(run.run_id, f"{since:%Y-%m-%d %H:%M}", slots, ", ".join(run.waits_for))
    return table


def history_table(runs: Sequence[RunInfo], places: Mapping[str, str] | None = None) -> Table:
    """Returns a table of runs in the order given, with the state and result of each; ``places``: where, by run."""
    table = Table("run", "where", "started by", "state", "exit code", "duration", "last loss", "disk")
    for run in runs:
        table.add_row(
            run.run_id,
            (places or {}).get(run.run_id) or run.head or "this machine",
            escape(printable(run.started_by)),
            run.state,
            "" if run.exit_code is None else str(run.exit_code),
            _time(run.duration_s),
            _number((run.metrics or {}).get("loss"), ".4f"),
            "" if run.disk_bytes is None else gib(run.disk_bytes),
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


def _time(seconds: float | None, units: int = 2) -> str:
    """Formats seconds in their largest units: ``3 s``, ``4 min 5 s``, ``2 h 10 min``, ``3 d 1 h``."""
    if seconds is None:
        return ""
    rest = int(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count or parts or unit == "s":
            parts.append(f"{count} {unit}")
    return " ".join(parts[:units])


def environment_table(found: Sequence[Difference]) -> Table:
    """Returns a table of the fields that differ from the original run."""
    then, now = Column("then", overflow="fold"), Column("now", overflow="fold")
    table = Table("field", then, now, title="environment", title_justify="left")
    for difference in found:
        table.add_row(*(escape(printable(text, 200)) for text in (difference.field, *difference.values)))
    if not found:
        table.add_row("no differences", "", "")
    return table


def verdict_table(outcome: Outcome) -> Table:
    """Returns a table of how the losses of a repeated run compare with the original."""
    title = f"{escape(outcome.now)} compared with {escape(outcome.then)}"
    return render_table(title, ((name, escape(text)) for name, text in _rows(outcome)))


def _rows(outcome: Outcome) -> Iterator[tuple[str, str]]:
    losses = outcome.losses
    yield "verdict", outcome.verdict
    yield "devices", " and ".join(device or "unknown" for device in outcome.devices)
    yield "tolerance", "none: bitwise equality" if not outcome.tolerance else f"{outcome.tolerance:g} x max(1, loss)"
    fields = len(outcome.environment)
    differ = "1 field differs" if fields == 1 else f"{fields} fields differ"
    yield "environment", differ if fields else "no differences"
    yield "losses compared", f"{losses.compared:,}"
    yield "losses different", f"{losses.differing:,}"
    if losses.first is not None:
        yield "first difference", _point(losses.first)
    if losses.largest_at is not None:
        yield "largest difference", f"{losses.largest:.3g} at iteration {losses.largest_at}"
    if losses.more:
        yield "only in the new run", f"{losses.more:,} losses: the original ended earlier"
    if outcome.moved:
        yield "note", "the original lost nodes and continued on others: its first losses have another layout"


def _point(point: Point) -> str:
    now = "not logged" if not point.there else _loss(point.now)
    return f"iteration {point.iteration}, {point.split}: {_loss(point.then)} then, {now} now"


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else repr(loss)
