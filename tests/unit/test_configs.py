"""Every shipped experiment loads and can be laid out on the ranks that it is meant for."""

from pathlib import Path

import pytest

from tridock.experiment import load_experiment
from tridock.plan import make_plan

CONFIGS = Path(__file__).parents[2] / "configs"
LAYOUTS = {
    "megatron/gpt2-345m": [(8, "TP1 PP1 DP8"), (16, "TP1 PP1 DP16")],
    "megatron/gpt2-345m-3d": [(16, "TP2 PP2 DP4")],
    "megatron/gpt2-345m-distributed": [(8, "TP1 PP1 DP8")],
    "megatron/gpt2-1.5b": [(8, "TP1 PP1 DP8")],
    "megatron/gpt2-10b": [(16, "TP4 PP1 DP4")],
    "megatron/tiny-345m": [(2, "TP1 PP1 DP2")],
    "megatron/tiny-345m-3d": [(4, "TP2 PP2 DP1"), (8, "TP2 PP2 DP2")],
    "megatron/tiny-345m-distributed": [(2, "TP1 PP1 DP2")],
    "megatron/tiny-1.5b": [(2, "TP1 PP1 DP2")],
    "megatron/tiny-10b": [(4, "TP2 PP1 DP2")],
}


def test_every_megatron_experiment_is_listed() -> None:
    found = {f"megatron/{path.stem}" for path in (CONFIGS / "megatron").glob("*.yaml")}
    assert found == LAYOUTS.keys()


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_can_be_laid_out(name: str) -> None:
    path = CONFIGS / f"{name}.yaml"
    experiment = load_experiment(path)
    assert experiment.name == path.stem
    for ranks, layout in LAYOUTS[name]:
        assert make_plan(experiment, {"node": range(ranks)}, str(path)).layout == layout
