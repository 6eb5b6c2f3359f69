"""The cost model of an engine: the memory, the traffic and the kernels of a rank, as the planner counts them. Pure."""

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import replace
from typing import ClassVar, Self

from tridock.engines.other_programs import OWN, OtherProgram
from tridock.engines.rules import Rules
from tridock.experiment import Experiment
from tridock.experiment.parameters import model_flops_per_token
from tridock.gpus import Gpu
from tridock.layout.activations import (
    Attention,
    Sizes,
    activation_terms,
    backward_peak,
    head_bytes,
    head_inputs,
    layer_bytes,
    with_scores,
    with_stepwise_norms,
)
from tridock.layout.compute_time import StageTime, stage_time, vision_seconds
from tridock.layout.kernels import KernelRates
from tridock.layout.shape import (
    FORMAT_BYTES,
    Device,
    HostWork,
    LayoutShape,
    Parameters,
    States,
    Term,
    in_flight,
    layers_of_stage,
    parameters_of_stage,
    recomputed_layers,
    unlike_stages,
)
from tridock.layout.traffic import Sent, Traffic, traffic_of_stage


class CostModel(ABC):
    """What a legal experiment needs on a rank. An engine must give its states, a layer's tensors, and what it sends."""

    rules: ClassVar[Rules]
    """Of the same engine: they give the rows of the token table."""
    program: OtherProgram = OWN
    """The program whose runs it plans, if that is not the engine."""
    chunks_loss: ClassVar[bool] = True
    """Whether the loss converts logits to fp32 in chunks instead of all at once."""

    def as_program(self, program: OtherProgram) -> Self:
        """Returns the cost model of a program that differs from the engine."""
        found = copy(self)
        found.program = program
        return found

    def parameters(self, experiment: Experiment, stage: int) -> Parameters:
        return parameters_of_stage(experiment, stage, self.rules.rows_of_vocabulary(experiment))

    @abstractmethod
    def states(self, experiment: Experiment, weights: Parameters, shape: LayoutShape, device: Device) -> States:
        """Returns the memory of a rank with these weights, between steps and within a step."""

    def copied_bytes(self, experiment: Experiment, weights: Parameters, states: States) -> int:
        """Returns the host memory of the rank that copies the most while a checkpoint is written in the background."""
        return states.saved

    def checkpoint_bytes(self, experiment: Experiment) -> int:
        """Returns the bytes of the whole model's weights and optimizer states in a checkpoint, each once."""
        defaults: dict[str, int | None] = {
            **dict.fromkeys(("parallel.data_parallel_shard_size", "parallel.expert_tensor_parallel_size")),
            **dict.fromkeys(("parallel.context_parallel_size", "parallel.expert_model_parallel_size"), 1),
        }
        whole = experiment.with_fields(defaults)
        tensor, stages = whole.parallel.tensor_model_parallel_size, whole.parallel.pipeline_model_parallel_size
        own = (
            self.states(whole, self.parameters(whole, stage), LayoutShape(1, 1, tensor), "cuda")
            for stage in range(stages)
        )
        return tensor * sum(states.saved for states in own)

    def host_work(self, experiment: Experiment, shape: LayoutShape) -> HostWork:
        """Returns the work on states offloaded to the host's memory, on the fullest rank."""
        return HostWork()

    @abstractmethod
    def sizes(self, experiment: Experiment, device: Device) -> Sizes:
        """Returns the tensors of a layer for one micro batch."""

    def head_bytes(self, experiment: Experiment, sizes: Sizes, accumulation: int) -> float:
        """Returns the bytes of the output layer and the loss, on the last stage."""
        return head_bytes(experiment, sizes, self.rules.rows_of_vocabulary(experiment), chunked=self.chunks_loss)

    def loss_bytes(self, experiment: Experiment, sizes: Sizes, accumulation: int) -> float:
        """Returns :meth:`head_bytes`, or those of a program that has all logits in fp32."""
        if not self.program.fp32_logits:
            return self.head_bytes(experiment, sizes, accumulation)
        logits, copies = self.logits_bytes(experiment, sizes), self.program.fp32_logits * 4 / sizes.short
        if self.program.gathers_logits:
            logits, copies = experiment.parallel.tensor_model_parallel_size * logits, 1 + copies
        return head_inputs(sizes) + copies * logits

    def activation_terms(
        self, experiment: Experiment, stage: int, accumulation: int, gpu: Gpu | None, attention: Attention = "fused"
    ) -> list[Term]:
        """Returns the activation memory of a step, on a rank of this stage; without a GPU, on a CPU rank."""
        if experiment.model.is_vision:
            return self.image_terms(experiment)
        device: Device = "cpu" if gpu is None else "cuda"
        sizes = self.sizes(experiment, device)
        sizes = with_scores(experiment, sizes) if attention == "unfused" else sizes
        if gpu is not None and self.stepwise_norms(experiment, gpu):
            sizes = with_stepwise_norms(experiment, sizes)
        head = self.loss_bytes(experiment, sizes, accumulation)
        messages = self.message_bytes(experiment, stage, accumulation, sizes)
        inside = self.backward_peak(experiment, stage, accumulation, sizes)
        terms = activation_terms(experiment, stage, accumulation, sizes, head, inside, messages)
        again = recomputed_layers(experiment, layers_of_stage(experiment, stage))
        kept = round(self.program.kept * again * layer_bytes(sizes))
        cached = self.program.cached * self.parameters(experiment, stage).total
        return [
            *terms,
            *self.further_terms(experiment, stage, device),
            Term("outputs of operations", kept, "selective activation checkpointing"),
            Term("cached buffers", cached, "flat gradients, gathered weights", least=0),
        ]

    def backward_peak(self, experiment: Experiment, stage: int, accumulation: int, sizes: Sizes) -> float:
        """Returns the peak of the backward passes of a stage's layers, beyond what they keep. If one rank's embedding
        and output layer have the same weights, autograd keeps the gradient from the output layer, the first, until it
        can add the embedding's, the last (``InputBuffer`` of torch's autograd engine)."""
        tied = not experiment.model.untie_embeddings_and_output_weights
        held = tied and experiment.parallel.pipeline_model_parallel_size == 1
        return backward_peak(experiment, stage, sizes) + (self.table_bytes(experiment, sizes) if held else 0.0)

    def table_bytes(self, experiment: Experiment, sizes: Sizes) -> float:
        """Returns the bytes of a rank's rows of the token table in the format of the matrix products."""
        rows = self.rules.rows_of_vocabulary(experiment) / experiment.parallel.tensor_model_parallel_size
        return rows * experiment.model.hidden_size * sizes.short

    def logits_bytes(self, experiment: Experiment, sizes: Sizes) -> float:
        """Returns the bytes of a micro batch's logits on one rank, in the format of the matrix products."""
        return self.table_bytes(experiment, sizes) / experiment.model.hidden_size * sizes.tokens

    def further_terms(self, experiment: Experiment, stage: int, device: Device) -> list[Term]:
        """Returns what the engine's layers have in memory besides activations, on a rank of this stage."""
        return []

    def image_terms(self, experiment: Experiment) -> list[Term]:
        """Returns the activation memory of a step of an image model; only of an engine that trains them."""
        raise NotImplementedError(experiment.engine)

    def message_bytes(self, experiment: Experiment, stage: int, accumulation: int, sizes: Sizes) -> float:
        """Returns the bytes of a stage's inputs and outputs that its layers do not keep. On a GPU an output is freed
        once it is sent; a CPU rank keeps those in flight."""
        last = stage == experiment.parallel.pipeline_model_parallel_size - 1
        count = in_flight(experiment, stage, accumulation) - last if sizes.device == "cpu" else 2
        return count * sizes.between

    def accumulated_gradients(
        self, experiment: Experiment, stage: int, shape: LayoutShape, states: States, device: Device, activations: int
    ) -> int:
        """Returns the gradients beyond those at a step's first backward pass. With one micro batch they are allocated
        as activations are freed.

        ``activations``: bytes of the activation terms.
        """
        return states.step_gradients if shape.accumulation > 1 else 0

    def stage_time(
        self,
        experiment: Experiment,
        stage: int,
        shape: LayoutShape,
        device: KernelRates,
        attention: Attention,
        gpu: Gpu | None,
    ) -> StageTime:
        """Returns the time of one micro batch on a rank of this stage."""
        rows = self.rules.rows_of_vocabulary(experiment)
        if experiment.model.is_vision:
            flops = experiment.batch.micro_batch_size * model_flops_per_token(experiment.model, rows)
            return StageTime(products=vision_seconds(device, flops))
        found = stage_time(
            experiment,
            stage,
            device,
            self.sizes(experiment, "cuda"),
            self.parameters(experiment, stage),
            rows,
            summed_bytes=self.summed_bytes(experiment, shape),
            attention=attention,
            fuses_rotation=self.fuses_rotation(experiment),
            stepwise_norms=gpu is not None and self.stepwise_norms(experiment, gpu),
        )
        return replace(found, recomputed=self.program.recomputed * found.recomputed)

    def summed_bytes(self, experiment: Experiment, shape: LayoutShape) -> float:
        """Returns the bytes read and written of a weight for each micro batch, as its gradient is accumulated."""
        return 3.0 * FORMAT_BYTES[experiment.precision]

    def fuses_rotation(self, experiment: Experiment) -> bool:
        """Whether rotary embeddings are one kernel, as in compiled layers."""
        return experiment.train.compile or self.program.fuses_rotation

    def stepwise_norms(self, experiment: Experiment, gpu: Gpu) -> bool:
        """Whether RMSNorm is computed step by step, by the torch of this GPU's base image."""
        always = gpu.stepwise_norms or self.program.stepwise_norms == "always"
        recomputed = self.program.stepwise_norms == "recomputed" and experiment.model.recompute_granularity == "full"
        return (always or recomputed) and not experiment.train.compile

    def gpu_terms(self, experiment: Experiment, shape: LayoutShape) -> list[Term]:
        """Returns memory that a rank has from step to step only on GPUs that support it."""
        return []

    @abstractmethod
    def sent(self, experiment: Experiment, shape: LayoutShape, stage: int) -> Sent:
        """Returns the engine-specific part of what a rank of this stage sends."""

    def traffic_of_stage(self, experiment: Experiment, shape: LayoutShape, stage: int) -> list[Traffic]:
        """Returns the traffic of every group that a rank of this stage shares with other ranks."""
        return traffic_of_stage(experiment, shape, stage, self.sent(experiment, shape, stage))

    def traffic(self, experiment: Experiment, shape: LayoutShape) -> list[Traffic]:
        """Returns the traffic of every group of more than one rank, at the stage that sends the most in it."""
        busiest: dict[str, Traffic] = {}
        for stage in unlike_stages(experiment):
            for one in self.traffic_of_stage(experiment, shape, stage):
                if one.group not in busiest or one.bytes_per_rank > busiest[one.group].bytes_per_rank:
                    busiest[one.group] = one
        return list(busiest.values())
