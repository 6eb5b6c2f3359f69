"""Cost of an iteration: FLOPs, the pipeline's bubble, traffic by link, and an estimate of the time.

The estimate adds up sequential parts: the slowest stage's work for every micro batch
(:mod:`~tridock.layout.compute_time`), the time in which the pipeline fills and drains at the other stages' rates
(Narayanan et al., 2021, section 2.2), the communication inside layers, between stages and of gradients
(:mod:`~tridock.plan.rates`), and the optimizer's reads and writes of its states. Communication that overlaps with
computation counts only as far as the computation does not hide it.
"""

from dataclasses import dataclass
from typing import Final

from tridock.engines import ENGINES, CostModel, cost_model_of, rules_of
from tridock.experiment import Experiment
from tridock.experiment.parameters import (
    causal_flops_per_token,
    model_flops_per_token,
    model_parameters,
    recomputed_flops_per_token,
)
from tridock.layout.kernels import pass_seconds
from tridock.layout.shape import HostWork, LayoutShape, layers_of_stage, recomputed_layers, unlike_stages
from tridock.layout.traffic import Sent, Traffic
from tridock.plan.rates import Rates

_DAY_S: Final = 86400.0
_BACKWARD: Final = 2 / 3
"""Share of the backward pass in the computation."""
HOST_LINK_GB_S: Final = 25.0
"""Assumed rate between a GPU and its host's page-locked memory, one way, over PCIe 4 with 16 lanes (31.5 GB/s)."""
HOST_MEMORY_GB_S: Final = 38.0
"""Assumed rate of the host's memory for each of its 8 GPUs. Two sockets with 8 channels of DDR4-3200 have 410 GB/s;
STREAM reaches three quarters of that."""
NVME_GB_S: Final = 1.6
"""Assumed rate of each of a node's GPUs to NVMe when all use it: 25 GB/s for the 16 of a DGX-2 (Rajbhandari et al.,
2021, ZeRO-Infinity, figure 2)."""
_UPDATE_PASSES: Final = 3
"""Passes over the gradients before the optimizer step: for the norm, to clip them, to copy them."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of one iteration, and the figures derived from their sum."""

    products: float
    attention: float
    elementwise: float
    recomputed: float
    launches: float
    contention: float
    """What computation takes longer because communication occupies units of the device beside it."""
    bubble: float
    tensor_and_context: float
    pipeline: float
    gradients: float
    optimizer: float
    offload: float
    unexplained: float
    """What published runs of this class typically take besides the other terms; negative if they take less."""
    seconds_range: tuple[float, float] | None
    """The seconds that nine of ten such runs lie between; None if none were published."""
    tokens_per_second: float
    mfu: float | None
    """Model FLOPs over the GPUs' peak."""

    @property
    def terms(self) -> dict[str, float]:
        """Returns the parts of the sum by their names."""
        return {
            "matrix products": self.products,
            "attention": self.attention,
            "other kernels": self.elementwise,
            "recomputation": self.recomputed,
            "launches": self.launches,
            "contention": self.contention,
            "bubble": self.bubble,
            "inside layers": self.tensor_and_context,
            "between stages": self.pipeline,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "offload": self.offload,
            "unexplained": self.unexplained,
        }

    @property
    def compute(self) -> float:
        """Returns the slowest stage's computation for all micro batches."""
        return self.products + self.attention + self.elementwise + self.recomputed + self.launches

    @property
    def iteration(self) -> float:
        return sum(self.terms.values())

    def times_of(self, value: float) -> tuple[float, float] | None:
        """Returns the range of a time that is ``value`` with the estimated iteration."""
        if self.seconds_range is None:
            return None
        return value * self.seconds_range[0] / self.iteration, value * self.seconds_range[1] / self.iteration

    @property
    def speeds(self) -> tuple[float, float] | None:
        """Returns the range of tokens a second."""
        tokens = self.tokens_per_second * self.iteration
        return self.seconds_range and (tokens / self.seconds_range[1], tokens / self.seconds_range[0])


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one iteration, of all ranks together unless a field says otherwise."""

    parameters: int
    active: int
    """The weights that work on one token; the others belong to experts that do not."""
    tokens: int
    model_flops: float
    causal_flops: float
    """The same with half of the attention FLOPs, as causal attention needs."""
    hardware_flops: float
    """The FLOPs including recomputation."""
    bubble: float
    """Share of the iteration in which a stage waits for the pipeline to fill and drain, without communication."""
    traffic: tuple[Traffic, ...]
    rates: Rates
    estimate: Estimate | None

    def days(self, tokens: float) -> float | None:
        return None if self.estimate is None else tokens / self.estimate.tokens_per_second / _DAY_S


def cost_of(experiment: Experiment, shape: LayoutShape, state_bytes: int, rates: Rates) -> Cost:
    """Returns the cost. If the engine has no cost model, traffic and time are unknown.

    ``state_bytes``: weights, gradients and optimizer states of the fullest rank.
    """
    model, parallel = experiment.model, experiment.parallel
    stages, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    rows, micro = rules_of(experiment).rows_of_vocabulary(experiment), experiment.batch.micro_batch_size
    tokens = micro * shape.data * shape.accumulation * model.seq_length
    again = sum(recomputed_layers(experiment, layers_of_stage(experiment, stage)) for stage in range(stages))
    selective = model.recompute_granularity == "selective"
    model_flops = tokens * model_flops_per_token(model, rows)
    filling = (stages - 1) / virtual
    exchanged: tuple[Traffic, ...] = ()
    estimate = None
    if ENGINES[experiment.engine].cost_model is not None:
        cost_model = cost_model_of(experiment)
        exchanged = tuple(cost_model.traffic(experiment, shape))
        estimate = _estimate(cost_model, experiment, shape, exchanged, model_flops, tokens, state_bytes, rates)
    return Cost(
        parameters=model_parameters(model, rows),
        active=model_parameters(model, rows, active=True),
        tokens=tokens,
        model_flops=model_flops,
        causal_flops=tokens * causal_flops_per_token(model, rows),
        hardware_flops=model_flops + tokens * recomputed_flops_per_token(model, again, selective),
        bubble=filling / (shape.accumulation + filling),
        traffic=exchanged,
        rates=rates,
        estimate=estimate,
    )


def _estimate(
    cost_model: CostModel,
    experiment: Experiment,
    shape: LayoutShape,
    exchanged: tuple[Traffic, ...],
    model_flops: float,
    tokens: int,
    state_bytes: int,
    rates: Rates,
) -> Estimate | None:
    # Convolutions reach a smaller share of the peak, for which no figure is known.
    if rates.device is None or (experiment.model.is_vision and not rates.device.flat):
        return None
    parallel = experiment.parallel
    stages, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    times = {
        kind: cost_model.stage_time(experiment, stage, shape, rates.device, rates.attention, rates.gpu)
        for kind, stage in {_kind(experiment, stage): stage for stage in reversed(range(stages))}.items()
    }
    slowest = max(times.values(), key=lambda time: time.total)
    everywhere = sum(times[_kind(experiment, stage)].total for stage in range(stages))
    steps = shape.accumulation
    seconds = {one.group: rates.seconds(one) for one in exchanged}
    sent = cost_model.sent(experiment, shape, 0)
    products = sent.tensor_overlap == "products"
    beside_tensor = slowest.products if products else slowest.column_gradients
    contention = 0.0
    for one in exchanged:
        behind = steps * (beside_tensor if one.group == "tensor" else slowest.total)
        hidden = min(behind, rates.carried(one, one.waits * one.hideable)) if rates.overlaps else 0.0
        seconds[one.group] -= hidden
        # Pieces beside products are copied without NCCL, and so are not counted.
        contention += 0.0 if products and one.group == "tensor" else hidden * rates.occupied(one)
    # Communication inside layers is part of every micro batch's work, also while the pipeline fills.
    inside = sum(seconds.get(group, 0.0) for group in ("tensor", "context", "expert", "expert tensor"))
    compute = steps * slowest.total
    bubble = (everywhere - slowest.total) / virtual + (stages - 1) / virtual * inside / steps
    # States count as read and written once. Gradients are only read, which compensates for the other passes.
    weights = max(cost_model.parameters(experiment, stage).total for stage in unlike_stages(experiment))
    moved = 2 * state_bytes + _UPDATE_PASSES * 4 * min(weights, state_bytes / 12)
    optimizer = pass_seconds(rates.device, moved)
    summed = seconds.get("data", 0.0) + seconds.get("expert data", 0.0)
    exposed = _exposed(experiment, sent, summed, compute) if rates.overlaps else summed
    contention += sum(
        (summed - exposed) * seconds[one.group] / summed * rates.occupied(one)
        for one in exchanged
        if one.group in ("data", "expert data") and summed
    )
    gradients = exposed + seconds.get("embedding", 0.0)
    offload = _offloading(cost_model.host_work(experiment, shape), _BACKWARD * compute)
    known = compute + contention + bubble + inside + seconds.get("pipeline", 0.0) + gradients + optimizer + offload
    spread = rates.spread
    total = known if spread is None else known * spread.typical
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size * stages * shape.data
    mfu = None if rates.peak_tflops is None else model_flops / total / ranks / (rates.peak_tflops * 1e12)
    return Estimate(
        products=steps * slowest.products,
        attention=steps * slowest.attention,
        elementwise=steps * slowest.elementwise,
        recomputed=steps * slowest.recomputed,
        launches=steps * slowest.launches,
        contention=contention,
        bubble=bubble,
        tensor_and_context=inside,
        pipeline=seconds.get("pipeline", 0.0),
        gradients=gradients,
        optimizer=optimizer,
        offload=offload,
        unexplained=total - known,
        seconds_range=None if spread is None else (known * spread.low, known * spread.high),
        tokens_per_second=tokens / total,
        mfu=mfu,
    )


def _offloading(work: HostWork, backward: float) -> float:
    """Gradients move to the host during the backward passes. The update on the host, the weights' way back, and NVMe
    do not overlap."""
    gradients, weights = (moved / (HOST_LINK_GB_S * 1e9) for moved in (work.gradients, work.weights))
    on_host = work.updated / (HOST_MEMORY_GB_S * 1e9) + work.nvme / (NVME_GB_S * 1e9)
    return max(0.0, gradients - backward) + weights + on_host


def _exposed(experiment: Experiment, sent: Sent, seconds: float, compute: float) -> float:
    """Returns the exposed time of the data parallel communication: at least the last layer's."""
    layers = max(layers_of_stage(experiment, stage) for stage in unlike_stages(experiment))
    return seconds - min(seconds * sent.overlapped * (1 - 1 / layers), compute * sent.computing)


def _kind(experiment: Experiment, stage: int) -> tuple[int, bool]:
    """Returns a key of stages that take equally long: the number of layers, and whether it has the output layer."""
    last = stage == experiment.parallel.pipeline_model_parallel_size - 1
    return layers_of_stage(experiment, stage), last
