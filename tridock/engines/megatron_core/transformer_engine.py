"""TransformerEngine's layers in megatron-core: where they are used, and what they keep in memory. Pure.

The bytes were counted with TransformerEngine 2.10 on a simulated GPU (tests/rehearsal/test_transformer_engine.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.experiment.parameters import layer_matrices, layer_weights, mlp_weights
from tridock.gpus import Gpu
from tridock.layout.activations import Sizes, norm_bytes
from tridock.layout.shape import FORMAT_BYTES, Device, Term, layers_of_stage

TE: Final = "transformer_engine"
"""As Megatron's --transformer-impl and Python name it."""
WORKSPACE_BYTES: Final = (32 << 20) + 1024
"""Its own workspace for cuBLAS on Hopper and newer GPUs; 4 MiB on older ones."""
_ALIGNED: Final = 16
"""cuBLAS's alignment in bytes. TransformerEngine refuses other widths, and numbers of tokens not divisible by 8."""
_FP8_COPIES: Final = 2
"""Bytes a weight: on Ada and Hopper, which multiply fp8 in one layout only, each matrix is there in both."""


def problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields a precision that its layers do not support."""
    if experiment.model.transformer_impl == TE and experiment.precision == "fp32":
        # It would keep every score, and refuse context parallelism.
        what, todo = "TransformerEngine has no fused attention in fp32", "set precision to bf16 or fp16, or use local"
        yield Problem("model.transformer_impl", what, TE, todo, ("local",))
    if experiment.model.fp8 is not None:
        yield from _fp8_problems(experiment, experiment.model.fp8)


def _fp8_problems(experiment: Experiment, fp8: str) -> Iterator[Problem]:
    model, parallel = experiment.model, experiment.parallel
    tensor = parallel.tensor_model_parallel_size
    if experiment.precision == "fp32":
        todo = "set precision to bf16 or fp16, or leave it out"
        yield Problem("model.fp8", "needs TransformerEngine's layers, which are not used in fp32", fp8, todo, ("null",))
    if model.transformer_impl not in (None, TE):
        todo = "leave one of the two out"
        yield Problem("model.fp8", "needs TransformerEngine's layers", "model.transformer_impl local", todo, ("null",))
    if model.num_moe_experts is not None:
        what = "a mixture of experts is not trained in fp8: its experts have any number of tokens"
        yield Problem("model.fp8", what, fp8, "leave it out", ("null",))
    spread = parallel.context_parallel_size * (tensor if parallel.sequence_parallel else 1)
    sizes = {
        "model.seq_length": (model.seq_length, spread),
        "model.hidden_size": (model.hidden_size, 1),
        "model.kv_channels": (model.attention_size, tensor),
        "model.num_query_groups": (model.attention_size + 2 * model.key_size, tensor),
        "model.ffn_hidden_size": (model.ffn_size, tensor),
    }
    for where, (size, ranks) in sizes.items():
        if size % ranks == 0 and size // ranks % _ALIGNED:
            what, got = "fp8 needs sizes of products on a rank that are multiples of 16", str(size // ranks)
            yield Problem(where, what, got, "choose another size or layout, or leave model.fp8 out")


def gpu_problems(experiment: Experiment, gpu: Gpu) -> Iterator[Problem]:
    """Yields its layers, or fp8, on a GPU that they do not support."""
    if experiment.model.fp8 is not None and gpu.tflops_16 is not None and gpu.tflops_8 is None:
        what = f"a {gpu.name} has no fp8: its compute capability is below 8.9"
        yield Problem("model.fp8", what, experiment.model.fp8, "leave it out", ("null",))
    if experiment.model.transformer_impl == TE and not gpu.bf16:
        what = f"TransformerEngine has no fused attention on a {gpu.name}: its compute capability is below 8.0"
        yield Problem("model.transformer_impl", what, TE, "set it to local, or leave it out", ("local",))


def packages(experiment: Experiment) -> Mapping[str, str]:
    """Returns its package with the field that needs it, if one does."""
    model = experiment.model
    needed = {
        "model.transformer_impl": model.transformer_impl == TE,
        "model.fp8": model.fp8 is not None,
        "parallel.tp_comm_overlap": experiment.parallel.tp_comm_overlap,
    }
    return next(({TE: field} for field, needs in needed.items() if needs), {})


def is_used(experiment: Experiment, device: Device) -> bool:
    """Returns whether the plan counts its layers: those that are chosen, and the default in bf16.

    The default in fp16 may run on GPUs older than compute capability 8.0, and counts as local, which keeps more.
    """
    model, default = experiment.model, experiment.precision == "bf16" or experiment.model.fp8 is not None
    return device == "cuda" and (model.transformer_impl == TE or (model.transformer_impl is None and default))


def sizes(experiment: Experiment, local: Sizes) -> Sizes:
    """Returns what its layers keep, from what ``local`` layers keep.

    Its norms, linear layers and activations keep the same tensors. Its attention keeps queries, keys, values and output
    without the fused tensor that they are slices of (get_qkv_layout copies slices that its kernels do not take), and
    passes keys and values around the context parallel ranks instead of gathering them
    (AttnFuncWithCPAndKVP2P).
    """
    model, tensor = experiment.model, experiment.parallel.tensor_model_parallel_size
    heads = local.heads
    # A rank has one whole group at least.
    keys = local.tokens * model.key_size * local.short / min(tensor, model.query_groups)
    normed = 0.0
    if model.qk_layernorm:
        rows = local.tokens * (model.num_attention_heads + model.query_groups) / tensor
        normed = norm_bytes(model, rows, model.head_size, local.short, "cuda")
    rows_of_heads = local.tokens * model.num_attention_heads / tensor
    inner = 2 * heads + 2 * keys + normed + 4.0 * model.rotary_size * model.seq_length * local.short
    found = replace(local, inner=inner, attention=4.0 * rows_of_heads)
    if model.fp8 is None:
        return found
    # The inputs of three matrices are kept in fp8; that of attention's output as attention keeps it anyway
    # (megatron-core's set_save_original_input). In the backward pass a gradient is quantized in both layouts.
    return replace(found, inputs=found.inputs / 2, mlp=found.mlp - found.ffn / 2, ffn=2 * found.ffn)


def _empty_gradients(experiment: Experiment) -> int:
    """Returns the bytes of what its layers return to autograd as the gradients of their matrices: one tensor for each
    shape, in the weights' format, which it keeps (``get_dummy_wgrad`` in ``transformer_engine/pytorch/module/base.py``;
    gradient_accumulation_fusion)."""
    model, parallel = experiment.model, experiment.parallel
    elements = sum(
        one.share(parallel.tensor_model_parallel_size) for one in layer_weights(model) if one.is_matrix and one.is_split
    )
    if model.num_moe_experts is not None:
        expert = sum(one.elements for one in mlp_weights(model) if one.is_matrix)
        elements += expert // parallel.expert_tensor_size
    return FORMAT_BYTES[experiment.precision] * elements


def terms(experiment: Experiment, stage: int) -> Iterator[Term]:
    """Yields what its layers keep from step to step besides weights and optimizer states."""
    yield Term("TransformerEngine", WORKSPACE_BYTES, "its workspace for matrix products; 4 MiB before Hopper")
    source = "autograd gets an empty tensor of each shape, as products add gradients to the fp32 sums themselves"
    yield Term("empty gradients", _empty_gradients(experiment), source)
    if experiment.model.fp8 is not None:
        size = _FP8_COPIES * layers_of_stage(experiment, stage) * layer_matrices(experiment.model)
        size //= experiment.parallel.tensor_model_parallel_size
        yield Term("fp8 weights", size, "a copy of each matrix of the layers, and its transpose, from step to step")
