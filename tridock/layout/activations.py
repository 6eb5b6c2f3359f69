"""Peak memory of a step's activations on one rank of a pipeline stage.

A layer's terms are those of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
section 4, counted tensor by tensor as the engines keep them: the inputs of both norms, of the four matrices and of the
activation function, and what attention and dropout keep. Attention is torch's fused attention, which keeps queries,
keys, values, output, and one fp32 number a row.

The peak is either at the loss, with the logits, or in the first backward pass of a layer, with recomputed activations
and the gradients in flight. The numbers were checked against every tensor that CPU ranks allocate (docs/planner.md).
GPU kernels keep different tensors: a byte an element for dropout, fp32 statistics of norms, attention fused with
dropout.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

from tridock.experiment import Experiment
from tridock.experiment.model import Model
from tridock.experiment.parameters import layer_matrices
from tridock.layout.shape import FORMAT_BYTES, Device, Term, in_flight, layers_of_stage, recomputed_layers, tokens_of

Attention = Literal["fused", "flash-2", "flash-triton", "flash-1", "unfused"]
"""What computes attention: the fastest fused kernel of today, an older one, or kernels that write the scores."""
TOKEN_BYTES: Final = 8  # int64
AFTER_FORWARD: Final = ("logits and loss", "backward pass")
"""Terms of tensors that come after the forward passes of all layers."""
_LOSS_TOKEN_BYTES: Final = 8 + 6 * 4
"""What the loss has of each token beside its logits, in ``vocab_parallel_cross_entropy``: the label's row on this rank,
and in fp32 the largest logit, the label's logit, the sum, its logarithm, the loss and its mask."""
LOSS_BYTES: Final = 4  # the loss is computed in fp32
LOSS_CHUNK_BYTES: Final = 1 << 25
"""Logits that are in fp32 at a time where the loss is computed in chunks: the size of a GPU's cache."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a layer's tensors, for one micro batch on one rank."""

    device: Device
    tokens: int
    """Tokens of this rank's micro batch."""
    short: int
    """Bytes of one number in the matrix products."""
    hidden: float
    """[tokens, hidden] in the format of the matrix products, unsplit."""
    ffn: float
    """[tokens, width of the MLP], split over the tensor parallel ranks inside a layer."""
    heads: float
    """[tokens, heads x head size], split likewise."""
    between: float
    """[tokens, hidden] between the split parts; sequence parallelism splits it."""
    residual: float
    """The residual stream between the split parts: fp32 under autocast."""
    norm: float
    """Tensors that a norm of the residual stream keeps: its input, and statistics of each token."""
    inner: float
    """Tensors inside attention: queries, keys and values, their normed or rotated copies, and the output."""
    mlp: float
    """Tensors inside the MLP: the activation function's inputs and outputs."""
    inputs: float
    """Inputs of the first matrices of attention and MLP."""
    dropout: float
    """Tensors that dropout on the residual stream keeps."""
    casts: float
    """Copies of a layer's matrices that autocast makes in the short format."""
    attention: float
    """Tensors that attention keeps besides queries, keys, values and output."""
    weight: float
    """The gradient of a layer's widest matrix, before it is accumulated."""
    restored: float
    """The input of a group of recomputed layers, which is kept anyway and so is not held twice."""
    gathered: float
    """Weights gathered for the layer that is computing."""


def activation_terms(
    experiment: Experiment, stage: int, accumulation: int, sizes: Sizes, head: float, inside: float, messages: float
) -> list[Term]:
    """Returns the terms of one rank of a stage. ``head``: bytes of the output layer and the loss, on the last stage.
    ``inside``: peak of the layers' backward passes, beyond what they keep. ``messages``: bytes of a stage's inputs and
    outputs that its layers do not keep."""
    layers, stages = layers_of_stage(experiment, stage), experiment.parallel.pipeline_model_parallel_size
    virtual = experiment.parallel.virtual_pipeline_model_parallel_size
    again, passes_in_flight = recomputed_layers(experiment, layers), in_flight(experiment, stage, accumulation)
    kept = kept_bytes(experiment, stage, sizes)
    first, last = stage == 0, stage == stages - 1
    runs = f"{passes_in_flight} runs of {layers // virtual} layers" if stages > 1 else f"{layers} layers"
    terms = [Term("activations", round(kept * passes_in_flight / virtual), f"{runs}; Korthikanti et al. 2022, 4.1")]
    if first:
        held = (sizes.tokens * TOKEN_BYTES + sizes.dropout) * min(passes_in_flight, accumulation)
        terms.append(Term("embedding", round(held), "tokens and dropout, each micro batch in flight"))
    if stages > 1:
        terms.append(Term("stage inputs and outputs", round(messages), "hidden states on their way"))
    head = head if last else 0.0
    if last:
        terms.append(Term("logits and loss", round(head), "probabilities in fp32, logits or their gradients"))
    what = "the layers computed again, and gradients on their way" if again else "gradients on their way"
    what += ", beyond the logits' room" if last else ""
    terms.append(Term("backward pass", round(max(0.0, inside - head)), what))
    return terms


