"""What an iteration costs: FLOPs, the pipeline's bubble, what goes over which link, and an estimate of its time.

The estimate adds up what happens one after the other: the slowest stage's work for every micro batch at the given rate,
the pipeline's filling and draining (Narayanan et al., 2021, section 2.2), the exchange inside layers, between stages
and of gradients at the links' rates, and the optimizer's reading and writing of its states. Gradients that travel while
the rank computes count only beyond what they can hide behind.
"""

from dataclasses import dataclass
from typing import Final, Self

from tridock.engines import engine_of
from tridock.experiment import Experiment
from tridock.experiment.flops import (
    attention_flops_per_token,
    causal_flops_per_token,
    head_flops_per_token,
    layer_flops_per_token,
    model_flops_per_token,
    recomputed_flops_per_token,
)
from tridock.experiment.weights import model_parameters
from tridock.gpus import Gpu
from tridock.layout.shape import Shape, layers_of_stage, recomputed_layers
from tridock.layout.traffic import Traffic

ASSUMED_SHARE: Final = 0.5
"""Of a GPU's peak, for its matrix products, where no rate is given; Narayanan et al. (2021) report 44 to 52 %."""
GIVEN: Final = "given"
DEFAULT_NETWORK_GBIT: Final = 100.0
DEFAULT_LINK_GB_S: Final = 32.0
"""PCIe 4, for a GPU that is not listed."""
DEFAULT_MEMORY_GB_S: Final = 900.0
"""HBM2's, for a GPU that is not listed."""
_DAY_S: Final = 86400.0


@dataclass(frozen=True, slots=True)
class Rates:
    """What the estimate stands on. None where it is not known: then there is no estimate."""

    tflops: float | None
    """Of one GPU, while it computes."""
    tflops_source: str
    link_gb_s: float
    """Between GPUs of a node, one direction, of one GPU."""
    network_gb_s: float
    """Between nodes, one direction, of one node."""
    memory_gb_s: float
    """A GPU's own memory."""
    peak_tflops: float | None

    @classmethod
    def of(
        cls, gpu: Gpu | None, precision: str, tflops: float | None, network_gbit: float | None, tf32: bool = False
    ) -> Self:
        """A GPU's rates; ``tflops``, measured or wished for, stands in for the assumed share of the peak."""
        network = (DEFAULT_NETWORK_GBIT if network_gbit is None else network_gbit) / 8
        peak = None if gpu is None else gpu.tflops(precision, tf32)
        link = (None if gpu is None else gpu.link_gb_s) or DEFAULT_LINK_GB_S
        memory = (None if gpu is None else gpu.memory_gb_s) or DEFAULT_MEMORY_GB_S
        if tflops is not None:
            return cls(tflops, GIVEN, link, network, memory, peak)
        rate = None if peak is None else ASSUMED_SHARE * peak
        return cls(rate, f"assumed: {ASSUMED_SHARE:.0%} of the peak", link, network, memory, peak)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of one iteration, and what follows from their sum."""

    compute: float
    bubble: float
    tensor_and_context: float
    pipeline: float
    gradients: float
    optimizer: float
    tokens_per_second: float
    mfu: float | None
    """Model FLOPs over what the GPUs could do at best."""

    @property
    def iteration(self) -> float:
        return self.compute + self.bubble + self.tensor_and_context + self.pipeline + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one iteration, all ranks together unless a field says otherwise."""

    parameters: int
    tokens: int
    model_flops: float
    causal_flops: float
    """The same with half of the attention, as causal attention needs it."""
    hardware_flops: float
    """With what is computed again."""
    bubble: float
    """Share of the iteration in which a stage waits for the pipeline to fill and drain, communication aside."""
    traffic: tuple[Traffic, ...]
    rates: Rates
    estimate: Estimate | None

    def days(self, tokens: float) -> float | None:
        return None if self.estimate is None else tokens / self.estimate.tokens_per_second / _DAY_S


