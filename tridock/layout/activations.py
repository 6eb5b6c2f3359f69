"""What a step holds for its backward passes, on one rank of a stage, at the moment when it holds most.

A layer's terms are those of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
section 4, counted tensor by tensor as the engines keep them: the inputs of both norms, of the four matrices and of the
activation function, and what attention and dropout keep. Attention is torch's fused one: queries, keys, values, output,
and one fp32 number a row.

The moment is either the loss, with the logits, or the first backward pass of a layer, with what is computed again and
the gradients on their way. The numbers were held against every tensor that CPU ranks allocate (docs/planner.md). A GPU
differs in what its kernels keep: a byte an element for dropout, fp32 statistics of norms, attention fused with dropout.
"""

from dataclasses import dataclass
from typing import Final

from tridock.experiment import Experiment
from tridock.experiment.model import Model
from tridock.experiment.weights import layer_matrices
from tridock.layout.shape import (
    FORMAT_BYTES,
    Device,
    Term,
    in_flight,
    layers_of_stage,
    recomputed_layers,
    tokens_of,
)

_TOKEN_BYTES: Final = 8  # int64
LOSS_BYTES: Final = 4  # the loss is computed in fp32
LOSS_CHUNK_BYTES: Final = 1 << 25
"""Logits that are in fp32 at a time where the loss is computed in chunks: what a GPU's cache holds."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the tensors that a layer is made of, for one micro batch on one rank."""

    device: Device
    tokens: int
    """Of this rank."""
    short: int
    """Of a number in the matrix products."""
    hidden: float
    """[tokens, hidden] in that format, whole."""
    ffn: float
    """[tokens, width of the MLP], as tensor parallel ranks share it out inside a layer."""
    heads: float
    """[tokens, heads x their size], likewise."""
    between: float
    """The same between the split parts, where sequence parallelism shares it out."""
    residual: float
    """The residual stream there: fp32 under autocast."""
    norm: float
    """What a norm of the residual stream keeps: its input, and numbers of each token."""
    inner: float
    """What keeps the attention's inside: queries, keys and values, their normed or rotated copies, and its output."""
    mlp: float
    """What keeps the MLP's inside: the activation function's inputs and outputs."""
    inputs: float
    """Inputs of the first matrices of attention and MLP."""
    dropout: float
    """What dropout of the residual stream's width keeps."""
    casts: float
    """Short copies that autocast makes of a layer's matrices."""
    attention: float
    """What the attention keeps besides queries, keys, values and its output."""
    weight: float
    """The gradient of the widest matrix of a layer, before it is added to the others."""
    restored: float
    """What a group of recomputed layers does not hold twice: its own input, which was kept."""
    gathered: float
    """Weights of the layer at work that are gathered for it."""


def activation_terms(experiment: Experiment, stage: int, accumulation: int, sizes: Sizes, head: float) -> list[Term]:
    """The terms of a stage's rank. ``head``: bytes of the output layer and the loss, on the last stage."""
    layers, stages = layers_of_stage(experiment, stage), experiment.parallel.pipeline_model_parallel_size
    virtual = experiment.parallel.virtual_pipeline_model_parallel_size
    again, passes_in_flight = recomputed_layers(experiment, layers), in_flight(experiment, stage, accumulation)
    kept_layers = (layers - again) * kept_layer(experiment, sizes)
    kept = kept_bytes(experiment, stage, sizes)
    first, last = stage == 0, stage == stages - 1
    runs = f"{passes_in_flight} runs of {layers // virtual} layers" if stages > 1 else f"{layers} layers"
    terms = [Term("activations", round(kept * passes_in_flight / virtual), f"{runs}; Korthikanti et al. 2022, 4.1")]
    if first:
        held = (sizes.tokens * _TOKEN_BYTES + sizes.dropout) * min(passes_in_flight, accumulation)
        terms.append(Term("embedding", round(held), "tokens and dropout, each micro batch in flight"))
    if stages > 1:
        # On a GPU megatron-core frees what it has sent; what is on its way remains.
        count = (passes_in_flight - 1 if last else passes_in_flight) if sizes.device == "cpu" else 2
        terms.append(Term("stage inputs and outputs", round(count * sizes.between), "hidden states on their way"))
    head = head if last else 0.0
    # Backward, the layers that are computed again come after those that were kept: these have gone by then.
    inside = max(backward_bytes(experiment, sizes, 0), backward_bytes(experiment, sizes, again) - kept_layers / virtual)
    if last:
        terms.append(Term("logits and loss", round(head), "probabilities in fp32, logits or their gradients"))
    terms.append(Term("backward pass", round(max(0.0, inside - head)), _backward_source(again, last)))
    return terms


