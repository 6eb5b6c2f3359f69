"""Engine ``megatron-core`` as the planner and the launchers see it."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Final

from tridock.engines.engine import Choice, Engine, RankProgram
from tridock.engines.megatron_core import legality, overlap, transformer_engine
from tridock.engines.megatron_core.experts import expert_choices, rank_problems
from tridock.engines.megatron_core.legality import FIELDS
from tridock.engines.megatron_core.stages import layers_of_stages, stage_choices, virtual_problems
from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.gpus import Gpu
from tridock.layout import Plan
from tridock.layout.activations import Sizes, sizes_of
from tridock.layout.kernels import MEMORY_SHARE
from tridock.layout.shape import (
    FORMAT_BYTES,
    Device,
    Parameters,
    Shape,
    States,
    Term,
    layers_of_stage,
    recomputed_layers,
    tokens_of,
)
from tridock.layout.split import divisors
from tridock.layout.traffic import Sent, all_gather, all_reduce, backward_pass, expert_replicas

_CONTEXT_TOKENS: Final = 2048
"""Minimum tokens of a sample for a rank of a context parallel group; Megatron Bridge's recipes for Llama 3 leave
4,096."""
_SUM_BYTES: Final = 8
"""Bytes read and written of a weight's gradient in fp32, as a micro batch is added."""