def backward_peak(experiment: Experiment, stage: int, sizes: Sizes) -> float:
    """Returns the peak of the backward passes of a stage's layers, beyond what they keep. They reach recomputed layers
    after the layers that were kept, which are freed by then."""
    layers, virtual = layers_of_stage(experiment, stage), experiment.parallel.virtual_pipeline_model_parallel_size
    again = recomputed_layers(experiment, layers)
    kept_layers = (layers - again) * kept_layer(experiment, sizes)
    return max(backward_bytes(experiment, sizes, 0), backward_bytes(experiment, sizes, again) - kept_layers / virtual)


def kept_bytes(experiment: Experiment, stage: int, sizes: Sizes) -> float:
    """Returns the bytes that a stage's layers keep of one micro batch for the backward pass."""
    layers = layers_of_stage(experiment, stage)
    again = recomputed_layers(experiment, layers)
    return (layers - again) * kept_layer(experiment, sizes) + _groups(experiment, again) * _kept_input(
        experiment, sizes
    )


def sizes_of(
    experiment: Experiment,
    device: Device,
    *,
    autocast: bool = False,
    sums_in_place: bool = False,
    restores_inputs: bool = False,
    gathered: float = 0.0,
    swiglu: int = 4,
    angles: float = 0.0,
) -> Sizes:
    """Returns the tensors of a micro batch, as an engine keeps them.

    ``autocast``: weights are fp32 and cast for each product. ``sums_in_place``: a weight's first gradient becomes its
    accumulated gradient. ``restores_inputs``: recomputed layers begin with the kept input. ``gathered``: bytes of
    weights gathered for the layer that is computing. ``swiglu``: tensors of the MLP's width that SwiGLU keeps.
    ``angles``: numbers that a layer keeps of its rotation for each position.
    """
    model, parallel = experiment.model, experiment.parallel
    tensor = parallel.tensor_model_parallel_size
    spread = tensor if parallel.sequence_parallel else 1
    tokens, short = tokens_of(experiment), FORMAT_BYTES[experiment.precision]
    autocast = autocast and short == 2
    elements = tokens * model.hidden_size
    residual = 4 if autocast else short
    dense, kept = model.num_moe_experts is None, swiglu if model.swiglu else 2
    # megatron-core weights an expert's output before its second matrix, on GPUs in SwiGLU's own kernel.
    weighted = 0 if model.swiglu and device == "cuda" else 1
    # Mixture of experts: each token counts once for each expert that takes it; all experts take equally many tokens.
    routed = tokens * model.active_experts * parallel.expert_tensor_size / tensor
    count, width = model.experts / parallel.expert_model_parallel_size, model.expert_size / parallel.expert_tensor_size
    return Sizes(
        device=device,
        tokens=tokens,
        short=short,
        hidden=elements * short,
        ffn=tokens * model.ffn_size * short / tensor if dense else routed * (model.hidden_size + width / count) * short,
        heads=tokens * model.attention_size * short / tensor,
        between=elements * short / spread,
        residual=elements * residual / spread,
        norm=norm_bytes(model, tokens / spread, model.hidden_size, residual, device),
        inner=_inner_bytes(experiment, tokens, short, device) + model.seq_length * angles * short,
        mlp=kept * tokens * model.ffn_size * short / tensor
        if dense
        else _mixture_bytes(model, tokens / spread, routed, (kept + weighted) * width, short)
        + kept * tokens * (model.moe_shared_expert_intermediate_size or 0) * short / tensor
        + (elements * short / spread if model.moe_shared_expert_gate else 0.0),
        inputs=(3 if model.swiglu and autocast else 2) * elements * short / spread,
        dropout=elements * (1 if device == "cuda" else short) / spread if model.hidden_dropout else 0.0,
        casts=layer_matrices(model) * short if autocast else 0.0,
        attention=_attention_bytes(experiment, tokens, short, device),
        weight=0.0 if sums_in_place else model.hidden_size * (model.ffn_size / tensor if dense else width) * short,
        restored=elements * short / spread if restores_inputs else 0.0,
        gathered=gathered,
    )


