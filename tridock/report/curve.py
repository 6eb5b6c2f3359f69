"""The loss curve as a picture."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

from tridock.contracts import run_folder
from tridock.contracts.records import check_run, read_metrics
from tridock.errors import Problem, RequestError
from tridock.experiment import load_experiment
from tridock.report.summary import summarize

_TRAIN, _VALID, _TEST = "#1f5fa8", "#d9662b", "#2e8b57"
_MANY = 150
"""From this many logged iterations on, the curve is a running mean over the single losses."""


def plot_loss(folder: Path, png: Path) -> None:
    """Draws training, validation and test loss of a run into ``png``.

    Raises :class:`RequestError` where the folder is no run's, or has no logged iteration yet.
    """
    check_run(folder)
    iterations, evaluations = read_metrics(folder)
    points = [(record["iteration"], record["loss"]) for record in iterations if record["loss"] is not None]
    if not points:
        where = str(folder / run_folder.METRICS)
        todo = "wait for the first logged iteration, or see the run's logs"
        raise RequestError(Problem(where, "holds no loss to draw", "no logged iteration", todo))

    # The figure's own canvas: no pyplot, no display, nothing global.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, losses = [step for step, _ in points], [loss for _, loss in points]
    if len(points) >= _MANY:
        axes.plot(steps, losses, color=_TRAIN, alpha=0.25, linewidth=0.8)
        axes.plot(steps, running_mean(losses, len(losses) // 30), color=_TRAIN, linewidth=2, label="training (mean)")
    else:
        axes.plot(steps, losses, color=_TRAIN, linewidth=2, label="training")
    valid = evaluations.get("valid", [])
    if valid:
        heights = [record["loss"] for record in valid]
        axes.plot([record["iteration"] for record in valid], heights, "o-", color=_VALID, label="validation")
    if test := evaluations.get("test"):
        axes.plot(test[-1]["iteration"], test[-1]["loss"], "D", color=_TEST, label="test")
    summary, experiment = summarize(folder), load_experiment(folder / run_folder.EXPERIMENT)
    ranks = f"{summary.ranks} ranks" if summary.ranks else ""
    axes.set_title(
        f"{experiment.name}: loss {losses[0]:.2f} to {losses[-1]:.2f}",
        loc="left",
        fontsize=14,
        fontweight="bold",
        pad=24,
    )
    subtitle = ", ".join(part for part in (summary.model, summary.layout, ranks) if part)
    axes.text(0.0, 1.025, subtitle, transform=axes.transAxes, fontsize=9, color="#555555")
    axes.set_xlabel("iteration")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    run_folder.write_atomic(png, buffer.getvalue())


def running_mean(values: list[float], width: int) -> list[float]:
    """The mean over the ``width`` values around each place (an odd number of them; fewer at both ends)."""
    reach = width // 2
    sums = [0.0, *itertools.accumulate(values)]
    means = []
    for place in range(len(values)):
        near = min(reach, place, len(values) - 1 - place)
        means.append((sums[place + near + 1] - sums[place - near]) / (2 * near + 1))
    return means
