"""The experiment of a launch that names none: a layout for every cluster, that can run there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tridock.cli import main
from tridock.ops.runs.default_experiment import CONFIG, choose_experiment, default_layout
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
    chosen, overrides, why = default_layout(slots)
    assert (chosen, why) == (layout, reason)
    planned = prepare(CONFIG, slots, Assumptions(), overrides).plan
    assert planned.layout == layout
    assert planned.accumulation_steps >= 2


def test_a_layout_of_ones_own_is_not_explained_away() -> None:
    slots = {"a": range(4)}
    _, overrides, note = choose_experiment(None, ["parallel.tensor_model_parallel_size=1"], slots)
    assert note == "no --config: configs/demo-3d.yaml"
    assert overrides[-1] == "parallel.tensor_model_parallel_size=1"
    assert choose_experiment(Path("mine.yaml"), ["a=1"], slots) == (Path("mine.yaml"), ["a=1"], "")


@pytest.mark.parametrize("nproc", ["0", "-1"])
def test_no_ranks_are_refused_before_a_layout_is_chosen(nproc: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--nproc", nproc]) == 2
    assert capsys.readouterr() == ("", f"--nproc: must be at least 1; got {nproc}; give the number of ranks\n")
