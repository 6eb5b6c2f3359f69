"""Engine ``megatron-deepspeed`` as the planner and the launchers see it."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tridock.contracts.pretrained import DEEPSPEED, MEGATRON
from tridock.engines.deepspeed import zero_sent, zero_states
from tridock.engines.engine import Choice, Engine, RankProgram
from tridock.engines.megatron_lm import legality
from tridock.engines.megatron_lm.arguments import INDEX_MAPS, MODULE, index_map_arguments, megatron_arguments
from tridock.engines.megatron_lm.checkpoint_layout import checkpoint_problems
from tridock.engines.megatron_lm.legality import FIELDS
from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.layout import Plan
from tridock.layout.activations import Sizes, sizes_of
from tridock.layout.shape import (
    FORMAT_BYTES,
    Device,
    Parameters,
    Shape,
    States,
    hidden_bytes,
    layers_of_stage,
    parameters_of_stage,
)
from tridock.layout.traffic import Sent, all_gather, all_reduce


class MegatronLM(Engine):
    """Megatron-LM v1.1.5 on DeepSpeed, or with its own data parallelism."""

    name = "megatron-deepspeed"
    fields = FIELDS
    tokenizer_fields = ("vocab_file", "merge_file")
    chunks_loss = False
    prints_timers = True
    checkpoints_load_on = "same layout"

    # With DeepSpeed, its own checkpoints are DeepSpeed's too.
    resumes_formats = frozenset((MEGATRON, DEEPSPEED))

    problems = staticmethod(legality.problems)

    def takes_sizes(self, experiment: Experiment) -> bool:
        parallel = experiment.parallel
        if parallel.context_parallel_size > 1 or any(legality.split_problems(experiment)):
            return False
        stages = parallel.pipeline_model_parallel_size
        return stages == 1 or (parallel.strategy == "zero" and parallel.zero_stage < 2)

    def batch_problems(self, experiment: Experiment, replicas: int) -> Iterator[Problem]:
        if experiment.parallel.strategy != "ddp":
            yield from super().batch_problems(experiment, replicas)
            return
        samples, per_pass = experiment.batch.samples_per_step(replicas), experiment.batch.micro_batch_size * replicas
        if samples != per_pass:
            what = "Megatron v1.1.5 without DeepSpeed does not accumulate gradients"
            todo = f"use {per_pass}, or strategy zero"
            yield Problem("batch.global_batch_size", what, str(samples), todo, (per_pass,))

    def parameters(self, experiment: Experiment, stage: int) -> Parameters:
        """The last stage receives the whole embedding, including the positions that it does not use."""
        return parameters_of_stage(experiment, stage, self.rows_of_vocabulary(experiment), copies_positions=True)

    def states(self, experiment: Experiment, weights: Parameters, shape: Shape, device: Device) -> States:
        if experiment.parallel.strategy == "zero":
            states = zero_states(experiment, weights, shape, device)
            return replace(states, startup=max(states.startup, FORMAT_BYTES[experiment.precision] * weights.total))
        short, count = FORMAT_BYTES[experiment.precision], weights.total
        again = 4 if short == 2 else 0  # gradients, and weights, again in fp32
        persistent = (short * count, (short + again) * count, (again + 8) * count)
        return States(*persistent, startup=sum(persistent) - 8 * count)

    def sizes(self, experiment: Experiment, device: Device) -> Sizes:
        model, ddp = experiment.model, experiment.parallel.strategy == "ddp"
        # Activations that are partitioned, or on the host, are whole while their layers compute.
        whole = not (model.partition_activations or model.checkpoint_in_cpu)
        return sizes_of(experiment, device, sums_in_place=ddp, restores_inputs=whole)

    def sent(self, experiment: Experiment, shape: Shape, stage: int) -> Sent:
        model, parallel = experiment.model, experiment.parallel
        size, final = parallel.tensor_model_parallel_size, stage == parallel.pipeline_model_parallel_size - 1
        short, weights = FORMAT_BYTES[experiment.precision], self.parameters(experiment, stage).total
        # Between stages DeepSpeed sends each rank's part. The receiver of an output gathers it; the sender gathers it
        # too, for the backward pass, with its gradient.
        gathers = (stage > 0) + 2 * (not final)
        if model.checkpoint_activations and model.partition_activations:
            gathers += math.ceil(layers_of_stage(experiment, stage) / model.checkpoint_num_layers)
        sent = Sent(
            gradient_bytes=all_reduce(shape.data, short * weights),
            embedding_bytes=short * self.parameters(experiment, 0).embedding,
            tensor_bytes=gathers * all_gather(size, hidden_bytes(experiment)),
            splits_messages=True,
            mask_bytes=2 * model.seq_length**2,  # in fp16
        )
        return sent if parallel.strategy == "ddp" else zero_sent(experiment, shape, weights, sent)

    def recompute_choices(self) -> tuple[Choice, ...]:
        # The options for stored activations depend on recomputation.
        off: Choice = {f"model.{name}": False for name in ("checkpoint_activations", *legality.CHECKPOINT_OPTIONS)}
        return ({**off, "model.checkpoint_num_layers": 1}, {"model.checkpoint_activations": True})

    def program(self, experiment: Experiment, plan: Plan, run_path: str, load: str | None) -> RankProgram:
        if load is not None:
            train = experiment.train.model_copy(update={"load": load})
            experiment = experiment.model_copy(update={"train": train})
        return RankProgram(MODULE, ("--run-folder", run_path, *megatron_arguments(experiment, plan, run_path)))

    def index_map_program(self, experiment: Experiment, plan: Plan, workspace: str) -> tuple[str, ...]:
        return (INDEX_MAPS, *index_map_arguments(experiment, plan, workspace))

    def checkpoint_problems(
        self, experiment: Experiment, data_parallel_size: int, written: Mapping[str, Any] | None
    ) -> Iterator[Problem]:
        yield from checkpoint_problems(experiment, data_parallel_size, written)