def kept_bytes(experiment: Experiment, stage: int, sizes: Sizes) -> float:
    """What the layers of a stage keep of one micro batch for their backward pass."""
    layers = layers_of_stage(experiment, stage)
    again = recomputed_layers(experiment, layers)
    return (layers - again) * kept_layer(experiment, sizes) + _groups(experiment, again) * _kept_input(
        experiment, sizes
    )


def _backward_source(again: int, last: bool) -> str:
    what = "the layers computed again, and gradients on their way" if again else "gradients on their way"
    return f"{what}, beyond the logits' room" if last else what


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
    """The tensors of a micro batch, as an engine keeps them.

    ``autocast``: weights are fp32, cast for each product. ``sums_in_place``: a weight's first gradient becomes its own.
    ``restores_inputs``: recomputed layers begin with the input that was kept. ``gathered``: bytes of weights that are
    gathered for the layer at work. ``swiglu``: tensors of the MLP's width that it keeps. ``angles``: numbers for each
    position that a layer keeps of its rotation.
    """
    model, parallel = experiment.model, experiment.parallel
    tensor = parallel.tensor_model_parallel_size
    spread = tensor if parallel.sequence_parallel else 1
    tokens, short = tokens_of(experiment), FORMAT_BYTES[experiment.precision]
    autocast = autocast and short == 2
    elements = tokens * model.hidden_size
    residual = 4 if autocast else short
    dense, kept = model.num_moe_experts is None, swiglu if model.swiglu else 2
    # Of a mixture: tokens of the rank's experts, each as often as experts take it, and as many to each.
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
        norm=_norm_bytes(model, tokens / spread, model.hidden_size, residual, device),
        inner=_inner_bytes(experiment, tokens, short, device) + model.seq_length * angles * short,
        mlp=kept * tokens * model.ffn_size * short / tensor
        if dense
        else _mixture_bytes(model, tokens / spread, routed, (kept + 1) * width, short),
        inputs=(3 if model.swiglu and autocast else 2) * elements * short / spread,
        dropout=elements * (1 if device == "cuda" else short) / spread if model.hidden_dropout else 0.0,
        casts=layer_matrices(model) * short if autocast else 0.0,
        attention=_attention_bytes(experiment, tokens, short, device),
        weight=0.0 if sums_in_place else model.hidden_size * (model.ffn_size / tensor if dense else width) * short,
        restored=elements * short / spread if restores_inputs else 0.0,
        gathered=gathered,
    )


def _mixture_bytes(model: Model, tokens: float, routed: float, width: float, short: int) -> float:
    """What a mixture of experts keeps: the routed tokens, the insides of experts, of ``width`` together, each token's
    share, and where each goes; the router's scores and what is made of them."""
    scores = tokens * model.experts * (3 * short + 2)
    return routed * ((model.hidden_size + width) * short + 8 + 8 + 2 * short) + scores


def _norm_bytes(model: Model, rows: float, width: int, size: int, device: Device) -> float:
    """A norm of ``rows`` of that width, in numbers of ``size`` bytes."""
    if model.normalization == "LayerNorm":
        return rows * (width * size + 2 * (4 if device == "cuda" else size))
    # torch has no kernel of its own for RMSNorm on CPUs: input and output stay, in fp32.
    return rows * (2 * width * 4 if device == "cpu" else width * size) + rows * 4


def _inner_bytes(experiment: Experiment, tokens: int, short: int, device: Device) -> float:
    """Queries, keys and values in one piece, copies of queries and keys, and the output."""
    model, tensor = experiment.model, experiment.parallel.tensor_model_parallel_size
    heads, keys = (tokens * size * short / tensor for size in (model.attention_size, model.key_size))
    grouped = heads if keys < heads else 0.0  # the queries of all groups are taken out of that piece
    changed = heads + keys if model.qk_layernorm or model.rotary_size else grouped
    normed = 0.0
    if model.qk_layernorm:
        rows = tokens * (model.num_attention_heads + model.query_groups) / tensor
        normed = _norm_bytes(model, rows, model.head_size, short, device)
        if model.normalization == "LayerNorm" or device == "cuda":  # the keys that went in lie in the piece
            normed -= heads + keys - grouped
    return heads + 2 * keys + changed + normed + heads


