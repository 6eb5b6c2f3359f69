"""The memory, traffic and kernels of engine ``megatron-deepspeed``."""

import math
from dataclasses import replace

from tridock.engines.cost_model import CostModel
from tridock.engines.deepspeed import zero_sent, zero_states
from tridock.engines.megatron_lm.rules import MegatronLMRules
from tridock.experiment import Experiment
from tridock.layout.activations import Sizes, head_inputs, kept_bytes, sizes_of
from tridock.layout.shape import (
    FORMAT_BYTES,
    Device,
    LayoutShape,
    Parameters,
    States,
    Term,
    hidden_bytes,
    in_flight,
    layer_parameters,
    layers_of_stage,
    parameters_of_stage,
)
from tridock.layout.traffic import Sent, all_gather, all_reduce


class MegatronLMCostModel(CostModel):
    """The cost model of Megatron-LM v1.1.5 on DeepSpeed, or with its own data parallelism."""

    rules = MegatronLMRules()
    chunks_loss = False

    def parameters(self, experiment: Experiment, stage: int) -> Parameters:
        """The last stage receives the whole embedding, including the positions that it does not use."""
        return parameters_of_stage(experiment, stage, self.rules.rows_of_vocabulary(experiment), copies_positions=True)

    def states(self, experiment: Experiment, weights: Parameters, shape: LayoutShape, device: Device) -> States:
        if experiment.parallel.strategy == "zero":
            found = zero_states(experiment, weights, shape, device)
            if self.program.cached:
                return replace(found, bucket=0)
            if self.program.gradients is None:
                return found
            return replace(found, gradients=self.program.gradients * weights.total, step_gradients=0)
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
        absent = (
            self.states(experiment, weights, LayoutShape(1, 1, 1), sizes.device).gradients - short * weights.final_norm
        )
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
        return min(2, accumulation) * self.logits_bytes(experiment, sizes)

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

    def further_terms(self, experiment: Experiment, stage: int, device: Device) -> list[Term]:
        mask = experiment.model.seq_length**2
        return [Term("attention mask", mask, "get_ltor_masks_and_position_ids: [seq_length, seq_length], a byte each")]

    def sent(self, experiment: Experiment, shape: LayoutShape, stage: int) -> Sent:
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