def _mixture_bytes(model: Model, tokens: float, routed: float, width: float, short: int) -> float:
    """Returns the bytes that a mixture of experts keeps: the routed tokens, the tensors inside the experts (``width``:
    of all together), each token's weight and destination, the router's scores and the tensors derived from them."""
    scores = tokens * model.experts * (3 * short + 2)
    return routed * ((model.hidden_size + width) * short + 8 + 8 + 2 * short) + scores


def norm_bytes(model: Model, rows: float, width: int, size: int, device: Device) -> float:
    """Returns the bytes that a norm of ``rows`` x ``width`` numbers of ``size`` bytes keeps."""
    if model.normalization == "LayerNorm":
        return rows * (width * size + 2 * (4 if device == "cuda" else size))
    # torch has no RMSNorm kernel for CPUs: input and output stay, in fp32.
    return rows * (2 * width * 4 if device == "cpu" else width * size) + rows * 4


def _inner_bytes(experiment: Experiment, tokens: int, short: int, device: Device) -> float:
    """Returns the bytes of the fused queries, keys and values, of copies of queries and keys, and of the output."""
    model, tensor = experiment.model, experiment.parallel.tensor_model_parallel_size
    heads, keys = (tokens * size * short / tensor for size in (model.attention_size, model.key_size))
    # The queries of several groups are copied out of the fused tensor; those of a rank's only group are a part of it.
    grouped = heads if keys < heads and model.query_groups != tensor else 0.0
    changed = heads + keys if model.qk_layernorm or model.rotary_size else grouped
    normed = 0.0
    if model.qk_layernorm:
        rows = tokens * (model.num_attention_heads + model.query_groups) / tensor
        if model.qk_layernorm_all_heads and tensor > 1:
            device = "cpu"  # no kernel: the ranks sum the squares between two operations
        normed = norm_bytes(model, rows, model.head_size, short, device)
        # The norms' input is a part of the fused tensor, or the queries' copy; a norm in fp32 casts a shorter format.
        if model.normalization == "LayerNorm" or device == "cuda" or short == 4:
            normed -= heads + keys - grouped
    return heads + 2 * keys + changed + normed + heads


def _attention_bytes(experiment: Experiment, tokens: int, short: int, device: Device) -> float:
    model, parallel = experiment.model, experiment.parallel
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    heads = model.num_attention_heads / tensor
    scores = tokens * heads * model.seq_length
    gathered = 2 * context * tokens * model.key_size * short / tensor if context > 1 else 0.0
    if device == "cpu" and model.attention_dropout > 0.0:
        # Unfused attention on CPUs: probabilities, dropout noise and their product in fp32, and a mask.
        return scores * (4 + 4 + 4 + 1) + gathered
    return tokens * heads * 4.0 + gathered


def with_scores(experiment: Experiment, sizes: Sizes) -> Sizes:
    """Returns the tensors with unfused attention, which keeps the output of softmax, and the mask and the output of
    dropout (Korthikanti et al. 2022, 4.1). On CPUs dropout in attention does so anyway."""
    model, dropout = experiment.model, experiment.model.attention_dropout > 0
    if sizes.device == "cpu" and dropout:
        return sizes
    scores = (
        sizes.tokens * model.seq_length * model.num_attention_heads / experiment.parallel.tensor_model_parallel_size
    )
    return replace(sizes, attention=scores * (sizes.short + (1 + sizes.short if dropout else 0)))