class MegatronCore(Engine):
    """NVIDIA's package: tensor, pipeline, context and data parallelism."""

    name = "megatron-core"
    fields = FIELDS
    checkpoints_load_on = "any layout"
    # Its checkpoints do not depend on the layout, only on what the optimizer holds.
    checkpoint_fields = ("precision", "parallel.use_distributed_optimizer")

    problems = staticmethod(legality.problems)
    node_problems = staticmethod(overlap.node_problems)
    needs_multicast = staticmethod(overlap.needs_multicast)

    def takes_sizes(self, experiment: Experiment) -> bool:
        parallel = experiment.parallel
        if any(legality.split_problems(experiment)) or any(virtual_problems(experiment)):
            return False
        return not (parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1)

    def gpu_problems(self, experiment: Experiment, gpu: Gpu) -> Iterator[Problem]:
        yield from transformer_engine.gpu_problems(experiment, gpu)
        yield from overlap.gpu_problems(experiment, gpu)

    def packages(self, experiment: Experiment) -> Mapping[str, str]:
        return transformer_engine.packages(experiment)

    def batch_problems(self, experiment: Experiment, replicas: int) -> Iterator[Problem]:
        if experiment.parallel.virtual_pipeline_model_parallel_size > 1:
            yield from legality.interleaved_batch_problems(experiment, replicas)
        else:
            yield from super().batch_problems(experiment, replicas)
        yield from rank_problems(experiment, replicas)

    def states(self, experiment: Experiment, weights: Parameters, shape: Shape, device: Device) -> States:
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
        startup = (short + 4) * count + max(master, moved)
        return States(short * count, 4 * count, master + 8 * owned, workspace=workspace, startup=startup)

    def copied_bytes(self, experiment: Experiment, weights: Parameters, states: States) -> int:
        """The first replica gathers the distributed optimizer's states, with fp32 weights in any precision."""
        if experiment.parallel.use_distributed_optimizer:
            return states.weights + 12 * weights.total
        return super().copied_bytes(experiment, weights, states)

    def sizes(self, experiment: Experiment, device: Device) -> Sizes:
        # Fused on GPUs, SwiGLU keeps the first matrix's output; otherwise also the tensors derived from its halves.
        local = sizes_of(
            experiment, device, swiglu=3 if device == "cuda" else 5, angles=4.0 * experiment.model.rotary_size
        )
        return transformer_engine.sizes(experiment, local) if transformer_engine.is_used(experiment, device) else local

    def further_terms(self, experiment: Experiment, stage: int, device: Device) -> list[Term]:
        used = transformer_engine.is_used(experiment, device)
        return list(transformer_engine.terms(experiment, stage)) if used else []

    def gpu_terms(self, experiment: Experiment, shape: Shape) -> list[Term]:
        return [overlap.term(experiment)] if overlap.is_planned(experiment, shape) else []

    def sent(self, experiment: Experiment, shape: Shape, stage: int) -> Sent:
        weights, short = self.parameters(experiment, stage), FORMAT_BYTES[experiment.precision]
        embedding, tensor = 4 * self.parameters(experiment, 0).embedding, self._gathered_queries(experiment, stage)
        distributed = experiment.parallel.use_distributed_optimizer

        def exchanged(size: int, count: int) -> float:
            # Gradients are sent during the last backward pass, weights during the next forward pass.
            return all_gather(size, (4 + short) * count) if distributed else all_reduce(size, 4 * count)

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

    def summed_bytes(self, _experiment: Experiment) -> float:
        """On GPUs the product itself reads and writes the fp32 sum (gradient_accumulation_fusion). Half of that time
        overlaps with the product: of the 61 such products that SimuMax measured on an A100, the median then is 1 % off
        (``configs/system/a100_pcie.json``, accumulate=True)."""
        return _SUM_BYTES / 2 * MEMORY_SHARE

    def _gathered_queries(self, experiment: Experiment, stage: int) -> float:
        """Returns the bytes that tensor parallel ranks gather of queries, keys and values if several have the same
        query group."""
        model, size = experiment.model, experiment.parallel.tensor_model_parallel_size
        if model.query_groups >= size:
            return 0.0
        layers = layers_of_stage(experiment, stage)
        width = model.attention_size + 2 * model.key_size
        volume = tokens_of(experiment) * width * FORMAT_BYTES[experiment.precision]
        return (2 * layers + recomputed_layers(experiment, layers)) * all_gather(size, volume)

    def _replicas(self, experiment: Experiment, shape: Shape) -> int:
        return shape.data * experiment.parallel.context_parallel_size

    def layout_choices(self, experiment: Experiment, tensor: int, stages: int) -> Iterator[Choice]:
        mixture = experiment.model.num_moe_experts is not None
        sequences = (mixture,) if tensor > 1 and mixture else (False, True) if tensor > 1 else (False,)
        splits = stage_choices(experiment, stages)
        for split, sequence, experts in product(splits, sequences, expert_choices(experiment, tensor)):
            yield {**split, "parallel.sequence_parallel": sequence, **experts}

    def state_choices(self, _experiment: Experiment, _stages: int) -> Iterator[Choice]:
        yield from ({"parallel.use_distributed_optimizer": value} for value in (False, True))

    def recompute_choices(self) -> tuple[Choice, ...]:
        names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
        values = ((None, None, None), ("selective", None, None), ("full", "uniform", 1))
        return tuple({f"model.{name}": value for name, value in zip(names, given, strict=True)} for given in values)

    def partial_recompute_choices(self, experiment: Experiment) -> tuple[Choice, ...]:
        if experiment.model.recompute_granularity != "full":
            return ()
        longest = max(layers_of_stages(experiment)) // experiment.parallel.virtual_pipeline_model_parallel_size
        return tuple(
            {"model.recompute_method": "block", "model.recompute_num_layers": count} for count in range(1, longest)
        )

    def context_sizes(self, experiment: Experiment) -> tuple[int, ...]:
        """Returns the sizes that leave a rank enough tokens to compute while it exchanges keys and values."""
        tokens, own = experiment.model.seq_length, experiment.parallel.context_parallel_size
        worth = {size for size in divisors(max(1, tokens // 2)) if tokens // size >= _CONTEXT_TOKENS}
        return tuple(sorted(worth | {1, own}))

    def program(self, _experiment: Experiment, _plan: Plan, run_path: str, load: str | None) -> RankProgram:
        arguments = ("--run-folder", run_path, *(() if load is None else ("--load", load)))
        # GPUs before Blackwell then start computation and communication in Megatron's order.
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        return RankProgram("tridock.train.megatron_core.pretrain_gpt", arguments, env)
