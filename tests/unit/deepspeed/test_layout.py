"""Layers and ranks of engine megatron-deepspeed are where DeepSpeed's own code puts them."""

import itertools
from typing import Any

import pytest

from tests.unit.plan.test_megatron import BASE, PP, TP, planned
from tridock.experiment import parse_experiment
from tridock.layout.shape import layers_of_stage

utils: Any = pytest.importorskip("deepspeed.runtime.utils")
topology: Any = pytest.importorskip("deepspeed.runtime.pipe.topology")


@pytest.mark.parametrize("stages", [*range(1, 17), 30, 59, 60])
def test_layers_lie_on_the_stages_where_deepspeed_puts_them(stages: int) -> None:
    experiment = parse_experiment(BASE, "e.yaml", [f"{PP}={stages}"])
    ours = [layers_of_stage(experiment, stage) for stage in range(stages)]
    # An embedding and a transposition come before the layers; a transposition, a norm and the logits after them.
    weights = [0, 0, *[1] * 60, 0, 0, 0]
    bounds = utils.partition_balanced(weights, stages)
    assert ours == [sum(weights[first:end]) for first, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize(("tensor", "stages", "data"), [(2, 2, 2), (4, 1, 2), (1, 4, 2), (2, 3, 3), (1, 1, 4)])
def test_ranks_are_numbered_as_deepspeed_numbers_them(tensor: int, stages: int, data: int) -> None:
    theirs = topology.PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=data)
    ours = planned(tensor * stages * data, f"{TP}={tensor}", f"{PP}={stages}").ranks
    for rank in ours:
        place = theirs.get_coord(rank.rank)
        assert (rank.pipeline_parallel_rank, rank.data_parallel_rank, rank.tensor_parallel_rank) == (
            place.pipe,
            place.data,
            place.model,
        )
