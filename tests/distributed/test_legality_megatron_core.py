"""What the plan says of an experiment is what megatron-core does with it, in hundreds of layouts.

Each is built and trained one step on the first and the last rank of a pretended world (``pretended.py``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed import legality
from tests.distributed.legality import Case, agree, chosen, reasons_in
from tridock.experiment.schema import Optimizer
from tridock.experiment.training import learning_rate

pytest.importorskip("torch")
pytest.importorskip("megatron.core", exc_type=ImportError)

pytestmark = pytest.mark.distributed

PROGRAM = "pretended"


def case(world_size: int, model: dict[str, Any], parallel: dict[str, Any], **others: Any) -> Case:
    return legality.case("megatron-core", world_size, model, parallel, **others)


def sizes() -> Iterator[Case]:
    """Every combination of small sizes, in a world of one or two replicas, or one rank more than fits."""
    chance = random.Random(1)
    parallel = product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2), (1, 2), (False, True))
    for layers, heads, (tensor, stages, virtual, context, sequence), steps in product(
        (2, 3, 4, 6, 8), (2, 3, 4, 5), list(parallel), (1, 2, 3, 4)
    ):
        replicas, over = chance.choice((1, 2)), chance.choice((0, 0, 0, 1))
        model = {"num_layers": layers, "num_attention_heads": heads, "seq_length": chance.choice((6, 7, 8, 10, 12, 24))}
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
        layout = {
            **dict(zip(names, (tensor, stages, virtual), strict=True)),
            "context_parallel_size": context,
            "sequence_parallel": sequence,
        }
        batch = legality.batch(chance, replicas, steps)
        yield case(tensor * stages * context * replicas + over, model, layout, batch=batch)


@pytest.mark.parametrize(
    ("accepted", "refused", "least"), [(20, 3, 50), pytest.param(200, 30, 500, marks=pytest.mark.full)]
)
def test_sizes(accepted: int, refused: int, least: int) -> None:
    cases = chosen(sizes(), accepted, refused)
    assert len(reasons_in(cases)) == 13
    assert len(cases) > least
    agree(cases, PROGRAM)


def unequal_stages() -> Iterator[Case]:
    """First and last stages with their own numbers of layers.

    Numbers that leave fewer layers than stages are not here: the engine takes some, and builds another model.
    """
    numbers = (None, 1, 2, 3, 4, 6)
    for layers, stages, virtual, first, last, number in product(
        (4, 6, 8), (1, 2, 3, 4), (1, 2), numbers, numbers, (None, 2)
    ):
        given, between = (first or 0) + (last or 0), stages - (first is not None) - (last is not None)
        if given + between > layers or (stages == 1 and None not in (first, last)):
            continue
        if number and stages > 2:
            continue  # no rank of a stage in between is built
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": number}
        parallel = {
            "pipeline_model_parallel_size": stages,
            "virtual_pipeline_model_parallel_size": virtual,
            "decoder_first_pipeline_num_layers": first,
            "decoder_last_pipeline_num_layers": last,
        }
        batch = {"micro_batch_size": 1, "global_batch_size": stages}
        yield case(stages, {"num_layers": layers, **(recompute if number else {})}, parallel, batch=batch)


@pytest.mark.parametrize(
    ("accepted", "refused", "least"), [(10, 2, 20), pytest.param(300, 60, 300, marks=pytest.mark.full)]
)
def test_unequal_stages(accepted: int, refused: int, least: int) -> None:
    cases = chosen(unequal_stages(), accepted, refused)
    assert len(cases) > least
    agree(cases, PROGRAM)


def test_recomputation() -> None:
    methods = product(("full", "selective"), (None, "uniform", "block"), (None, 1, 2, 3, 4, 5, 6))
    layouts = [(1, 1, 6), (2, 1, 6), (2, 2, 4)]
    cases = []
    for (granularity, method, number), (stages, virtual, layers) in product(methods, layouts):
        if granularity == "selective" and method is not None:
            continue  # the engine takes the method then, and does nothing with it
        model = {"num_layers": layers, "recompute_method": method, "recompute_num_layers": number}
        parallel = {"pipeline_model_parallel_size": stages, "virtual_pipeline_model_parallel_size": virtual}
        batch = {"micro_batch_size": 1, "global_batch_size": 2}
        cases.append(case(stages, {**model, "recompute_granularity": granularity}, parallel, batch=batch))
    assert len(reasons_in(cases)) == 4
    agree(cases, PROGRAM)


def test_formats_optimizers_and_the_smallest_models() -> None:
    cases = []
    for precision, optimizer, data, tensor in product(("fp32", "bf16", "fp16"), (False, True), (1, 2), (1, 2)):
        parallel = {"use_distributed_optimizer": optimizer, "tensor_model_parallel_size": tensor}
        cases.append(case(data * tensor, {}, parallel, precision=precision))
    for positions, length in product((1, 7, 8, 9), (1, 7, 8, 9)):
        cases.append(case(1, {"max_position_embeddings": positions, "seq_length": length}, {}))
    for stages, context, mapping in product((1, 2), (1, 2), (False, True)):
        layout = {
            "pipeline_model_parallel_size": stages,
            "context_parallel_size": context,
            "use_tp_pp_dp_mapping": mapping,
        }
        cases.append(case(2 * stages * context, {"num_layers": 2}, layout))
    cases.append(case(1, {"num_layers": 1, "hidden_size": 1, "num_attention_heads": 1, "seq_length": 1}, {}))
    cases.append(case(4, {"vocab_size": 1, "make_vocab_size_divisible_by": 1}, {"tensor_model_parallel_size": 4}))
    agree(cases, PROGRAM)


def test_kinds_of_layers() -> None:
    """Query groups, also fewer than tensor parallel ranks, MLPs that these cannot share, and all sorts of layers."""
    cases = []
    for groups, tensor, ffn in product((1, 2, 3, 4, 6, 12), (1, 2, 3, 4), (24, 10)):
        model = {"num_attention_heads": 12, "kv_channels": 2, "num_query_groups": groups, "ffn_hidden_size": ffn}
        cases.append(case(tensor, model, {"tensor_model_parallel_size": tensor}))
    kinds = (("normalization", "RMSNorm"), ("swiglu", True), ("add_bias_linear", False), ("qk_layernorm", True))
    for chosen_kinds in product((False, True), repeat=len(kinds)):
        model = {name: value for (name, value), taken in zip(kinds, chosen_kinds, strict=True) if taken}
        parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
        cases.append(case(2, {**model, "position_embedding_type": "rope", "kv_channels": 4}, parallel))
    assert len(reasons_in(cases)) == 2
    agree(cases, PROGRAM)


def mixtures() -> Iterator[Case]:
    """Experts, and how ranks share them out, in worlds of one to three replicas."""
    chance = random.Random(4)
    layouts = product((1, 2), (1, 2), (1, 2), (1, 2, 3, 4), (None, 1, 2, 3))
    for (tensor, stages, context, experts, shared), count, replicas in product(layouts, (2, 3, 4), (1, 2, 3)):
        model = {
            "num_moe_experts": count,
            "moe_router_topk": chance.choice((2, 2, 2, 3)),
            "moe_ffn_hidden_size": chance.choice((None, 12, 15)),
            "moe_aux_loss_coeff": 0.1,
            "moe_router_load_balancing_type": chance.choice(("aux_loss", "seq_aux_loss")),
            "swiglu": chance.choice((False, True)),
            "add_bias_linear": experts == 1 and chance.random() < 0.2,
        }
        parallel = {
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": stages,
            "context_parallel_size": context,
            "expert_model_parallel_size": experts,
            "expert_tensor_parallel_size": shared,
            "sequence_parallel": tensor > 1 and chance.random() < 0.9,
            "use_tp_pp_dp_mapping": chance.random() < 0.3,
        }
        yield case(tensor * stages * context * replicas, model, parallel)


@pytest.mark.parametrize(
    ("accepted", "refused", "least"), [(20, 3, 30), pytest.param(400, 60, 400, marks=pytest.mark.full)]
)
def test_mixtures_of_experts(accepted: int, refused: int, least: int) -> None:
    cases = chosen(mixtures(), accepted, refused)
    assert len(reasons_in(cases)) == 9
    assert len(cases) > least
    agree(cases, PROGRAM)


@pytest.mark.parametrize("style", ["cosine", "linear", "constant"])
def test_the_schedule_is_one_of_megatrons(style: str) -> None:
    scheduler: Any = pytest.importorskip("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    for warmup, decay, iterations, peak, least in product(
        (0, 1, 4, 5), (None, 1, 5), (1, 5), (1e-3, 1e-5), (0.0, 1e-4)
    ):
        settings = {"lr_warmup_iters": warmup, "lr_decay_iters": decay, "lr": peak, "min_lr": least}
        one = case(1, {}, {}, optimizer={**settings, "lr_decay_style": style}, train={"train_iters": iterations})
        # Megatron trains nothing with a rate that is 0 throughout.
        reasons = [reason for reason in one.reasons() if "makes the learning rate of all" not in reason]
        try:
            scheduler(
                SimpleNamespace(param_groups=[]),
                0.0,
                peak,
                least,
                warmup,
                decay or iterations,
                style,
                0.0,
                0.0,
                1,
                "constant",
            )
        except AssertionError:
            assert reasons, one
        else:
            assert not reasons, one


def test_a_warm_up_of_a_fraction_has_megatrons_rates() -> None:
    scheduler: Any = pytest.importorskip("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    for fraction, decay, style in product((0.0, 0.1, 0.5, 0.99), (7, 25), ("cosine", "linear", "constant")):
        own = Optimizer(lr=1.0, min_lr=0.1, lr_warmup_fraction=fraction, lr_decay_iters=decay, lr_decay_style=style)
        groups = [{"lr": 0.0}]
        theirs = scheduler(
            SimpleNamespace(param_groups=groups), 0.0, 1.0, 0.1, fraction * decay, decay, style, 0.0, 0.0, 1, "constant"
        )
        for iteration in range(1, decay + 3):
            theirs.step(1)
            assert learning_rate(iteration, own, 99) == pytest.approx(groups[0]["lr"]), (own, iteration)
