"""Builds this rank's parts of an experiment's GPT with megatron-core."""

import hashlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import layers as tensor_parallel_layers
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide
from torch import Tensor, nn
from torch.nn import functional as F

from tridock.contracts.prerequisites import compiler_problems
from tridock.errors import Problem, RequestError
from tridock.experiment.model import Model
from tridock.experiment.schema import Experiment
from tridock.train.huggingface.weights import Weights
from tridock.train.megatron_core import user_buffers
from tridock.train.megatron_core.attention import FusedAttention
from tridock.train.megatron_core.names import parts_of
from tridock.train.models.cross_entropy import token_losses
from tridock.train.models.layered import with_rows
from tridock.train.models.rotary import frequencies
from tridock.train.rank.process_group import local_ranks

BLOCK: Final = 1 << 16
"""Elements drawn at a time; a longer row is drawn whole."""
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class GPT(GPTModel):
    """megatron-core's GPT with a loss that excludes the padding rows of the vocabulary.

    Their number depends on the tensor parallel size, so including them would make the loss depend on the layout.
    """

    def __init__(self, *given: Any, tokens: int, **named: Any) -> None:
        super().__init__(*given, **named)
        self.tokens = tokens

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Returns the loss of each token, [batch, sequence].

        ``logits`` are [sequence, batch, this rank's part of the vocabulary].
        """
        part, group = logits.size(-1), parallel_state.get_tensor_model_parallel_group()
        first = part * group.rank()
        padding = max(0, self.tokens - first)
        if padding < part:
            logits[..., padding:].fill_(-math.inf)
        # Logits are [sequence, batch, part of the vocabulary], labels and losses [batch, sequence].
        among = group if group.size() > 1 else None
        compiled = can_fuse(logits.device.type)
        losses = token_losses(logits.flatten(0, 1), labels.t().flatten(), among, first, compiled=compiled)
        return losses.view(logits.shape[:2]).t().contiguous()


def build_chunks(
    experiment: Experiment, tokens: int, padded: int, device: torch.device, pretrained: Weights | None = None
) -> list[DistributedDataParallel]:
    """Returns this rank's model chunks, several with an interleaved schedule, each in megatron-core's DDP.

    The vocabulary has ``tokens`` entries, and the embedding ``padded`` rows, a multiple for tensor parallelism.
    """
    config = transformer_config(experiment, device)
    if config.transformer_impl == "transformer_engine":
        config.tp_comm_overlap = user_buffers.begin(experiment, local_ranks())
    model, virtual = experiment.model, experiment.parallel.virtual_pipeline_model_parallel_size
    chunks: list[nn.Module] = []
    for number in range(virtual):
        stage = number if virtual > 1 else None
        chunk = GPT(
            config,
            block_spec(config, stage),
            padded,
            model.positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            position_embedding_type=model.position_embedding_type,
            rotary_percent=model.rotary_percent,
            vp_stage=stage,
            tokens=tokens,
        )
        if model.rotary_size:
            chunk.rotary_pos_emb.inv_freq = frequencies(model, device)
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:
                # 0.16.1 does it with expert parallelism only: otherwise ranks with the same experts and other tokens
                # would not sum their gradients where tensor parallel ranks have whole experts, and a checkpoint's
                # optimizer would not fit where there is expert parallelism.
                parameter.allreduce = False
        if pretrained is None:
            initialize(chunk.to(device), experiment)
        else:
            copy_weights(chunk.to(device), pretrained)
        chunks.append(chunk if experiment.precision == "fp32" else Float16Module(config, chunk))
    return [_data_parallel(config, chunk, number, experiment) for number, chunk in enumerate(chunks)]


def transformer_config(experiment: Experiment, device: torch.device) -> TransformerConfig:
    """Returns megatron-core's configuration of the model and its layout."""
    model, parallel, dtype = experiment.model, experiment.parallel, DTYPES[experiment.precision]
    virtual = parallel.virtual_pipeline_model_parallel_size
    fused = can_fuse(device.type)
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        # As in Megatron-LM's arguments; without it the package silently rounds a head's width down.
        kv_channels=model.kv_channels or divide(model.hidden_size, model.num_attention_heads),
        num_query_groups=model.query_groups,
        ffn_hidden_size=model.ffn_size,
        gated_linear_unit=model.swiglu,
        activation_func=_activation(model, is_fused=can_fuse(device.type)),
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=model.qk_layernorm,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        no_rope_freq=[*map(int, model.unrotated_layers)] if model.no_rope_freq else None,
        softmax_scale=_softmax_scale(model),
        # `initialize` does it, alike in every layout; Megatron only marks what it splits on this occasion.
        init_method=_untouched,
        output_layer_init_method=_untouched,
        embedding_init_method=_untouched,
        use_cpu_initialization=device.type != "cuda",
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        num_layers_in_first_pipeline_stage=parallel.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=parallel.decoder_last_pipeline_num_layers,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        **expert_settings(experiment),
        # With two stages, the next stage is also the previous one: batched messages would be mixed up.
        overlap_p2p_comm=virtual > 1,
        batch_p2p_comm=virtual == 1,
        # A stage frees its output once it is sent. CUDA streams keep that order; Gloo has none.
        deallocate_pipeline_outputs=device.type == "cuda",
        recompute_granularity=model.recompute_granularity,
        recompute_method=model.recompute_method,
        recompute_num_layers=model.recompute_num_layers,
        fp16=experiment.precision == "fp16",
        bf16=experiment.precision == "bf16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,  # its kernels are not part of the package
        # apex's kernel, which the output layer needs also with transformer-engine's layers
        gradient_accumulation_fusion=tensor_parallel_layers._grad_accum_fusion_available,
        bias_activation_fusion=fused and _fuses_activation(model),
        apply_rope_fusion=False,  # transformer-engine's
        bias_dropout_fusion=fused,
        finalize_model_grads_func=finalize_model_grads,
        transformer_impl=implementation(experiment, device, dtype),
        fp8=model.fp8,
        fp8_recipe="tensorwise",  # delayed scaling has a state of each layer, which checkpoints would have to keep
    )


