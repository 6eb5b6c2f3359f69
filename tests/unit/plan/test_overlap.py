"""Gradients that travel while the rank computes, in the estimate of an iteration's time."""

from typing import Any

import pytest

from tests.experiments import with_fields
from tridock.gpus import GPUS
from tridock.layout.traffic import Traffic
from tridock.plan import Assumptions, assess
from tridock.plan.cost import Estimate
from tridock.plan.rates import Rates

LAYERS, PASSES = 4, 5
BASE: dict[str, Any] = {
    "name": "overlap",
    "model": {"num_layers": LAYERS, "hidden_size": 1024, "num_attention_heads": 8, "seq_length": 512},
    "batch": {"micro_batch_size": 2, "global_batch_size": 2 * 2 * PASSES},
    "data": {"data_path": "data/x"},
    "train": {"train_iters": 1},
}
ZERO1, ZERO2, ZERO3 = ({"parallel.strategy": "zero", "parallel.zero_stage": stage} for stage in (1, 2, 3))
CORE = {"engine": "megatron-core"}


def estimated(network_gbit: float, fields: dict[str, Any], *, overlaps: bool = True) -> tuple[Estimate, float]:
    """The estimate on two nodes of one GPU, and the seconds of the exchange of gradients by itself."""
    assumed = Assumptions(GPUS["a100-80gb"], network_gbit=network_gbit, overlaps=overlaps)
    assessed = assess(with_fields(BASE, fields), {"a": range(1), "b": range(1)}, "overlap", assumed)
    assert assessed.cost is not None
    assert assessed.cost.estimate is not None
    (data,) = (one for one in assessed.cost.traffic if one.group == "data")
    assert isinstance(data, Traffic)
    return assessed.cost.estimate, assessed.cost.rates.seconds(data)


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"parallel.strategy": "ddp"}, 2 / 3 / PASSES),
        ({"parallel.strategy": "fsdp"}, 1.0),
        (ZERO3, 1.0),
        (CORE, 2 / 3 / PASSES),
        ({**CORE, "parallel.use_distributed_optimizer": True}, 1 / PASSES),
    ],
    ids=["ddp", "fsdp", "zero3", "megatron-core", "distributed optimizer"],
)
def test_what_the_computing_does_not_cover(fields: dict[str, Any], window: float) -> None:
    slow, alone = estimated(1.0, fields)
    assert slow.gradients == pytest.approx(alone - window * slow.compute)
    fast, alone = estimated(10_000.0, fields)
    assert fast.gradients == pytest.approx(alone / LAYERS)  # the last layer's come when all is computed


def test_an_interleaved_pipeline_sends_each_chunks_gradients_beside_the_other_chunks() -> None:
    """The other chunks work for as many micro batches as there are stages."""
    fields = {
        **CORE,
        "parallel.pipeline_model_parallel_size": 2,
        "parallel.use_tp_pp_dp_mapping": True,
        "batch.global_batch_size": 2 * 2 * 2 * PASSES,
    }
    windows = []
    for virtual in (1, 2):
        experiment = with_fields(BASE, {**fields, "parallel.virtual_pipeline_model_parallel_size": virtual})
        assumed = Assumptions(GPUS["a100-80gb"], network_gbit=0.5)
        cost = assess(experiment, {"a": range(2), "b": range(2)}, "overlap", assumed).cost
        assert cost is not None
        assert cost.estimate is not None
        alone = sum(cost.rates.seconds(one) for one in cost.traffic if one.group in ("data", "embedding"))
        windows.append((alone - cost.estimate.gradients) / cost.estimate.compute)
    assert windows == pytest.approx([2 / 3 / (2 * PASSES), 2 / 3 * 2 / (2 * PASSES)])


def test_communication_takes_units_from_the_computation_beside_it() -> None:
    """NCCL's 16 channels over a network, of an A100's 108 units."""
    found, alone = estimated(1000.0, {"parallel.strategy": "fsdp"})
    assert found.contention == pytest.approx((alone - found.gradients) * 16 / 108)
    assert found.iteration == pytest.approx(sum(found.terms.values()))
    waiting, _ = estimated(1000.0, {"parallel.strategy": "fsdp"}, overlaps=False)
    assert waiting.contention == 0.0
    assert waiting.iteration > found.iteration