def with_stepwise_norms(experiment: Experiment, sizes: Sizes) -> Sizes:
    """Returns the tensors with an RMSNorm of several operations, as on GPUs in torch 2.6 (counted there): it keeps its
    input in fp32 and what it has divided, 4 bytes more for each element than a kernel that keeps its input."""
    model = experiment.model
    if model.normalization == "LayerNorm":
        return sizes
    heads = model.attention_size + model.key_size if model.qk_layernorm else 0
    of_heads = 4 * sizes.tokens * heads / experiment.parallel.tensor_model_parallel_size
    return replace(sizes, norm=sizes.norm + 4 * sizes.between / sizes.short, inner=sizes.inner + of_heads)


def layer_bytes(sizes: Sizes) -> float:
    """Returns the bytes of one layer without recomputation: Korthikanti et al. 2022, equation 2, term by term."""
    inside = sizes.inputs + sizes.inner + sizes.mlp
    return 2 * sizes.norm + inside + sizes.attention + 2 * sizes.dropout + sizes.casts


def kept_layer(experiment: Experiment, sizes: Sizes) -> float:
    """Returns the bytes of a layer that is not fully recomputed; selective recomputation omits attention's inside."""
    selective = experiment.model.recompute_granularity == "selective"
    return layer_bytes(sizes) - (sizes.attention if selective else 0.0)


def backward_bytes(experiment: Experiment, sizes: Sizes, again: int) -> float:
    """Returns the peak of a layer's backward pass: at the MLP's second matrix, when both of its gradients have just
    been made, on top of the recomputed activations."""
    gathered = sizes.hidden if sizes.between < sizes.hidden else 0.0
    gradients = sizes.between + gathered + sizes.ffn + sizes.weight
    selective = sizes.attention if experiment.model.recompute_granularity == "selective" else 0.0
    group = _group(experiment, again) * layer_bytes(sizes)
    return gradients + selective + (group - sizes.restored if group else 0.0) + sizes.gathered


def _kept_input(experiment: Experiment, sizes: Sizes) -> float:
    """Returns the bytes of the hidden state kept for a group of layers; offloading or partitioning reduces them."""
    model = experiment.model
    if model.checkpoint_in_cpu:
        return 0.0
    shared = experiment.parallel.tensor_model_parallel_size if model.partition_activations else 1
    return sizes.residual / shared


def _groups(experiment: Experiment, again: int) -> int:
    """Returns how many hidden states are kept instead of the activations of recomputed layers."""
    return -(-again // _group(experiment, again)) if again else 0


def _group(experiment: Experiment, again: int) -> int:
    """Returns how many layers are recomputed together."""
    if again == 0:
        return 0
    model = experiment.model
    if model.recompute_granularity == "full":
        return 1 if model.recompute_method == "block" else model.recompute_num_layers or 1
    return min(again, model.checkpoint_num_layers)


def head_inputs(sizes: Sizes) -> float:
    """Returns the bytes that the last norm and the output layer keep: their inputs, the tokens and the loss mask."""
    return sizes.norm + sizes.between + sizes.tokens * (TOKEN_BYTES + 1)


def head_bytes(experiment: Experiment, sizes: Sizes, rows: int, *, chunked: bool, forward: float = 0.0) -> float:
    """Returns the peak of the last norm, the output layer and the loss. It is at the loss, or in the first backward
    pass after it, with the gradient of the table of ``rows``.

    ``chunked``: logits are converted to fp32 in chunks. ``forward``: other bytes, freed at the end of the forward pass.
    """
    rows_of_rank, width = rows / experiment.parallel.tensor_model_parallel_size, experiment.model.hidden_size
    logits, table = sizes.tokens * rows_of_rank, rows_of_rank * width * sizes.short
    gathered = sizes.hidden + sizes.between if sizes.between < sizes.hidden else 0.0
    whole = logits * LOSS_BYTES if sizes.short < LOSS_BYTES else 0.0
    in_fp32 = min(logits * LOSS_BYTES, LOSS_CHUNK_BYTES) if chunked else whole
    loss = logits * sizes.short + in_fp32 + forward + sizes.tokens * _LOSS_TOKEN_BYTES
    after = logits * sizes.short + (table if sizes.weight else 0.0) + sizes.hidden + gathered
    return head_inputs(sizes) + max(loss, after)