def cost_of(experiment: Experiment, shape: Shape, state_bytes: int, rates: Rates) -> Cost:
    """``state_bytes``: weights, gradients and optimizer states of the fullest rank."""
    model, parallel = experiment.model, experiment.parallel
    stages, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    rows, micro = engine_of(experiment).rows_of_vocabulary(experiment), experiment.batch.micro_batch_size
    tokens = micro * shape.data * shape.accumulation * model.seq_length
    again = sum(recomputed_layers(experiment, layers_of_stage(experiment, stage)) for stage in range(stages))
    selective = model.recompute_granularity == "selective"
    model_flops = tokens * model_flops_per_token(model, rows)
    filling = (stages - 1) / virtual
    exchanged = tuple(engine_of(experiment).traffic(experiment, shape))
    return Cost(
        parameters=model_parameters(model, rows),
        tokens=tokens,
        model_flops=model_flops,
        causal_flops=tokens * causal_flops_per_token(model, rows),
        hardware_flops=model_flops + tokens * recomputed_flops_per_token(model, again, selective),
        bubble=filling / (shape.accumulation + filling),
        traffic=exchanged,
        rates=rates,
        estimate=_estimate(experiment, shape, exchanged, model_flops, tokens, state_bytes, rates),
    )


def _estimate(
    experiment: Experiment,
    shape: Shape,
    exchanged: tuple[Traffic, ...],
    model_flops: float,
    tokens: int,
    state_bytes: int,
    rates: Rates,
) -> Estimate | None:
    # Convolutions run at a smaller share of the peak, which nobody has set down here.
    assumed = rates.tflops is not None and rates.tflops_source != GIVEN
    if rates.tflops is None or (experiment.model.is_vision and assumed):
        return None
    parallel = experiment.parallel
    stages, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    micro = _slowest_stage_flops(experiment) / (rates.tflops * 1e12)
    seconds = {one.group: seconds_of(one, rates) for one in exchanged}
    inside = seconds.get("tensor", 0.0) + seconds.get("context", 0.0)
    filling = (stages - 1) / virtual
    # What is exchanged inside layers is part of every micro batch's work, the filling's too.
    compute, inside_all = shape.accumulation * micro, inside
    bubble = filling * (micro + inside / shape.accumulation)
    # States are read and written once; the gradients among them are read only, which the rest makes up for.
    optimizer = 2 * state_bytes / (rates.memory_gb_s * 1e9)
    gradients = _exposed(experiment, shape, seconds.get("data", 0.0), compute) + seconds.get("embedding", 0.0)
    total = compute + bubble + inside_all + seconds.get("pipeline", 0.0) + gradients + optimizer
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size * stages * shape.data
    mfu = None if rates.peak_tflops is None else model_flops / total / ranks / (rates.peak_tflops * 1e12)
    return Estimate(
        compute=compute,
        bubble=bubble,
        tensor_and_context=inside_all,
        pipeline=seconds.get("pipeline", 0.0),
        gradients=gradients,
        optimizer=optimizer,
        tokens_per_second=tokens / total,
        mfu=mfu,
    )


def _exposed(experiment: Experiment, shape: Shape, seconds: float, compute: float) -> float:
    """The time of the data parallel exchange in which the rank does not compute: the last layer's, at least."""
    sent, layers = engine_of(experiment).sent(experiment, shape, 0), layers_of_stage(experiment, 0)
    return seconds - min(seconds * sent.overlapped * (1 - 1 / layers), compute * sent.computing)


def seconds_of(one: Traffic, rates: Rates) -> float:
    """How long a group's exchange takes with nothing else on its link but its like."""
    if one.link == "network":
        return one.waits * one.sharing / (rates.network_gb_s * 1e9)
    return one.waits / (rates.link_gb_s * 1e9)


def _slowest_stage_flops(experiment: Experiment) -> float:
    """Forward, backward and recomputation of one micro batch on one rank of the stage that has the most to do."""
    model, parallel = experiment.model, experiment.parallel
    stages = parallel.pipeline_model_parallel_size
    tokens = experiment.batch.micro_batch_size * model.seq_length
    if model.is_vision:
        return tokens * model_flops_per_token(model, engine_of(experiment).rows_of_vocabulary(experiment))
    shared = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    worst = 0.0
    for stage in {0, stages - 1}:
        layers = layers_of_stage(experiment, stage)
        flops = 3 * layers * layer_flops_per_token(model)
        flops += recomputed_layers(experiment, layers) * layer_flops_per_token(model)
        if model.recompute_granularity == "selective":
            flops += layers * attention_flops_per_token(model)
        if stage == stages - 1:
            flops += 3 * head_flops_per_token(model, engine_of(experiment).rows_of_vocabulary(experiment))
        worst = max(worst, flops)
    return worst * tokens / shared
