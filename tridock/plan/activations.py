"""What a step holds for its backward passes, on one rank of a stage, at the moment when it holds most.

A layer's terms are those of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
section 4, counted tensor by tensor as the engines keep them: the inputs of both norms, of the four matrices and of the
activation function, and what attention and dropout keep. Attention is torch's fused one (queries, keys, values, output,
and one fp32 number a row), but for Megatron v1.1.5's, which keeps the probabilities.

The moment is either the loss, with the logits, or the first backward pass of a layer, with what is computed again and
the gradients on their way. The numbers were held against every tensor that CPU ranks allocate (docs/planner.md). A GPU
differs in what its kernels keep: a byte an element for dropout, fp32 statistics of norms, attention fused with dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tridock.engines.torch.legality import shared_by_torch
from tridock.experiment import Experiment
from tridock.layout.shape import FORMAT_BYTES, Term
from tridock.plan.parameters import layer_parameters, layers_of_stage, rows_of_vocabulary
from tridock.plan.resnet import image_terms
from tridock.plan.traffic import recomputed_layers

Device = Literal["cpu", "cuda"]
_TOKEN_BYTES = 8  # int64
_LOSS_BYTES = 4  # the loss is reckoned in fp32


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
    split: float
    """The same as tensor parallel ranks share it out inside a layer."""
    between: float
    """The same between the split parts, where sequence parallelism shares it out."""
    residual: float
    """The residual stream there: fp32 under autocast."""
    statistics: float
    """The two numbers a token that a norm keeps."""
    dropout: float
    """What dropout of the residual stream's width keeps."""
    casts: float
    """Short copies that autocast makes of a layer's matrices."""
    attention: float
    """What the attention keeps besides queries, keys, values and its output."""
    weight: float
    """The gradient of the widest matrix of a layer, before it is added to the others."""


def activation_terms(experiment: Experiment, stage: int, accumulation: int, device: Device) -> list[Term]:
    """The terms of a stage's rank."""
    if experiment.model.is_vision:
        return image_terms(experiment)
    sizes = sizes_of(experiment, device)
    layers, stages = layers_of_stage(experiment, stage), experiment.parallel.pipeline_model_parallel_size
    virtual = experiment.parallel.virtual_pipeline_model_parallel_size
    again, flights = recomputed_layers(experiment, layers), in_flight(experiment, stage, accumulation)
    kept_layers = (layers - again) * kept_layer(experiment, sizes)
    kept = kept_bytes(experiment, stage, sizes)
    first, last = stage == 0, stage == stages - 1
    runs = f"{flights} runs of {layers // virtual} layers" if stages > 1 else f"{layers} layers"
    terms = [Term("activations", round(kept * flights / virtual), f"{runs}; Korthikanti et al. 2022, 4.1")]
    if first:
        held = (sizes.tokens * _TOKEN_BYTES + sizes.dropout) * min(flights, accumulation)
        terms.append(Term("embedding", round(held), "tokens and dropout, each micro batch in flight"))
    if stages > 1:
        # On a GPU megatron-core frees what it has sent; what is on its way remains.
        count = (flights - 1 if last else flights) if device == "cpu" else 2
        terms.append(Term("stage inputs and outputs", round(count * sizes.between), "hidden states on their way"))
    head = head_bytes(experiment, sizes) + waiting_outputs(experiment, sizes, flights) if last else 0.0
    # Backward, the layers that are computed again come after those that were kept: these have gone by then.
    inside = max(backward_bytes(experiment, sizes, 0), backward_bytes(experiment, sizes, again) - kept_layers / virtual)
    if last:
        terms.append(Term("logits and loss", round(head), "probabilities in fp32, logits or their gradients"))
    terms.append(Term("backward pass", round(max(0.0, inside - head)), _backward_words(again, last)))
    return terms