def _attention_bytes(experiment: Experiment, tokens: int, short: int, device: Device) -> float:
    model, parallel = experiment.model, experiment.parallel
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    heads = model.num_attention_heads / tensor
    scores = tokens * heads * model.seq_length
    gathered = 2 * context * tokens * model.key_size * short / tensor if context > 1 else 0.0
    if device == "cpu" and model.attention_dropout > 0.0:
        # Not fused there: probabilities, noise and their product in fp32, and a mask.
        return scores * (4 + 4 + 4 + 1) + gathered
    return tokens * heads * 4.0 + gathered


def layer_bytes(sizes: Sizes) -> float:
    """One layer, nothing of it computed again: Korthikanti et al. 2022, equation 2, term by term."""
    inside = sizes.inputs + sizes.inner + sizes.mlp
    return 2 * sizes.norm + inside + sizes.attention + 2 * sizes.dropout + sizes.casts


def kept_layer(experiment: Experiment, sizes: Sizes) -> float:
    """A layer that is not computed again as a whole; selective recomputation leaves out the attention's inside."""
    selective = experiment.model.recompute_granularity == "selective"
    return layer_bytes(sizes) - (sizes.attention if selective else 0.0)


def backward_bytes(experiment: Experiment, sizes: Sizes, again: int) -> float:
    """A layer's backward pass at its fullest: the MLP's second matrix, whose both gradients have just been made, on top
    of what was computed again before."""
    gathered = sizes.hidden if sizes.between < sizes.hidden else 0.0
    gradients = sizes.between + gathered + sizes.ffn + sizes.weight
    selective = sizes.attention if experiment.model.recompute_granularity == "selective" else 0.0
    group = _group(experiment, again) * layer_bytes(sizes)
    return gradients + selective + (group - sizes.restored if group else 0.0) + sizes.gathered


def _kept_input(experiment: Experiment, sizes: Sizes) -> float:
    """The hidden state that is kept in place of a group's layers: on the host, or a part of it on each rank."""
    model = experiment.model
    if model.checkpoint_in_cpu:
        return 0.0
    shared = experiment.parallel.tensor_model_parallel_size if model.partition_activations else 1
    return sizes.residual / shared


def _groups(experiment: Experiment, again: int) -> int:
    """How many hidden states are kept in place of the layers that are computed again."""
    return -(-again // _group(experiment, again)) if again else 0


def _group(experiment: Experiment, again: int) -> int:
    """Layers that are computed again together."""
    if again == 0:
        return 0
    model = experiment.model
    if model.recompute_granularity == "full":
        return 1 if model.recompute_method == "block" else model.recompute_num_layers or 1
    return min(again, model.checkpoint_num_layers)


def head_inputs(sizes: Sizes) -> float:
    """What the last norm and the output layer keep: their inputs, the tokens and the loss mask."""
    return sizes.norm + sizes.between + sizes.tokens * (_TOKEN_BYTES + 1)


def head_bytes(experiment: Experiment, sizes: Sizes, rows: int, *, chunked: bool, forward: float = 0.0) -> float:
    """The last norm, the output layer and the loss, at the fuller of two moments: the loss, or the first backward pass
    after it, with the gradient of the table of ``rows``.

    ``chunked``: whether logits come into fp32 in chunks. ``forward``: other bytes that go when the forward pass ends.
    """
    rows_of_rank, width = rows / experiment.parallel.tensor_model_parallel_size, experiment.model.hidden_size
    logits, table = sizes.tokens * rows_of_rank, rows_of_rank * width * sizes.short
    gathered = sizes.hidden + sizes.between if sizes.between < sizes.hidden else 0.0
    whole = logits * LOSS_BYTES if sizes.short < LOSS_BYTES else 0.0
    in_fp32 = min(logits * LOSS_BYTES, LOSS_CHUNK_BYTES) if chunked else whole
    loss = logits * sizes.short + in_fp32 + forward
    after = logits * sizes.short + (table if sizes.weight else 0.0) + sizes.hidden + gathered
    return head_inputs(sizes) + max(loss, after)
