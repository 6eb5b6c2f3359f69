"""A run's plan beside what was measured: memory, time of a step, throughput."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tridock.report.subject import Subject
from tridock.report.text import gib, seconds


def planned_memory_by_rank(subject: Subject) -> dict[int, float]:
    """Bytes that the plan predicts for each rank: its stage's. Empty where there is no plan."""
    stages = _of(subject.plan_document, "memory", "stages")
    if subject.plan is None or not isinstance(stages, list):
        return {}
    totals = {_of(stage, "stage"): _of(stage, "total_bytes") for stage in stages}
    found = {rank.rank: totals.get(rank.pipeline_parallel_rank) for rank in subject.plan.ranks}
    return {rank: float(size) for rank, size in found.items() if isinstance(size, int | float)}


def gpu_limit(subject: Subject) -> float | None:
    """The memory of the GPU that the plan was made for, in bytes."""
    limit = _of(subject.plan_document, "memory", "limit_gib")
    return float(limit) * 2**30 if isinstance(limit, int | float) else None


def plan_rows(subject: Subject) -> Iterator[tuple[str, str, str, str]]:
    """What was predicted, what was measured, and how much more that is; only where both are known."""
    planned = max(planned_memory_by_rank(subject).values(), default=None)
    if planned and subject.peak_memory:
        ratio = subject.peak_memory / planned
        yield "memory of the fullest rank", gib(planned), gib(subject.peak_memory), _more(ratio)
    estimate = _of(subject.plan_document, "cost", "estimate")
    time, speed = _of(estimate, "iteration"), _of(estimate, "tokens_per_second")
    if _positive(time) and subject.step_time:
        yield "time of a step (median)", seconds(time), seconds(subject.step_time), _more(subject.step_time / time)
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
    """The plan's memory of a rank, stage by stage: the stage, its layers, GiB."""
    stages = _of(subject.plan_document, "memory", "stages")
    for stage in stages if isinstance(stages, list) else ():
        size = _of(stage, "total_bytes")
        if isinstance(size, int | float):
            yield f"stage {_of(stage, 'stage')}", str(_of(stage, "layers")), gib(size)


def _of(document: Any, *path: str) -> Any:
    """What stands there; None where nothing does."""
    for name in path:
        document = document.get(name) if isinstance(document, dict) else None
    return document


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _more(ratio: float) -> str:
    return f"{ratio - 1:+.1%}" if ratio < 10 else f"{ratio:,.0f} times"