def kept_bytes(experiment: Experiment, stage: int, sizes: Sizes) -> float:
    """What the layers of a stage keep of one micro batch for their backward pass."""
    layers = layers_of_stage(experiment, stage)
    again = recomputed_layers(experiment, layers)
    return (layers - again) * kept_layer(experiment, sizes) + _groups(experiment, again) * sizes.between


def _backward_words(again: int, last: bool) -> str:
    what = "the layers computed again, and gradients on their way" if again else "gradients on their way"
    return f"{what}, beyond the logits' room" if last else what


def sizes_of(experiment: Experiment, device: Device) -> Sizes:
    """The tensors of a micro batch."""
    model, parallel = experiment.model, experiment.parallel
    tensor = parallel.tensor_model_parallel_size
    spread = tensor if parallel.sequence_parallel else 1
    tokens = model.seq_length // parallel.context_parallel_size * experiment.batch.micro_batch_size
    short = FORMAT_BYTES[experiment.precision]
    own = experiment.engine == "megatron-deepspeed" and parallel.strategy == "ddp"
    autocast = experiment.engine == "torch" and not shared_by_torch(experiment) and parallel.strategy == "ddp"
    autocast = autocast and short == 2
    elements = tokens * model.hidden_size
    residual = 4 if autocast else short
    return Sizes(
        device=device,
        tokens=tokens,
        short=short,
        hidden=elements * short,
        split=elements * short / tensor,
        between=elements * short / spread,
        residual=elements * residual / spread,
        statistics=2 * tokens * (4 if device == "cuda" else residual) / spread,
        dropout=elements * (1 if device == "cuda" else short) / spread if model.hidden_dropout else 0.0,
        casts=12 * model.hidden_size**2 * short if autocast else 0.0,
        attention=_attention_bytes(experiment, tokens, short, device),
        # Megatron v1.1.5 alone lets it become the weight's own.
        weight=0.0 if own else 4 * model.hidden_size**2 * short / tensor,
    )


def _attention_bytes(experiment: Experiment, tokens: int, short: int, device: Device) -> float:
    model, parallel = experiment.model, experiment.parallel
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    heads = model.num_attention_heads / tensor
    scores = tokens * heads * model.seq_length
    dropped = model.attention_dropout > 0.0
    if experiment.engine == "megatron-deepspeed":
        # The probabilities; with dropout, its mask and what is left of them.
        return scores * (short + ((1 if device == "cuda" else short) + short if dropped else 0))
    gathered = 2 * context * tokens * model.hidden_size * short / tensor if context > 1 else 0.0
    if device == "cpu" and dropped:
        # Not fused there: probabilities, noise and their product in fp32, and a mask.
        return scores * (4 + 4 + 4 + 1) + gathered
    return tokens * heads * 4.0 + gathered


def layer_bytes(sizes: Sizes) -> float:
    """One layer, nothing of it computed again: Korthikanti et al. 2022, equation 2, term by term."""
    norms = 2 * (sizes.residual + sizes.statistics)
    inputs = 2 * sizes.between  # of the attention's and the MLP's first matrix
    inner = (3 + 1 + 4 + 4) * sizes.split  # queries, keys, values; output; the activation function's input and output
    return norms + inputs + inner + sizes.attention + 2 * sizes.dropout + sizes.casts


def kept_layer(experiment: Experiment, sizes: Sizes) -> float:
    """A layer that is not computed again as a whole; selective recomputation leaves out the attention's inside."""
    selective = experiment.model.recompute_granularity == "selective"
    return layer_bytes(sizes) - (sizes.attention if selective else 0.0)


def backward_bytes(experiment: Experiment, sizes: Sizes, again: int) -> float:
    """A layer's backward pass at its fullest: the MLP's second matrix, whose both gradients have just been made, on top
    of what was computed again before."""
    gathered = sizes.hidden if sizes.between < sizes.hidden else 0.0
    gradients = sizes.between + gathered + 4 * sizes.split + sizes.weight
    selective = sizes.attention if experiment.model.recompute_granularity == "selective" else 0.0
    group = _group(experiment, again) * layer_bytes(sizes)
    if group and experiment.engine == "megatron-deepspeed":
        group -= sizes.between  # what comes back first is the hidden state that was kept
    return gradients + selective + group + _gathered_layers(experiment, sizes)


