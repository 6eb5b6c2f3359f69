"""The results of a benchmark: JSON, a Markdown table and plots in a folder, a table in the terminal."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from tridock.bench.cells import Measured, scaling
from tridock.bench.schema import Bench
from tridock.report.bar_chart import draw_bars
from tridock.run_folder import write_atomic

_GIB: Final = 2**30
_PACKAGES: Final = ("torch", "deepspeed", "megatron-core")
COLUMNS: Final = (
    *("cell", "step", "spread", "speed", "TFLOP/s a rank", "MFU", "peak memory", "planned", "scaling"),
    *("communication", "over bare torch"),
)
FORMULAS: Final = """\
step: the median of the runs' median steps; spread: slowest run less fastest, over the median. TFLOP/s: model FLOPs
(Narayanan et al., 2021, equation 3, without recomputation) a second; MFU: that over the device's dense peak. Peak
memory: of the rank that held most (on a CPU the whole process); planned: what the planner predicts of a rank.
Scaling: the speed of a rank over that in the smallest world. Communication: share of a step in which a rank exchanges
something and computes nothing, the mean over the ranks, by torch's profiler in steps of their own. Over bare
torch: the engine's step over that of a loop of plain PyTorch on the same model, with which it takes turns in one run on
the same ranks: the median of all turns, and its standard error."""


def row(one: Measured, others: Sequence[Measured]) -> list[str]:
    """A cell's figures as they are shown."""
    if one.state != "ok":
        return [one.cell.name, one.state, *[""] * (len(COLUMNS) - 2)]
    assert one.median_s is not None
    return [
        one.cell.name,
        f"{one.median_s * 1e3:,.1f} ms",
        _shown(one.spread, lambda value: f"{value:.1%}"),
        _shown(one.tokens_per_second, lambda value: f"{value:,.0f} {one.unit}/s"),
        _shown(one.model_tflops_per_rank, lambda value: f"{value:.3g}"),
        _shown(one.mfu, lambda value: f"{value:.1%}"),
        _shown(one.peak_bytes, lambda value: f"{value / _GIB:.2f} GiB"),
        _shown(one.predicted_bytes, lambda value: f"{value / _GIB:.2f} GiB"),
        _shown(scaling(one, others), lambda value: f"{value:.1%}"),
        _shown(one.communication, lambda value: f"{value:.1%}"),
        _shown(one.overhead, lambda value: f"{value:+.1%}{_shown_error(one.overhead_error)}"),
    ]


def _shown_error(value: float | None) -> str:
    return "" if value is None else f" \N{PLUS-MINUS SIGN}{value:.1%}"


def _shown(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value)


def table(measured: Sequence[Measured]) -> Table:
    """For the terminal."""
    shown = Table(*COLUMNS)
    for one in measured:
        shown.add_row(*row(one, measured))
    return shown


def markdown(measured: Sequence[Measured]) -> str:
    """The same, and why what is missing is missing."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(row(one, measured))} |" for one in measured]
    devices = sorted({one.device for one in measured if one.device})
    lines += ["", f"On {', '.join(devices) or 'no device'}, {_versions()}.", "", FORMULAS, ""]
    reasons = [f"- {one.cell.name}: {one.state}: {one.reason}" for one in measured if one.reason]
    reasons += [f"- {one.cell.name}: communication: {one.no_communication}" for one in measured if one.no_communication]
    reasons += [f"- {one.cell.name}: over bare torch: {one.no_bare}" for one in measured if one.no_bare]
    return "\n".join([*lines, *reasons, *([""] if reasons else [])])


def _versions() -> str:
    return ", ".join(f"{name} {found}" for name, found in versions().items())


def versions() -> dict[str, str]:
    """What was measured with."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def document(measured: Sequence[Measured], bench: Bench) -> dict[str, Any]:
    """For programs."""
    cells = []
    for one in measured:
        figures = {"median_s", "tokens_per_second", "spread", "overhead", "overhead_error"}
        own = {name: getattr(one, name) for name in sorted(figures)}
        cells.append({**asdict(one), **own, "scaling": scaling(one, measured)})
    return {"versions": versions(), "bench": bench.model_dump(), "cells": cells}


def record(measured: Sequence[Measured], bench: Bench, folder: Path) -> None:
    """Writes all of it, each file whole."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "results.json", (json.dumps(document(measured, bench), indent=2) + "\n").encode())
    write_atomic(folder / "results.md", markdown(measured).encode())
    done = [one for one in measured if one.median_s is not None]
    if done:
        _plots(done, folder)


def _plots(done: Sequence[Measured], folder: Path) -> None:
    names = [one.cell.name for one in done]
    steps = [(min(one.step_s) * 1e3, max(one.step_s) * 1e3) for one in done]
    draw_bars(folder / "step.png", "time of a step", "ms", names, [(one.median_s or 0.0) * 1e3 for one in done], steps)
    rates = [(one.tokens_per_step / max(one.step_s), one.tokens_per_step / min(one.step_s)) for one in done]
    speeds = [one.tokens_per_second or 0.0 for one in done]
    unit = " or ".join(sorted({one.unit for one in done}))
    draw_bars(folder / "speed.png", f"{unit} a second", f"{unit}/s", names, speeds, rates)
    memory = [(one.peak_bytes or 0) / _GIB for one in done]
    _draw_plain(folder / "memory.png", "peak memory of a rank", "GiB", names, memory)
    known = [(one.cell.name, one.communication * 100) for one in done if one.communication is not None]
    if known:
        title = "communication that nothing overlaps, of a step"
        _draw_plain(folder / "communication.png", title, "%", *zip(*known, strict=True))


def _draw_plain(path: Path, title: str, unit: str, names: Sequence[str], values: Sequence[float]) -> None:
    """What was measured once has no spread."""
    draw_bars(path, title, unit, names, values, [(value, value) for value in values])
