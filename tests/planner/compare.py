"""What the planner predicts of an iteration's time and of memory beside what was published (``make bench-planner``)."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.experiments import with_fields
from tridock.experiment.parameters import model_flops_per_token
from tridock.gpus import GPUS
from tridock.layout.shape import least_bytes, total_bytes
from tridock.plan import Assessment, Assumptions, assess
from tridock.plan.memory import GIB, OVERHEAD
from tridock.yaml_text import parse_yaml

PUBLISHED = Path(__file__).parents[1] / "data" / "planner-times.yaml"
RANKED = 6
"""Layouts of one model from which on their order is compared."""
_OWN = ("model", "gpus", "slots", "measured", "memory", "recomputed")
_BASE: dict[str, Any] = {"name": "published", "data": {"data_path": "data/x"}, "train": {"train_iters": 1}}


@dataclass(frozen=True)
class Memory:
    """The fullest rank's, in GiB."""

    verdict: str
    planned: float
    """The upper end of what was measured."""
    least: float
    measured: float | None
    gpu: float

    @property
    def error(self) -> float:
        assert self.measured is not None
        return self.planned / self.measured - 1


@dataclass(frozen=True)
class Compared:
    """One row of a table, in seconds of an iteration. ``predicted``: the sum of the terms whose cause is known."""

    model: str
    gpus: int
    label: str
    predicted: float
    measured: float
    """Not a number where a table's times say nothing."""
    tokens: int
    memory: Memory

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


_SETTINGS = ("network_gbit", "matmul_share", "gpu_fields")


def as_user(table: Mapping[str, Any], *, program: bool = False) -> dict[str, Any]:
    """The table as a user has it: the experiment, the GPU and the nodes; with ``program`` also its name."""
    return {key: value for key, value in table.items() if key not in _SETTINGS and (program or key != "program")}


@cache
def tables() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = parse_yaml(PUBLISHED.read_text(), str(PUBLISHED))["tables"]
    return found


def compared(table: Mapping[str, Any]) -> list[Compared]:
    """Every row of a table."""
    rows = (dict(zip(table["columns"], values, strict=True)) for values in table["rows"])
    models = table.get("fields_of", {})
    return [_row(table, {**table["fields"], **models.get(row["model"], {}), **row}) for row in rows]


