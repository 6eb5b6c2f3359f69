"""The memory, traffic and kernels of engine ``torch``: GPT and ResNet-50."""

from dataclasses import replace

from tridock.engines.cost_model import CostModel
from tridock.engines.deepspeed import zero_sent, zero_states
from tridock.engines.offload import Offload, nvme_folders
from tridock.engines.torch.fsdp import accumulation_peak, is_sharded, scatter_peak, scatters_each, shards_of
from tridock.engines.torch.rules import TorchRules
from tridock.experiment import Experiment
from tridock.experiment.resnet import cast_elements, kept_elements
from tridock.layout.activations import TOKEN_BYTES, Sizes, head_bytes, head_inputs, sizes_of
from tridock.layout.shape import (
    FORMAT_BYTES,
    Device,
    HostWork,
    LayoutShape,
    Parameters,
    States,
    Term,
    in_flight,
    layer_parameters,
    layers_of_stage,
    recomputed_layers,
)
from tridock.layout.traffic import Sent, all_gather, all_reduce, backward_pass


class TorchCostModel(CostModel):
    """The cost model of DDP, FSDP2, tensor parallelism, pipelines, and DeepSpeed's ZeRO."""

    rules = TorchRules()

    def states(self, experiment: Experiment, weights: Parameters, shape: LayoutShape, device: Device) -> States:
        if experiment.parallel.strategy == "zero":
            return zero_states(experiment, weights, shape, device)
        count = weights.total
        if not is_sharded(experiment):  # the fused AdamW works in place
            if shape.data == 1:  # there are no buckets, and gradients are freed after the optimizer step
                return States(4 * count, 0, 8 * count, 4 * count, startup=4 * count)
            return States(4 * count, 4 * count, 8 * count, startup=8 * count)
        # FSDP2 gathers layer by layer, and the embeddings and the last norm for the whole step. The first backward pass
        # allocates gradients; they are freed after the optimizer step, which works in place.
        owned, short = -(-count // shards_of(experiment, shape.data)), FORMAT_BYTES[experiment.precision]
        gathered = short * (count - weights.layers)
        return States(4 * owned, 0, 8 * owned, 4 * owned, gathered=gathered, startup=4 * owned)

    def copied_bytes(self, experiment: Experiment, weights: Parameters, states: States) -> int:
        """Checkpoints of states on NVMe are written from there, while training waits."""
        return 0 if nvme_folders(experiment) else super().copied_bytes(experiment, weights, states)

    def host_work(self, experiment: Experiment, shape: LayoutShape) -> HostWork:
        owned = -(-self.parameters(experiment, 0).total // shape.data)
        return Offload.of(experiment).moved(experiment, shape, owned)

    def sizes(self, experiment: Experiment, device: Device) -> Sizes:
        parallel = experiment.parallel
        # Copies of the rotation in the short format.
        angles = 2.0 * experiment.model.rotary_size if experiment.precision != "fp32" else 0.0
        if not is_sharded(experiment):
            return sizes_of(experiment, device, autocast=parallel.strategy == "ddp", angles=angles)
        # FSDP2's gathered weights of the current layer; if other ranks hold shards, also the buffer for the next
        # layer's.
        buffers = 2 if parallel.strategy == "fsdp" and parallel.data_parallel_shard_size != 1 else 1
        gathered = FORMAT_BYTES[experiment.precision] * layer_parameters(experiment) * buffers
        found = sizes_of(experiment, device, gathered=gathered, angles=angles)
        if not self.program.sequence_parallel:
            return found
        names, shared = ("between", "residual", "norm", "inputs", "dropout"), parallel.tensor_model_parallel_size
        return replace(found, **{name: getattr(found, name) / shared for name in names})

    def head_bytes(self, experiment: Experiment, sizes: Sizes, accumulation: int) -> float:
        """With GPipe the last stage of a pipeline holds the logits of every micro batch."""
        rows = self.rules.rows_of_vocabulary(experiment)
        # Autocast's cache also keeps the casts of recomputed layers, until the forward pass ends.
        cached = recomputed_layers(experiment, experiment.model.num_layers) * sizes.casts
        cast = self.table_bytes(experiment, sizes) if sizes.casts else 0.0
        further = self._further_heads(experiment, sizes, accumulation)
        return head_bytes(experiment, sizes, rows, chunked=True, forward=cached) + cast + further

    def _further_heads(self, experiment: Experiment, sizes: Sizes, accumulation: int) -> float:
        """Returns what GPipe's last stage keeps of its output layer and last norm, of all micro-batches but one."""
        parallel = experiment.parallel
        if parallel.pipeline_model_parallel_size == 1 or parallel.pipeline_schedule != "gpipe":
            return 0.0
        return (accumulation - 1) * (self.logits_bytes(experiment, sizes) + head_inputs(sizes))

    def backward_peak(self, experiment: Experiment, stage: int, accumulation: int, sizes: Sizes) -> float:
        """In the last stage of a pipeline 1F1B and GPipe still refer to the last logits (``output`` in
        ``_step_microbatches`` of ``torch.distributed.pipelining.schedules``), and FSDP2 to the table's gradient, which
        it reduces with those outside layers at the end. A stage of one layer has no next one to gather; the buffer that
        its own weights are gathered in is free when its backward pass begins."""
        parallel, inside = experiment.parallel, super().backward_peak(experiment, stage, accumulation, sizes)
        virtual = parallel.virtual_pipeline_model_parallel_size
        if parallel.pipeline_model_parallel_size == 1 or stage < parallel.pipeline_model_parallel_size - 1:
            return inside
        layer = FORMAT_BYTES[experiment.precision] * layer_parameters(experiment)
        if layers_of_stage(experiment, stage) == 1 and sizes.gathered > layer:
            inside = max(sizes.between + sizes.gathered, inside - layer)
        kept = self.logits_bytes(experiment, sizes) + self.table_bytes(experiment, sizes) if virtual == 1 else 0.0
        return inside + kept + self._further_heads(experiment, sizes, accumulation)

    def image_terms(self, experiment: Experiment) -> list[Term]:
        # Within 2 % of a CPU rank's memory (tests/unit/train).
        short = FORMAT_BYTES[experiment.precision]
        kept = kept_elements(experiment.model) * experiment.batch.micro_batch_size * short
        terms = [Term("activations", kept, "each convolution's input and output")]
        if experiment.parallel.strategy == "ddp" and short < 4:
            copies = cast_elements(experiment.model) * short
            terms.append(
                Term("copies of weights", copies, "autocast's, in the short format, kept for the backward pass")
            )
        return terms

    def message_bytes(self, experiment: Experiment, stage: int, accumulation: int, sizes: Sizes) -> float:
        """Torch's stages have a buffer for each micro-batch that they receive, and for each gradient, from the first
        step on (``torch.distributed.pipelining.stage``). Layers keep the inputs in flight; outputs in flight stay.
        The gradient that a backward pass begins with lies in its buffer."""
        parallel = experiment.parallel
        last, virtual = parallel.pipeline_model_parallel_size - 1, parallel.virtual_pipeline_model_parallel_size
        inputs, outputs = virtual - (stage == 0), virtual - (stage == last)
        passes_in_flight = in_flight(experiment, stage, accumulation)
        kept = passes_in_flight * (inputs - outputs) / virtual
        # A step's tokens, on every stage, and the copies of inputs and targets that are not yet, or no longer, in use.
        copied = (stage == 0) * max(0, accumulation - passes_in_flight) + (stage == last) * (accumulation - 1)
        tokens = (accumulation + copied) * sizes.tokens * TOKEN_BYTES
        return (accumulation * (inputs + outputs) - kept - (stage != last)) * sizes.between + tokens

    def accumulated_gradients(
        self, experiment: Experiment, stage: int, shape: LayoutShape, states: States, device: Device, activations: int
    ) -> int:
        if not is_sharded(experiment):
            return super().accumulated_gradients(experiment, stage, shape, states, device, activations)
        weights, sizes = self.parameters(experiment, stage), self.sizes(experiment, device)
        scattering = scatter_peak(experiment, stage, shape, weights, sizes) - activations
        head = 0.0
        if stage == experiment.parallel.pipeline_model_parallel_size - 1:
            loss = self.head_bytes(experiment, sizes, shape.accumulation)
            head = max(0.0, loss - self.backward_peak(experiment, stage, shape.accumulation, sizes))
        return round(max(accumulation_peak(experiment, stage, shape, weights, sizes, head), scattering))

    def sent(self, experiment: Experiment, shape: LayoutShape, stage: int) -> Sent:
        weights = self.parameters(experiment, stage).total
        embedding = 4 * self.parameters(experiment, 0).embedding / shards_of(experiment, shape.data)
        last_backward = backward_pass(shape.accumulation)
        if is_sharded(experiment):
            # FSDP2 gathers weights for each micro batch, and again for its backward pass. Gradients are sent in fp32,
            # to other copies of the shards once a step.
            shards, short = shards_of(experiment, shape.data), FORMAT_BYTES[experiment.precision]
            gathered = 2 * all_gather(shards, short * weights) * shape.accumulation
            scatters = shape.accumulation if scatters_each(experiment, shape.data) else 1
            reduced = self.program.reduced or 4
            volume = (
                gathered
                + scatters * all_gather(shards, reduced * weights)
                + all_reduce(shape.data // shards, reduced * weights / shards)
            )
            gathers = 2 * shape.accumulation + scatters if shards > 1 else 1
            messages = gathers * layers_of_stage(experiment, stage)
            computing = 1.0 if shards > 1 else last_backward
            return Sent(volume, embedding, overlapped=1.0, computing=computing, messages=messages)
        if experiment.parallel.strategy == "ddp":
            return Sent(all_reduce(shape.data, 4 * weights), embedding, overlapped=1.0, computing=last_backward)
        return zero_sent(experiment, shape, weights, Sent(0.0, embedding))

    def summed_bytes(self, experiment: Experiment, shape: LayoutShape) -> float:
        """DDP's autocast casts fp32 weights, and short gradients back, for each micro batch. FSDP2 copies the weights
        out of each of two gathered buffers, and the gradients, in fp32, into the one that is scattered
        (``torch.distributed.fsdp._fully_shard._fsdp_collectives``, on the stream that computes), also on one rank.
        Without DDP's buckets the first gradients of a step are not added to anything."""
        short, replicas = FORMAT_BYTES[experiment.precision], max(2, shape.data)
        if experiment.parallel.strategy == "zero":
            return super().summed_bytes(experiment, shape)
        copied = 2 * 2.0 * short if shards_of(experiment, replicas) > 1 else 0.0
        if scatters_each(experiment, replicas):
            return copied + short + 4.0
        casts = 2 * (short + 4.0) if short < 4 and not is_sharded(experiment) else 0.0
        adds = 1.0 if shape.data > 1 and not is_sharded(experiment) else 1 - 1 / shape.accumulation
        return copied + casts + adds * (short + 8.0)
