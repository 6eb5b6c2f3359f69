"""Figures, as they are drawn."""

from __future__ import annotations

from array import array

import pytest

from tridock.report.columns import Curve
from tridock.report.drawing import Bars, Line, draw_bars, draw_lines

RUN = "demo-20261122-110613-14b7"
LONG = "pretraining-of-gpt-on-openwebtext-with-another-seed-" * 2


@pytest.mark.parametrize("names", [["planned", "measured"], [RUN] * 3, [LONG] * 5, ["_" * 48, "0" * 48]])
def test_the_legend_of_bars_is_not_cut(names: list[str]) -> None:
    figure = draw_bars(["forward", "backward"], [Bars(name, [1.0, 2.0], "#000000") for name in names], "ms")
    figure.draw_without_rendering()
    legend, plot = figure.legends[0].get_window_extent(), figure.axes[0].get_window_extent()
    assert 0 <= legend.x0 <= legend.x1 <= figure.bbox.width
    assert 0 <= legend.y0 <= legend.y1 <= plot.y0
    assert plot.height > 50


@pytest.mark.parametrize(
    ("names", "below"), [(["training", "validation"], False), ([RUN] * 3, True), ([LONG] * 8, True)]
)
def test_a_legend_of_long_names_covers_no_curve(names: list[str], below: bool) -> None:
    curve = Curve(array("d", (1, 2)), array("d", (2.0, 1.0)))
    figure = draw_lines([Line(name, curve, "#000000") for name in names], "loss")
    figure.draw_without_rendering()
    plot = figure.axes[0].get_window_extent()
    assert plot.height > 200
    assert bool(figure.legends) == below
    if below:
        legend = figure.legends[0].get_window_extent()
        assert 0 <= legend.x0 <= legend.x1 <= figure.bbox.width
        assert 0 <= legend.y0 <= legend.y1 <= plot.y0
