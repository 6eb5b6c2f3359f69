"""Engine ``megatron-deepspeed`` as the planner and the launchers see it."""

import math
from collections.abc import Iterator, Mapping
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
from tridock.layout.activations import Sizes, head_inputs, kept_bytes, sizes_of
from tridock.layout.shape import (
    FORMAT_BYTES,
    Device,
    Parameters,
    Shape,
    States,
    Term,
    hidden_bytes,
    in_flight,
    layer_parameters,
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
            return zero_states(experiment, weights, shape, device)
        short, count = FORMAT_BYTES[experiment.precision], weights.total
        again = 4 if short == 2 else 0  # gradients, and weights, again in fp32
        persistent = (short * count, (short + again) * count, (again + 8) * count)
        return States(*persistent, startup=sum(persistent) - 8 * count)

    def sizes(self, experiment: Experiment, device: Device) -> Sizes:
        model, ddp = experiment.model, experiment.parallel.strategy == "ddp"
        # Activations that are partitioned, or on the host, are whole while their layers compute.
        whole = not (model.partition_activations or model.checkpoint_in_cpu)
        return sizes_of(experiment, device, sums_in_place=ddp, restores_inputs=whole)

    def backward_peak(self, experiment: Experiment, stage: int, accumulation: int, sizes: Sizes) -> float:
        """Layers that are computed again end their forward pass with the outputs of attention and of the MLP, with the
        latter's sum with its bias, and with their own output (locals of ``ParallelTransformerLayer.forward``), which
        the checkpoint function keeps through their backward pass (``outputs`` in ``megatron/mpu/random.py``).

        Without DeepSpeed the gradients of the previous step are freed between the loss and the backward pass
        (``backward_step`` in ``megatron/training.py``), which makes them layer by layer. The layers' backward passes
        peak in the last group of layers, or in the first, with the gradients of all others.
        """
        inside, parallel = super().backward_peak(experiment, stage, accumulation, sizes), experiment.parallel
        layers = layers_of_stage(experiment, stage)
        group = min(layers, experiment.model.checkpoint_num_layers)
        recomputed = experiment.model.checkpoint_activations
        forward = inside + 4 * sizes.between - sizes.ffn - sizes.weight if recomputed else 0.0
        inside += sizes.between if recomputed else 0.0
        if parallel.strategy == "zero":
            logits = self._kept_logits(experiment, sizes, accumulation) if stage == self._last(experiment) else 0.0
            return max(inside, forward) + logits
        weights, short = self.parameters(experiment, stage), FORMAT_BYTES[experiment.precision]
        second = experiment.model.hidden_size * experiment.model.ffn_size // parallel.tensor_model_parallel_size
        peak = max(inside + short * second, forward)
        absent = self.states(experiment, weights, Shape(1, 1, 1), sizes.device).gradients - short * weights.final_norm
        if not recomputed:
            return peak - absent
        made = short * (layers - group) * layer_parameters(experiment)
        freed = (kept_bytes(experiment, stage, sizes) / layers * group) * (layers // group - 1)
        return peak - absent + max(0.0, made - freed)

    def _last(self, experiment: Experiment) -> int:
        return experiment.parallel.pipeline_model_parallel_size - 1

    def _kept_logits(self, experiment: Experiment, sizes: Sizes, accumulation: int) -> float:
        """Returns the bytes of the logits that a pipeline of DeepSpeed keeps: those of the last micro-batch in each of
        the last stage's two buffers (``_exec_backward_pass`` in ``deepspeed/runtime/pipe/engine.py`` frees outputs on
        the other stages only)."""
        if self._last(experiment) == 0:
            return 0.0
        rows = self.rows_of_vocabulary(experiment) / experiment.parallel.tensor_model_parallel_size
        return min(2, accumulation) * sizes.tokens * rows * sizes.short

    def head_bytes(self, experiment: Experiment, sizes: Sizes, accumulation: int) -> float:
        """In a pipeline of DeepSpeed further logits are kept. New ones replace the old ones of their buffer only when
        the forward pass has ended."""
        kept = self._kept_logits(experiment, sizes, accumulation)
        own = kept / min(2, accumulation)
        return max(super().head_bytes(experiment, sizes, accumulation) + kept - own, head_inputs(sizes) + kept + own)

    def message_bytes(self, experiment: Experiment, stage: int, accumulation: int, sizes: Sizes) -> float:
        """What a pipeline of DeepSpeed has in buffers (``deepspeed/runtime/pipe/engine.py``): the outputs in flight,
        of which each tensor parallel rank keeps its part, and their gradient; the inputs in flight, of which the layers
        have copies unless the ranks have gathered them; what is received next, with the attention mask in fp16. The
        previous loss still refers to its stage's input and to the gradient of that."""
        tensor, last = experiment.parallel.tensor_model_parallel_size, self._last(experiment)
        passes_in_flight, part = in_flight(experiment, stage, accumulation), sizes.between / tensor
        outputs = (passes_in_flight + 1) * part if stage < last else 2 * sizes.between
        if stage == 0:
            return outputs
        inputs = passes_in_flight * part if tensor == 1 else 0.0
        return outputs + inputs + part + 2 * experiment.model.seq_length**2

    def further_terms(self, experiment: Experiment, _stage: int, _device: Device) -> list[Term]:
        mask = experiment.model.seq_length**2
        return [Term("attention mask", mask, "get_ltor_masks_and_position_ids: [seq_length, seq_length], a byte each")]

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