def _gathered_layers(experiment: Experiment, sizes: Sizes) -> float:
    """FSDP2's weights of the layer at work; where they come from others, the buffer for the next one's too."""
    if not shared_by_torch(experiment):
        return 0.0
    is_split = experiment.parallel.strategy == "fsdp" and experiment.parallel.data_parallel_shard_size != 1
    return sizes.short * layer_parameters(experiment) * (2 if is_split else 1)


def _groups(experiment: Experiment, again: int) -> int:
    """How many hidden states are kept in place of the layers that are computed again."""
    return -(-again // _group(experiment, again)) if again else 0


def _group(experiment: Experiment, again: int) -> int:
    """Layers that are computed again together."""
    if again == 0:
        return 0
    model = experiment.model
    if experiment.engine == "megatron-core":
        return 1 if model.recompute_method == "block" else model.recompute_num_layers or 1
    return min(again, model.checkpoint_num_layers)


def in_flight(experiment: Experiment, stage: int, accumulation: int) -> int:
    """Runs of a stage's layers whose backward pass is still to come, at most.

    GPipe: all. 1F1B: as many as there are stages from here to the last (Narayanan et al., 2021, section 2.2).
    Interleaved: Megatron's warm-up of 2 (p - stage - 1) + (v - 1) p runs, and one.
    """
    parallel = experiment.parallel
    stages, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    if stages == 1:
        return 1
    if parallel.pipeline_schedule == "gpipe":
        return accumulation
    if virtual == 1:
        return min(stages - stage, accumulation)
    return min(2 * (stages - stage - 1) + (virtual - 1) * stages + 1, accumulation * virtual)


def waiting_outputs(experiment: Experiment, sizes: Sizes, flights: int) -> float:
    """What the last stage of engine torch's pipeline holds of logits besides those that are worked on: the logits
    themselves and, with GPipe, of every further micro batch these and their probabilities in fp32."""
    parallel = experiment.parallel
    if experiment.engine != "torch" or parallel.pipeline_model_parallel_size == 1:
        return 0.0
    further = flights - 1 if parallel.pipeline_schedule == "gpipe" else 0
    return logits_of(experiment, sizes) * (sizes.short + further * (sizes.short + _LOSS_BYTES))


def logits_of(experiment: Experiment, sizes: Sizes) -> float:
    """How many a micro batch has on one tensor parallel rank."""
    return sizes.tokens * rows_of_vocabulary(experiment) / experiment.parallel.tensor_model_parallel_size


def head_bytes(experiment: Experiment, sizes: Sizes) -> float:
    """The last norm, the output layer and the loss, at the fuller of two moments: the loss, or the first backward pass
    after it, with the gradient of the table."""
    tensor = experiment.parallel.tensor_model_parallel_size
    rows, width = rows_of_vocabulary(experiment) / tensor, experiment.model.hidden_size
    inputs = sizes.residual + sizes.statistics + sizes.between + sizes.tokens * (_TOKEN_BYTES + 1)
    logits, table = sizes.tokens * rows, rows * width * sizes.short
    gathered = sizes.hidden + sizes.between if sizes.between < sizes.hidden else 0.0
    if experiment.engine == "torch":
        cast = table if sizes.casts else 0.0
        # log_softmax's result, and in the backward pass two gradients of its size; of a shared vocabulary three.
        return inputs + cast + (3 if tensor == 1 else 4) * logits * _LOSS_BYTES
    loss = logits * (_LOSS_BYTES + (sizes.short if sizes.short < _LOSS_BYTES else 0))
    after = logits * sizes.short + (table if sizes.weight else 0.0) + sizes.hidden + gathered
    return inputs + max(loss, after)
