"""TransformerEngine's layers in megatron-core: where they are used, and what they keep in memory. Pure.

The bytes were counted with TransformerEngine 2.10 on a simulated GPU (tests/rehearsal/test_transformer_engine.py).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.gpus import Gpu
from tridock.layout.activations import Sizes, norm_bytes
from tridock.layout.shape import Device

TE: Final = "transformer_engine"
"""As Megatron's --transformer-impl and Python name it."""
WORKSPACE_BYTES: Final = (32 << 20) + 1024
"""Its own workspace for cuBLAS on Hopper and newer GPUs; 4 MiB on older ones."""


def problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields a precision that its layers do not support."""
    if experiment.model.transformer_impl == TE and experiment.precision == "fp32":
        # It would keep every score, and refuse context parallelism.
        what, todo = "TransformerEngine has no fused attention in fp32", "set precision to bf16 or fp16, or use local"
        yield Problem("model.transformer_impl", what, TE, todo, ("local",))


def gpu_problems(experiment: Experiment, gpu: Gpu) -> Iterator[Problem]:
    """Yields its layers on a GPU that they do not support."""
    if experiment.model.transformer_impl == TE and not gpu.bf16:
        what = f"TransformerEngine has no fused attention on a {gpu.name}: its compute capability is below 8.0"
        yield Problem("model.transformer_impl", what, TE, "set it to local, or leave it out", ("local",))


def is_used(experiment: Experiment, device: Device) -> bool:
    """Returns whether the plan counts its layers: those that are chosen, and the default in bf16.

    The default in fp16 may run on GPUs older than compute capability 8.0, and counts as local, which keeps more.
    """
    chosen = experiment.model.transformer_impl
    return device == "cuda" and (chosen == TE or (chosen is None and experiment.precision == "bf16"))


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
    return replace(local, inner=inner, attention=4.0 * rows_of_heads)
