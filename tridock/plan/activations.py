"""What a step holds for its backward passes, on one rank of a stage.

The terms of a layer are those of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(2022), section 4, counted tensor by tensor as the engines keep them: the inputs of both norms, of the four matrices, of
the activation function, and what the attention and dropout keep. Attention is torch's fused one (queries, keys, values,
its output and one fp32 number a row) but for Megatron v1.1.5, which keeps the probabilities.

On CPU ranks the numbers are those that were counted (docs/planner.md); on a GPU dropout keeps a byte an element instead
of a number, and norms keep fp32 statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tridock.experiment import Experiment
from tridock.plan.parameters import layers_of_stage, rows_of_vocabulary
from tridock.plan.term import Term
from tridock.plan.traffic import FORMAT_BYTES, recomputed_layers

Device = Literal["cpu", "cuda"]
_TOKEN = 8  # int64
_LOSS = 4  # the loss is reckoned in fp32


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the tensors that a layer is made of, for one micro batch on one rank."""

    tokens: int
    """Of this rank."""
    hidden: int
    """[tokens, hidden] in the format of the matrix products, whole."""
    shared: float
    """The same as tensor parallel ranks share it out where a layer is split."""
    between: float
    """The same between the split parts, where sequence parallelism shares it out."""
    residual: float
    """The residual stream there: fp32 under autocast."""
    statistics: float
    """The two numbers a token that a norm keeps."""
    dropout: float
    """What dropout of such a tensor keeps."""
    weights: int
    """Short copies of a layer's matrices that autocast makes."""
    attention: float
    """What the attention keeps besides its inputs."""


def activation_terms(experiment: Experiment, stage: int, accumulation: int, device: Device) -> list[Term]:
    """The terms of a stage's rank, at the moment of the step that holds most."""
    sizes = sizes_of(experiment, device)
    layers = layers_of_stage(experiment, stage)
    stages, virtual = (
        experiment.parallel.pipeline_model_parallel_size,
        experiment.parallel.virtual_pipeline_model_parallel_size,
    )
    again = recomputed_layers(experiment, layers)
    whole = layer_bytes(experiment, sizes)
    kept = (layers - again) * whole + checkpoints(experiment, layers, again) * sizes.between
    flights = in_flight(experiment, stage, accumulation)
    group = recomputed_group(experiment, again) * whole
    first, last = stage == 0, stage == stages - 1
    head = head_bytes(experiment, sizes, device) if last else 0.0
    terms = [
        Term("activations", round(kept * flights / virtual), f"{flights} runs of {layers // virtual} layers in flight; Korthikanti et al. 2022, 4.1"),
    ]  # fmt: skip
    if first:
        held = _embedding_bytes(experiment, sizes) * min(flights, accumulation)
        terms.append(Term("embedding", round(held), "tokens and dropout of the embedding, each micro batch in flight"))
    if last:
        terms.append(
            Term("logits and loss", round(head), "fp32 probabilities [tokens, vocabulary / TP], and the logits")
        )
    if again:
        beyond = max(0.0, group - head)
        terms.append(Term("recomputed layers", round(beyond), "one group of layers again, beyond the logits' room"))
    return terms


def sizes_of(experiment: Experiment, device: Device) -> Sizes:
    """The tensors of a micro batch."""
    model, parallel = experiment.model, experiment.parallel
    tensor = parallel.tensor_model_parallel_size
    spread = tensor if parallel.sequence_parallel else 1
    tokens = model.seq_length // parallel.context_parallel_size * experiment.batch.micro_batch_size
    short = FORMAT_BYTES[experiment.precision]
    autocast = experiment.engine == "torch" and parallel.strategy == "ddp" and short == 2
    hidden = tokens * model.hidden_size * short
    residual = 4 if autocast else short
    kept = 1 if device == "cuda" else short
    return Sizes(
        tokens=tokens,
        hidden=hidden,
        shared=hidden / tensor,
        between=hidden / spread,
        residual=hidden // short * residual / spread,
        statistics=2 * tokens / spread * (4 if device == "cuda" else residual),
        dropout=hidden // short * kept / spread if model.hidden_dropout else 0.0,
        weights=12 * model.hidden_size**2 * short if autocast else 0,
        attention=_attention_bytes(experiment, tokens, short, device),
    )


def _attention_bytes(experiment: Experiment, tokens: int, short: int, device: Device) -> float:
    """Besides queries, keys, values and the output."""
    model, parallel = experiment.model, experiment.parallel
    heads = model.num_attention_heads / parallel.tensor_model_parallel_size
    scores = tokens * heads * model.seq_length * short
    dropped = model.attention_dropout > 0.0
    kept = scores / short if device == "cuda" else scores
    if experiment.engine == "megatron-deepspeed":
        # The probabilities; with dropout, its mask and what is left of them.
        return scores + (kept + scores if dropped else 0.0)
    if device == "cpu" and dropped:
        return 0.0  # filled in from the measured grid
    return tokens * heads * 4.0


def layer_bytes(experiment: Experiment, sizes: Sizes) -> float:
    """One layer, nothing of it recomputed: Korthikanti et al. 2022, equation 2, with its terms as they are kept."""
    norms = 2 * (sizes.residual + sizes.statistics)
    inputs = 2 * sizes.between  # of the attention's and the MLP's first matrix
    split = (3 + 1 + 4 + 4) * sizes.shared  # queries, keys and values; output; the activation function and after it
    return norms + inputs + split + sizes.attention + 2 * sizes.dropout + sizes.weights


def checkpoints(experiment: Experiment, layers: int, again: int) -> int:
    """How many hidden states are kept in place of the layers that are computed again."""
    if again == 0:
        return 0
    group = recomputed_group(experiment, again)
    return -(-again // group)


def recomputed_group(experiment: Experiment, again: int) -> int:
    """Layers that are computed again together."""
    if again == 0:
        return 0
    model = experiment.model
    if experiment.engine == "megatron-core":
        return 1 if model.recompute_method == "block" else model.recompute_num_layers or 1
    return model.checkpoint_num_layers


def in_flight(experiment: Experiment, stage: int, accumulation: int) -> int:
    """Runs of a stage's layers whose backward pass is still to come, at most.

    1F1B: as many as there are stages from here to the last (Narayanan et al., 2021, section 2.2). Interleaved:
    Megatron's warm-up of 2 (p - stage - 1) + (v - 1) p runs, and one.
    """
    stages, virtual = (
        experiment.parallel.pipeline_model_parallel_size,
        experiment.parallel.virtual_pipeline_model_parallel_size,
    )
    if stages == 1:
        return 1
    if virtual == 1:
        return min(stages - stage, accumulation)
    return min(2 * (stages - stage - 1) + (virtual - 1) * stages + 1, accumulation * virtual)


def _embedding_bytes(experiment: Experiment, sizes: Sizes) -> float:
    """Besides its output, which the first layer keeps."""
    return sizes.tokens * _TOKEN + sizes.dropout


def head_bytes(experiment: Experiment, sizes: Sizes, device: Device) -> float:
    """The last norm's and the output layer's inputs, and the loss."""
    rows = rows_of_vocabulary(experiment) / experiment.parallel.tensor_model_parallel_size
    short = FORMAT_BYTES[experiment.precision]
    norm = sizes.residual + sizes.statistics + sizes.between
    if experiment.engine == "torch":
        # log_softmax's result, and in the backward pass two gradients of its size.
        return norm + sizes.tokens * (3 * rows * _LOSS + _TOKEN)
    logits = short if short != _LOSS else 0
    return norm + sizes.tokens * (rows * (_LOSS + logits) + _TOKEN + 1)