def test_rings_take_a_step_for_every_rank() -> None:
    """An all-gather of a layer on 64 nodes: 63 steps over the network, 448 inside nodes (NCCL's own model)."""
    rates = Rates.of(GPUS["h100-80gb"], "bf16", None, None)
    few, many = (Traffic("data", ranks, "network", 1, 0, 0, 1, 8) for ranks in (16, 512))
    assert rates.seconds(few) == pytest.approx(110e-6)  # measured
    assert rates.seconds(many) == pytest.approx(63 * 14e-6 + 448 * 3.4e-6)


@pytest.mark.parametrize(
    ("fields", "window", "hidden"),
    [
        (ZERO1, 2 / 3 / PASSES, 2 / 3),
        (ZERO2, 2 / 3, 2 * PASSES / (2 * PASSES + 1)),
    ],
    ids=["zero1", "zero2"],
)
def test_weights_are_gathered_after_the_step(fields: dict[str, Any], window: float, hidden: float) -> None:
    slow, alone = estimated(1.0, fields)
    assert slow.gradients == pytest.approx(alone - window * slow.compute)
    fast, alone = estimated(10_000.0, fields)
    assert fast.gradients == pytest.approx(alone * (1 - hidden * (1 - 1 / LAYERS)))


@pytest.mark.parametrize(
    "fields",
    [
        {"parallel.strategy": "zero", "parallel.zero_stage": 0},
        {
            "engine": "megatron-deepspeed",
            "data.vocab_file": "data/vocab.json",
            "data.merge_file": "data/merges.txt",
            "parallel.strategy": "ddp",
            "batch.global_batch_size": 4,
        },
    ],
    ids=["zero0", "v1.1.5 ddp"],
)
def test_who_waits_for_all_of_it(fields: dict[str, Any]) -> None:
    found, alone = estimated(100.0, {"precision": "fp16", **fields})
    assert found.gradients == pytest.approx(alone)


@pytest.mark.parametrize("fields", [{"parallel.strategy": "fsdp"}, CORE], ids=["fsdp", "megatron-core"])
def test_a_program_that_overlaps_nothing(fields: dict[str, Any]) -> None:
    found, alone = estimated(100.0, fields, overlaps=False)
    assert found.gradients == pytest.approx(alone)


def test_tensor_parallel_ranks_that_overlap_nothing() -> None:
    fields = {**CORE, "parallel.tensor_model_parallel_size": 2}
    assumed = [Assumptions(GPUS["a100-80gb"], overlaps=overlaps) for overlaps in (True, False)]
    with_it, without = (assess(with_fields(BASE, fields), {"a": range(2)}, "e", one).cost for one in assumed)
    assert with_it is not None
    assert without is not None
    assert with_it.estimate is not None
    assert without.estimate is not None
    (tensor,) = (one for one in without.traffic if one.group == "tensor")
    assert without.estimate.tensor_and_context == pytest.approx(without.rates.seconds(tensor))
    assert with_it.estimate.tensor_and_context < without.estimate.tensor_and_context


def test_all_layers_again_take_their_forward_pass() -> None:
    """A third of the products, attention and other kernels, as backward passes take twice as long; the output layer and
    the loss are not computed again."""
    plain, again = (estimated(400.0, {"model.checkpoint_activations": full})[0] for full in (False, True))
    forward = (plain.products + plain.attention + plain.elementwise) / 3
    assert plain.recomputed == 0
    assert 0.5 * forward < again.recomputed < forward
    assert again.compute == pytest.approx(plain.compute + again.recomputed, rel=0.2)


def test_kernels_that_are_too_small_wait_for_their_launches() -> None:
    small, large = (
        estimated(400.0, {"model.hidden_size": hidden, "model.num_attention_heads": 8})[0] for hidden in (256, 8192)
    )
    deep, _ = estimated(400.0, {"model.hidden_size": 256, "model.num_layers": 2 * LAYERS})
    assert small.launches > 0.4 * small.compute
    assert large.launches < 0.1 * large.compute
    assert deep.launches == pytest.approx(2 * small.launches, rel=0.15)
