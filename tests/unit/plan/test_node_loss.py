"""The layout with which a run that has lost nodes continues."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.experiments import SMALL, with_fields
from tridock.experiment import Experiment
from tridock.gpus import GPUS
from tridock.plan import Assessment, Assumptions
from tridock.plan.node_loss import fewer_replicas, first_slots, other_layout

CORE = {"engine": "megatron-core", "parallel.use_distributed_optimizer": True}


def experiment(**fields: Any) -> Experiment:
    return with_fields(SMALL, fields)


def nodes(*slots: int) -> dict[str, list[int]]:
    return {f"node-{number}": list(range(count)) for number, count in enumerate(slots, start=1)}


def shown(found: Assessment | None) -> tuple[str, int, dict[str, int]] | None:
    """Layout, micro-batches of a replica, and ranks by node."""
    if found is None:
        return None
    counts: dict[str, int] = {}
    for rank in found.laid_out.ranks:
        counts[rank.node] = counts.get(rank.node, 0) + 1
    return found.laid_out.layout, found.laid_out.accumulation_steps, counts


def test_as_many_replicas_as_the_batch_allows() -> None:
    """24 samples are 12 micro-batches: not for 5 replicas, nor for 7."""
    assert shown(fewer_replicas(experiment(), nodes(4, 1), "e", Assumptions())) == ("TP1 PP1 DP4", 3, {"node-1": 4})
    assert shown(fewer_replicas(experiment(), nodes(4, 3), "e", Assumptions())) == (
        "TP1 PP1 DP6", 2, {"node-1": 4, "node-2": 2},
    )  # fmt: skip


def test_a_replica_stays_as_it_is() -> None:
    split = experiment(**CORE, **{"parallel.tensor_model_parallel_size": 2, "parallel.pipeline_model_parallel_size": 2})
    assert shown(fewer_replicas(split, nodes(4, 3), "e", Assumptions())) == ("TP2 PP2 DP1", 12, {"node-1": 4})
    assert fewer_replicas(split, nodes(2, 1), "e", Assumptions()) is None


def test_megatron_core_takes_another_layout() -> None:
    split = experiment(**CORE, **{"parallel.tensor_model_parallel_size": 2, "parallel.pipeline_model_parallel_size": 2})
    assert shown(other_layout(split, nodes(2, 1), "e", Assumptions())) == (
        "TP1 PP1 DP3", 4, {"node-1": 2, "node-2": 1},
    )  # fmt: skip


def test_what_does_not_fit_the_gpu_is_not_taken() -> None:
    """1.2 B parameters without sharing: 18 bytes each do not fit 16 GiB; on two ranks they do."""
    large = {"model.num_layers": 24, "model.hidden_size": 2048, "model.num_attention_heads": 16, "precision": "fp16"}
    split = experiment(**CORE, **large, **{"parallel.pipeline_model_parallel_size": 4})
    known = Assumptions(gpu=GPUS["v100-16gb"])
    found = other_layout(split, nodes(2), "e", known)
    assert found is not None
    assert found.verdict in ("fits", "tight")
    assert found.laid_out.data_parallel_size == 1
    assert other_layout(split, nodes(1), "e", known) is None
    assert other_layout(split, nodes(1), "e", known, force=True) is not None


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 8))
def test_the_batch_and_the_optimizer_stay(slots: list[int], micro_batches: int) -> None:
    given_ = experiment(**CORE, **{"batch.global_batch_size": 2 * micro_batches})
    for found in (
        fewer_replicas(given_, nodes(*slots), "e", Assumptions()),
        other_layout(given_, nodes(*slots), "e", Assumptions()),
    ):
        assert found is not None  # one replica on one slot always runs
        assert found.laid_out.global_batch_size == given_.batch.global_batch_size
        assert found.laid_out.micro_batch_size == given_.batch.micro_batch_size
        assert found.experiment.parallel.use_distributed_optimizer
        places = {(rank.node, rank.slot) for rank in found.laid_out.ranks}
        assert len(places) == found.laid_out.world_size
        assert all(slot < nodes(*slots)[node].__len__() for node, slot in places)


@pytest.mark.parametrize(
    ("count", "expected"), [(0, {}), (1, {"node-1": (0,)}), (3, {"node-1": (0, 1), "node-2": (0,)})]
)
def test_first_slots(count: int, expected: dict[str, tuple[int, ...]]) -> None:
    assert first_slots(nodes(2, 2), count) == expected
