"""The results of a benchmark: JSON, a Markdown table and plots in a folder, a table in the terminal."""

import json
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from tridock.bench.cells import Bench, Measured, scaling
from tridock.contracts.codec import JSON_VERSION
from tridock.contracts.run_folder import write_atomic
from tridock.report.drawing import Bars, as_png, draw_bars
from tridock.report.theme import SERIES

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
    """Returns the cells of one line of the table; those after the state are empty if the cell failed."""
    if one.state != "ok":
        return [one.cell.name, one.state, *[""] * (len(COLUMNS) - 2)]
    assert one.median_s is not None
    return [
        one.cell.name,
        f"{one.median_s * 1e3:,.1f} ms",
        _text(one.spread, lambda value: f"{value:.1%}"),
        _text(one.tokens_per_second, lambda value: f"{value:,.0f} {one.unit}/s"),
        _text(one.model_tflops_per_rank, lambda value: f"{value:.3g}"),
        _text(one.mfu, lambda value: f"{value:.1%}"),
        _text(one.peak_bytes, lambda value: f"{value / _GIB:.2f} GiB"),
        _text(one.predicted_bytes, lambda value: f"{value / _GIB:.2f} GiB"),
        _text(scaling(one, others), lambda value: f"{value:.1%}"),
        _text(one.communication, lambda value: f"{value:.1%}"),
        _text(one.overhead, lambda value: f"{value:+.1%}{_error_text(one.overhead_error)}"),
    ]


def _error_text(value: float | None) -> str:
    return "" if value is None else f" \N{PLUS-MINUS SIGN}{value:.1%}"


def _text(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value)


def table(measured: Sequence[Measured]) -> Table:
    shown = Table(*COLUMNS)
    for one in measured:
        shown.add_row(*row(one, measured))
    return shown


def markdown(measured: Sequence[Measured]) -> str:
    """Returns the table in Markdown, and the reasons for missing values."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(row(one, measured))} |" for one in measured]
    devices = sorted({one.device for one in measured if one.device})
    packages = ", ".join(f"{name} {found}" for name, found in versions().items())
    lines += ["", f"On {', '.join(devices) or 'no device'}, {packages}.", "", FORMULAS, ""]
    reasons = [f"- {one.cell.name}: {one.state}: {one.reason}" for one in measured if one.reason]
    reasons += [f"- {one.cell.name}: communication: {one.no_communication}" for one in measured if one.no_communication]
    reasons += [f"- {one.cell.name}: over bare torch: {one.no_bare}" for one in measured if one.no_bare]
    return "\n".join([*lines, *reasons, *([""] if reasons else [])])


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def document(measured: Sequence[Measured], bench: Bench) -> dict[str, Any]:
    cells = []
    for one in measured:
        figures = {"median_s", "tokens_per_second", "spread", "overhead", "overhead_error"}
        own = {name: getattr(one, name) for name in sorted(figures)}
        cells.append({**asdict(one), **own, "scaling": scaling(one, measured)})
    return {"version": JSON_VERSION, "versions": versions(), "bench": bench.model_dump(), "cells": cells}


def record(measured: Sequence[Measured], bench: Bench, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "results.json", (json.dumps(document(measured, bench), indent=2) + "\n").encode())
    write_atomic(folder / "results.md", markdown(measured).encode())
    done = [one for one in measured if one.median_s is not None]
    for name, (title, unit, bars) in plots_of(done).items():
        if any(value is not None for value in bars[0].values):
            figure = draw_bars([one.cell.name for one in done], bars, unit)
            figure.suptitle(title, fontsize=11)
            write_atomic(folder / f"{name}.png", as_png(figure))


def plots_of(done: Sequence[Measured]) -> dict[str, tuple[str, str, list[Bars]]]:
    """Returns title, unit and bars of each plot, a bar per cell; an unknown figure has no bar."""
    worked = " or ".join(sorted({one.unit for one in done}))
    times = [[step * 1e3 for step in one.step_s] for one in done]
    speeds = [[one.tokens_per_step / step for step in one.step_s] for one in done]
    planned = Bars("planned", [_gib(one.predicted_bytes) for one in done], SERIES[7])
    return {
        "step": ("time of a step", "ms", [_bars(map(statistics.median, times), times)]),
        "speed": (f"{worked} a second", f"{worked}/s", [_bars((one.tokens_per_second for one in done), speeds)]),
        "tflops": ("model FLOPs a second, of a rank", "TFLOP/s", [_bars(one.model_tflops_per_rank for one in done)]),
        "mfu": ("MFU: model FLOPs a second over the dense peak", "%", [_bars(_percent(one.mfu) for one in done)]),
        "memory": ("peak memory of a rank", "GiB", [_bars(_gib(one.peak_bytes) for one in done), planned]),
        "communication": (
            "communication that nothing overlaps, of a step",
            "%",
            [_bars(_percent(one.communication) for one in done)],
        ),
        "scaling": (
            "speed of a rank over that in the smallest world",
            "%",
            [_bars(_percent(scaling(one, done)) for one in done)],
        ),
    }


def _bars(values: Iterable[float | None], runs: Sequence[Sequence[float]] = ()) -> Bars:
    """Returns a bar per cell, with the range of the values in its runs."""
    return Bars("measured", list(values), SERIES[0], [(min(each), max(each)) for each in runs])


def _percent(share: float | None) -> float | None:
    return None if share is None else share * 100.0


def _gib(size: int | None) -> float | None:
    return None if size is None else size / _GIB
