"""Computation time of one micro batch on a rank of a pipeline stage: matrix products by their shapes, attention, the
kernels between them, and recomputation. Pure.

Between the products a layer reads and writes the residual stream and the tensors inside attention and MLP: two norms
(read, written), two additions of the residual with their dropout (two read, one written), the activation function and
the changes to queries and keys. Each tensor that these keep is written or read a second time. The backward pass takes
twice as long. Rotary embeddings are many kernels, unless the engine fuses them.
"""

from dataclasses import dataclass, replace
from typing import Final

from tridock.experiment import Experiment
from tridock.layout.activations import Attention, Sizes
from tridock.layout.kernels import KernelRates, attention_seconds, pass_seconds, product_seconds
from tridock.layout.shape import Parameters, layers_of_stage, recomputed_layers

_FORWARD_KERNELS: Final = 20
"""Kernels of one layer's forward pass: products, attention, norms, additions, the activation function, copies."""
_BACKWARD_KERNELS: Final = 40
_COMPILED: Final = 0.5
"""Share of these that a compiled layer has: few besides its products and attention."""
_SCORE_PASSES: Final = 8
"""Passes over the scores of unfused attention: written, scaled, masked, softmax, dropout and its mask, read."""
_QUANTIZED_BYTES: Final = 6
"""Bytes moved for each element quantized to fp8: read for its maximum (2), read again (2), written twice (1 + 1)."""
_ROTATION: Final = (14, 16)
"""Bytes that the kernels of a rotation move for each rotated number of two bytes, forward and backward: four products
of halves (8), a sum and a difference (6); backward also the negation of a half (2)."""
_JOINED: Final = (4 - 1, 4 - 2)
"""Bytes that joining the halves moves, less what the tensors inside attention count for the rotated copies."""
_CAST: Final = 3
"""Autocast reads a weight in four bytes and writes its copy in two; backward it does the same with the gradient."""
_STEPWISE_NORM: Final = (36 - 4, 92 - 8)
"""Bytes that RMSNorm's single operations in fp32 move for each short number, forward and backward, less those of its
kernel (``tests/unit/train/test_layer_kernels.py``)."""
_LOSS_BYTES: Final = 28
"""Bytes moved for each logit, forward and backward: to fp32 and back (6 and 6), softmax (8), its gradient (8)."""
_COMPILED_LOSS_BYTES: Final = 8
"""The same of compiled kernels, measured on an H100: they read the logits twice, and read and write them again."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one micro batch on one rank."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    """Memory-bound kernels: norms, additions, activation functions, sums of gradients."""
    recomputed: float = 0.0
    launches: float = 0.0
    """Starts and ends of kernels, and the time that the device waits for the host to launch them."""
    column_gradients: float = 0.0
    """Weight-gradient products of the column-parallel matrices; included in ``products``."""

    @property
    def total(self) -> float:
        return self.products + self.attention + self.elementwise + self.recomputed + self.launches


@dataclass(frozen=True, slots=True)
class _Pass:
    products: float
    attention: float
    elementwise: float
    kernels: int

    def waits(self, device: KernelRates) -> float:
        busy = self.products + self.attention + self.elementwise + self.kernels * device.start_s
        return max(0.0, self.kernels * device.launch_s - busy) + self.kernels * device.start_s

    def total(self, device: KernelRates) -> float:
        return self.products + self.attention + self.elementwise + self.waits(device)


def stage_time(
    experiment: Experiment,
    stage: int,
    device: KernelRates,
    sizes: Sizes,
    weights: Parameters,
    rows: int,
    *,
    summed_bytes: float,
    attention: Attention,
    fuses_rotation: bool,
    stepwise_norms: bool,
) -> StageTime:
    """Returns the time of one micro batch. ``rows``: of the token table, over all tensor parallel ranks.
    ``summed_bytes``: bytes read and written of a weight for each micro batch, as its gradient is accumulated.
    ``stepwise_norms``: of a torch without an RMSNorm kernel."""
    layers = layers_of_stage(experiment, stage)
    moved = between_bytes(experiment, sizes, fuses_rotation=fuses_rotation, stepwise_norms=stepwise_norms)
    forward, backward, column = _layer(experiment, device, sizes, attention, moved)
    again = recomputed_layers(experiment, layers) * forward.total(device)
    if experiment.model.recompute_granularity == "selective":
        again = layers * forward.attention
    waits = layers * (forward.waits(device) + backward.waits(device))
    time = StageTime(
        products=layers * (forward.products + backward.products),
        attention=layers * (forward.attention + backward.attention),
        elementwise=layers * (forward.elementwise + backward.elementwise),
        recomputed=again,
        launches=waits,
        column_gradients=layers * column,
    )
    if not device.flat:
        sums = pass_seconds(device, summed_bytes * weights.total)
        time = replace(time, elementwise=time.elementwise + sums)
    if stage < experiment.parallel.pipeline_model_parallel_size - 1:
        return time
    products, loss = _head(experiment, device, sizes, rows)
    return replace(time, products=time.products + products, elementwise=time.elementwise + loss)


def _layer(
    experiment: Experiment, device: KernelRates, sizes: Sizes, attention: Attention, moved: tuple[float, float]
) -> tuple[_Pass, _Pass, float]:
    """Returns the forward pass, the backward pass, and the part of the latter that can hide the exchange of gradients
    between tensor parallel ranks: weight-gradient products of the column-parallel matrices."""
    model, parallel = experiment.model, experiment.parallel
    tensor = parallel.tensor_model_parallel_size
    wide, narrow, ffn = model.hidden_size, model.attention_size // tensor, model.ffn_size // tensor
    first = (model.attention_size + 2 * model.key_size) // tensor, ffn * (2 if model.swiglu else 1)
    tokens, size = sizes.tokens, sizes.short
    matrices = [(tokens, first[0], wide), (tokens, wide, narrow)]
    if model.num_moe_experts is None:
        matrices += [(tokens, first[1], wide), (tokens, wide, ffn)]
    else:
        matrices += expert_matrices(experiment, tokens)
        if shared := (model.moe_shared_expert_intermediate_size or 0) // tensor:
            matrices += [(tokens, shared * (2 if model.swiglu else 1), wide), (tokens, wide, shared)]
    fast, width, quantized = device, size, (0.0, 0.0)
    if model.fp8 is not None and not device.flat:
        fast, width = replace(device, tflops=device.tflops * device.fp8), 1
        ways = ([rows * into for rows, _, into in matrices], [rows * out for rows, out, _ in matrices])
        quantized = (
            pass_seconds(device, _QUANTIZED_BYTES * sum(ways[0])),
            pass_seconds(device, _QUANTIZED_BYTES * sum(ways[1])),
        )
    one_way = sum(product_seconds(fast, rows, out, into, width) for rows, out, into in matrices)
    inputs = sum(product_seconds(fast, rows, into, out, width) for rows, out, into in matrices)
    gradients = [product_seconds(fast, out, into, rows, width) for rows, out, into in matrices]
    samples = experiment.batch.micro_batch_size / parallel.context_parallel_size
    heads = model.num_attention_heads / tensor
    if attention == "unfused" and not device.flat:
        mixed = _unfused(experiment, device, size, heads)
    else:
        mixed = attention_seconds(device, model.seq_length, heads, model.head_size, samples, attention)
    kernels = _COMPILED if experiment.train.compile else 1.0
    between = (0.0, 0.0) if device.flat else (pass_seconds(device, moved[0]), pass_seconds(device, moved[1]))
    return (
        _Pass(one_way, mixed[0], between[0] + quantized[0], round(_FORWARD_KERNELS * kernels)),
        _Pass(inputs + sum(gradients), mixed[1], between[1] + quantized[1], round(_BACKWARD_KERNELS * kernels)),
        gradients[0] + (gradients[2] if model.num_moe_experts is None else 0.0),
    )


def expert_matrices(experiment: Experiment, tokens: int) -> list[tuple[int, int, int]]:
    """Returns rows, columns and width of the products of a rank's experts, each with an equal number of tokens.

    ``tokens``: of a context parallel rank's micro batch.
    """
    model, parallel = experiment.model, experiment.parallel
    count, tensor = model.experts // parallel.expert_model_parallel_size, parallel.expert_tensor_size
    routed = tokens * model.active_experts * tensor // parallel.tensor_model_parallel_size
    rows, ffn = max(1, routed // count), model.expert_size // tensor
    return [(rows, ffn * (2 if model.swiglu else 1), model.hidden_size), (rows, model.hidden_size, ffn)] * count


def between_bytes(
    experiment: Experiment, sizes: Sizes, *, fuses_rotation: bool, stepwise_norms: bool = False
) -> tuple[float, float]:
    """Returns the bytes read and written between the products of a layer, forward and backward."""
    model = experiment.model
    fused = 8 * sizes.residual + 2 * sizes.between + 4 * sizes.dropout + sizes.mlp + sizes.inner / 2
    if sizes.casts:
        fused += 2 * (sizes.residual + sizes.between)  # the norms' outputs
    casts, rotation = _CAST * sizes.casts, (0.0, 0.0)
    if model.position_embedding_type == "rope" and not fuses_rotation:
        heads = (model.attention_size + model.key_size) / experiment.parallel.tensor_model_parallel_size
        numbers, share = sizes.tokens * heads * sizes.short / 2, model.rotary_size / model.head_size
        rotation = (numbers * (_ROTATION[0] * share + _JOINED[0]), numbers * (_ROTATION[1] * share + _JOINED[1]))
    norms = 0.0
    if stepwise_norms and model.normalization != "LayerNorm":
        heads = model.attention_size + model.key_size if model.qk_layernorm else 0
        norms = 2 * sizes.between / sizes.short
        norms += sizes.tokens * heads / experiment.parallel.tensor_model_parallel_size
    forward, backward = (norms * moved for moved in _STEPWISE_NORM)
    return fused + casts + rotation[0] + forward, 2 * fused + casts + rotation[1] + backward


def _unfused(experiment: Experiment, device: KernelRates, size: int, heads: float) -> tuple[float, float]:
    """Returns the time of attention that writes its scores to memory: two products forward, four backward."""
    model = experiment.model
    samples, length = experiment.batch.micro_batch_size, model.seq_length
    of_a_head = product_seconds(device, length, length, model.head_size, size)
    flops = 4.0 * length * length * model.head_size
    products = max(of_a_head / 4, flops / (device.tflops * 1e12 * device.matmul_share)) * heads * samples
    scores = pass_seconds(device, _SCORE_PASSES * size * samples * heads * length * length)
    return products + scores, 2 * products + scores


def _head(experiment: Experiment, device: KernelRates, sizes: Sizes, rows: int) -> tuple[float, float]:
    """Returns the time of the output layer's products, both ways, and of the passes over the logits."""
    columns, wide = rows // experiment.parallel.tensor_model_parallel_size, experiment.model.hidden_size
    tokens, size = sizes.tokens, sizes.short
    products = (
        product_seconds(device, tokens, columns, wide, size)
        + product_seconds(device, tokens, wide, columns, size)
        + product_seconds(device, columns, wide, tokens, size)
    )
    moved = _COMPILED_LOSS_BYTES if experiment.train.compile else _LOSS_BYTES
    return products, 0.0 if device.flat else pass_seconds(device, moved * float(tokens) * columns)


def vision_seconds(device: KernelRates, flops: float) -> float:
    return flops / (device.tflops * 1e12 * device.matmul_share)