def _softmax_scale(model: Model) -> float | None:
    if model.rotary_factor == 1:
        return model.attention_multiplier
    return (model.attention_multiplier or 1 / math.sqrt(model.head_size)) * model.rotary_factor**2


def _fuses_activation(model: Model) -> bool:
    """Whether megatron-core fuses the MLP's activation, where it can: its GELU is then the tanh approximation."""
    return model.swiglu or (model.add_bias_linear and model.gelu != "gelu")


def _activation(model: Model, *, is_fused: bool) -> Callable[[Tensor], Tensor]:
    if model.swiglu:
        return F.silu
    is_fused = is_fused and _fuses_activation(model)
    return _gelu_tanh if model.gelu == "gelu_tanh" and not is_fused else F.gelu


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def expert_settings(experiment: Experiment) -> dict[str, Any]:
    """Returns megatron-core's configuration of a mixture of experts; empty for another model."""
    model, parallel = experiment.model, experiment.parallel
    if model.num_moe_experts is None:
        return {}
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 looks for it where transformer-engine, which has it, is missing
    return {
        "num_moe_experts": model.num_moe_experts,
        "moe_router_topk": model.moe_router_topk,
        "moe_router_pre_softmax": model.moe_router_pre_softmax,
        "moe_ffn_hidden_size": model.expert_size,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "moe_shared_expert_gate": model.moe_shared_expert_gate,
        "moe_router_load_balancing_type": model.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_size,
    }


def can_fuse(device_type: str) -> bool:
    """Whether torch.compile can build fused kernels of biases, dropout and activations on this machine."""
    return device_type == "cuda" and not any(compiler_problems(device_type))


def _untouched(weight: Tensor) -> None:
    """Replaces Megatron's initialization, and leaves the weight as it is."""


class Norm:
    """torch's norm, marked for sequence parallelism, so that Megatron sums its gradients over tensor parallel ranks."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> nn.Module:  # type: ignore[misc]
        kind = nn.LayerNorm if config.normalization == "LayerNorm" else nn.RMSNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def block_spec(config: TransformerConfig, stage: int | None) -> Any:
    """Returns the spec of the layers' modules: transformer-engine's, or megatron-core's own.

    megatron-core's norm refuses sequence parallelism; its attention refuses context parallelism and stores every score.
    This replaces both.
    """
    if config.transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm
        )
    layer: Any = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm)
    if config.num_moe_experts is not None:  # a norm without a matrix to fuse: its name is that of transformer-engine
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = FusedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    layers = get_num_layers_to_build(config, vp_stage=stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=Norm)


def implementation(experiment: Experiment, device: torch.device, dtype: torch.dtype) -> str:
    """Returns whose layers are used: those that the experiment names, else transformer-engine's where its attention is
    fused. Raises :class:`RequestError` if the experiment needs transformer-engine's and they cannot be used."""
    model = experiment.model
    if model.transformer_impl not in (None, "transformer_engine"):
        return "local"
    lacks = "a GPU" if device.type != "cuda" else "" if has_transformer_engine() else "the package transformer_engine"
    if not lacks and not fuses_attention(dtype):
        lacks = "its fused attention: that needs bf16 or fp16, and compute capability 8.0"
    elif not lacks and model.fp8 is not None and torch.cuda.get_device_capability() < (8, 9):
        lacks = "fp8: that needs compute capability 8.9"
    needed = {
        "model.fp8": model.fp8,
        "model.transformer_impl": model.transformer_impl,
        "parallel.tp_comm_overlap": "true" if experiment.parallel.tp_comm_overlap else None,
    }
    if lacks and (field := next((name for name, value in needed.items() if value is not None), None)):
        what, todo = f"needs TransformerEngine, and this rank lacks {lacks}", "leave it out"
        raise RequestError(Problem(field, what, str(needed[field]), todo))
    return "local" if lacks else "transformer_engine"


