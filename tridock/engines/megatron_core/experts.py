"""Reasons why megatron-core cannot run a mixture of experts. The expert groups are those of its parallel_state."""

import math
from collections.abc import Iterator
from itertools import product

from tridock.engines.fields import MIXTURE, as_yaml
from tridock.engines.rules import Choice
from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.layout.split import around, divisors, either, must_divide, nearest_multiples


def problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields the problems of the mixture that do not depend on the number of ranks."""
    if experiment.model.num_moe_experts is None:
        yield from _without_experts(experiment)
    else:
        yield from _size_problems(experiment, experiment.model.num_moe_experts)
        yield from _layout_problems(experiment)


def rank_problems(experiment: Experiment, replicas: int) -> Iterator[Problem]:
    """Yields a number of ranks in a pipeline stage that expert groups do not fill."""
    if (count := experiment.model.num_moe_experts) is None:
        return
    parallel = experiment.parallel
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size * replicas
    tensor, size = parallel.expert_tensor_size, parallel.expert_model_parallel_size
    if ranks % tensor:
        named = f"the {ranks} ranks of a pipeline stage"
        yield must_divide("parallel.expert_tensor_parallel_size", tensor, ranks, named)
    elif ranks % (tensor * size):
        near = around([one for one in divisors(ranks // tensor) if count % one == 0], size)
        of = f"{ranks // tensor} of the " if tensor > 1 else ""
        what = f"must divide {of}{ranks} ranks of a pipeline stage" + (
            f" (one in expert_tensor_parallel_size {tensor})" if tensor > 1 else ""
        )
        yield Problem("parallel.expert_model_parallel_size", what, str(size), f"use {either(near)}", near)


def expert_choices(experiment: Experiment, tensor: int) -> list[Choice]:
    """Returns the expert parallel sizes to try, with experts whole or split like the other weights."""
    if (count := experiment.model.num_moe_experts) is None:
        return [{}]
    names = ("parallel.expert_model_parallel_size", "parallel.expert_tensor_parallel_size")
    sizes = product(divisors(count), (1,) if tensor == 1 else (1, tensor))
    return [dict(zip(names, chosen, strict=True)) for chosen in sizes]


def _without_experts(experiment: Experiment) -> Iterator[Problem]:
    for path in MIXTURE:
        section, _, name = path.partition(".")
        given = getattr(experiment, section)
        default, value = type(given).model_fields[name].default, getattr(given, name)
        if value != default:
            yield Problem(path, "needs model.num_moe_experts", as_yaml(value), "leave it out", (as_yaml(default),))


def _size_problems(experiment: Experiment, count: int) -> Iterator[Problem]:
    model, parallel = experiment.model, experiment.parallel
    if model.moe_router_topk > count:
        what, todo = f"must be at most num_moe_experts {count}", f"use {count} or fewer"
        yield Problem("model.moe_router_topk", what, str(model.moe_router_topk), todo, (count,))
    if model.moe_router_topk == 1 and not model.moe_router_pre_softmax:
        what = "moe_router_topk 1 needs it: the softmax of one score is 1, and its router would not learn"
        yield Problem("model.moe_router_pre_softmax", what, "false", "set it to true, or use 2 experts", ("true",))
    if model.moe_router_load_balancing_type == "none" and model.moe_aux_loss_coeff:
        what = "moe_router_load_balancing_type none has no such loss"
        yield Problem("model.moe_aux_loss_coeff", what, f"{model.moe_aux_loss_coeff:g}", "leave it out", ("0.0",))
    size, tensor = parallel.expert_model_parallel_size, parallel.expert_tensor_size
    if count % size:
        yield must_divide("parallel.expert_model_parallel_size", size, count, f"num_moe_experts {count}")
    shared, ranks = model.moe_shared_expert_intermediate_size, parallel.tensor_model_parallel_size
    if shared is not None and shared % ranks:
        near = nearest_multiples(ranks, shared)
        what = f"must be a multiple of tensor_model_parallel_size {ranks}"
        yield Problem("model.moe_shared_expert_intermediate_size", what, str(shared), f"use {either(near)}", near)
    if shared is None and model.moe_shared_expert_gate:
        what = "needs model.moe_shared_expert_intermediate_size"
        yield Problem("model.moe_shared_expert_gate", what, "true", "set it, or leave this out", ("false",))
    if model.expert_size % tensor:
        whole, named = math.gcd(model.expert_size, ranks) or 1, f"the experts' width {model.expert_size}"
        yield must_divide("parallel.expert_tensor_parallel_size", tensor, whole, named)


def _layout_problems(experiment: Experiment) -> Iterator[Problem]:
    parallel, tensor = experiment.parallel, experiment.parallel.expert_tensor_size
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        what = "megatron-core trains a mixture of experts with tensor parallelism only so"
        yield Problem("parallel.sequence_parallel", what, "false", "set it to true", ("true",))
    if experiment.model.add_bias_linear:
        # It adds the biases in place to outputs of its autograd functions: the first step fails (0.16.1).
        what = "megatron-core does not train experts with biases"
        yield Problem("model.add_bias_linear", what, "true", "set it to false", ("false",))
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    covered = tensor * parallel.expert_model_parallel_size
    if parallel.use_tp_pp_dp_mapping and parallel.pipeline_model_parallel_size > 1 and covered != ranks:
        what = (
            "megatron-core numbers the ranks so only where expert_tensor_parallel_size x expert_model_parallel_size"
            f" {covered} is tensor x context parallel size {ranks}"
        )
        yield Problem("parallel.use_tp_pp_dp_mapping", what, "true", "leave it out, or change one of them", ("false",))