def planned(table: Mapping[str, Any], row: Mapping[str, Any]) -> Assessment:
    fields = {name: value for name, value in row.items() if name not in _OWN}
    slots = min(row.get("slots", 8), row["gpus"])
    nodes = {f"node-{number}": range(slots) for number in range(row["gpus"] // slots)}
    gpu = replace(GPUS[table["gpu"]], **table.get("gpu_fields", {}))
    kernels = table.get("kernels", {}) | {key: table[key] for key in ("matmul_share",) if key in table}
    gpu = replace(gpu, kernels=replace(gpu.kernels, **kernels))
    experiment = with_fields(_BASE, fields | {"program": table.get("program")})
    return assess(experiment, nodes, table["name"], Assumptions(gpu, table.get("network_gbit")))


def _row(table: Mapping[str, Any], row: Mapping[str, Any]) -> Compared:
    assessed = planned(table, row)
    cost, plan = assessed.cost, assessed.laid_out if assessed.plan is not None else None
    assert cost is not None, [str(problem) for problem in assessed.problems]
    assert cost.estimate is not None
    assert plan is not None
    label = f"{plan.layout} mbs {plan.micro_batch_size} gbs {plan.global_batch_size}"
    known = "time_unknown" not in table
    measured = _seconds(table["unit"], row["measured"], row["gpus"], assessed) if known else math.nan
    estimate = cost.estimate
    predicted = estimate.iteration - estimate.unexplained
    if (share := row.get("recomputed")) is not None:
        predicted -= (1 - share) * estimate.recomputed
    memory = memory_of(table, row, assessed)
    return Compared(str(row["model"]), row["gpus"], label, predicted, measured, cost.tokens, memory)


def memory_of(table: Mapping[str, Any], row: Mapping[str, Any], assessed: Assessment) -> Memory:
    worst, kind = "memory_of" not in table, table.get("memory_is", "used")
    stage = assessed.worst if worst else assessed.memory[0]
    left_out = {"used": (), "reserved": ("CUDA context", "NCCL"), "allocated": OVERHEAD}[kind]
    counted = [term for term in stage.terms if term.name not in left_out]
    planned, least = total_bytes(counted) / GIB, least_bytes(counted) / GIB
    assert stage.limit_bytes is not None
    verdict = "unknown" if "memory_unknown" in table else assessed.verdict
    return Memory(verdict, planned, least, row.get("memory"), stage.limit_bytes / GIB)


def ran_out(table: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Assessment]]:
    """The published rows that ran out of memory, and their plans."""
    rows = [dict(zip(table["columns"], values, strict=True)) for values in table.get("out_of_memory", ())]
    return [(row, planned(table, {**table["fields"], **row})) for row in rows]


def _seconds(unit: str, value: float, gpus: int, assessed: Assessment) -> float:
    cost = assessed.cost
    assert cost is not None
    if unit == "seconds":
        return value
    if unit == "tokens/s":
        return cost.tokens / value
    if unit == "tokens/s per GPU":
        return cost.tokens / (value * gpus)
    if unit == "hardware TFLOP/s per GPU":
        return cost.hardware_flops / (value * 1e12 * gpus)
    if unit == "causal TFLOP/s per GPU":
        return cost.causal_flops / (value * 1e12 * gpus)
    assert unit == "model TFLOP/s per GPU", unit
    model = assessed.experiment.model
    return cost.tokens * model_flops_per_token(model, model.vocab_size or 0) / (value * 1e12 * gpus)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """The correlation of the ranks; equal values share the mean of theirs."""
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def rankings(rows: Sequence[Compared]) -> Iterator[tuple[str, int, float, float]]:
    """Of each model with enough layouts on the same number of GPUs: their number, the rank correlation of the times for
    a token, and how much slower the planner's first choice is than the fastest."""
    for model, gpus in dict.fromkeys((row.model, row.gpus) for row in timed(rows)):
        of_it = [row for row in rows if (row.model, row.gpus) == (model, gpus)]
        if len(of_it) >= RANKED:
            predicted, measured = ([seconds / row.tokens for row, seconds in pairs] for pairs in _pairs(of_it))
            first = measured[predicted.index(min(predicted))]
            yield model, len(of_it), spearman(predicted, measured), first / min(measured) - 1


def _pairs(rows: Sequence[Compared]) -> Iterator[list[tuple[Compared, float]]]:
    yield [(row, row.predicted) for row in rows]
    yield [(row, row.measured) for row in rows]


def timed(rows: Sequence[Compared]) -> list[Compared]:
    """The rows whose times were published and can be trusted."""
    return [row for row in rows if not math.isnan(row.measured)]


def median_error(rows: Sequence[Compared]) -> float:
    return statistics.median(abs(row.error) for row in timed(rows))


def main(names: Sequence[str]) -> int:
    console, every = Console(), []
    wanted = [table for table in tables() if not names or any(name in table["name"] for name in names)]
    for table in wanted:
        rows = compared(table)
        every += rows
        console.print(_shown(table, rows))
        if errors := [row.error for row in timed(rows)]:
            console.print(f"median error {median_error(rows):.1%}, {statistics.median(errors):+.1%} with its sign")
        if known := [row.memory.error for row in rows if row.memory.measured is not None]:
            console.print(
                f"memory: median error {statistics.median(map(abs, known)):.1%},"
                f" {statistics.median(known):+.1%} with its sign, {min(known):+.1%} to {max(known):+.1%}"
            )
        for model, count, correlation, regret in rankings(rows):
            console.print(f"{model}: {count} layouts, Spearman {correlation:.2f}, first choice {regret:.1%} slower")
        console.print()
    if every:
        refused = sum(row.memory.verdict == "no-fit" for row in every)
        console.print(
            f"{len(timed(every))} times: median error {median_error(every):.1%};"
            f" {refused} of {len(every)} called no-fit, all of which ran"
        )
    if known := [row.memory for row in every if row.memory.measured is not None]:
        full = [memory for memory in known if (memory.measured or 0) > 0.9 * memory.gpu]
        fit = sum(memory.verdict == "fits" for memory in full)
        error = statistics.median(abs(memory.error) for memory in known)
        console.print(f"memory of {len(known)}: median error {error:.1%}; {fit} of {len(full)} above 90 % called fits")
    if out := [plan.verdict for table in wanted for _, plan in ran_out(table)]:
        console.print(f"{len(out)} ran out of memory: {out.count('fits')} called fits, {out.count('tight')} tight")
    return 0


def _shown(table: Mapping[str, Any], rows: Sequence[Compared]) -> Table:
    shown = Table(title=table["name"], caption=table["source"], title_justify="left")
    for name in ("model", "layout", "predicted", "measured", "error", "GiB", "measured"):
        shown.add_column(name, justify="left" if name in ("model", "layout") else "right")
    for row in rows:
        is_timed = not math.isnan(row.measured)
        error = f"{row.error:+.1%}" * is_timed + " (no-fit)" * (row.memory.verdict == "no-fit")
        memory = row.memory
        gib = "" if memory.measured is None else f"{memory.measured:g}"
        shown.add_row(
            row.model,
            row.label,
            f"{row.predicted:.3f} s",
            f"{row.measured:.3f} s" * is_timed,
            error,
            f"{memory.least:.1f} to {memory.planned:.1f}",
            gib,
        )
    return shown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