def has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def fuses_attention(dtype: torch.dtype) -> bool:
    """Whether transformer-engine fuses attention; otherwise it stores every score and refuses context parallelism."""
    return dtype != torch.float32 and torch.cuda.get_device_capability() >= (8, 0)


def initialize(model: GPTModel, experiment: Experiment) -> None:
    """Draws GPT-2's initial weights, the same in every layout. Leaves norms as they were built.

    Each block of a weight's rows has its own seed, and a rank draws only the blocks that contain its rows. The values
    thus do not depend on the rank or on earlier draws.
    """
    std = experiment.model.init_method_std
    onto_residual = std / math.sqrt(2.0 * experiment.model.num_layers)
    for key, sharded in sharded_weights(model):
        if key.endswith(".bias"):
            sharded.data.detach().zero_()
        if not key.endswith("weight") or sharded.data.dim() < 2:
            continue
        scale = onto_residual if key.endswith(("linear_proj.weight", "linear_fc2.weight")) else std
        draw(sharded, scale, experiment.train.seed)


def copy_weights(model: GPTModel, pretrained: Weights) -> None:
    """Copies this rank's part of each pretrained weight into the model; rows beyond the vocabulary become zeros."""
    parts = parts_of(pretrained.model, pretrained.names)
    for _, sharded in sharded_weights(model):
        expert, first = expert_of(sharded)
        whole = torch.cat([pretrained.read(name) for name in parts[sharded.key, expert]])
        whole = with_rows(whole, sharded.global_shape[first])
        share = zip(sharded.global_offset[first:], sharded.local_shape[-whole.dim() :], strict=True)
        sharded.data.detach().copy_(whole[tuple(slice(start, start + size) for start, size in share)])


def sharded_weights(model: GPTModel) -> Iterator[tuple[str, ShardedTensor]]:
    """Yields a rank's weights by name, each with its place in the whole weight; SwiGLU's two halves come separately."""
    for name, found in model.sharded_state_dict(metadata={"non_homogeneous_layers": True}).items():
        parts = found.build() if isinstance(found, ShardedTensorFactory) else found
        for sharded in parts if isinstance(parts, list) else [parts]:
            if isinstance(sharded, ShardedTensor):
                yield name, sharded


def expert_of(sharded: ShardedTensor) -> tuple[int, int]:
    """Returns the number of a weight's expert, else 0; and the number of leading dimensions that are not the weight's.

    megatron-core's checkpoints store a layer's experts as one tensor, whose first dimension is the number of experts.
    """
    dimensions = sharded.prepend_axis_num
    return (sharded.global_offset[0] if dimensions else 0), dimensions


def draw(sharded: ShardedTensor, std: float, seed: int) -> None:
    """Draws this rank's part of a matrix from N(0, std)."""
    (first, left), (rows, width) = sharded.global_offset[-2:], sharded.data.shape
    columns = sharded.global_shape[-1]
    expert, dimensions = expert_of(sharded)
    name = f"{sharded.key} expert {expert}" if dimensions else sharded.key
    size = max(1, BLOCK // columns)
    local = sharded.data.detach()
    for block in range(first // size, -(-(first + rows) // size)):
        generator = torch.Generator().manual_seed(seed_of(f"{name} {block}", seed))
        # Whole, however many rows the matrix has of it: their number depends on the padding of the vocabulary.
        drawn = torch.empty(size, columns).normal_(0.0, std, generator=generator)
        start = block * size - first  # of the block, in this rank's rows
        here = slice(max(0, start), min(rows, start + size))
        local[here].copy_(drawn[here.start - start : here.stop - start, left : left + width])


def seed_of(name: str, seed: int) -> int:
    """Returns the seed of a weight, from its name and the run's seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest(), "little")


def _data_parallel(
    config: TransformerConfig, chunk: nn.Module, number: int, experiment: Experiment
) -> DistributedDataParallel:
    replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    distributed = experiment.parallel.use_distributed_optimizer
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=replicas > 1,  # during the last backward pass
        overlap_param_gather=replicas > 1 and distributed,  # during the next forward pass
        use_distributed_optimizer=distributed,
    )
    # Later chunks' gradients wait for the first's anyway.
    return DistributedDataParallel(config, settings, chunk, disable_bucketing=number > 0)
