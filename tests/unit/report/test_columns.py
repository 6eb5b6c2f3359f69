"""Curves of any length, thinned to what is drawn."""

import math
import time
from array import array

from hypothesis import given
from hypothesis import strategies as st

from tridock.report.columns import DRAWN, Columns, Curve


def curve(values: list[float]) -> Curve:
    return Curve(array("d", range(1, len(values) + 1)), array("d", values))


def test_what_comes_again_replaces_all_that_followed() -> None:
    columns = Columns()
    for iteration in (1, 2, 3, 2, 2, 5):
        columns.add(iteration, {"loss": float(iteration), **({"late": 1.0} if iteration == 5 else {})})
    assert (list(columns.curve("loss").x), columns.last, columns.returns) == ([1.0, 2.0, 5.0], 5, 1)
    late = columns.curve("late").y
    assert (math.isnan(late[0]), math.isnan(late[1]), late[2]) == (True, True, 1.0)
    assert len(columns.curve("none")) == 0


@given(values=st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=400), points=st.integers(4, 60))
def test_a_thinned_curve_keeps_its_ends_and_its_extremes(values: list[float], points: int) -> None:
    whole = curve(values)
    thin = whole.thinned(points)
    assert len(thin) <= max(points, 4)
    assert (thin.x[0], thin.x[-1]) == (whole.x[0], whole.x[-1])
    assert list(thin.x) == sorted(thin.x)
    if whole.finite:
        assert (min(thin.finite), max(thin.finite)) == (min(whole.finite), max(whole.finite))
    places = dict(zip(whole.x, whole.y, strict=True))
    assert all(places[x] == y or math.isnan(y) for x, y in zip(thin.x, thin.y, strict=True))


def test_a_spike_and_a_gap_among_a_million_points_are_seen() -> None:
    values = [1.0] * 1_000_000
    values[777_777] = 50.0
    values[300_000:310_000] = [math.nan] * 10_000
    started = time.process_time()
    thin = curve(values).thinned()
    assert time.process_time() - started < 10
    assert len(thin) <= DRAWN
    assert max(thin.finite) == 50.0
    assert 300_000 < thin.gaps()[0] < 310_000
