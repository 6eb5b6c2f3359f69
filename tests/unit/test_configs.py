"""Every shipped experiment loads and can be laid out on the ranks that it is meant for."""

import re
from pathlib import Path

import pytest

from tests.experiments import make_plan
from tridock.cluster.hostfile import parse_hostfile
from tridock.errors import RequestError
from tridock.experiment import load_experiment

CONFIGS = Path(__file__).parents[2] / "configs"
LAYOUTS = {
    "demo": [(1, "TP1 PP1 DP1"), (2, "TP1 PP1 DP2"), (4, "TP1 PP1 DP4"), (12, "TP1 PP1 DP12")],
    "demo-3d": [(4, "TP2 PP2 DP1"), (8, "TP2 PP2 DP2")],
    "demo-3d-v1.1.5": [(4, "TP2 PP2 DP1"), (8, "TP2 PP2 DP2")],
    **{f"bench/gpt-{size}": [(1, "TP1 PP1 DP1"), (8, "TP1 PP1 DP8")] for size in ("125m", "1.3b")},
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
    "resnet50": [(1, "TP1 PP1 DP1"), (8, "TP1 PP1 DP8")],
    "gcp/gpt-xl-ddp": [(32, "TP1 PP1 DP32")],
    "gcp/gpt-xl-pipeline": [(32, "TP1 PP2 DP16")],
    "jean-zay/7.5b": [(16, "TP4 PP4 DP1"), (32, "TP4 PP4 DP2")],
    "jean-zay/30b": [(64, "TP4 PP16 DP1")],
    "jean-zay/76b": [(120, "TP4 PP30 DP1")],
    "jean-zay/tiny-7.5b": [(4, "TP2 PP2 DP1")],
    "jean-zay/tiny-30b": [(8, "TP2 PP4 DP1")],
    "jean-zay/tiny-76b": [(6, "TP2 PP3 DP1")],
}
REFUSED = {"jean-zay/76b-as-written"}
BENCHMARKS = {"bench/small", "bench/h200", "bench/engines"}
"""Matrices of experiments, with a test of their own."""


def test_every_experiment_is_listed() -> None:
    found = {str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.rglob("*.yaml")}
    found = {
        name for name in found if not name.startswith(("slurm/", "recipes/"))
    }  # sites' profiles, and others' programs
    assert found - {"reference"} - BENCHMARKS == LAYOUTS.keys() | REFUSED


def named_size(path: Path) -> tuple[int, int] | None:
    """Nodes and slots a node, where the comment at the head of the file names them."""
    head = " ".join(line[2:] for line in path.read_text().splitlines() if line.startswith("# "))
    if found := re.search(r"on (\d+) nodes of (\d+) ", head):
        return int(found[1]), int(found[2])
    found = re.search(r"(?:on|of) (\d+) (?:GPUs|CPU ranks)", head)
    return found and (1, int(found[1]))


SIZED = [name for name in sorted(LAYOUTS.keys() | REFUSED) if named_size(CONFIGS / f"{name}.yaml")]


def test_the_sizes_that_comments_name_are_found() -> None:
    assert [name for name in SIZED if name.startswith("jean-zay")] == [
        f"jean-zay/{name}" for name in ("30b", "7.5b", "76b", "76b-as-written", "tiny-30b", "tiny-7.5b", "tiny-76b")
    ]
    assert len(SIZED) == 14


@pytest.mark.parametrize("name", [name for name in SIZED if name not in REFUSED])
def test_it_can_be_laid_out_on_what_its_comment_names(name: str) -> None:
    path = CONFIGS / f"{name}.yaml"
    size = named_size(path)
    assert size is not None
    text = "".join(f"node-{number} slots={size[1]}\n" for number in range(size[0]))
    slots = {name: range(count) for name, count in parse_hostfile(text, "hostfile").pool.items()}
    assert (size[0] * size[1], make_plan(load_experiment(path), slots, str(path)).layout) in LAYOUTS[name]


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_can_be_laid_out(name: str) -> None:
    path = CONFIGS / f"{name}.yaml"
    experiment = load_experiment(path)
    assert experiment.name == path.stem
    for ranks, layout in LAYOUTS[name]:
        assert make_plan(experiment, {"node": range(ranks)}, str(path)).layout == layout


def test_the_plan_of_76b_is_refused_as_it_was_written() -> None:
    path = CONFIGS / "jean-zay/76b-as-written.yaml"
    assert named_size(path) == (32, 4)
    with pytest.raises(RequestError) as caught:
        make_plan(load_experiment(path), {f"node-{number}": range(4) for number in range(32)}, str(path))
    assert str(caught.value) == (
        f"{path}: parallel.pipeline_model_parallel_size: must divide num_layers 60; got 32; "
        "use 30 or 60, or num_layers 64"
    )


def test_76b_differs_from_what_was_written_in_its_stages_alone() -> None:
    written, corrected = (load_experiment(CONFIGS / f"jean-zay/{name}.yaml") for name in ("76b-as-written", "76b"))
    parallel = written.parallel.model_copy(update={"pipeline_model_parallel_size": 30})
    assert corrected == written.model_copy(update={"name": "76b", "parallel": parallel})
