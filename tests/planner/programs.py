"""Programs of published tables that keep or send something else than Tridock's engines, each with its source.

A table names its program (``program:``); the planner then plans with it instead of the engine of the experiment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final
from unittest import mock

from tridock import engines
from tridock.engines import Engine
from tridock.engines.megatron_core.engine import MegatronCore
from tridock.engines.megatron_lm.engine import MegatronLM
from tridock.engines.torch.engine import Torch
from tridock.engines.torch.fsdp import shards_of
from tridock.experiment import Experiment
from tridock.gpus import Gpu
from tridock.layout.activations import Sizes, head_inputs, sizes_of
from tridock.layout.kernels import MEMORY_SHARE
from tridock.layout.shape import (
    FORMAT_BYTES,
    Device,
    Parameters,
    Shape,
    States,
    Term,
    hidden_bytes,
    layers_of_stage,
    recomputed_layers,
)
from tridock.layout.traffic import Sent, all_gather, all_reduce


class Scaling(MegatronCore):
    """Aleph Alpha's program, with which Hagemann et al. measured (Aleph-Alpha/scaling, ``src/scaling``).

    - Gradients have the weights' format, from the first backward pass to the optimizer step
      (``core/optimizer/parameter_group.py``). They are all-reduced in fp32, through buckets of 5e8 elements
      (``core/optimizer/allreduce.py``); the updated weights are gathered.
    - The output layer gathers the logits of the whole vocabulary on every tensor parallel rank
      (``ColumnParallelLinear`` without ``parallel_output``), and the loss has them in fp32
      (``transformer/model/losses/cross_entropy.py``).
    - A stage keeps its outputs in the pipeline's buffers, the last one the logits
      (``core/nn/parallel_module/parallel_module.py``).
    - SwiGLU is not fused (``core/nn/mlp.py``).
    - Rows with recomputed layers are without the RMSNorm kernel, which failed with recomputation: each norm is eight
      kernels (``core/nn/norm/rms_norm.py``).
    """

    _BUCKET: Final = 500_000_000
    _NORM: Final = (26 - 4, 58 - 8)
    """Bytes that a norm's kernels move for each bf16 number, forward and backward, less those that the planner counts.
    Counted with a torch dispatch mode on the source's operations."""

    def states(self, experiment: Experiment, weights: Parameters, shape: Shape, device: Device) -> States:
        short, count = FORMAT_BYTES[experiment.precision], weights.total
        owned = -(-count // shape.data)
        # A bucket in both formats; afterwards the gradient of the own part in fp32.
        table = max(weights.embedding, weights.head)
        bucket = (short + 4) * min(count, self._BUCKET + table) if shape.data > 1 else 0
        return States(short * count, 0, 12 * owned, short * count, workspace=max(bucket, 4 * owned))

    def sizes(self, experiment: Experiment, device: Device) -> Sizes:
        return sizes_of(experiment, device, swiglu=4)

    def further_terms(self, _experiment: Experiment, _stage: int, _device: Device) -> list[Term]:
        """Nothing: its layers are not TransformerEngine's."""
        return []

    def head_bytes(self, experiment: Experiment, sizes: Sizes, _accumulation: int) -> float:
        """In the backward pass: the logits, their softmax's logarithm, and the gradients of both."""
        logits = sizes.tokens * self.rows_of_vocabulary(experiment)
        return head_inputs(sizes) + logits * (sizes.short + 4 + 4 + 4)

    def sent(self, experiment: Experiment, shape: Shape, stage: int) -> Sent:
        parallel, weights = experiment.parallel, self.parameters(experiment, stage).total
        short = FORMAT_BYTES[experiment.precision]
        logits = short * self.sizes(experiment, "cuda").tokens * self.rows_of_vocabulary(experiment)
        last = stage == parallel.pipeline_model_parallel_size - 1
        return replace(
            super().sent(experiment, shape, stage),
            gradient_bytes=all_reduce(shape.data, 4 * weights) + all_gather(shape.data, short * weights),
            tensor_bytes=all_gather(parallel.tensor_model_parallel_size, logits) if last else 0.0,
        )

    def summed_bytes(self, experiment: Experiment) -> float:
        return 3.0 * FORMAT_BYTES[experiment.precision]

    def unfused_bytes(self, experiment: Experiment) -> float:
        """What the slowest stage's norms move for a micro batch beyond what the planner counts."""
        stages = range(experiment.parallel.pipeline_model_parallel_size)
        again = max(recomputed_layers(experiment, layers_of_stage(experiment, stage)) for stage in stages)
        numbers = self.sizes(experiment, "cuda").tokens * experiment.model.hidden_size
        return 2.0 * again * numbers * (sum(self._NORM) + self._NORM[0])


class MegatronDeepSpeed2021(MegatronLM):
    """Megatron-DeepSpeed before DeepSpeed's commit e2fdd254e (October 2021): between stages each tensor parallel rank
    sends its part of the outputs, but whole gradients (``pipe/engine.py``: ``is_grad_partitioned = False``)."""

    def sent(self, experiment: Experiment, shape: Shape, stage: int) -> Sent:
        found, size = super().sent(experiment, shape, stage), experiment.parallel.tensor_model_parallel_size
        return replace(found, mask_bytes=found.mask_bytes + hidden_bytes(experiment) * (size - 1) // size)


class MegatronDeepSpeedZero1(MegatronLM):
    """BigScience's Megatron-DeepSpeed of December 2021 (DeepSpeed 0.5.8, torch 1.10) with ZeRO 1.

    - One stage is a ``PipelineModule``, too: it keeps the logits of two micro-batches (``pipe/engine.py``).
    - Gradients are reduced in flat copies of at most 5e8 elements (``zero/stage2.py``, ``allreduce_bucket``; stage 1
      has no contiguous gradients), and the weights are gathered in pieces of 5e8 to 1e9 elements, which
      ``ProcessGroupNCCL::allgather`` flattens. Torch's allocator gives none of them to the next one, because the
      NCCL stream still uses it when the host asks (``recordStream``), and the pieces are larger than the copies, so
      all of them stay cached.
    """

    _BUCKET: Final = 500_000_000

    def states(self, experiment: Experiment, weights: Parameters, shape: Shape, device: Device) -> States:
        found, count = super().states(experiment, weights, shape, device), weights.total
        short, owned = FORMAT_BYTES[experiment.precision], -(-count // shape.data)
        piece = count // max(1, count // self._BUCKET)
        return replace(
            found, bucket=0, workspace=max(short * min(count, self._BUCKET), (4 + short) * owned, short * piece)
        )

    def _kept_logits(self, experiment: Experiment, sizes: Sizes, accumulation: int) -> float:
        rows = self.rows_of_vocabulary(experiment) / experiment.parallel.tensor_model_parallel_size
        return min(2, accumulation) * sizes.tokens * rows * sizes.short

    def further_terms(self, experiment: Experiment, stage: int, device: Device) -> list[Term]:
        """And what the allocator keeps: flat gradients, and the gathered pieces if they are larger than those."""
        count = self.parameters(experiment, stage).total
        flat = FORMAT_BYTES[experiment.precision] * count * (2 if count > self._BUCKET else 1)
        cached = Term("cached buffers", flat, "flat gradients, gathered weights", least=0)
        return [*super().further_terms(experiment, stage, device), cached]


class MegatronDeepSpeedBf16(MegatronLM):
    """BLOOM's fork of Megatron-DeepSpeed, in bf16 (``deepspeed/runtime/bf16_optimizer.py``).

    Gradients are summed in fp32 on every rank (``fp32_groups_gradients_flat``); those in bf16 stay too, because the
    pipeline does not clear them (``pipe/engine.py``: ``update_hp_grads(clear_lp_grads=False)``).
    """

    def states(self, experiment: Experiment, weights: Parameters, shape: Shape, device: Device) -> States:
        found = super().states(experiment, weights, shape, device)
        return replace(found, gradients=4 * weights.total + found.step_gradients, step_gradients=0)


class Torchtitan(Torch):
    """PyTorch's own trainer (pytorch/torchtitan at 9dec370, with which its first table was measured).

    - Tensor parallelism is sequence parallel too (``parallelisms/parallelize_llama.py``, ``apply_tp``).
    - ``checkpoint_activations`` recomputes layers; ``selective``, of which the source is ``_save_list`` in the same
      file, keeps what attention and every second matrix product give: those of queries and values, the first matrix of
      the MLP and its last one.
    - The loss has all logits in fp32; the output of the model is freed before the backward pass (``train.py``).
    - Norms are single operations in fp32 unless layers are compiled (``models/norms.py``).
    """

    def __init__(self, *, selective: bool) -> None:
        self._selective = selective

    def sizes(self, experiment: Experiment, device: Device) -> Sizes:
        found, tensor = super().sizes(experiment, device), experiment.parallel.tensor_model_parallel_size
        shared = {name: getattr(found, name) / tensor for name in ("between", "residual", "norm", "inputs", "dropout")}
        return replace(found, **shared)

    def head_bytes(self, experiment: Experiment, sizes: Sizes, _accumulation: int) -> float:
        """In the backward pass: the softmax's logarithm, and the gradients of it and of the logits."""
        rows = self.rows_of_vocabulary(experiment) / experiment.parallel.tensor_model_parallel_size
        return head_inputs(sizes) + 3 * sizes.tokens * rows * 4

    def further_terms(self, experiment: Experiment, stage: int, device: Device) -> list[Term]:
        if not self._selective:
            return []
        sizes, model = self.sizes(experiment, device), experiment.model
        values = sizes.heads * model.key_size / model.attention_size
        tensor = experiment.parallel.tensor_model_parallel_size
        scattered = 2 * sizes.between if tensor > 1 else 0.0
        kept = sizes.heads + values + sizes.heads + sizes.attention + sizes.ffn + sizes.hidden + scattered
        layers = layers_of_stage(experiment, stage)
        return [Term("outputs of operations", round(layers * kept), "selective activation checkpointing")]

    def stepwise_norms(self, experiment: Experiment, _gpu: Gpu) -> bool:
        return not experiment.train.compile

    def recomputed_share(self, experiment: Experiment) -> float:
        """The share of a layer's forward FLOPs that the backward pass repeats."""
        if not self._selective:
            return 1.0
        model = experiment.model
        wide, keys, ffn = model.attention_size, model.key_size, model.ffn_size
        products = 2 * wide + 2 * keys + 3 * ffn  # for each number of a hidden state
        attention = model.seq_length * wide / model.hidden_size  # causal
        return (keys + wide + ffn) / (products + attention)


class FmsFsdp(Torch):
    """IBM's trainer (foundation-model-stack/fms-fsdp): FSDP reduces gradients in bf16 (``policies/mixed_precision.py``,
    ``bfSixteen``)."""

    def sent(self, experiment: Experiment, shape: Shape, stage: int) -> Sent:
        found, weights = super().sent(experiment, shape, stage), self.parameters(experiment, stage).total
        shards = shards_of(experiment, shape.data)
        saved = all_gather(shards, 2 * weights) + all_reduce(shape.data // shards, 2 * weights / shards)
        return replace(found, gradient_bytes=found.gradient_bytes - saved)


class Megatron2021(MegatronCore):
    """Megatron-LM before February 2022: a gradient is added to its fp32 sum after its product (NVIDIA/Megatron-LM,
    commit 83b1e42f30)."""

    def summed_bytes(self, experiment: Experiment) -> float:
        return FORMAT_BYTES[experiment.precision] + 8.0


class MegatronWithKernels(MegatronCore):
    """Megatron-LM with TransformerEngine's kernel for rotary embeddings (``apply_rope_fusion``, its default)."""

    def fuses_rotation(self, _experiment: Experiment) -> bool:
        return True


class Nemo(MegatronWithKernels):
    """NeMo's performance recipes (NVIDIA/NeMo, ``scripts/performance/helpers.py``; NVIDIA/dgxc-benchmarking).

    - The rotation is one kernel (``apply_rope_fusion``).
    - Gradients are summed and reduce-scattered in bf16 (``grad_reduce_in_fp32 = False``, ``grad_sync_dtype: bf16``).
    """

    def states(self, experiment: Experiment, weights: Parameters, shape: Shape, device: Device) -> States:
        return replace(super().states(experiment, weights, shape, device), gradients=2 * weights.total)

    def sent(self, experiment: Experiment, shape: Shape, stage: int) -> Sent:
        found, whole = super().sent(experiment, shape, stage), self.parameters(experiment, stage)
        gathered = 2 * whole.total - (2 - self.gathered_bytes) * whole.layers
        plain = 4 * whole.total + 2 * whole.total
        return replace(found, gradient_bytes=found.gradient_bytes * (2 * whole.total + gathered) / plain)

    gathered_bytes = 2
    """Of a weight of a layer, in the all-gather."""

    def summed_bytes(self, experiment: Experiment) -> float:
        return super().summed_bytes(experiment) / 2


class NemoFp8(Nemo):
    """NeMo's recipes in fp8 (``recipes/precision``): matrices of the layers are in fp8 only, in both layouts, and are
    gathered in fp8 (``fp8_param_gather``)."""

    gathered_bytes = 1

    def states(self, experiment: Experiment, weights: Parameters, shape: Shape, device: Device) -> States:
        return replace(super().states(experiment, weights, shape, device), weights=2 * (weights.total - weights.layers))


PROGRAMS: Final[Mapping[str, Engine]] = {
    "scaling": Scaling(),
    "megatron-deepspeed, 2021": MegatronDeepSpeed2021(),
    "megatron-deepspeed, zero 1": MegatronDeepSpeedZero1(),
    "megatron-deepspeed, bf16": MegatronDeepSpeedBf16(),
    "megatron-lm, 2021": Megatron2021(),
    "megatron-lm, transformer engine": MegatronWithKernels(),
    "nemo, bf16": Nemo(),
    "nemo, fp8": NemoFp8(),
    "fms-fsdp": FmsFsdp(),
    "torchtitan": Torchtitan(selective=False),
    "torchtitan, selective": Torchtitan(selective=True),
}


def recomputed_share(program: str | None, experiment: Experiment) -> float:
    """How much of the recomputation that the planner counts the program does."""
    found = PROGRAMS.get(program or "")
    return found.recomputed_share(experiment) if isinstance(found, Torchtitan) else 1.0


def unfused_seconds(program: str | None, experiment: Experiment, micro_batches: int, gpu: Gpu) -> float:
    """How long the program's kernels take in an iteration where the planner counts fused ones."""
    found = PROGRAMS.get(program or "")
    if not isinstance(found, Scaling):
        return 0.0
    assert gpu.memory_gb_s is not None
    slots = micro_batches + experiment.parallel.pipeline_model_parallel_size - 1
    return slots * found.unfused_bytes(experiment) / (gpu.memory_gb_s * MEMORY_SHARE * 1e9)


@contextmanager
def planned_as(program: str | None) -> Iterator[None]:
    """Plans every experiment of the program's engine as that program."""
    if program is None:
        yield
        return
    found = PROGRAMS[program]
    with mock.patch.dict(engines.ENGINES, {found.name: found}):  # type: ignore[arg-type]
        yield
