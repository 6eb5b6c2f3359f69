"""The memory, traffic and kernels of megatron-core."""

from tridock.engines.cost_model import CostModel
from tridock.engines.megatron_core import overlap, transformer_engine
from tridock.engines.megatron_core.rules import MegatronCoreRules
from tridock.experiment import Experiment
from tridock.layout.activations import Sizes, sizes_of
from tridock.layout.kernels import MEMORY_SHARE
from tridock.layout.shape import (
    FORMAT_BYTES,
    Device,
    LayoutShape,
    Parameters,
    States,
    Term,
    layers_of_stage,
    recomputed_layers,
    tokens_of,
)
from tridock.layout.traffic import Sent, all_gather, all_reduce, backward_pass, expert_replicas


class MegatronCoreCostModel(CostModel):
    """The cost model of tensor, pipeline, context, expert and data parallelism."""

    rules = MegatronCoreRules()

    def states(self, experiment: Experiment, weights: Parameters, shape: LayoutShape, device: Device) -> States:
        distributed, replicas = experiment.parallel.use_distributed_optimizer, self._replicas(experiment, shape)
        short, count = FORMAT_BYTES[experiment.precision], weights.total
        of_experts = expert_replicas(experiment, shape.data)
        owned = (count - weights.experts) // replicas + weights.experts // of_experts if distributed else count
        # On GPUs Adam is apex's or transformer-engine's, and works in place. On CPUs Gloo scatters a copy of the
        # gradients.
        workspace = 4 * count if device == "cpu" and distributed and replicas > 1 else 0
        master = 4 * owned if short == 2 else 0
        # At start-up also the distributed optimizer's buffer for the weights of a virtual stage.
        moved = short * count // experiment.parallel.virtual_pipeline_model_parallel_size if distributed else 0
        gradients = (self.program.gradients or 4) * count
        startup = 0 if self.program.gradients else (short + 4) * count + max(master, moved)
        kept = short * (count - (weights.layers if self._sends_fp8(experiment) else 0))
        return States(kept, gradients, master + 8 * owned, workspace=workspace, startup=startup)

    def _sends_fp8(self, experiment: Experiment) -> bool:
        return self.program.fp8_weights and experiment.model.fp8 is not None

    def copied_bytes(self, experiment: Experiment, weights: Parameters, states: States) -> int:
        """The first replica gathers the distributed optimizer's states, with fp32 weights in any precision."""
        if experiment.parallel.use_distributed_optimizer:
            return states.weights + 12 * weights.total
        return super().copied_bytes(experiment, weights, states)

    def sizes(self, experiment: Experiment, device: Device) -> Sizes:
        # Fused on GPUs, SwiGLU keeps the first matrix's output; otherwise also the tensors derived from its halves.
        if self.program.swiglu:
            return sizes_of(experiment, device, swiglu=self.program.swiglu)
        local = sizes_of(
            experiment, device, swiglu=3 if device == "cuda" else 5, angles=4.0 * experiment.model.rotary_size
        )
        return transformer_engine.sizes(experiment, local) if transformer_engine.is_used(experiment, device) else local

    def further_terms(self, experiment: Experiment, stage: int, device: Device) -> list[Term]:
        used = transformer_engine.is_used(experiment, device)
        return list(transformer_engine.terms(experiment, stage)) if used else []

    def gpu_terms(self, experiment: Experiment, shape: LayoutShape) -> list[Term]:
        return [overlap.term(experiment)] if overlap.is_planned(experiment, shape) else []

    def sent(self, experiment: Experiment, shape: LayoutShape, stage: int) -> Sent:
        weights, short = self.parameters(experiment, stage), FORMAT_BYTES[experiment.precision]
        embedding, tensor = 4 * self.parameters(experiment, 0).embedding, self._gathered_queries(experiment, stage)
        distributed = experiment.parallel.use_distributed_optimizer

        reduced, gathered = self.program.reduced or 4, float(short)
        if self._sends_fp8(experiment):
            gathered -= (short - 1) * weights.layers / weights.total
        if self.program.gathers_logits and stage == experiment.parallel.pipeline_model_parallel_size - 1:
            logits = short * self.sizes(experiment, "cuda").tokens * self.rules.rows_of_vocabulary(experiment)
            tensor += all_gather(experiment.parallel.tensor_model_parallel_size, logits)

        def exchanged(size: int, count: int) -> float:
            # Gradients are sent during the last backward pass, weights during the next forward pass.
            return all_gather(size, (reduced + gathered) * count) if distributed else all_reduce(size, reduced * count)

        # A chunk of an interleaved pipeline sends its gradients when its last micro batch is done (``no_sync_func`` of
        # each chunk), while the stage works on the other chunks for as many micro batches as it has stages.
        stages = experiment.parallel.pipeline_model_parallel_size
        together = stages if experiment.parallel.virtual_pipeline_model_parallel_size > 1 else 1
        last_backward = backward_pass() * min(1.0, together / shape.accumulation)
        return Sent(
            exchanged(self._replicas(experiment, shape), weights.total - weights.experts),
            embedding,
            tensor,
            expert_gradient_bytes=exchanged(max(1, expert_replicas(experiment, shape.data)), weights.experts),
            overlapped=1.0,
            computing=last_backward + ((1 - backward_pass()) / shape.accumulation if distributed else 0.0),
            tensor_overlap="products" if overlap.is_planned(experiment, shape) else "weight gradients",
            hides_pipeline=experiment.parallel.virtual_pipeline_model_parallel_size > 1,
        )

    def summed_bytes(self, experiment: Experiment, shape: LayoutShape) -> float:
        """On GPUs the product itself reads and writes the fp32 sum (gradient_accumulation_fusion). Half of that time
        overlaps with the product: of the 61 such products that SimuMax measured on an A100, the median then is 1 % off
        (``configs/system/a100_pcie.json``, accumulate=True)."""
        kept = self.program.gradients or 4
        return FORMAT_BYTES[experiment.precision] + 2 * kept if self.program.adds_gradients else kept * MEMORY_SHARE

    def _gathered_queries(self, experiment: Experiment, stage: int) -> float:
        """Returns the bytes of queries, keys and values that ranks gather if several share a query group."""
        model, size = experiment.model, experiment.parallel.tensor_model_parallel_size
        if model.query_groups >= size:
            return 0.0
        layers = layers_of_stage(experiment, stage)
        width = model.attention_size + 2 * model.key_size
        volume = tokens_of(experiment) * width * FORMAT_BYTES[experiment.precision]
        return (2 * layers + recomputed_layers(experiment, layers)) * all_gather(size, volume)

    def _replicas(self, experiment: Experiment, shape: LayoutShape) -> int:
        return shape.data * experiment.parallel.context_parallel_size
