"""The experiment of a launch that names none: a layout for every cluster, that can run there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tridock.ops.runs.default_experiment import default_experiment
from tridock.ops.runs.prepare import prepare
from tridock.plan import Assumptions

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("counts", "layout", "reason"),
    [
        ((1,), "TP1 PP1 DP1", "there is one slot"),
        ((2,), "TP2 PP1 DP1", "2 slots are a multiple of two, but not of four"),
        ((1, 1), "TP1 PP2 DP1",
         "2 slots are a multiple of two, and a pair of ranks would cross nodes at every layer"),
        ((3,), "TP1 PP1 DP3", "3 slots are odd"),
        ((2, 2), "TP2 PP2 DP1", "4 slots are a multiple of four"),
        ((4, 2), "TP2 PP1 DP3", "6 slots are a multiple of two, but not of four"),
        ((8,), "TP2 PP2 DP2", "8 slots are a multiple of four"),
        ((8, 8), "TP2 PP2 DP4", "16 slots are a multiple of four"),
        ((8,) * 7, "TP2 PP2 DP14", "56 slots are a multiple of four"),
    ],
)  # fmt: skip
def test_the_layout_is_the_one_that_the_plan_has(
    counts: Sequence[int], layout: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    slots = {f"node-{number}": range(count) for number, count in enumerate(counts)}
    chosen = default_experiment(slots)
    assert (chosen.layout, chosen.reason) == (layout, reason)
    planned = prepare(chosen.config, slots, Assumptions(), chosen.overrides).plan
    assert planned.layout == layout
    assert planned.accumulation_steps >= 2
