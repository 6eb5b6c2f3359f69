"""Figures, as they are drawn."""

from __future__ import annotations

import pytest

from tridock.report.drawing import Bars, draw_bars


@pytest.mark.parametrize(
    "names", [["planned", "measured"], ["demo-20261122-110613-14b7"] * 3, ["m" * 60] * 5, ["_" * 48, "0" * 48]]
)
def test_the_legend_of_bars_is_not_cut(names: list[str]) -> None:
    figure = draw_bars(["forward", "backward"], [Bars(name, [1.0, 2.0], "#000000") for name in names], "ms")
    figure.draw_without_rendering()
    legend, plot = figure.legends[0].get_window_extent(), figure.axes[0].get_window_extent()
    assert 0 <= legend.x0 <= legend.x1 <= figure.bbox.width
    assert 0 <= legend.y0 < plot.y0
    assert plot.height > 50
